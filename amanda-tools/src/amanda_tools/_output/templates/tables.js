"use strict";
// Tables: only visible rows are in the document.

const ROW = 26, AHEAD = 12, SMALL = 9, WIDEST = 44, WIDEST_NAME = 72, NARROWEST = 11, LEAST_NAME = 30, NARROW = 64, MOST_CHOICES = 400;
const PREFIXES = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""], [1e-3, "m"], [1e-6, "µ"], [1e-9, "n"]];

// Columns that get a choice of their values, and phases of the model, which are shown first.
const CHOSEN = ["phase", "direction", "module", "type"], OF_MODEL = ["forward", "backward"];

// Columns that give way first where not all fit: what the id tells as well, and what is chosen above.
const FIRST_HIDDEN = ["module", "input names", "phase", "direction", "forward", "counted", "source", "attributes", "inputs", "outputs"];

// What tells rows of one operator apart gives way last.
const LAST_HIDDEN = ["kind", "tensor"];

// Letters of a heading's second line are smaller.
const UNDER = 0.82;

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// A heading with the tool and the unit of its figures below.
function heading(name, tool, unit) {
  const under = [tool, unit].filter(Boolean).join(", ");
  return under ? [name, element("small", {}, under)] : [name];
}

// Letters below which a column is of little use: others give way before it is cut that short.
const LEAST_LETTERS = { type: 20, inputs: 22, outputs: 22, attributes: 18 };

// Made once: making one costs more than formatting many numbers.
const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const DIGITS = new Intl.NumberFormat("en-US", { maximumSignificantDigits: 5 });
const COLLATOR = new Intl.Collator("en", { numeric: true });

function shown(value) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return WHOLE.format(value);
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(4);
  return DIGITS.format(value);
}

function amount(value, unit) {
  if (value === null || value === undefined) return "";
  if (!value) return "0";
  if (!Number.isFinite(value)) return `${value} ${unit}`.trim();
  const size = Math.abs(value);
  if (unit === "%") return `${size < 0.001 ? value.toExponential(2) : Number(value.toPrecision(3))} %`;
  for (const [factor, prefix] of PREFIXES) {
    if (size < factor * 0.9995 || (factor < 1 && unit !== "s")) continue;
    const scaled = value / factor;
    const digits = Math.abs(scaled) >= 99.95 ? scaled.toFixed(0) : String(Number(scaled.toPrecision(3)));
    return `${digits} ${prefix}${unit}`.trim();
  }
  return `${Number(value.toPrecision(3))} ${unit}`.trim();
}

// A text with at most so many letters; what it begins with goes first, if `shared` tells it.
function middle(text, most, shared = "") {
  if (text.length <= most) return text;
  // A text that begins otherwise may still have a part of it in common.
  while (shared && !text.startsWith(shared)) shared = shared.slice(0, -1).replace(/[^./]*$/, "");
  if (shared) {
    const rest = text.slice(shared.length);
    if (rest.length < most) return `…${rest}`;
    return `…${middle(rest, most - 1)}`;
  }
  const tail = Math.ceil((most - 1) * 0.55);
  return `${text.slice(0, most - 1 - tail)}…${text.slice(-tail)}`;
}

// The width of a vertical scroll bar; 0 where it lies above what it scrolls.
function scrollbar() {
  if (scrollbar.width === undefined) {
    const probe = document.createElement("div");
    probe.style.cssText = "position:absolute;visibility:hidden;overflow-y:scroll;width:60px";
    document.body.append(probe);
    scrollbar.width = probe.offsetWidth - probe.clientWidth;
    probe.remove();
  }
  return scrollbar.width;
}

// The beginning that most paths have in common, up to a separator: it tells none from another.
function common(paths) {
  const counts = new Map();
  for (const path of paths) {
    for (let at = 1; at < path.length; at++) {
      if (!"./".includes(path[at])) continue;
      const start = path.slice(0, at + 1);
      counts.set(start, (counts.get(start) ?? 0) + 1);
    }
  }
  let longest = "";
  for (const [start, count] of counts) if (count > paths.length * 0.6 && start.length > longest.length) longest = start;
  return longest;
}

// Names with at most so many letters. What most begin with goes from all that have it, if it makes
// one of them too long.
function shortened(names, most) {
  const shared = common(names);
  const has = (name) => shared && name.startsWith(shared);
  const isCut = names.some((name) => has(name) && name.length > most);
  return names.map((name) => middle(isCut && has(name) ? `…${name.slice(shared.length)}` : name, most));
}

// The sort key of a cell: a number, or null for an empty one, which always comes last.
function keyed(value) {
  if (typeof value === "number" || value === null || value === undefined) return value ?? null;
  const special = { inf: Infinity, "-inf": -Infinity };
  return value in special ? special[value] : null;
}

class Column {
  constructor(data) {
    this.name = data.name;
    this.isNumeric = data.numeric;
    this.tool = data.tool ?? "";
    this.values = data.index ? data.index.map((i) => data.texts[i]) : data.values;
    this.unit = data.unit;
    this.texts = this.values.map((value) => (data.unit && typeof value === "number" ? amount(value, data.unit) : shown(value)));
    this.keys = data.numeric ? (data.keys ?? this.values).map(keyed) : null;
  }

  // Letters that its longest text has.
  get most() { return (this.letterCount ??= this.texts.reduce((most, text) => Math.max(most, text.length), 0)); }

  // The same, or those of the heading with room for the arrow.
  get longest() {
    const words = this.isNumeric ? this.name.split(" ") : [this.name];
    const under = this.tool ? UNDER * `${this.tool}, ${this.unit ?? ""}`.length : 0;
    return Math.max(...words.map((word) => word.length + 2), under, this.most);
  }

  // A long text of one word, such as an id, loses what all begin with, and its middle; so does a tensor,
  // which is an id and a word.
  cut(text) {
    if (text.length <= this.letters) return text;
    if (text.includes(" ") && !this.shared) return `${text.slice(0, this.letters - 1)}…`;
    if (this.name === "source") return `…${text.slice(1 - this.letters)}`;
    return middle(text, this.letters, this.shared);
  }

  // Note what most texts of the rows begin with, if some are to be cut.
  share(rows) {
    if (this.shared !== undefined || this.isNumeric || !rows.length || this.most <= this.letters) return;
    this.shared = common(rows.map((row) => this.texts[row]));
  }

  // Orders two rows; empty cells come last in both directions.
  compare(a, b, sign) {
    const [x, y] = this.keys ? [this.keys[a], this.keys[b]] : [this.texts[a], this.texts[b]];
    const nothing = this.keys ? null : "";
    if (x === nothing || y === nothing) return (x === nothing) - (y === nothing);
    if (this.keys) return sign * (x < y ? -1 : x > y ? 1 : 0);
    return sign * COLLATOR.compare(x, y);
  }
}

class Grid {
  constructor(element) {
    const data = JSON.parse(document.getElementById(element.dataset.grid).textContent);
    this.columns = data.columns.map((column) => new Column(column));
    this.all = Array.from({ length: data.rows }, (_, i) => i);
    this.order = this.all;
    this.rows = this.all;
    this.sorted = null;
    this.scroll = element.querySelector(".scroll");
    this.input = element.querySelector("input");
    this.output = element.querySelector("output");
    this.tools = element.querySelector(".tools");
    this.isSmall = data.rows < SMALL;
    this.isWhole = false;
    this.more = this.tools.querySelector("[data-do=columns]");
    this.more.addEventListener("click", () => { this.isWhole = !this.isWhole; this.fit(); this.draw(); });
    this.input.hidden = this.output.hidden = this.isSmall;
    this.choices = data.rows < SMALL ? [] : this.choose(element.querySelector(".choices"));
    this.build();
    this.fit();
    window.addEventListener("resize", () => { this.fit(); this.draw(); });
    this.input.addEventListener("input", () => this.filter());
    this.scroll.addEventListener("scroll", () => requestAnimationFrame(() => this.draw()));
    this.filter();
  }

  build() {
    const table = document.createElement("table");
    const head = table.createTHead().insertRow();
    this.heads = this.columns.map((column, i) => {
      const cell = document.createElement("th");
      const button = document.createElement("button");
      cell.scope = "col";
      cell.className = column.isNumeric ? "n" : "";
      button.type = "button";
      button.append(...heading(column.name || " ", column.tool, column.tool && column.unit));
      button.addEventListener("click", () => this.sort(i));
      cell.append(button);
      button.title = column.name;
      head.append(cell);
      return cell;
    });
    this.table = table;
    this.body = table.createTBody();
    this.scroll.replaceChildren(table);
    if (this.all.length > SMALL) this.scroll.tabIndex = 0;
  }

  // Give columns the widths of their texts; where they do not fit the page, long texts give way.
  fit() {
    const probe = document.createElement("span");
    probe.textContent = "0".repeat(100);
    probe.style.cssText = "position:absolute;visibility:hidden;font-size:.86rem";
    this.scroll.append(probe);
    const letter = probe.getBoundingClientRect().width / 100 || 7.5;
    probe.remove();
    const room = ((this.scroll.closest(".part, .tool, main")?.clientWidth || 1200) - 8 - scrollbar()) / letter;
    const padding = 3;
    const wanted = this.columns.map((column, i) => Math.min(column.longest, i ? WIDEST : WIDEST_NAME));
    // On a narrow page the name leaves room for the first figure.
    const leastName = Math.min(LEAST_NAME, Math.max(NARROWEST, room * 0.5));
    const widths = wanted.map((letters, i) => letters * (this.columns[i].isNumeric ? 1 : 0.95));
    // On a narrow page ids, which end with the type, stand for it.
    const isNarrow = room < NARROW && this.columns[1]?.name === "type" && this.columns[0].name === "id";
    this.table.classList.toggle("narrow", isNarrow);
    if (isNarrow) widths[1] = 0;
    const least = this.columns.map((column, i) => {
      if (!i) return leastName;
      return this.isWhole || room < NARROW ? NARROWEST : Math.min(column.longest, LEAST_LETTERS[column.name] ?? NARROWEST);
    });
    const sum = () => widths.reduce((all, width) => all + (width && width + padding), 0);
    let over = sum() - room;
    const shrink = () => {
      while (over > 0.5) {
        // How much wider than it has to be each column of texts is; the first one names the rows.
        const spare = widths.map((width, i) => (this.columns[i].isNumeric || !width ? 0 : width - least[i]));
        const at = spare.indexOf(Math.max(...spare));
        if (spare[at] <= 0) return;
        const less = Math.min(over, 1);
        widths[at] -= less;
        over -= less;
      }
    };
    shrink();
    this.hidden = new Set();
    for (const i of this.isWhole ? [] : this.givesWay(room < NARROW)) {
      if (over <= 0.5) break;
      this.hidden.add(i);
      widths[i] = 0;
      this.columns.forEach((column, k) => {
        if (!column.isNumeric && widths[k]) widths[k] = Math.min(column.longest, k ? WIDEST : WIDEST_NAME) * 0.95;
      });
      over = sum() - room;
      shrink();
    }
    this.more.hidden = !this.hidden.size && !this.isWhole;
    this.more.textContent = this.isWhole ? "fewer columns" : `${this.hidden.size} more column${this.hidden.size > 1 ? "s" : ""}`;
    this.tools.hidden = this.isSmall && this.more.hidden;
    this.columns.forEach((column, i) => {
      column.letters = Math.max(Math.floor(widths[i] / (column.isNumeric ? 1 : 0.95) + 0.01), 4);
      this.heads[i].hidden = this.hidden.has(i);
      // In pixels: headings are bold, and would count wider letters.
      this.heads[i].style.width = `${widths[i] && (widths[i] + padding) * letter}px`;
    });
    this.table.style.width = `${sum() * letter}px`;
  }

  // The columns that may be left out, in order: texts, and where there is room for figures at all
  // also the last of those.
  givesWay(isNarrow) {
    const texts = [], figures = [], places = {}, counts = {};
    this.columns.forEach((column, i) => {
      if (i === 0 || (i === 1 && column.name === "type" && this.columns[0].name === "id")) return;
      (column.isNumeric ? figures : texts).unshift(i);
      if (column.isNumeric) places[i] = counts[column.tool] = (counts[column.tool] ?? 0) + 1;
    });
    // Each tool keeps its first figures.
    figures.sort((a, b) => places[b] - places[a]);
    const rank = (i) => FIRST_HIDDEN.indexOf(this.columns[i].name);
    if (this.columns[0].name !== "id") return !isNarrow ? [...texts, ...figures] : figures.length ? texts : [];
    texts.sort((a, b) => rank(a) - rank(b));
    const isLast = (i) => !this.columns[i].tool && LAST_HIDDEN.includes(this.columns[i].name);
    if (isNarrow) return [...texts.filter((i) => !isLast(i)), ...texts.filter(isLast)];
    return [...texts.filter((i) => !isLast(i)), ...figures, ...texts.filter(isLast)];
  }

  // Offer the values of columns; of paths of modules all that are above others, too.
  choose(place) {
    const found = [];
    this.columns.forEach((column) => {
      if (!CHOSEN.includes(column.name) || column.isNumeric) return;
      const isModule = column.name === "module";
      const values = new Map();
      for (const text of column.texts) {
        const parts = isModule ? text.split(/([./])/) : [text];
        for (let k = 1; k <= parts.length; k += 2) {
          const name = parts.slice(0, k).join("");
          if (name) values.set(name, (values.get(name) ?? 0) + 1);
        }
      }
      if (values.size < 2 || values.size > MOST_CHOICES) return;
      const select = document.createElement("select");
      select.setAttribute("aria-label", column.name);
      const option = (text, value) => {
        const made = document.createElement("option");
        made.textContent = text;
        made.value = value;
        select.append(made);
      };
      option(`any ${column.name}`, "");
      const isPhase = column.name === "phase" && OF_MODEL.some((phase) => values.has(phase));
      if (isPhase) option("the model's", "\0model");
      const names = isModule ? [...values.keys()].sort(COLLATOR.compare) : [...values.keys()];
      names.forEach((name) => option(`${name} (${values.get(name)})`, `=${name}`));
      if (isPhase) select.value = "\0model";
      select.addEventListener("change", () => this.filter());
      place.append(select);
      found.push({ column, select, isModule });
    });
    return found;
  }

  fits(row, { column, select, isModule }) {
    if (!select.value) return true;
    const text = column.texts[row], name = select.value.slice(1);
    if (select.value === "\0model") return OF_MODEL.includes(text);
    return text === name || (isModule && text.startsWith(name) && "./".includes(text[name.length]));
  }

  // Numbers begin with the largest; the third click restores the first order.
  sort(i) {
    const first = this.columns[i].isNumeric ? "descending" : "ascending";
    const second = first === "ascending" ? "descending" : "ascending";
    const now = this.sorted?.column === i ? this.sorted.direction : null;
    const next = now === null ? first : now === first ? second : null;
    this.sorted = next && { column: i, direction: next };
    this.heads.forEach((head, j) => {
      if (next && i === j) head.setAttribute("aria-sort", next);
      else head.removeAttribute("aria-sort");
    });
    const sign = next === "ascending" ? 1 : -1;
    // Equal rows keep the order of the last sort.
    this.order = next ? [...this.order].sort((a, b) => this.columns[i].compare(a, b, sign)) : this.all;
    this.scroll.scrollTop = 0;
    this.filter();
  }

  // Keep rows that contain all words, in any column.
  filter() {
    const words = this.input.value.toLowerCase().split(/\s+/).filter(Boolean);
    const choices = this.choices.filter(({ select }) => select.value);
    const isAll = words.length + choices.length === 0;
    this.rows = isAll ? this.order : this.order.filter((row) => (
      choices.every((choice) => this.fits(row, choice)) && words.every((word) => this.line(row).includes(word))
    ));
    const total = WHOLE.format(this.all.length);
    const count = WHOLE.format(this.rows.length);
    this.output.textContent = !isAll ? `${count} of ${total} rows` : `${total} rows`;
    this.draw();
  }

  line(row) {
    this.lines ??= [];
    return (this.lines[row] ??= this.columns.map((c) => c.texts[row]).join("\n").toLowerCase());
  }

  draw() {
    this.columns.forEach((column) => column.share(this.rows));
    const height = this.scroll.clientHeight || 500;
    const first = Math.max(Math.floor(this.scroll.scrollTop / ROW) - AHEAD, 0);
    const last = Math.min(first + Math.ceil(height / ROW) + 2 * AHEAD, this.rows.length);
    const parts = [this.gap(first)];
    for (let i = first; i < last; i++) parts.push(this.row(this.rows[i]));
    parts.push(this.gap(this.rows.length - last));
    this.body.replaceChildren(...parts);
    // The element's own height limits it only once the rows are there.
    if (last < this.rows.length && this.scroll.clientHeight > height) this.draw();
  }

  gap(rows) {
    const row = document.createElement("tr");
    row.className = "gap";
    row.hidden = rows === 0;
    row.insertCell().style.height = `${rows * ROW}px`;
    return row;
  }

  row(number) {
    const row = document.createElement("tr");
    row.className = "row";
    for (const [i, column] of this.columns.entries()) {
      const cell = row.insertCell();
      cell.hidden = this.hidden.has(i);
      const text = column.texts[number];
      cell.textContent = column.cut(text);
      if (column.isNumeric) cell.className = "n";
      if (text.length > column.letters) cell.title = text;
      else if (typeof column.values[number] === "number") cell.title = String(column.values[number]);
    }
    return row;
  }
}

// What is folded has no width: its tables are made when it is opened.
function unfold(details) {
  if (!details.open) return;
  for (const grid of details.querySelectorAll("[data-grid]:not(.made)")) {
    grid.classList.add("made");
    new Grid(grid);
  }
}

for (const grid of document.querySelectorAll("#operators [data-grid]")) new Grid(grid);
for (const details of document.querySelectorAll("details.tool")) {
  unfold(details);
  details.addEventListener("toggle", () => unfold(details));
}

// Links lead to parts that are open.
function reveal() {
  const part = document.getElementById(location.hash.slice(1));
  if (part?.tagName !== "DETAILS") return;
  part.open = true;
  part.scrollIntoView();
}

window.addEventListener("hashchange", reveal);
reveal();
