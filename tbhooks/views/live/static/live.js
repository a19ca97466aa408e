/*
 * The interactive live view. Python sends text, numbers and palette indices; this module lays them out and computes no
 * statistics. It is one module without imports, because a notebook loads it as one; nothing is fetched.
 * Text is only ever set as text content, never as markup.
 */

const SVG = "http://www.w3.org/2000/svg";
const ROW = 16;
const LOWEST_MAP = 480;
const HELP = "Heat map of layers and steps. Arrow keys move from cell to cell, Enter shows the histogram of a cell.";
const WAITING = "Waiting for the kernel; a busy kernel may answer after the cell has ended.";

function make(name, attributes = {}, ...children) {
  const element = name === "svg" || name === "path" ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** A labelled <select>. Unchanged options are not replaced, because the list may be open. */
function makeChoice(label, onChange) {
  const box = make("select", { "aria-label": label });
  let shown = "";
  box.addEventListener("change", () => onChange(box.value));
  return {
    element: make("label", {}, `${label} `, box),
    set(options, value) {
      if (shown !== options.join()) box.replaceChildren(...options.map((each) => make("option", { value: each }, each)));
      shown = options.join();
      box.value = value;
    },
  };
}

const bytes = (data) => new Uint8Array(data.buffer, data.byteOffset, data.byteLength);

/** Little-endian floats that may start anywhere in a message. */
const floats = (data) => new Float32Array(bytes(data).slice().buffer);

const whole = (step) => step.toLocaleString("en-US");
const stepsInWords = ([first, last]) => (first === last ? `step ${whole(first)}` : `steps ${whole(first)} to ${whole(last)}`);

function valueInWords(value, wrong) {
  if (wrong) return Number.isNaN(value) ? "not finite" : `${Number(value.toPrecision(6))}, with NaN or Inf inside`;
  return Number.isNaN(value) ? "no data" : String(Number(value.toPrecision(6)));
}

/** A line through heights from 0 to 1; null where there is no value. */
function drawLine(heights, width = 220, height = 34) {
  let path = "";
  heights.forEach((value, i) => {
    if (value === null) return;
    const x = ((i + 0.5) / heights.length) * width;
    path += `${path ? "L" : "M"}${x.toFixed(1)} ${(height - 2 - value * (height - 4)).toFixed(1)}`;
  });
  return make("svg", { width, height, class: "line", "aria-hidden": "true" }, make("path", { d: path }));
}

function drawBars(heights, width = 480, height = 90) {
  const most = Math.max(...heights, 1e-300);
  const wide = width / heights.length;
  const bars = heights.map((value, i) => {
    const tall = value > 0 ? Math.max(1, (value / most) * height) : 0;
    return `M${(i * wide).toFixed(1)} ${height}v${(-tall).toFixed(1)}h${(wide - 1).toFixed(1)}v${tall.toFixed(1)}z`;
  });
  const box = `0 0 ${width} ${height}`;
  return make("svg", { viewBox: box, class: "bars", "aria-hidden": "true" }, make("path", { d: bars.join("") }));
}

/** The palette's colours as canvas pixels. */
function pixels(palette) {
  const table = new Uint32Array(256);
  for (let i = 0; i < 255; i++) table[i] = (255 << 24) | (palette[3 * i + 2] << 16) | (palette[3 * i + 1] << 8) | palette[3 * i];
  return table;
}

function paint(canvas, width, height, colourAt) {
  canvas.width = Math.max(1, width);
  canvas.height = Math.max(1, height);
  if (!width || !height) return;
  const image = new ImageData(width, height);
  const target = new Uint32Array(image.data.buffer);
  for (let i = 0; i < target.length; i++) target[i] = colourAt(i % width, Math.floor(i / width));
  canvas.getContext("2d").putImageData(image, 0, 0);
}

/** The map with names beside it and steps below; `onMove(cell)` and `onPick(cell)` get a name and a column. */
function createMap(colours, onMove, onPick) {
  const canvas = make("canvas", { "aria-hidden": "true" });
  const frame = make("div", { class: "cursor", hidden: "" });
  const stage = make("div", { class: "stage", tabindex: "0", role: "application", "aria-label": HELP }, canvas, frame);
  const names = make("div", { class: "names", "aria-hidden": "true" });
  const element = make("div", { class: "live-map" }, make("div", { class: "scroller" }, names, stage));
  const axis = make("div", { class: "axis", "aria-hidden": "true" });
  element.append(axis);
  let shown = { rows: [], names: [], columns: 0 };
  let cursor = null;

  const cellAt = (row, column) => ({ row, column, index: shown.rows[row], name: shown.names[shown.rows[row]] });
  const clamp = (value, most) => Math.min(Math.max(value, 0), most - 1);

  function under(event) {
    const box = stage.getBoundingClientRect();
    const column = clamp(Math.floor(((event.clientX - box.left) / box.width) * shown.columns), shown.columns);
    return cellAt(clamp(Math.floor((event.clientY - box.top) / ROW), shown.rows.length), column);
  }

  function mark() {
    const row = cursor ? shown.rows.findIndex((index) => shown.names[index] === cursor.name) : -1;
    frame.hidden = row < 0 || cursor.column >= shown.columns;
    const wide = 100 / Math.max(shown.columns, 1);
    frame.style.cssText = `top:${row * ROW}px;height:${ROW}px;left:${(cursor?.column ?? 0) * wide}%;width:${wide}%`;
    return row;
  }

  function moveTo(cell) {
    cursor = cell;
    mark();
    frame.scrollIntoView?.({ block: "nearest" });
    onMove(cell);
  }

  const MOVES = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  stage.addEventListener("keydown", (event) => {
    if (!shown.rows.length || !shown.columns) return;
    const row = mark();
    if (event.key in MOVES) {
      const [down, right] = MOVES[event.key];
      const start = row < 0 ? cellAt(0, shown.columns - 1) : cellAt(clamp(row + down, shown.rows.length), clamp(cursor.column + right, shown.columns));
      moveTo(start);
    } else if (event.key === "Enter" && row >= 0) onPick(cellAt(row, cursor.column));
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  stage.addEventListener("pointermove", (event) => shown.rows.length && shown.columns && onMove(under(event)));
  stage.addEventListener("pointerleave", () => onMove(cursor));
  stage.addEventListener("click", (event) => {
    if (!shown.rows.length || !shown.columns) return;
    cursor = under(event);
    mark();
    onPick(cursor);
  });

  function draw(view, rows, levels) {
    shown = { rows, names: view.names, columns: view.steps.length };
    const n = shown.columns;
    paint(canvas, n, rows.length, (x, y) => colours[levels[rows[y] * n + x]]);
    stage.style.height = `${rows.length * ROW}px`;
    element.firstChild.style.maxHeight = `${LOWEST_MAP}px`;
    const flagged = new Set(view.flagged);
    names.replaceChildren(
      ...rows.map((i) => make("div", { title: view.names[i], class: flagged.has(i) ? "flagged" : "" }, (flagged.has(i) ? "! " : "") + view.names[i])),
    );
    const ends = n ? [view.steps[0][0], view.steps[Math.floor((n - 1) / 2)][0], view.steps[n - 1][1]] : [];
    axis.replaceChildren(...(n > 2 ? ends : [...new Set(ends)]).map((step, i) => make("span", {}, i ? whole(step) : `step ${whole(step)}`)));
    axis.style.paddingLeft = `${names.offsetWidth}px`;
    mark();
  }

  return { element, draw };
}

/** One widget. The search text and the chosen histogram outlive a view that is removed and shown again. */
export default () => {
  const kept = { search: "", histogram: null };

  function render({ model, el }) {
    const colours = pixels(bytes(model.get("palette")));
    el.classList.add("tbhooks", "tbhooks-live");
    const staticClass = model.get("static_class");
    // The static view for readers without a kernel is in the same cell; this view hides it.
    if (/^[\w-]+$/.test(staticClass)) el.append(make("style", {}, `.tbhooks:has(> .${staticClass}){display:none}`));

    const headline = make("p", { class: "headline" });
    const lines = make("div", { class: "lines" });
    const kind = makeChoice("kind", (value) => choose("kind", value));
    const stat = makeChoice("stat", (value) => choose("stat", value));
    const search = make("input", { type: "search", placeholder: "find a layer", "aria-label": "find a layer", value: kept.search });
    const matches = make("span", { class: "soft", role: "status" });
    const title = make("p", { class: "soft" });
    const ramp = make("canvas", { class: "ramp", "aria-hidden": "true" });
    const [low, high] = [make("span"), make("span")];
    const legend = make("p", { class: "legend" }, low, " ", ramp, " ", high);
    const value = make("p", { class: "value", role: "status" });
    const histogram = make("div", { class: "histogram", role: "status" });
    const findings = make("div", {});
    const notes = make("div", {});
    const map = createMap(colours, showValue, requestHistogram);
    paint(ramp, 64, 1, (x) => colours[x * 4]);
    const controls = make("div", { class: "controls" }, kind.element, stat.element, search, matches);
    el.append(headline, lines, controls, title, legend, map.element, value, histogram, findings, notes);

    let view = null;
    let values = new Float32Array();
    let levels = new Uint8Array();

    function choose(name, wanted) {
      model.set(name, wanted);
      const needsAnother = name === "kind" && model.get("stat") === "ratio" && !wanted.endsWith("update");
      if (needsAnother) model.set("stat", "std");
      model.save_changes();
      title.textContent = WAITING;
    }

    function showValue(cell) {
      if (!cell || !cell.name || cell.column >= view.steps.length) return void (value.textContent = "\u00a0");
      const at = cell.index * view.steps.length + cell.column;
      const words = valueInWords(values[at], levels[at] === 254);
      value.textContent = `${cell.name} at ${stepsInWords(view.steps[cell.column])}: ${view.stat} ${words}`;
    }

    function requestHistogram(cell) {
      const [first, last] = view.steps[cell.column];
      showValue(cell);
      kept.histogram = { title: `${cell.name} at ${stepsInWords([first, last])}`, why: WAITING };
      showHistogram();
      model.send({ ask: "histogram", name: cell.name, first, last });
    }

    function showHistogram() {
      const shown = kept.histogram;
      if (!shown) return histogram.replaceChildren();
      const parts = [make("h4", {}, shown.title)];
      if (shown.why) parts.push(make("p", { class: "soft" }, shown.why));
      if (shown.heights) parts.push(drawBars(shown.heights), make("div", { class: "axis" }, make("span", {}, shown.low), make("span", {}, shown.high)));
      if (shown.words) parts.push(make("p", {}, shown.words));
      histogram.replaceChildren(...parts);
    }

    function drawMap() {
      const wanted = search.value.toLowerCase();
      const rows = view.names.map((_, i) => i).filter((i) => view.names[i].toLowerCase().includes(wanted));
      matches.textContent = wanted ? `${rows.length} of ${view.names.length}` : "";
      map.draw(view, rows, levels);
    }

    function show() {
      view = model.get("view");
      values = floats(view.values);
      levels = bytes(view.levels);
      headline.textContent = view.headline;
      lines.replaceChildren(...view.lines.map((line) => make("p", {}, `${line.name} `, drawLine(line.heights), ` ${line.words}`)));
      kind.set(view.kinds.includes(view.kind) ? view.kinds : [view.kind, ...view.kinds], view.kind);
      stat.set(view.stats, view.stat);
      title.textContent = view.title;
      legend.hidden = !view.steps.length;
      low.textContent = view.scale.low;
      high.textContent = view.scale.high + (view.scale.logarithmic ? " (logarithmic)" : "");
      findings.replaceChildren(...view.findings.map(drawFinding));
      if (!view.findings.length) findings.append(make("p", {}, "No issues found."));
      notes.replaceChildren(...view.notes.map((note) => make("p", {}, note)));
      drawMap();
    }

    const onMessage = (message) => {
      if (!message?.histogram) return;
      kept.histogram = message.histogram;
      showHistogram();
    };
    search.addEventListener("input", () => {
      kept.search = search.value;
      drawMap();
    });
    search.addEventListener("keydown", (event) => event.stopPropagation()); // letters are keyboard shortcuts of the notebook
    model.on("change:view", show);
    model.on("msg:custom", onMessage);
    value.textContent = "\u00a0";
    show();
    showHistogram();
    return () => {
      model.off("change:view", show);
      model.off("msg:custom", onMessage);
    };
  }

  return { render };
};

function drawFinding({ severity, heading, message }) {
  return make("div", { class: `finding ${severity}` }, make("b", {}, severity), ` ${heading}`, make("p", {}, message));
}
