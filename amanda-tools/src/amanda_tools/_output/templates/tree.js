// The tree of the model: rows of modules and operators with figures; only visible rows are drawn.

const TREE_ROW = 27, NAME_WIDTH = 260, LONGEST_SHAPE = 19, DIGIT = 8.6, FIGURE_WIDTH = 100, TYPE_WIDTH = 150;

class Tree {
  constructor(box, view) {
    this.box = box;
    this.view = view;
    this.model = view.model;
    this.rows = [];
    const { figures, nodes } = this.model;
    this.hasShapes = nodes.some((node) => node[SHAPE] && node[KIND] === "module");
    // Shapes of a single tensor stand whole, as 16×256×112×112 f32 does.
    const lengths = nodes.map((node) => node[SHAPE]?.length ?? 0).filter((length) => length <= LONGEST_SHAPE);
    this.shapeWidth = Math.max(...lengths, 8) * DIGIT + 16;
    this.hasTypes = nodes.some((node) => node[KIND] === "module" && node[TYPE]);
    this.room();
    const table = element("table");
    const head = table.createTHead().insertRow();
    const column = (text, name) => {
      const cell = element("th", { scope: "col", class: name }, text);
      head.append(cell);
      return cell;
    };
    column("module", "name");
    if (this.hasShapes) column("output", "shape");
    this.heads = figures.map((figure, f) => {
      const button = element("button", { type: "button" }, ...heading(figure.name, figure.tool, figure.unit));
      const cell = column(button, "n");
      button.addEventListener("click", () => this.sort(f));
      return cell;
    });
    if (this.hasTypes) column("type", "type");
    this.widen(head, table);
    this.body = table.createTBody();
    this.body.addEventListener("click", (event) => this.click(event.target.closest("tr.row")));
    this.box.replaceChildren(table);
    this.box.addEventListener("scroll", () => requestAnimationFrame(() => this.draw()));
    this.box.addEventListener("keydown", (event) => this.press(event));
    // Beyond the first screen a box that is taller is of no use.
    new ResizeObserver(() => this.draw()).observe(this.box);
  }

  // Give the tree the width of its columns, as far as the graph keeps some; types, which the details
  // have as well, give way.
  room() {
    const views = this.box.parentElement;
    const isBeside = views.classList.contains("both") && views.clientWidth > 960;
    const most = isBeside ? views.clientWidth * 0.73 : views.clientWidth;
    const wanted = scrollbar() + 2 + NAME_WIDTH + (this.hasShapes ? this.shapeWidth : 0) + this.model.figures.length * FIGURE_WIDTH;
    if (wanted + TYPE_WIDTH > most) this.hasTypes = false;
    this.isDense = wanted > most;
    this.box.classList.toggle("dense", this.isDense);
    if (isBeside) views.style.setProperty("--tree", `${Math.round(Math.min(wanted + (this.hasTypes ? TYPE_WIDTH : 0), most))}px`);
    // A small model leaves no empty screen below it.
    const rows = this.model.nodes.length + this.model.nodes.reduce((sum, node) => sum + (node[BACKWARD]?.length ?? 0), 0);
    if (isBeside) views.style.setProperty("--views", `${Math.min(640, Math.max(380, rows * TREE_ROW + 44))}px`);
  }

  // Figures have the width of the longest ones, and names take what is left.
  widen(head, table) {
    // Shapes keep theirs: a batch of images has four numbers.
    const tight = this.isDense ? 0.95 : 1;
    const widths = { name: NAME_WIDTH * (this.isDense ? 0.75 : 1), shape: this.shapeWidth, n: FIGURE_WIDTH * tight, type: TYPE_WIDTH };
    const cells = [...head.cells];
    for (const cell of cells) if (cell.className !== "name") cell.style.width = `${Math.round(widths[cell.className])}px`;
    // A phone shows no shapes; names leave room there for the first figures.
    const isPhone = matchMedia("(max-width: 640px)").matches;
    const shown = cells.filter((cell) => !isPhone || cell.className !== "shape");
    table.style.minWidth = `${Math.round(shown.reduce((sum, cell) => sum + widths[cell.className], 0))}px`;
  }

  // Sort within each module: the largest first, the smallest first, the order of the run.
  sort(f) {
    const now = this.model.sorted;
    const sign = now?.figure !== f ? 1 : now.sign === 1 ? -1 : 0;
    this.model.sorted = sign ? { figure: f, sign } : null;
    this.heads.forEach((head, k) => {
      if (sign && k === f) head.setAttribute("aria-sort", sign === 1 ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    this.fill();
  }

  fill() {
    const { model } = this;
    this.rows = [];
    const visit = (i, depth) => {
      this.rows.push({ i, depth });
      if (!model.open.has(i)) return;
      if (model.isOp(i)) model.nodes[i][BACKWARD].forEach((_, b) => this.rows.push({ i, b, depth: depth + 1 }));
      else model.below(i).forEach((child) => visit(child, depth + 1));
    };
    model.below(0).forEach((child) => visit(child, 0));
    const f = model.figure;
    const figure = f >= 0 && !model.figures[f].over ? model.below(0).filter((i) => model.kind(i) !== "phase") : [];
    this.whole = figure.reduce((sum, i) => sum + (model.value(i, f) ?? 0), 0);
    this.seen = "";
    this.draw();
  }

  draw() {
    const height = this.box.clientHeight || 600;
    const first = Math.max(Math.floor(this.box.scrollTop / TREE_ROW) - 8, 0);
    const last = Math.min(first + Math.ceil(height / TREE_ROW) + 16, this.rows.length);
    // A row that is pressed while the box scrolls must stay the same element.
    if (this.seen === `${first} ${last}`) return;
    this.seen = `${first} ${last}`;
    const gap = (count) => {
      const row = element("tr", { class: "gap" });
      row.hidden = !count;
      row.append(element("td", { style: `height:${count * TREE_ROW}px` }));
      return row;
    };
    const made = this.rows.slice(first, last).map((row) => this.line(row));
    const focused = this.body.contains(document.activeElement) && document.activeElement.closest("tr.row").dataset.node;
    this.body.replaceChildren(gap(first), ...made, gap(this.rows.length - last));
    if (focused !== false) this.focus(focused);
  }

  // Rows are made anew: the one that had the focus keeps it, or the tree where it is out of sight.
  focus(node) {
    const fold = this.body.querySelector(`tr.row:not(.back)[data-node="${node}"] .fold[aria-expanded]`);
    (fold ?? this.box).focus({ preventScroll: true });
  }

  line({ i, b, depth }) {
    const { model, view } = this;
    const node = model.nodes[i];
    const isBack = b !== undefined;
    const line = element("tr", { class: `row ${node[KIND]} ${isBack ? "back" : ""}`, "aria-level": depth + 1 });
    line.dataset.node = i;
    if (isBack) line.dataset.back = b;
    const canOpen = !isBack && this.canOpen(i);
    const name = element("td", { class: "name" });
    name.style.paddingLeft = `${0.5 + depth * 1.05}rem`;
    const mark = element("button", { type: "button", class: "fold", tabindex: canOpen ? 0 : -1 });
    if (canOpen) {
      mark.setAttribute("aria-expanded", String(model.open.has(i)));
      mark.setAttribute("aria-label", `open ${node[NAME]}`);
      mark.textContent = model.open.has(i) ? "▾" : "▸";
    }
    const text = isBack ? `∇ ${node[BACKWARD][b][1]}` : node[NAME];
    const parts = element("div", {}, mark, element("span", { class: "text" }, text));
    if (model.repeats(i) > 1) parts.append(element("b", { class: "count" }, `sum of ${model.repeats(i)}`));
    name.append(parts);
    name.title = isBack ? node[BACKWARD][b][0] : node[DETAILS]?.id ?? model.path(i);
    line.append(name);
    if (this.hasShapes) line.append(element("td", { class: "shape", title: node[SHAPE] }, isBack ? "" : node[SHAPE]));
    model.figures.forEach((figure, f) => line.append(this.cell(i, b, f, figure)));
    if (this.hasTypes) line.append(element("td", { class: "type" }, isBack || node[KIND] === "op" ? "" : node[TYPE]));
    line.classList.toggle("chosen", view.chosen === i);
    return line;
  }

  canOpen(i) { return this.model.canOpen(i) || (this.model.isOp(i) && this.model.nodes[i][BACKWARD].length > 0); }

  click(line) {
    if (!line) return;
    const i = Number(line.dataset.node);
    if (this.canOpen(i) && !("back" in line.dataset)) this.view.toggle(i);
    else this.view.choose(i);
    this.view.graph?.goTo(i);
  }

  cell(i, b, f, figure) {
    const { model } = this;
    const values = b === undefined ? null : model.nodes[i][BACKWARD][b][2 + f];
    const single = Array.isArray(values) ? (values[1] ? 100 * values[0] / values[1] : null) : values;
    const value = b === undefined ? model.value(i, f) : single;
    const cell = element("td", { class: "n" }, amount(value, figure.unit));
    if (f === model.figure && value !== null && model.kind(i) !== "phase") {
      const share = figure.over ? value / 100 : value / (this.whole || 1);
      cell.style.setProperty("--share", `${Math.min(Math.max(share, 0), 1) * 100}%`);
      cell.classList.add("bar");
    }
    return cell;
  }

  press(event) {
    const steps = { ArrowDown: 1, ArrowUp: -1 };
    const at = this.rows.findIndex((row) => row.i === this.view.chosen && row.b === undefined);
    if (event.key in steps) {
      event.preventDefault();
      const next = this.rows[Math.min(Math.max(at + steps[event.key], 0), this.rows.length - 1)];
      if (next) { this.view.choose(next.i); this.goTo(next.i); }
    } else if (["ArrowLeft", "ArrowRight"].includes(event.key) && at >= 0) {
      event.preventDefault();
      this.view.toggle(this.view.chosen, event.key === "ArrowRight");
    }
  }

  mark() {
    for (const row of this.body.querySelectorAll("tr.row")) row.classList.toggle("chosen", Number(row.dataset.node) === this.view.chosen);
  }

  goTo(i) {
    const at = this.rows.findIndex((row) => row.i === i);
    const top = at * TREE_ROW;
    const { scrollTop, clientHeight } = this.box;
    if (top < scrollTop + TREE_ROW || top > scrollTop + clientHeight - 3 * TREE_ROW) this.box.scrollTop = Math.max(top - clientHeight / 2, 0);
    this.draw();
  }
}
