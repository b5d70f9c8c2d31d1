// The model of a run: what its tree and its graph show alike, namely which nodes are open, figures
// of nodes, repeated modules once or one by one, the search and the details of a node.

const PARENT = 0, KIND = 1, NAME = 2, TYPE = 3, SHAPE = 4, DETAILS = 5, FORWARD = 6, BACKWARD = 7;
const FIRST_SHOWN = 30, MOST_INSTANCES = 64, LEAST_SIDE = 200;

class Model {
  constructor(data) {
    this.figures = data.figures;
    this.steps = data.steps;
    this.nodes = data.nodes;
    this.edges = data.edges;
    this.children = this.nodes.map(() => []);
    this.nodes.forEach((node, i) => i && this.children[node[PARENT]].push(i));
    this.sizes = this.nodes.map(() => 1);
    for (let i = this.nodes.length - 1; i > 0; i--) this.sizes[this.nodes[i][PARENT]] += this.sizes[i];
    this.open = new Set();
    this.once = true;
    this.figure = 0;
    this.direction = "both";
    this.sorted = null;
    this.count();
  }

  kind(i) { return this.nodes[i][KIND]; }
  isOp(i) { return this.nodes[i][KIND] === "op"; }

  // Sum figures up; with `once`, those of repeated modules into the first of them.
  count() {
    const own = { forward: [], backward: [] };
    const sum = (into, values) => values?.forEach((value, f) => {
      if (value === null) return;
      if (Array.isArray(value)) into[f] = into[f] ? [into[f][0] + value[0], into[f][1] + value[1]] : [...value];
      else into[f] = (into[f] ?? 0) + value;
    });
    for (let i = this.nodes.length - 1; i >= 0; i--) {
      const node = this.nodes[i];
      const forward = own.forward[i] ??= [], backward = own.backward[i] ??= [];
      if (node[KIND] === "op") {
        const isBackward = node[DETAILS].id.includes("/grad/") && !node[BACKWARD].length;
        sum(isBackward ? backward : forward, node[FORWARD]);
        for (const [, , ...values] of node[BACKWARD]) sum(backward, values);
      } else {
        sum(forward, node[FORWARD]);
      }
      if (i) {
        sum(own.forward[node[PARENT]] ??= [], forward);
        sum(own.backward[node[PARENT]] ??= [], backward);
      }
    }
    this.canon = this.nodes.map((_, i) => i);
    if (this.once) {
      this.nodes.forEach((node, i) => {
        if (node[KIND] !== "repeat") return;
        const [first, ...others] = this.children[i];
        for (const other of others) {
          for (let k = 0; k < this.sizes[other]; k++) this.canon[other + k] = first + k;
        }
      });
      const find = (i) => { while (this.canon[i] !== i) i = this.canon[i]; return i; };
      this.canon = this.canon.map((_, i) => find(i));
    }
    this.flow = this.once ? this.edges.filter(([from, to]) => !this.crosses(from, to)) : this.edges;
    this.instances = this.nodes.map(() => []);
    this.sums = { forward: [], backward: [] };
    this.nodes.forEach((_, i) => {
      const at = this.canon[i];
      this.instances[at].push(i);
      for (const way of ["forward", "backward"]) sum(this.sums[way][at] ??= [], own[way][i]);
    });
    this.own = own;
  }

  // Whether an edge leads from one of repeated modules to another one, which are shown as one.
  crosses(from, to) {
    const found = new Map();
    for (let at = from, parent; at > 0; at = parent) {
      parent = this.nodes[at][PARENT];
      if (this.kind(parent) === "repeat") found.set(parent, at);
    }
    for (let at = to, parent; at > 0; at = parent) {
      parent = this.nodes[at][PARENT];
      if (found.has(parent) && found.get(parent) !== at) return true;
    }
    return false;
  }

  // The figure of a node; null if none of its operators has it.
  value(i, f, direction = this.direction, from = this.sums) {
    // Shares of activations and of gradients are figures of their own.
    const both = this.figures[f].over ? ["forward"] : ["forward", "backward"];
    const ways = direction === "both" ? both : [direction];
    const found = ways.map((way) => from[way][i]?.[f]).filter((value) => value !== undefined && value !== null);
    if (!found.length) return null;
    if (!this.figures[f].over) return found.reduce((a, b) => a + b, 0);
    const [part, whole] = found.reduce((a, b) => [a[0] + b[0], a[1] + b[1]]);
    return whole ? 100 * part / whole : null;
  }

  text(i, f, direction) { return amount(this.value(i, f, direction), this.figures[f].unit); }

  // The nodes below a node as they are shown: of repeated modules the first one's.
  below(i) {
    if (this.kind(i) === "repeat" && this.once) return this.below(this.children[i][0]);
    const found = this.children[i].flatMap((child) => (
      this.kind(child) === "repeat" && !this.once ? this.children[child] : [child]
    ));
    if (this.sorted === null) return found;
    const { figure, sign } = this.sorted;
    const key = (node) => this.value(node, figure) ?? -Infinity;
    return [...found].sort((a, b) => (this.kind(a) === "phase") - (this.kind(b) === "phase") || sign * (key(b) - key(a)));
  }

  // The node above, as shown.
  above(i) {
    const parent = this.nodes[i][PARENT];
    if (parent < 0) return -1;
    const over = this.nodes[parent][PARENT];
    if (this.once) return over >= 0 && this.kind(over) === "repeat" ? over : parent;
    return this.kind(parent) === "repeat" ? over : parent;
  }

  // The node that stands for this one: itself, or the first of repeated ones.
  shown(i) {
    const at = this.canon[i];
    const parent = this.nodes[at][PARENT];
    return this.once && parent >= 0 && this.kind(parent) === "repeat" ? parent : at;
  }

  ways(i) {
    const found = [];
    for (let at = i; at >= 0; at = this.above(at)) found.push(at);
    return found.reverse();
  }

  canOpen(i) { return this.children[i].length > 0; }

  repeats(i) { return this.kind(i) === "repeat" ? this.children[i].length : 1; }

  label(i) {
    const node = this.nodes[i];
    return this.repeats(i) > 1 ? `${node[NAME]} ×${this.repeats(i)}` : node[NAME];
  }

  // Open modules level by level as long as few nodes are to be seen; those of operators stay closed.
  begin() {
    this.open.clear();
    this.open.add(0);
    const holds = (i) => this.below(i).some((child) => !this.isOp(child));
    let level = this.below(0).filter((i) => this.kind(i) !== "phase" && this.canOpen(i));
    let seen = level.length;
    while (level.length) {
      const next = level.filter((i) => this.open.size === 1 || holds(i)).flatMap((i) => this.below(i));
      if (!next.length || (seen + next.length > FIRST_SHOWN && this.open.size > 1)) return;
      level.filter((i) => this.open.size === 1 || holds(i)).forEach((i) => this.open.add(i));
      seen += next.length;
      level = next.filter((i) => this.canOpen(i));
    }
  }

  openTo(depth) {
    this.open.clear();
    const visit = (i, left) => {
      if (left < 0 || !this.canOpen(i) || this.kind(i) === "phase") return;
      this.open.add(i);
      this.below(i).forEach((child) => visit(child, left - 1));
    };
    visit(0, depth);
  }

  reveal(i) { this.ways(i).slice(0, -1).forEach((at) => this.open.add(at)); }

  path(i) {
    const names = [];
    for (let at = i; at > 0; at = this.nodes[at][PARENT]) {
      if (!["repeat", "part"].includes(this.kind(at))) names.push(this.nodes[at][NAME]);
    }
    return names.reverse().join(".");
  }

  search(words) {
    this.texts ??= this.nodes.map((node, i) => {
      if (["root", "repeat", "part"].includes(node[KIND])) return "";
      const ids = node[KIND] === "op" ? [node[DETAILS].id, ...node[BACKWARD].flatMap(([id, type]) => [id, type])] : [];
      return [this.path(i), node[TYPE], ...ids].join("\n").toLowerCase();
    });
    return this.texts.flatMap((text, i) => (text && words.every((word) => text.includes(word)) ? [i] : []));
  }

  // Lines about a node, by heading.
  about(i) {
    const node = this.nodes[i];
    const lines = [];
    const { id, path, phase, ...details } = node[DETAILS] ?? {};
    lines.push([node[KIND] === "op" ? "operator" : node[KIND] === "repeat" ? "repeated" : "module", id ?? (this.path(i) || node[NAME])]);
    if (node[TYPE]) lines.push(["type", node[TYPE]]);
    if (node[SHAPE]) lines.push(["output", node[SHAPE]]);
    this.figures.forEach((figure, f) => {
      const parts = ["forward", "backward"].map((way) => [way, this.text(i, f, way)]).filter(([, text]) => text);
      if (!parts.length) return;
      const times = this.instances[this.canon[i]].length > 1 && this.once ? ` (all ${this.instances[this.canon[i]].length})` : "";
      lines.push([figure.name, parts.length > 1 ? parts.map(([way, text]) => `${text} ${way}`).join(", ") + times : parts[0][1] + times]);
    });
    lines.push(...Object.entries(details));
    return lines;
  }
}

class ModelView {
  constructor(section) {
    this.section = section;
    this.model = new Model(JSON.parse(section.querySelector("script").textContent));
    this.model.begin();
    this.panel = section.querySelector(".details");
    this.output = section.querySelector(".tools output");
    this.input = section.querySelector("input[type=search]");
    this.chosen = null;
    this.hits = [];
    this.opened = [];
    this.at = -1;
    this.controls();
    this.tree = new Tree(section.querySelector(".tree"), this);
    const canvas = section.querySelector(".canvas");
    this.graph = canvas && this.model.edges.length ? new Graph(canvas, this) : null;
    if (this.graph) this.divide(section.querySelector(".divider"));
    this.update();
    this.graph?.begin();
  }

  controls() {
    const { model, section } = this;
    const figures = section.querySelector("[data-figure]");
    model.figures.forEach((figure, f) => figures.append(element("option", { value: f }, figure.name)));
    figures.append(element("option", { value: -1 }, "type"));
    figures.addEventListener("change", () => { model.figure = Number(figures.value); this.recolour(); });
    if (!model.figures.length) model.figure = -1;
    figures.value = String(model.figure);
    const direction = section.querySelector("[data-direction]");
    direction.addEventListener("change", () => { model.direction = direction.value; this.recolour(); });
    const depth = section.querySelector("[data-depth]");
    depth.addEventListener("change", () => {
      if (depth.value === "0") model.begin();
      else model.openTo(Number(depth.value));
      this.update();
      this.graph?.begin();
    });
    const once = section.querySelector("[data-once]");
    once.parentElement.hidden = !model.nodes.some((node) => node[KIND] === "repeat");
    once.addEventListener("change", () => {
      model.once = once.checked;
      model.count();
      this.chosen = null;
      this.panel.hidden = true;
      this.update();
      this.graph?.begin();
    });
    this.input.addEventListener("input", () => this.search());
    this.input.addEventListener("keydown", (event) => event.key === "Enter" && this.next(event.shiftKey ? -1 : 1));
    section.querySelector("[data-do=next]").addEventListener("click", () => this.next(1));
  }

  // Let the reader move the line between the graph and what stands beside it.
  divide(line) {
    const views = line.parentElement;
    const isFull = () => views.classList.contains("full");
    const first = () => views.querySelector(isFull() ? ".drawing" : ".tree").getBoundingClientRect();
    const move = (wanted) => {
      const width = Math.min(Math.max(wanted, LEAST_SIDE), views.clientWidth - LEAST_SIDE);
      views.style.setProperty(isFull() ? "--graph" : "--tree", `${Math.round(width)}px`);
      line.setAttribute("aria-valuenow", Math.round(100 * width / views.clientWidth));
      this.graph.cy.resize();
    };
    line.addEventListener("pointerdown", (event) => line.setPointerCapture(event.pointerId));
    line.addEventListener("pointermove", (event) => line.hasPointerCapture(event.pointerId) && move(event.clientX - first().left - line.clientWidth / 2));
    line.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -40, ArrowRight: 40 }[event.key];
      if (!step) return;
      event.preventDefault();
      move(first().width + step);
    });
  }

  update() {
    this.tree.fill();
    this.graph?.draw();
  }

  recolour() {
    this.tree.fill();
    this.graph?.paint();
  }

  toggle(i, isOpen = !this.model.open.has(i)) {
    if (isOpen) this.model.open.add(i);
    else this.model.open.delete(i);
    this.tree.fill();
    this.graph?.draw(i);
    this.choose(i);
  }

  choose(i, real = i) {
    this.chosen = i;
    this.tree.mark();
    this.graph?.mark();
    this.describe(real);
  }

  describe(i) {
    const { model, panel } = this;
    panel.hidden = false;
    const list = element("dl");
    for (const [name, text] of model.about(i)) list.append(element("div", {}, element("dt", {}, name), element("dd", {}, text)));
    const close = element("button", { type: "button", "aria-label": "close the details" }, "×");
    close.addEventListener("click", () => { panel.hidden = true; });
    panel.replaceChildren(close, list);
    const rows = (title, items) => {
      if (!items.length) return;
      const table = element("table");
      table.append(element("caption", {}, title));
      const heads = ["", ...model.figures.map((figure) => figure.name)];
      const used = heads.map((_, c) => c === 0 || items.some((item) => item[c]));
      table.createTHead().append(element("tr", {}, ...heads.filter((_, c) => used[c]).map((head) => element("th", {}, head))));
      const body = table.createTBody();
      for (const item of items.slice(0, MOST_INSTANCES)) {
        body.append(element("tr", {}, ...item.filter((_, c) => used[c]).map((text, c) => (
          c ? element("td", { class: "n" }, text) : element("td", { title: text }, middle(text, 44))
        ))));
      }
      panel.append(table);
    };
    const shares = (value, f) => Array.isArray(value) ? (value[1] ? 100 * value[0] / value[1] : null) : value;
    if (model.isOp(i)) {
      rows("backward operators", model.nodes[i][BACKWARD].map(([id, type, ...values]) => [
        `${type}  ${id.split("/grad/").pop()}`, ...values.map((value, f) => amount(shares(value, f), model.figures[f].unit)),
      ]));
    }
    const same = model.repeats(i) > 1 ? model.children[i] : model.instances[model.canon[i]];
    if (model.once && same.length > 1) {
      rows(`each of ${same.length}`, same.map((other) => [
        model.nodes[other][DETAILS]?.id ?? model.path(other),
        ...model.figures.map((figure, f) => amount(model.value(other, f, "both", model.own), figure.unit)),
      ]));
    }
  }

  search() {
    const words = this.input.value.toLowerCase().split(/\s+/).filter(Boolean);
    this.hits = words.length ? this.model.search(words) : [];
    this.at = -1;
    this.output.textContent = words.length ? `${this.hits.length} found` : "";
    // What was opened for the first letters of the text is closed again.
    const isClosed = this.opened.filter((i) => this.model.open.delete(i)).length > 0;
    this.opened = [];
    if (this.hits.length) {
      this.next(1, isClosed);
      return;
    }
    this.chosen = null;
    this.panel.hidden = true;
    if (isClosed) this.update();
    this.tree.mark();
    this.graph?.mark();
  }

  next(step, isChanged = false) {
    if (!this.hits.length) return;
    this.at = (this.at + step + this.hits.length) % this.hits.length;
    const real = this.hits[this.at];
    const shown = this.model.shown(real);
    const before = new Set(this.model.open);
    this.model.reveal(shown);
    const opened = [...this.model.open].filter((i) => !before.has(i));
    this.opened.push(...opened);
    if (isChanged || opened.length) this.update();
    this.choose(shown, real);
    this.tree.goTo(shown);
    this.graph?.goTo(shown);
    this.output.textContent = `${this.at + 1} of ${this.hits.length}`;
  }
}
