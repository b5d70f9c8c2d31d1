"use strict";
// Tables: only visible rows are in the document.

const ROW = 26, AHEAD = 12, SMALL = 9, WIDEST = 44, NARROWEST = 11, LEAST_NAME = 30, MOST_CHOICES = 400;

// Columns that get a choice of their values, and phases of the model, which are shown first.
const CHOSEN = ["phase", "direction", "module", "type"], OF_MODEL = ["forward", "backward"];

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
    this.values = data.index ? data.index.map((i) => data.texts[i]) : data.values;
    this.texts = this.values.map(shown);
    this.keys = data.numeric ? (data.keys ?? this.values).map(keyed) : null;
  }

  // Letters that its longest text has, and those of the heading with room for the arrow.
  get longest() {
    let longest = this.name.length + 2;
    for (const text of this.texts) if (text.length > longest) longest = text.length;
    return longest;
  }

  // A long text of one word, such as an id, shows its beginning and its end.
  cut(text) {
    if (text.length <= this.letters) return text;
    const tail = text.includes(" ") ? 0 : Math.ceil((this.letters - 1) * 0.55);
    return `${text.slice(0, this.letters - 1 - tail)}…${tail ? text.slice(-tail) : ""}`;
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
    this.marks = data.marks;
    this.all = Array.from({ length: data.rows }, (_, i) => i);
    this.order = this.all;
    this.rows = this.all;
    this.sorted = null;
    this.scroll = element.querySelector(".scroll");
    this.input = element.querySelector("input");
    this.output = element.querySelector("output");
    element.querySelector(".tools").hidden = data.rows < SMALL;
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
      button.textContent = column.name || " ";
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
    const room = ((this.scroll.closest("section.tool, main")?.clientWidth || 1200) - 4) / letter;
    const padding = 3;
    const wanted = this.columns.map((column) => Math.min(column.longest, WIDEST));
    const widths = wanted.map((letters, i) => letters * (this.columns[i].isNumeric ? 1 : 0.95));
    let over = widths.reduce((sum, width) => sum + width + padding, 0) - room;
    while (over > 0.5) {
      // How much wider than it has to be each column of texts is; the first one names the rows.
      const spare = widths.map((width, i) => (this.columns[i].isNumeric ? 0 : width - (i ? NARROWEST : LEAST_NAME)));
      const at = spare.indexOf(Math.max(...spare));
      if (spare[at] <= 0) break;
      const less = Math.min(over, 1);
      widths[at] -= less;
      over -= less;
    }
    this.columns.forEach((column, i) => {
      column.letters = Math.max(Math.floor(widths[i] / (column.isNumeric ? 1 : 0.95)), 4);
      this.heads[i].style.width = `${widths[i] + padding}ch`;
    });
    this.table.style.width = `${widths.reduce((sum, width) => sum + width + padding, 0)}ch`;
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
    row.className = `row ${this.marks[number] ?? ""}`;
    for (const column of this.columns) {
      const cell = row.insertCell();
      const text = column.texts[number];
      cell.textContent = column.cut(text);
      if (column.isNumeric) cell.className = "n";
      if (text.length > column.letters) cell.title = text;
      else if (typeof column.values[number] === "number") cell.title = String(column.values[number]);
    }
    return row;
  }
}

for (const element of document.querySelectorAll("[data-grid]")) {
  if (element.tagName !== "DETAILS") new Grid(element);
  else element.addEventListener("toggle", () => new Grid(element), { once: true });
}
