// The graph of the model. Cytoscape.js draws it and dagre places the nodes of each open module by
// themselves, so that opening one places few nodes anew, however many there are. Of many nodes the
// library has those alone that are in sight.

const BOX = { width: 178, height: 52 }, PADDING = 14, TITLE = 26, TITLE_ROOM = 28, GRID_FROM = 7, SMALLEST = 0.8, LEAST = 0.62, LETTER = 6.8, LONGEST_TITLE = 24;
// So many nodes and edges are drawn all the time. Of more, those in sight are and, to move without
// a gap, those around, as far as they are not too small to be seen (in pixels); of a great many, to
// be read.
const FONT = 11, FINER = 1.08, LEAST_ZOOM = 0.02, NARROW_CANVAS = 480, ALWAYS_DRAWN = 500, AROUND = 0.4, SEEN = 2, READ = 6, MANY = 1000;

function around(points) {
  const xs = points.map(({ x }) => x), ys = points.map(({ y }) => y);
  const [x, y] = [Math.min(...xs), Math.min(...ys)];
  return { x, y, width: Math.max(...xs) - x, height: Math.max(...ys) - y };
}

function centre(box) { return { x: box.x + box.width / 2, y: box.y + box.height / 2 }; }

class Graph {
  constructor(canvas, view) {
    this.canvas = canvas;
    this.view = view;
    this.model = view.model;
    this.layouts = new Map();
    this.boxes = new Map();
    this.edges = [];
    this.hits = new Set();
    this.scale = 1;
    this.cy = cytoscape({
      container: canvas, layout: { name: "preset" }, autoungrabify: true, boxSelectionEnabled: false,
      minZoom: LEAST_ZOOM, maxZoom: 4, userZoomingEnabled: false, hideEdgesOnViewport: false, pixelRatio: "auto",
      style: this.style(),
    });
    this.cy.on("viewport", () => { this.frame ??= requestAnimationFrame(() => this.follow()); });
    this.cy.on("tap", "node", (event) => this.tap(event.target.data("i")));
    // The wheel scrolls the page until the graph has the focus.
    canvas.addEventListener("pointerdown", () => canvas.focus({ preventScroll: true }));
    canvas.addEventListener("focus", () => this.cy.userZoomingEnabled(true));
    canvas.addEventListener("blur", () => this.cy.userZoomingEnabled(false));
    canvas.addEventListener("keydown", (event) => this.press(event));
    const actions = { fit: () => this.fit(), in: () => this.zoom(1.35), out: () => this.zoom(1 / 1.35), full: () => this.full() };
    for (const button of view.section.querySelectorAll("[data-do]")) {
      if (button.dataset.do in actions) button.addEventListener("click", actions[button.dataset.do]);
    }
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.views.classList.contains("full") && this.full(false));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { this.cy.style(this.style()); this.paint(); });
  }

  get views() { return this.canvas.closest(".views"); }

  // Give the graph and the details the whole window, or give it back.
  full(isFull = !this.views.classList.contains("full")) {
    this.views.classList.toggle("full", isFull);
    document.documentElement.classList.toggle("still", isFull);
    const button = this.views.querySelector("[data-do=full]");
    button.setAttribute("aria-pressed", String(isFull));
    button.textContent = isFull ? "close" : "full window";
    this.begin();
    if (this.view.chosen !== null) this.goTo(this.view.chosen);
  }

  tap(i) {
    if (this.model.canOpen(i)) this.view.toggle(i);
    else this.view.choose(i);
    this.view.tree.goTo(i);
  }

  zoom(factor) {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    this.cy.zoom({ level: this.cy.zoom() * factor, renderedPosition: { x: width / 2, y: height / 2 } });
  }

  press(event) {
    const step = 60;
    const moves = { ArrowLeft: [step, 0], ArrowRight: [-step, 0], ArrowUp: [0, step], ArrowDown: [0, -step] };
    const keys = { "+": () => this.zoom(1.25), "-": () => this.zoom(0.8), 0: () => this.fit() };
    if (event.key in moves) this.cy.panBy({ x: moves[event.key][0], y: moves[event.key][1] });
    else if (event.key in keys) keys[event.key]();
    else return;
    event.preventDefault();
  }

  // Edges between the nodes below each open node, and between the nodes that stand for operators.
  lift() {
    const { model } = this;
    const ways = new Map();
    const way = (i) => {
      if (!ways.has(i)) ways.set(i, model.ways(model.shown(i)));
      return ways.get(i);
    };
    const within = new Map(), drawn = new Map(), ports = { in: new Map(), out: new Map() };
    // The open modules between the one in which both ends are and an end, and what is crossed there.
    const cross = (side, path, k) => {
      const parts = [];
      for (let at = k; at < path.length - 1 && model.open.has(path[at]); at++) {
        const [group, child] = [path[at], path[at + 1]];
        if (!ports[side].has(group)) ports[side].set(group, new Set());
        ports[side].get(group).add(child);
        parts.push({ group, edge: side === "in" ? `in ${child}` : `${child} out` });
      }
      return parts;
    };
    for (const [from, to] of model.flow) {
      const a = way(from), b = way(to);
      let k = 0;
      while (k < a.length - 1 && k < b.length - 1 && a[k] === b[k] && model.open.has(a[k])) k++;
      if (a[k] === b[k]) continue;
      const group = a[k - 1];
      if (!within.has(group)) within.set(group, new Map());
      const lifted = `${a[k]} ${b[k]}`;
      within.get(group).set(lifted, [a[k], b[k]]);
      const end = (path) => path.find((i, at) => at >= k && (!model.open.has(i) || at === path.length - 1));
      const ends = [end(a), end(b)];
      const parts = [...cross("out", a, k).reverse(), { group, edge: lifted }, ...cross("in", b, k)];
      drawn.set(ends.join(" "), { ends, parts });
    }
    return { within, drawn, ports };
  }

  below(i) { return this.model.below(i).filter((child) => this.model.kind(child) !== "phase"); }

  // Place the nodes below `i`; their boxes are relative to it.
  place(i, within, ports) {
    const children = this.below(i);
    const inner = new Map(children.filter((c) => this.model.open.has(c) && !this.model.isOp(c)).map((c) => [c, this.place(c, within, ports)]));
    const size = (c) => (inner.has(c) ? { width: inner.get(c).width, height: inner.get(c).height } : { ...BOX });
    const edges = [...(within.get(i)?.values() ?? [])];
    edges.push(...this.through(edges, [...(ports.in.get(i) ?? [])], [...(ports.out.get(i) ?? [])]));
    const found = this.named(children, this.lay(children.map(size), this.numbered(children, edges)));
    return { ...(ports.in.has(i) ? this.widen(i, found) : found), inner };
  }

  // Edges between the positions of nodes among `children`.
  numbered(children, edges) {
    const at = new Map(children.map((child, k) => [child, k]));
    const end = (node) => (typeof node === "string" ? node : at.get(node));
    return edges.map(([from, to]) => [end(from), end(to)]).filter((ends) => !ends.includes(undefined));
  }

  // The same layout with the nodes themselves, of which equal modules have different ones.
  named(children, { boxes, points, ...size }) {
    const name = (end) => (typeof end === "string" ? end : children[end]);
    return {
      ...size,
      boxes: new Map(boxes.map((box, k) => [children[k], box])),
      points: new Map(points.map(([[from, to], line]) => [`${name(from)} ${name(to)}`, line])),
    };
  }

  // The layout of nodes of these sizes, by position; modules of equal contents are laid out once.
  lay(sizes, edges) {
    const key = JSON.stringify([sizes.map(({ width, height }) => [width, height]), edges]);
    let found = this.layouts.get(key) ?? this.before?.get(key);
    found ??= edges.length || sizes.length < GRID_FROM ? this.layer(sizes, edges) : this.grid(sizes);
    this.layouts.set(key, found);
    return found;
  }

  // Edges that come in or go out beside nodes of a module get a way around them, by ends of their own.
  through(edges, entered, left) {
    const isBeside = (nodes, end) => nodes.some((node) => edges.some((edge) => edge[end] === node));
    return [
      ...(isBeside(entered, 1) ? entered.map((node) => ["in", node]) : []),
      ...(isBeside(left, 0) ? left.map((node) => [node, "out"]) : []),
    ];
  }

  layer(sizes, edges) {
    const graph = new dagre.graphlib.Graph();
    graph.setGraph({ nodesep: 18, ranksep: 30, edgesep: 10, marginx: PADDING, marginy: PADDING });
    graph.setDefaultEdgeLabel(() => ({}));
    sizes.forEach((size, k) => graph.setNode(k, { ...size }));
    for (const end of ["in", "out"]) if (edges.some((edge) => edge.includes(end))) graph.setNode(end, { width: 1, height: 1 });
    for (const [from, to] of edges) graph.setEdge(from, to);
    dagre.layout(graph);
    const boxes = sizes.map((_, k) => {
      const { x, y, width, height } = graph.node(k);
      return { x: x - width / 2, y: y - height / 2 + TITLE, width, height };
    });
    const points = edges.map((ends) => [ends, graph.edge(...ends).points.map(({ x, y }) => ({ x, y: y + TITLE }))]);
    const { width, height } = graph.graph();
    return { boxes, points, width: Math.max(width, BOX.width), height: height + TITLE };
  }

  // A module that edges enter is wide enough for its title beside an edge in its middle.
  widen(i, found) {
    const letters = Math.min(this.model.label(i).length, LONGEST_TITLE);
    const more = 2 * (letters * LETTER + PADDING) - found.width;
    if (more <= 0) return found;
    const moved = (box) => ({ ...box, x: box.x + more / 2 });
    return {
      ...found, width: found.width + more,
      boxes: new Map([...found.boxes].map(([child, box]) => [child, moved(box)])),
      points: new Map([...found.points].map(([edge, points]) => [edge, points.map(moved)])),
    };
  }

  // Nodes that nothing connects, in rows.
  grid(sizes) {
    const columns = Math.ceil(Math.sqrt(sizes.length / 2));
    const boxes = [];
    let y = TITLE + PADDING, widest = 0;
    for (let at = 0; at < sizes.length; at += columns) {
      let x = PADDING, tallest = 0;
      for (const size of sizes.slice(at, at + columns)) {
        boxes.push({ x, y, ...size });
        x += size.width + PADDING;
        tallest = Math.max(tallest, size.height);
      }
      widest = Math.max(widest, x);
      y += tallest + PADDING;
    }
    return { boxes, points: [], width: widest, height: y };
  }

  // Draw all anew; what was pressed stays where it is on the screen.
  draw(pressed = null) {
    const { within, drawn, ports } = this.lift();
    const before = this.boxes.get(pressed);
    this.boxes = new Map();
    this.points = new Map();
    this.crossed = new Map();
    const visit = (i, layout, x, y, depth) => {
      this.points.set(i, { x, y, points: layout.points });
      for (const [child, box] of layout.boxes) {
        const at = { ...box, x: x + box.x, y: y + box.y, isOpen: layout.inner.has(child), depth };
        this.boxes.set(child, at);
        if (at.isOpen) visit(child, layout.inner.get(child), at.x, at.y, depth + 1);
      }
    };
    // Layouts of the last time are kept: what opens and closes again has its own at once.
    [this.before, this.layouts] = [this.layouts, new Map()];
    const whole = this.place(0, within, ports);
    visit(0, whole, 0, -TITLE, 0);
    this.size = { width: whole.width, height: whole.height };
    this.edges = [...drawn.values()].map((edge) => this.edge(edge));
    if (before) this.stay(pressed, before);
    this.paint();
  }

  // Draw what is placed: colours and texts are those of the chosen figure.
  paint() {
    this.cy.elements().remove();
    this.window = null;
    this.follow();
    this.mark();
  }

  // Draw what is in sight; all, if it is not much.
  follow() {
    this.frame = null;
    const zoom = this.cy.zoom(), { x1, y1, x2, y2, w, h } = this.cy.extent();
    this.letter(zoom);
    const isAll = this.boxes.size + this.edges.length <= ALWAYS_DRAWN;
    const now = this.window;
    const isInside = now && x1 >= now.x1 && y1 >= now.y1 && x2 <= now.x2 && y2 <= now.y2;
    if (now && (isAll || (isInside && zoom > 0.8 * now.zoom && zoom < 1.25 * now.zoom))) return;
    this.window = { x1: x1 - AROUND * w, y1: y1 - AROUND * h, x2: x2 + AROUND * w, y2: y2 + AROUND * h, zoom };
    let found = this.inWindow(isAll ? 0 : SEEN);
    if (!isAll && found.nodes.size + found.edges.length > MANY) found = this.inWindow(READ);
    this.exchange(found);
  }

  // Texts have 11 pixels at the least, however small the graph is drawn: there are fewer letters.
  letter(zoom) {
    const scale = FINER ** Math.ceil(Math.max(0, -Math.log(zoom) / Math.log(FINER)));
    if (scale === this.scale) return;
    this.scale = scale;
    this.cy.batch(() => this.cy.nodes().forEach((node) => { node.data(this.node(node.data("i")).data); }));
  }

  // The lines that a box of this height has room for, each cut to so many letters; none in a tiny one.
  fitting(lines, height, letters) {
    const most = Math.floor(letters / this.scale);
    return most < 4 ? "" : lines.slice(0, Math.floor(height / (1.2 * FONT * this.scale))).map((line) => middle(line, most)).join("\n");
  }

  // The nodes and edges of the window that are at least so many pixels high on the screen; all for 0.
  inWindow(least) {
    const { x1, y1, x2, y2, zoom } = this.window;
    const sees = (box, size) => !least || (
      size * zoom >= least && box.x <= x2 && box.y <= y2 && box.x + box.width >= x1 && box.y + box.height >= y1
    );
    const nodes = new Set(), edges = [];
    for (const [i, box] of this.boxes) if (sees(box, box.height)) nodes.add(i);
    for (const edge of this.edges) {
      if (!sees(edge.box, Math.max(edge.box.width, edge.box.height) / 2)) continue;
      edges.push(edge);
      edge.ends.forEach((end) => nodes.add(end));
    }
    return { nodes, edges };
  }

  // Remove what is not among these nodes and edges from the picture, and add what is missing.
  exchange({ nodes, edges }) {
    const { cy } = this;
    const kept = new Set([...nodes].map((i) => `n${i}`));
    for (const { element } of edges) kept.add(element.data.id);
    cy.startBatch();
    cy.elements().filter((element) => !kept.has(element.id())).remove();
    const isNew = (id) => !cy.hasElementWithId(id);
    cy.add([
      ...[...nodes].filter((i) => isNew(`n${i}`)).map((i) => this.node(i)),
      ...edges.map(({ element }) => element).filter(({ data }) => isNew(data.id)),
    ]);
    cy.endBatch();
  }

  // Where the title of an open module stands, and its letters: in the widest gap between edges.
  title(box, crossed) {
    let left = box.x, widest = { left, width: 0 };
    for (const [low, high] of [...crossed, [box.x + box.width, 0]].sort((a, b) => a[0] - b[0])) {
      if (low - left > widest.width + 1) widest = { left, width: low - left };
      left = Math.max(left, high);
    }
    return { shift: widest.left + PADDING / 2 - box.x - box.width, letters: (widest.width - PADDING) / LETTER };
  }

  node(i) {
    const { model } = this;
    const box = this.boxes.get(i), { isOpen, depth } = box;
    const node = model.nodes[i];
    const { shift, letters } = isOpen ? this.title(box, this.crossed.get(i) ?? []) : { shift: 0, letters: 24 };
    const lines = [isOpen ? model.label(i) : node[NAME]];
    if (!isOpen) {
      if (model.repeats(i) > 1) lines.push(`sum of ${model.repeats(i)}`);
      else if (node[SHAPE]) lines.push(node[SHAPE]);
      else if (node[TYPE] && node[TYPE] !== node[NAME]) lines.push(node[TYPE]);
      const cost = model.figure >= 0 ? model.text(i, model.figure) : "";
      if (cost && cost !== "0") lines.push(cost);
    }
    return {
      group: "nodes",
      data: {
        id: `n${i}`, i, label: this.fitting(lines, isOpen ? TITLE_ROOM : box.height, letters), width: box.width, height: box.height,
        colour: isOpen ? "" : this.colour(i), depth, shift, font: FONT * this.scale,
      },
      position: centre(box),
      classes: [
        isOpen ? "open" : node[KIND], model.repeats(i) > 1 ? "many" : "",
        this.hits.has(i) ? "hit" : "", this.view.chosen === i ? "chosen" : "",
      ].join(" "),
    };
  }

  // Note where an edge crosses the titles of the modules that it enters.
  cross(parts, line) {
    for (const { group } of parts.filter(({ edge }) => edge.startsWith("in "))) {
      const { y } = this.boxes.get(group), xs = [];
      for (let k = 1; k < line.length; k++) {
        const [a, b] = [line[k - 1], line[k]], height = b.y - a.y;
        if (Math.max(a.y, b.y) < y || Math.min(a.y, b.y) > y + TITLE) continue;
        const at = (level) => a.x + (b.x - a.x) * (height ? Math.min(Math.max((level - a.y) / height, 0), 1) : 1);
        xs.push(at(y), at(y + TITLE));
      }
      if (!xs.length) continue;
      if (!this.crossed.has(group)) this.crossed.set(group, []);
      this.crossed.get(group).push([Math.min(...xs) - 3, Math.max(...xs) + 3]);
    }
  }

  edge({ ends: [from, to], parts }) {
    const a = this.boxes.get(from), b = this.boxes.get(to);
    const route = parts.flatMap(({ group, edge }) => {
      const { x, y, points } = this.points.get(group);
      // All but the points at borders of nodes; the ends of a module's own are no nodes.
      const [first, last] = [edge.startsWith("in ") ? 0 : 1, edge.endsWith(" out") ? undefined : -1];
      return (points.get(edge) ?? []).slice(first, last).map((point) => ({ x: x + point.x, y: y + point.y }));
    });
    const start = { x: a.x + a.width / 2, y: a.y + a.height }, end = { x: b.x + b.width / 2, y: b.y };
    const dx = end.x - start.x, dy = end.y - start.y, length = Math.hypot(dx, dy) || 1;
    const share = route.map((p) => ((p.x - start.x) * dx + (p.y - start.y) * dy) / length ** 2);
    const aside = route.map((p) => ((p.x - start.x) * -dy + (p.y - start.y) * dx) / length);
    const isBent = aside.some((distance) => Math.abs(distance) > 3);
    const line = isBent ? [start, ...route, end] : [start, end];
    this.cross(parts, line);
    const element = {
      group: "edges",
      data: {
        id: `e${from}-${to}`, source: `n${from}`, target: `n${to}`, share, aside,
        start: `0px ${a.height / 2}px`, end: `0px ${-b.height / 2}px`,
      },
      classes: [isBent ? "bent" : "", [from, to].includes(this.view.chosen) ? "near" : ""].join(" "),
    };
    return { ends: [from, to], box: around(line), element };
  }

  // Colours of a node: by type, or by its share of the largest figure that is seen.
  colour(i) {
    const { model } = this;
    const css = getComputedStyle(document.documentElement);
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const type = model.nodes[i][TYPE] || model.nodes[i][NAME].replace(/\d+/g, "");
    let hash = 0;
    for (const letter of type) hash = (hash * 31 + letter.codePointAt(0)) % 360;
    if (model.figure < 0) return `hsl(${hash}, 55%, ${dark ? 27 : 88}%)`;
    const value = model.value(i, model.figure);
    if (value === null || value <= 0) return css.getPropertyValue("--raised").trim();
    const whole = model.figures[model.figure].over ? 100 : this.view.tree.whole || 1;
    // A square root: small shares are told apart, too.
    const share = Math.sqrt(Math.min(value / whole, 1));
    return dark ? `hsl(24, ${20 + 55 * share}%, ${17 + 27 * share}%)` : `hsl(28, ${60 + 35 * share}%, ${96 - 36 * share}%)`;
  }

  style() {
    const css = getComputedStyle(document.documentElement);
    const of = (name) => css.getPropertyValue(name).trim();
    const font = getComputedStyle(document.body).fontFamily;
    return [
      { selector: "node", style: {
        shape: "round-rectangle", width: "data(width)", height: "data(height)", label: "data(label)", "background-color": "data(colour)",
        "border-width": 1, "border-color": of("--edge"), color: of("--text"), "font-family": font, "font-size": "data(font)", "text-wrap": "wrap",
        "text-valign": "center", "text-halign": "center", "line-height": 1.2, "z-index-compare": "manual", "z-index": 2000,
      } },
      { selector: "node.module, node.repeat, node.part", style: { "border-width": 1.5, "font-weight": 600, "border-color": of("--quiet") } },
      { selector: "node.many", style: { "border-style": "double", "border-width": 5 } },
      { selector: "node.open", style: {
        "background-color": of("--raised"), "background-opacity": 0.75, "text-valign": "top", "text-margin-y": (node) => 15.6 + 0.4 * node.data("font"), "font-weight": 600,
        // From the right edge, at which such texts begin, back to the gap that was found.
        "text-halign": "right", "text-margin-x": (node) => node.data("shift"),
        "border-color": of("--line"), "border-width": 1.5, "z-index": "data(depth)",
      } },
      { selector: "edge", style: {
        width: 1.3, "line-color": of("--edge"), "target-arrow-color": of("--edge"), "target-arrow-shape": "triangle", "arrow-scale": 0.75,
        "curve-style": "straight", "source-endpoint": "data(start)", "target-endpoint": "data(end)", "z-index-compare": "manual", "z-index": 1000,
      } },
      { selector: "edge.bent", style: {
        "curve-style": "round-segments", "segment-weights": (edge) => edge.data("share"), "segment-distances": (edge) => edge.data("aside"),
        "segment-radii": 14, "edge-distances": "endpoints",
      } },
      { selector: "node.hit", style: { "border-color": of("--hit"), "border-width": 4, "border-style": "solid" } },
      { selector: "node.chosen", style: { "border-color": of("--link"), "border-width": 3, "border-style": "solid" } },
      { selector: "edge.near", style: { "line-color": of("--link"), "target-arrow-color": of("--link"), width: 2.4 } },
    ];
  }

  mark() {
    const { model, view } = this;
    this.hits = new Set(view.hits.map((i) => model.shown(i)));
    this.cy.startBatch();
    this.cy.nodes().forEach((node) => {
      node.toggleClass("hit", this.hits.has(node.data("i")));
      node.toggleClass("chosen", node.data("i") === view.chosen);
    });
    const chosen = this.cy.getElementById(`n${view.chosen}`);
    this.cy.edges(".near").removeClass("near");
    chosen.connectedEdges().addClass("near");
    this.cy.endBatch();
  }

  stay(i, before) {
    const now = this.boxes.get(i);
    if (!now) return;
    const zoom = this.cy.zoom();
    const pan = this.cy.pan();
    this.cy.pan({ x: pan.x + (before.x + before.width / 2 - now.x - now.width / 2) * zoom, y: pan.y + (before.y - now.y) * zoom });
    const { clientWidth: width, clientHeight: height } = this.canvas;
    if (now.width * zoom > width || now.height * zoom > height) this.show(now);
  }

  // Show a box whole where it stays readable, else its top.
  show(box) {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    const whole = Math.min(width / (box.width + 40), height / (box.height + 40));
    // A model that is wide is drawn smaller, as far as its names can be read.
    const least = Math.min(SMALLEST, Math.max(LEAST, width / (box.width + 40)));
    const zoom = Math.min(Math.max(whole, least), 1.1);
    this.cy.zoom(zoom);
    // On a phone the first title stands below the buttons.
    const top = box.height * zoom > height ? (width < NARROW_CANVAS ? 50 : 16) : (height - box.height * zoom) / 2;
    this.cy.pan({ x: width / 2 - (box.x + box.width / 2) * zoom, y: top - box.y * zoom });
  }

  // All of it, however small.
  fit() {
    const { clientWidth, clientHeight } = this.canvas, { width, height } = this.size;
    const zoom = Math.min((clientWidth - 40) / width, (clientHeight - 40) / height, this.cy.maxZoom());
    this.cy.minZoom(Math.min(LEAST_ZOOM, zoom));
    this.cy.zoom(zoom);
    this.cy.pan({ x: (clientWidth - width * zoom) / 2, y: (clientHeight - height * zoom) / 2 });
    this.follow();
  }

  begin() {
    this.cy.resize();
    const whole = { x: 0, y: 0, width: this.size.width, height: this.size.height };
    // What stands beside the model, such as its loss, would push it to the edge.
    const isWide = (whole.width + 40) * LEAST > this.canvas.clientWidth;
    this.show(isWide ? this.largest() : whole);
    this.follow();
  }

  // The box of the module with the most nodes of those that stand outermost.
  largest() {
    const { sizes, nodes } = this.model;
    const outermost = [...this.boxes.keys()].filter((i) => i && nodes[i][PARENT] === 0);
    return this.boxes.get(outermost.reduce((most, i) => (sizes[i] > sizes[most] ? i : most)));
  }

  goTo(i) {
    const box = this.boxes.get(i);
    if (!box) return;
    if (this.cy.zoom() < SMALLEST) this.cy.zoom(0.9);
    const { clientWidth: width, clientHeight: height } = this.canvas;
    const zoom = this.cy.zoom(), { x, y } = centre(box);
    this.cy.pan({ x: width / 2 - x * zoom, y: height / 2 - y * zoom });
    this.follow();
  }
}

for (const section of document.querySelectorAll("section.model")) section.model = new ModelView(section);
