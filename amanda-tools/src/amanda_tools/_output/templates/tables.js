"use strict";
// Tables: only visible rows are in the document.

const ROW = 26, AHEAD = 12, SMALL = 9, WIDEST = 48;

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

  get width() {
    let longest = this.name.length + 2;
    for (const text of this.texts) if (text.length > longest) longest = text.length;
    // Letters are narrower than digits, which the unit "ch" measures.
    return Math.min(longest, WIDEST) * (this.isNumeric ? 1 : 0.92) + 3;
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
    this.build();
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
      cell.style.width = `${column.width}ch`;
      head.append(cell);
      return cell;
    });
    table.style.width = `${this.columns.reduce((sum, column) => sum + column.width, 0)}ch`;
    this.body = table.createTBody();
    this.scroll.replaceChildren(table);
    if (this.all.length > SMALL) this.scroll.tabIndex = 0;
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
    this.rows = words.length === 0 ? this.order : this.order.filter((row) => {
      const text = this.line(row);
      return words.every((word) => text.includes(word));
    });
    const total = WHOLE.format(this.all.length);
    const count = WHOLE.format(this.rows.length);
    this.output.textContent = words.length ? `${count} of ${total} rows` : `${total} rows`;
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
      cell.textContent = text;
      if (column.isNumeric) cell.className = "n";
      if (text.length > WIDEST - 4) cell.title = text;
      else if (typeof column.values[number] === "number") cell.title = String(column.values[number]);
    }
    return row;
  }
}

for (const element of document.querySelectorAll("[data-grid]")) {
  if (element.tagName !== "DETAILS") new Grid(element);
  else element.addEventListener("toggle", () => new Grid(element), { once: true });
}
