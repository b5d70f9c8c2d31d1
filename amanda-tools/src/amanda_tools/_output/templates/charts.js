// Charts, drawn by Chart.js. Bars of modules are summed up at the depth that the reader picks.

const MOST_BARS = 24, BAR = 22, FINEST = 800, AXIS = 42, LEGEND_LINE = 36;

function css(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

function depthOf(path) { return path.split(/[./]/).length; }

function prefix(path, depth) { return path.split(/([./])/).slice(0, 2 * depth - 1).join(""); }

class PageChart {
  constructor(figure) {
    this.figure = figure;
    this.data = JSON.parse(figure.querySelector("script").textContent);
    this.more = figure.querySelector(".more");
    this.select = figure.querySelector("[data-depth]");
    if (this.select) this.depths();
    this.over = figure.querySelector("[data-over]");
    this.over?.addEventListener("change", () => this.draw());
    this.draw();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  // Offer the depths at which more bars appear; the first choice is the deepest with few bars.
  depths() {
    const { labels } = this.data;
    const deepest = Math.max(...labels.map(depthOf));
    let before = 0, chosen = 1;
    for (let depth = 1; depth <= deepest; depth++) {
      const bars = new Set(labels.map((label) => prefix(label, depth))).size;
      if (bars === before) continue;
      before = bars;
      this.select.append(element("option", { value: depth }, `depth ${depth} (${bars})`));
      if (bars <= MOST_BARS) chosen = depth;
    }
    this.select.value = String(chosen);
    this.select.closest("label").hidden = this.select.options.length < 2;
    this.select.addEventListener("change", () => this.draw());
  }

  bars() {
    const { labels } = this.data;
    const values = this.over?.value === "run" ? this.data.run : this.data.values;
    const depth = this.select ? Number(this.select.value) : 0;
    const groups = new Map();
    labels.forEach((label, i) => {
      const name = depth ? prefix(label, depth) : label;
      const sums = groups.get(name) ?? values.map(() => 0);
      values.forEach(([, numbers], s) => { sums[s] += numbers[i] ?? 0; });
      groups.set(name, sums);
    });
    const rows = [...groups].map(([name, sums]) => ({ name, sums, total: sums.reduce((a, b) => a + b, 0) }));
    if (depth || this.over) rows.sort((a, b) => b.total - a.total);
    this.more.textContent = rows.length > MOST_BARS ? `${rows.length - MOST_BARS} more in the tables` : "";
    return rows.slice(0, MOST_BARS);
  }

  draw() {
    const { kind, unit, values, names, labels } = this.data;
    this.chart?.destroy();
    const box = this.figure.querySelector(".plot");
    const canvas = this.figure.querySelector("canvas");
    const text = css("--quiet"), line = css("--line");
    const colour = (s) => css(`--c${s % 10}`);
    const isNarrow = this.figure.clientWidth < 480;
    const scale = { grid: { color: line }, ticks: { color: text } };
    const amounts = { ...scale, ticks: { color: text, maxTicksLimit: isNarrow ? 4 : 7, maxRotation: 0, callback: (value) => amount(value, unit) } };
    // At the left the topmost number of a plot's axis would touch it.
    const isPlot = !["bar", "spans"].includes(kind);
    const options = {
      animation: false, responsive: true, maintainAspectRatio: false,
      plugins: { legend: { display: values.length > 1, labels: { color: text, boxWidth: 12, padding: 14 }, align: isPlot ? "end" : "start" } },
    };
    const way = { bar: "ranking", spans: "rows" }[kind] ?? "plot";
    const made = this[way](options, amounts, scale, colour);
    // The legend of many series has several lines; how many is known when it is drawn.
    const tall = (legend) => `${made.data.labels.length * BAR + AXIS + legend}px`;
    if (way !== "plot") box.style.height = tall(values.length > 1 ? values.length * LEGEND_LINE : 0);
    options.plugins.tooltip ??= { callbacks: {
      title: ([item]) => (kind === "bar" ? this.shown[item.dataIndex].name : names[item.dataIndex] ?? String(labels[item.dataIndex])),
      label: (item) => `${values.length > 1 ? `${item.dataset.label}: ` : ""}${amount(item.dataset.real[item.dataIndex], unit)}`,
    } };
    this.chart = new Chart(canvas, made);
    if (way === "plot" || values.length < 2) return;
    box.style.height = tall(this.chart.legend.height);
    this.chart.resize();
  }

  cut(names) { return shortened(names, this.figure.clientWidth < 480 ? 19 : 30); }

  ranking(options, amounts, scale, colour) {
    this.shown = this.bars();
    const { values } = this.data;
    Object.assign(options, {
      indexAxis: "y", interaction: { mode: "index", axis: "y", intersect: false },
      scales: {
        x: { ...amounts, stacked: true },
        y: { ...scale, stacked: true, grid: { display: false }, ticks: { ...scale.ticks, autoSkip: false } },
      },
    });
    return { type: "bar", options, data: {
      labels: this.cut(this.shown.map(({ name }) => name)),
      datasets: values.map(([name], s) => {
        const real = this.shown.map(({ sums }) => sums[s]);
        return { label: name, data: real, real, backgroundColor: colour(s), barThickness: 14 };
      }),
    } };
  }

  // Spans over time: a row for each module at the depth that the reader picks, in the order in which
  // they begin. What follows at once in a row is one bar.
  rows(options, amounts, scale, colour) {
    const { labels, values, names, starts, unit } = this.data;
    const depth = this.select ? Number(this.select.value) : 0;
    const end = Math.max(...starts.map((start, i) => start + values.reduce((most, [, numbers]) => Math.max(most, numbers[i] ?? 0), 0)));
    const times = new Map();
    const bars = values.map(() => []);
    const last = new Map();
    starts.forEach((start, i) => {
      const name = depth ? prefix(labels[i], depth) : labels[i];
      const s = values.findIndex(([, numbers]) => numbers[i] !== null);
      const length = values[s][1][i];
      times.set(name, (times.get(name) ?? 0) + length);
      const before = last.get(name);
      if (before?.s === s && start - before.end < end / FINEST) {
        before.end = Math.max(before.end, start + length);
        before.time += length;
        before.count += 1;
      } else {
        const bar = { name, s, start, end: start + length, time: length, count: 1, type: names[i] ?? "" };
        last.set(name, bar);
        bars[s].push(bar);
      }
    });
    const longest = new Set([...times].sort((a, b) => b[1] - a[1]).slice(0, MOST_BARS).map(([name]) => name));
    const shown = [...times.keys()].filter((name) => longest.has(name));
    this.more.textContent = times.size > MOST_BARS ? `${times.size - MOST_BARS} more in the tables` : "";
    const cut = this.cut(shown);
    Object.assign(options, {
      indexAxis: "y", interaction: { mode: "nearest", intersect: true },
      scales: {
        x: { ...amounts, min: 0 },
        y: { ...scale, type: "category", labels: shown, grid: { display: false }, ticks: { ...scale.ticks, autoSkip: false, callback: (_, i) => cut[i] } },
      },
    });
    options.plugins.tooltip = { callbacks: {
      title: ([item]) => item.raw.bar.name,
      label: ({ raw: { bar } }) => `${values[bar.s][0]}: ${amount(bar.time, unit)} in ${bar.count === 1 ? bar.type : `${bar.count} operators`}, from ${amount(bar.start, unit)} to ${amount(bar.end, unit)}`,
    } };
    return { type: "bar", options, data: {
      labels: shown,
      datasets: values.map(([name], s) => ({
        label: name, backgroundColor: colour(s), barThickness: 14, grouped: false, minBarLength: 1,
        data: bars[s].filter((bar) => longest.has(bar.name)).map((bar) => ({ x: [bar.start, bar.end], y: bar.name, bar })),
      })),
    } };
  }

  plot(options, amounts, scale, colour) {
    const { kind, values, labels, axis, log } = this.data;
    const isSteps = axis === "step";
    const positive = values.flatMap(([, numbers]) => numbers.filter((value) => value > 0));
    // What has no logarithm stands a power of ten below the smallest that has one.
    const least = positive.length ? Math.min(...positive) / 10 : 0.1;
    // Below a factor of ten all ticks would have the same text.
    const isLog = log && positive.length > 0 && Math.max(...positive) >= 100 * least;
    const place = (value) => (value === null ? null : isLog && value <= 0 ? least : value);
    const isHist = kind === "hist";
    Object.assign(options, {
      interaction: { mode: "nearest", intersect: false },
      scales: {
        x: { ...scale, ...(isHist ? { ticks: { ...scale.ticks, maxRotation: 0, autoSkipPadding: 10 } } : { type: "linear", ticks: { ...scale.ticks, precision: isSteps ? 0 : undefined } }), title: { display: Boolean(axis), text: axis, color: scale.ticks.color, align: "end" } },
        y: { ...amounts, ...(isLog ? { type: "logarithmic" } : { beginAtZero: isHist || isSteps }) },
      },
    });
    return { type: isHist ? "bar" : kind === "line" ? "line" : "scatter", options, data: {
      labels: labels.map(String),
      datasets: values.map(([name, numbers], s) => ({
        label: name, real: numbers, backgroundColor: colour(s), borderColor: colour(s), borderWidth: kind === "line" ? 1.5 : 0,
        pointRadius: kind === "line" ? (numbers.length > 200 ? 0 : 2) : 2.5, barPercentage: 1, categoryPercentage: 0.96,
        data: isHist ? numbers : numbers.map((value, i) => ({ x: Number(labels[i]), y: place(value) })),
      })),
    } };
  }
}

// What is hidden has no width: charts are drawn when their tab is chosen.
function show(panel) {
  panel.hidden = false;
  for (const figure of panel.querySelectorAll("figure.chart")) figure.chart ??= new PageChart(figure);
}

const TABS = [...document.querySelectorAll("[role=tab]")];

function choose(tab) {
  for (const other of TABS) {
    other.setAttribute("aria-selected", String(other === tab));
    other.tabIndex = other === tab ? 0 : -1;
    document.getElementById(other.getAttribute("aria-controls")).hidden = true;
  }
  show(document.getElementById(tab.getAttribute("aria-controls")));
}

TABS.forEach((tab, i) => {
  tab.tabIndex = i ? -1 : 0;
  tab.addEventListener("click", () => choose(tab));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    const next = TABS[(i + step + TABS.length) % TABS.length];
    choose(next);
    next.focus();
  });
});
show(document.querySelector(".charts"));
