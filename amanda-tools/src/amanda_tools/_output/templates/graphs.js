// Operator graphs: an SVG of one level at a time, moved and zoomed through its view box.

const SVG = "http://www.w3.org/2000/svg";

function svg(name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function cut(text) {
  return text.length <= 28 ? text : `…${text.slice(-27)}`;
}

class Graph {
  constructor(element) {
    this.data = JSON.parse(document.getElementById(element.dataset.graph).textContent);
    this.canvas = element.querySelector(".canvas");
    this.select = element.querySelector("select");
    this.input = element.querySelector("input");
    this.output = element.querySelector("output");
    this.about = element.querySelector("pre.about");
    this.select.addEventListener("change", () => this.open(Number(this.select.value)));
    this.input.addEventListener("input", () => this.search());
    this.input.addEventListener("keydown", (event) => event.key === "Enter" && this.next());
    const actions = { next: () => this.next(), fit: () => this.fit(), in: () => this.zoom(0.7), out: () => this.zoom(1 / 0.7) };
    for (const button of element.querySelectorAll("[data-do]")) {
      button.addEventListener("click", actions[button.dataset.do]);
    }
    this.listen();
    this.open(this.data.chosen);
  }

  open(level) {
    const { nodes, edges } = this.data.levels[level];
    const { width, height } = this.data;
    this.nodes = nodes;
    this.select.value = String(level);
    this.drawing = svg("svg", {});
    this.paths = edges.map(([from, to]) => {
      const [, , x1, y1] = nodes[from], [, , x2, y2] = nodes[to];
      const [a, b, c, d] = [x1 + width / 2, y1 + height, x2 + width / 2, y2];
      const bend = Math.max(20, Math.abs(d - b) / 3);
      return svg("path", { d: `M${a},${b} C${a},${b + bend} ${c},${d - bend} ${c},${d}` });
    });
    this.edges = edges;
    this.boxes = nodes.map((node, i) => this.box(node, i));
    this.drawing.append(...this.paths, ...this.boxes);
    this.canvas.replaceChildren(this.drawing);
    this.whole = {
      x: 0, y: 0,
      w: Math.max(...nodes.map((node) => node[2])) + width + 24,
      h: Math.max(...nodes.map((node) => node[3])) + height + 20,
    };
    this.about.hidden = true;
    this.begin();
    this.search();
  }

  box([label, place, x, y, hue, count, about], i) {
    const { width, height } = this.data;
    const group = svg("g", { class: count > 1 ? "many" : "one" });
    const rect = svg("rect", { x, y, width, height, rx: 5 });
    rect.style.setProperty("--h", hue);
    group.append(
      svg("title", {}, about), rect,
      svg("text", { x: x + width / 2, y: y + (place ? 14 : 21) }, cut(label)),
      svg("text", { x: x + width / 2, y: y + 28, class: "sub" }, cut(place)),
    );
    group.addEventListener("click", () => this.moved || this.choose(i));
    return group;
  }

  // Show the beginning of the largest part, at a readable size.
  begin() {
    const { clientWidth: w, clientHeight: h } = this.canvas;
    const scale = Math.min(Math.max(this.whole.w / w, this.whole.h / h, 0.6), 1.25);
    const [, , x, y] = this.nodes[0];
    const view = { w: w * scale, h: h * scale, y: Math.max(y - 60, 0), x: 0 };
    const middle = view.w >= this.whole.w ? this.whole.w / 2 : x + this.data.width / 2;
    this.look({ ...view, x: Math.max(middle - view.w / 2, Math.min(0, (this.whole.w - view.w) / 2)) });
  }

  fit() {
    const { clientWidth: w, clientHeight: h } = this.canvas;
    const scale = Math.max(this.whole.w / w, this.whole.h / h);
    this.look({ x: (this.whole.w - w * scale) / 2, y: 0, w: w * scale, h: h * scale });
  }

  look(view) {
    this.view = view;
    this.drawing.setAttribute("viewBox", `${view.x} ${view.y} ${view.w} ${view.h}`);
  }

  zoom(factor, at) {
    const { x, y, w, h } = this.view;
    const point = at ?? { x: x + w / 2, y: y + h / 2 };
    const width = Math.min(Math.max(w * factor, 120), Math.max(this.whole.w, this.whole.h, 1000) * 4);
    const f = width / w;
    this.look({ x: point.x - (point.x - x) * f, y: point.y - (point.y - y) * f, w: width, h: h * f });
  }

  move(dx, dy) {
    this.look({ ...this.view, x: this.view.x + dx, y: this.view.y + dy });
  }

  centre(i) {
    const [, , x, y] = this.nodes[i];
    const { w, h } = this.view;
    this.look({ ...this.view, x: x + this.data.width / 2 - w / 2, y: y + this.data.height / 2 - h / 2 });
  }

  choose(i) {
    this.boxes.forEach((box, j) => box.classList.toggle("chosen", i === j));
    this.paths.forEach((path, j) => path.classList.toggle("near", this.edges[j].includes(i)));
    this.about.textContent = this.nodes[i][6];
    this.about.hidden = false;
  }

  search() {
    const words = this.input.value.toLowerCase().split(/\s+/).filter(Boolean);
    const matches = ([label, place, , , , , about]) => {
      const text = `${label}\n${place}\n${about}`.toLowerCase();
      return words.length > 0 && words.every((word) => text.includes(word));
    };
    this.hits = this.nodes.flatMap((node, i) => (matches(node) ? [i] : []));
    const found = new Set(this.hits);
    this.boxes.forEach((box, i) => box.classList.toggle("hit", found.has(i)));
    this.at = -1;
    this.output.textContent = words.length ? `${this.hits.length} found` : "";
    if (this.hits.length) this.next();
  }

  next() {
    if (!this.hits.length) return;
    this.at = (this.at + 1) % this.hits.length;
    this.choose(this.hits[this.at]);
    this.centre(this.hits[this.at]);
    this.output.textContent = `${this.at + 1} of ${this.hits.length}`;
  }

  listen() {
    const canvas = this.canvas;
    const scale = () => this.view.w / canvas.clientWidth;
    let from = null;
    canvas.addEventListener("pointerdown", (event) => {
      from = event;
      this.moved = false;
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!from || !event.buttons) return;
      const dx = from.clientX - event.clientX, dy = from.clientY - event.clientY;
      if (!this.moved && Math.hypot(dx, dy) < 4) return;
      if (!this.moved) canvas.setPointerCapture(event.pointerId);
      this.moved = true;
      this.move(dx * scale(), dy * scale());
      from = event;
    });
    canvas.addEventListener("pointerup", () => (from = null));
    // The wheel scrolls the page until the graph has the focus.
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && document.activeElement !== canvas) return;
      event.preventDefault();
      const box = canvas.getBoundingClientRect();
      const at = { x: this.view.x + (event.clientX - box.x) * scale(), y: this.view.y + (event.clientY - box.y) * scale() };
      this.zoom(Math.exp(event.deltaY / 400), at);
    }, { passive: false });
    const step = () => this.view.w / 10;
    const keys = {
      ArrowLeft: () => this.move(-step(), 0), ArrowRight: () => this.move(step(), 0),
      ArrowUp: () => this.move(0, -step()), ArrowDown: () => this.move(0, step()),
      "+": () => this.zoom(0.8), "-": () => this.zoom(1.25), 0: () => this.fit(),
    };
    canvas.addEventListener("keydown", (event) => {
      if (!(event.key in keys)) return;
      event.preventDefault();
      keys[event.key]();
    });
  }
}

for (const element of document.querySelectorAll("[data-graph]")) new Graph(element);
