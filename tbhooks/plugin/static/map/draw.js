/*
 * Draws the heat map on a canvas context: cells, labels, step axis, marks. Used by the page and the saved image.
 * Takes a geometry (positions) and a model (contents); caches only shortened names.
 */

import { paintCells, columnsOf } from "./cells.js";
import { distinct, elide } from "./labels.js";
import { shortStep } from "../core/numbers.js";
import { drawStrip } from "./strip.js";
import { stepTicks } from "./view.js";

export const FONT = 'Roboto, "Helvetica Neue", "Segoe UI", Arial, sans-serif';
const LABEL_SIZE = 12;
const INDENT = 13;
const CHEVRON = 16;
const HIGH_ENOUGH = 13; // pixels a row needs for its name
export const SPARK = 46;
const MARK = { error: "bad", warning: "warn", info: "soft" };

/** The first visible row, and one past the last. */
export function rowsInSight(g, count) {
  const first = Math.max(0, Math.floor(g.scroll / g.rowHeight));
  return [first, Math.min(count, Math.ceil((g.scroll + g.height - g.top) / g.rowHeight))];
}

export const rowTop = (g, row) => g.top + row * g.rowHeight - g.scroll;
export const stepX = (pane, view, step) => pane.x + ((step - view[0]) / (view[1] - view[0])) * pane.width;

export const xStep = (pane, view, x) => view[0] + ((x - pane.x) / pane.width) * (view[1] - view[0]);

function drawCells(context, g, model) {
  const [first, last] = rowsInSight(g, model.rows.length);
  const height = Math.round((g.height - g.top) * g.dpr);
  model.panes.forEach((pane, p) => {
    const { x, width } = g.panes[p];
    const left = Math.round(x * g.dpr);
    const pixels = Math.round((x + width) * g.dpr) - left;
    if (pixels <= 0 || height <= 0) return;
    const image = new ImageData(pixels, height);
    paintCells(new Uint32Array(image.data.buffer), {
      width: pixels,
      height,
      first,
      last,
      top: (row) => Math.round((row * g.rowHeight - g.scroll) * g.dpr),
      gap: g.rowHeight >= 9 ? Math.round(g.dpr) : 0,
      columns: columnsOf(pane.edges, model.view, pixels, 9 * g.dpr),
      codes: (row) => pane.codes(row),
      table: pane.table,
      pitch: Math.max(1, Math.round(1.5 * g.dpr)),
    });
    context.putImageData(image, left, Math.round(g.top * g.dpr));
  });
}

function drawChevron(context, x, y, open) {
  context.beginPath();
  if (open) [[-4, -2], [4, -2], [0, 3]].forEach(([dx, dy]) => context.lineTo(x + dx, y + dy));
  else [[-2, -4], [3, 0], [-2, 4]].forEach(([dx, dy]) => context.lineTo(x + dx, y + dy));
  context.fill();
}

/** The position of a name: beside its row, but never cut off by an edge. */
function labelMiddle(g, row) {
  const middle = rowTop(g, row) + g.rowHeight / 2;
  return g.rowHeight < HIGH_ENOUGH ? Math.min(Math.max(middle, g.top + 7), g.height - 7) : middle;
}

/** The room of a name: what is left of the column beside chevron, sparkline and the dot of a chosen module. */
const roomOf = (g, depth) => g.labels - g.left - depth * INDENT - CHEVRON - 10 - (g.spark ? SPARK : 0);

const shortNames = new WeakMap();

/** The text of every row, shortened where it must be; different names on one level stay different. */
function textsOf(context, g, rows) {
  const known = shortNames.get(rows);
  if (known?.width === g.labels && known.spark === g.spark) return known.texts;
  const levels = new Map();
  for (const row of rows) levels.set(row.depth, [...(levels.get(row.depth) ?? []), row.label]);
  context.font = `${LABEL_SIZE}px ${FONT}`;
  const short = new Map();
  for (const [depth, names] of levels) short.set(depth, distinct(names, (text) => context.measureText(text).width <= roomOf(g, depth)));
  const texts = rows.map((row) => short.get(row.depth).get(row.label));
  shortNames.set(rows, { width: g.labels, spark: g.spark, texts });
  return texts;
}

/** The course of a row over the shown steps on a scale of its own: what a shared colour scale hides. */
function drawSpark(context, g, model, row, theme, columns) {
  const numbers = model.panes[0].numbers(model.rows[row]);
  if (!numbers) return;
  const points = [];
  for (let x = 0; x < columns.from.length; x++) {
    const value = columns.from[x] < 0 ? NaN : numbers.values[columns.to[x] - 1];
    points.push(Number.isFinite(value) ? value : NaN);
  }
  const known = points.filter((value) => !Number.isNaN(value));
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const height = Math.min(12, g.rowHeight - 5);
  const top = rowTop(g, row) + (g.rowHeight - height) / 2;
  context.beginPath();
  let open = false;
  points.forEach((value, x) => {
    if (Number.isNaN(value)) {
      open = false;
      return;
    }
    const at = [g.labels - SPARK + x, top + (high > low ? (1 - (value - low) / (high - low)) * height : height / 2)];
    if (open) context.lineTo(...at);
    else context.moveTo(...at);
    open = true;
  });
  context.lineWidth = 1;
  context.strokeStyle = theme.soft;
  context.stroke();
}

function drawLabel(context, g, model, row, theme, text, columns) {
  const { depth, group, open, key, site, tag } = model.rows[row];
  const y = labelMiddle(g, row);
  const x = g.left + depth * INDENT;
  const colour = model.picks.get(key);
  if (group) {
    context.fillStyle = theme.soft;
    drawChevron(context, x + 6, y, open);
  }
  context.fillStyle = site ? theme.ink : theme.soft;
  context.font = `${colour ? 600 : 400} ${LABEL_SIZE}px ${FONT}`;
  context.fillText(text, x + CHEVRON, y + 0.5);
  if (columns && !tag) drawSpark(context, g, model, row, theme, columns);
  if (tag) {
    context.font = `11px ${FONT}`;
    context.textAlign = "right";
    context.fillStyle = theme.soft;
    context.fillText(tag, g.labels - 8, y + 0.5);
    context.textAlign = "left";
  }
  if (!colour) return;
  context.fillStyle = colour;
  context.beginPath();
  context.arc(x + (group ? 16 : 8) - (group ? 4 : 0), y, 4, 0, 2 * Math.PI);
  context.fill();
}

/** Labels where there is room: chosen modules first, then groups, outermost first. */
function drawLabels(context, g, model, theme) {
  const [first, last] = rowsInSight(g, model.rows.length);
  const order = [];
  for (let row = first; row < last; row++) order.push(row);
  const dense = g.rowHeight < HIGH_ENOUGH;
  const texts = textsOf(context, g, model.rows);
  const columns = g.spark && model.panes.length ? columnsOf(model.panes[0].edges, model.view, SPARK - 10, Infinity) : null;
  if (dense) {
    const rank = (row) => (model.picks.has(model.rows[row].key) ? -1 : model.rows[row].depth + (model.rows[row].group ? 0 : 0.5));
    order.sort((one, other) => rank(one) - rank(other) || one - other);
  }
  const taken = new Uint8Array(Math.ceil(g.height) + 40);
  context.save();
  context.beginPath();
  context.rect(0, g.top, g.labels, g.height - g.top);
  context.clip();
  context.textBaseline = "middle";
  context.textAlign = "left";
  for (const row of order) {
    const middle = Math.round(labelMiddle(g, row));
    if (dense) {
      const span = taken.subarray(Math.max(0, middle - 7), Math.max(0, middle + 7));
      if (span.includes(1)) continue;
      span.fill(1);
    }
    const { key, full } = model.rows[row];
    const whole = dense && model.picks.has(key); // the rows around it that would say where it is have no room
    drawLabel(context, g, model, row, theme, whole ? elide(context, full, roomOf(g, model.rows[row].depth)) : texts[row], columns);
  }
  context.restore();
}

function drawAxis(context, g, model, pane, theme, titled) {
  context.textBaseline = "alphabetic";
  if (titled) {
    context.fillStyle = theme.ink;
    context.textAlign = "left";
    context.font = `600 12px ${FONT}`;
    context.fillText(elide(context, titled, pane.width), pane.x, 15);
  }
  context.font = `11px ${FONT}`;
  context.textAlign = "center";
  let free = -Infinity;
  for (const step of stepTicks(model.view, pane.width / 80)) {
    const x = stepX(pane, model.view, step);
    context.fillStyle = theme.line;
    context.fillRect(Math.round(x), g.top - 5, 1, 4);
    context.fillStyle = theme.soft;
    const text = shortStep(step);
    const half = context.measureText(text).width / 2;
    const middle = Math.min(Math.max(x, pane.x + half), pane.x + pane.width - half);
    if (middle - half < free + 6) continue;
    context.fillText(text, middle, g.top - 9);
    free = middle + half;
  }
}

export function drawBase(context, g, model, theme) {
  context.setTransform(1, 0, 0, 1, 0, 0);
  context.fillStyle = theme.paper;
  context.fillRect(0, 0, g.width * g.dpr, g.height * g.dpr);
  drawCells(context, g, model);
  context.setTransform(g.dpr, 0, 0, g.dpr, 0, 0);
  drawLabels(context, g, model, theme);
  drawStrip(context, g, model, theme);
  g.panes.forEach((pane, p) => drawAxis(context, g, model, pane, theme, model.panes.length > 1 ? model.panes[p].title : null));
  context.font = `11px ${FONT}`;
  context.fillStyle = theme.soft;
  context.textAlign = "right";
  context.fillText("step", g.labels - 10, g.top - 9);
}

/** Rectangle of a cell, at least three pixels wide. */
export function cellBox(g, model, { row, pane, index }) {
  const { edges } = model.panes[pane];
  const left = stepX(g.panes[pane], model.view, edges[2 * index]);
  const right = stepX(g.panes[pane], model.view, edges[2 * index + 1]);
  const width = Math.max(3, right - left);
  return { x: (left + right - width) / 2, y: rowTop(g, row), width, height: Math.max(3, g.rowHeight) };
}

function drawMarks(context, g, model, theme) {
  for (const mark of model.marks) {
    const pane = g.panes[mark.pane];
    const x = stepX(pane, model.view, mark.step);
    if (x < pane.x - 1 || x > pane.x + pane.width + 1) continue;
    const inside = mark.row >= 0;
    const y = inside ? rowTop(g, mark.row) + g.rowHeight / 2 : g.top - 3;
    const size = inside ? Math.min(6, Math.max(3.5, g.rowHeight / 3)) : 3.5;
    if (model.strip) {
      context.globalAlpha = 0.55;
      context.fillStyle = theme[MARK[mark.severity] ?? "soft"];
      context.fillRect(Math.round(x), g.strip.top, 1, g.strip.height);
      context.globalAlpha = 1;
    }
    if (inside && (y < g.top || y > g.height)) continue;
    context.beginPath();
    [[0, -size], [size, 0], [0, size], [-size, 0]].forEach(([dx, dy]) => context.lineTo(x + dx, y + dy));
    context.closePath();
    context.fillStyle = theme[MARK[mark.severity] ?? "soft"];
    context.fill();
    context.lineWidth = inside ? 1.5 : 0;
    context.strokeStyle = "#fff";
    if (inside) context.stroke();
  }
}

function outline(context, box, inner, outer, width) {
  context.lineWidth = width + 2;
  context.strokeStyle = outer;
  context.strokeRect(box.x - 1, box.y - 1, box.width + 2, box.height + 2);
  context.lineWidth = width;
  context.strokeStyle = inner;
  context.strokeRect(box.x - 1, box.y - 1, box.width + 2, box.height + 2);
}

/** The layer that changes without the cells: marks, the cursor, the cell under the mouse. */
export function drawOverlay(context, g, model, theme, hover) {
  context.setTransform(g.dpr, 0, 0, g.dpr, 0, 0);
  context.clearRect(0, 0, g.width, g.height);
  context.save();
  context.beginPath();
  context.rect(0, (g.strip?.top ?? g.top) - 8, g.width, g.height);
  context.clip();
  drawMarks(context, g, model, theme);
  context.beginPath();
  context.rect(0, g.top - 1, g.width, g.height);
  context.clip();
  if (hover && hover.row >= 0) {
    context.fillStyle = theme.dark ? "rgb(255 255 255 / 7%)" : "rgb(0 0 0 / 5%)";
    context.fillRect(0, rowTop(g, hover.row), g.labels - 2, g.rowHeight);
    if (hover.index >= 0) outline(context, cellBox(g, model, hover), theme.ink, theme.paper, 1);
  }
  if (model.cursor && model.cursor.row >= 0) outline(context, cellBox(g, model, model.cursor), theme.accent, theme.paper, 2);
  context.restore();
}
