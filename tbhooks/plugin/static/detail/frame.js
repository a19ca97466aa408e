/* Shared by all charts: margins, axis lines, ticks, lines with gaps where there is no data. */

import { linearScale, stepTicks } from "./axes.js";
import { isFinite, shortStep } from "../core/numbers.js";
import { svg } from "../core/elements.js";

/** All charts share their margins, so that they line up below each other. */
export const LEFT = 52;
export const RIGHT = 14;
export const TOP = 22;
export const BOTTOM = 24;

export const crisp = (pixel) => Math.round(pixel) + 0.5;
export const short = (pixel) => Math.round(pixel * 100) / 100;

/** Text of a tick: a power of ten gets a raised exponent. */
export function tickLabel({ text, exponent, sign }, attributes) {
  if (text !== undefined) return svg("text", attributes, text);
  const minus = sign < 0 ? "\u2212" : "";
  if (exponent === 0 || exponent === 1) return svg("text", attributes, `${minus}${10 ** exponent}`);
  const raised = svg("tspan", { class: "detail-raised", dy: "-4" }, String(exponent).replace("-", "\u2212"));
  return svg("text", attributes, `${minus}10`, raised);
}

export function line(x1, y1, x2, y2, name) {
  return svg("line", { x1: short(x1), y1: short(y1), x2: short(x2), y2: short(y2), class: name });
}

/** Grid lines and labels on the left; `title` says what is measured, above them. */
export function leftAxis(scale, right, title) {
  const nodes = [svg("text", { x: 0, y: 10, class: "detail-axis-title" }, title)];
  for (const tick of scale.ticks) {
    const y = scale.pixel(tick.value);
    nodes.push(line(LEFT, crisp(y), right, crisp(y), "detail-gridline"));
    nodes.push(tickLabel(tick, { x: LEFT - 6, y: short(y + 3.5), class: "detail-tick detail-tick-left" }));
  }
  return nodes;
}

export function stepScale(first, last, left, right) {
  if (first === last) return { pixel: () => (left + right) / 2, first, last, left, right };
  const { pixel } = linearScale(first, last, left, right);
  return { pixel, first, last, left, right };
}

/** Labels below the axis, and its title at the far left. */
export function stepAxis(scale, y) {
  const nodes = [line(scale.left, crisp(y), scale.right, crisp(y), "detail-axis")];
  const wanted = Math.max(2, Math.floor((scale.right - scale.left) / 72));
  for (const step of stepTicks(scale.first, scale.last, wanted)) {
    const [x, text] = [scale.pixel(step), shortStep(step)];
    const at = Math.min(x, scale.right + RIGHT - text.length * 3.3);
    nodes.push(line(crisp(x), y, crisp(x), y + 4, "detail-axis"));
    nodes.push(svg("text", { x: short(at), y: y + 16, class: "detail-tick detail-tick-below" }, text));
  }
  nodes.push(svg("text", { x: 0, y: y + 16, class: "detail-tick detail-soft" }, "step"));
  return nodes;
}

/** The line of the chosen step, with its label above the plot. */
export function chosenStep(scale, step, top, bottom) {
  if (!isFinite(step) || step < scale.first || step > scale.last) return [];
  const x = scale.pixel(step);
  const label = `step ${step}`;
  const half = label.length * 3;
  const at = Math.max(scale.left + half, Math.min(scale.right - half, x));
  return [
    line(crisp(x), top - 4, crisp(x), bottom, "detail-chosen"),
    svg("text", { x: short(at), y: top - 8, class: "detail-tick detail-chosen-label" }, label),
  ];
}

/** Runs of points without a gap in them. */
function unbroken(points) {
  const runs = [[]];
  for (const point of points) {
    if (point.every(isFinite)) runs.at(-1).push(point);
    else if (runs.at(-1).length) runs.push([]);
  }
  return runs.filter((run) => run.length);
}

const move = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${short(x)} ${short(y)}`).join("");

/** A line through [x, y] points; gaps stay gaps, and a point alone between two of them is a dot. */
export function linePath(points, attributes) {
  const runs = unbroken(points);
  const path = runs.map((run) => (run.length === 1 ? `${move(run)}h0.01` : move(run))).join("");
  return svg("path", { d: path, ...attributes });
}

/** The area between [x, low, high] points. */
export function bandPath(points, attributes) {
  const path = unbroken(points).map((run) => {
    const [[x, low, high]] = run;
    const all = run.length > 1 ? run : [[x - 4, low, high], [x + 4, low, high]]; // a single step must be visible, too
    const lower = all.map(([at, value]) => [at, value]);
    const upper = all.map(([at, , value]) => [at, value]).reverse();
    return `${move([...lower, ...upper])}Z`;
  });
  return svg("path", { d: path.join(""), ...attributes });
}

/** At most a few points for each pixel column: the lowest and highest of each measure survive. */
export function thinnedToColumns(points) {
  if (points.length < 2 || points.length < 3 * (points.at(-1)[0] - points[0][0])) return points;
  const kept = [];
  let column = [];
  const close = () => {
    if (column.length <= 4) kept.push(...column);
    else kept.push(...extremes(column));
    column = [];
  };
  for (const point of points) {
    if (column.length && Math.floor(point[0]) !== Math.floor(column[0][0])) close();
    column.push(point);
  }
  close();
  return kept;
}

function extremes(column) {
  const wanted = new Set([0, column.length - 1]);
  for (let measure = 1; measure < column[0].length; measure += 1) {
    const finite = column.map((point, i) => [point[measure], i]).filter(([value]) => isFinite(value));
    if (!finite.length) continue;
    wanted.add(finite.reduce((a, b) => (b[0] < a[0] ? b : a))[1]);
    wanted.add(finite.reduce((a, b) => (b[0] > a[0] ? b : a))[1]);
  }
  return [...wanted].sort((a, b) => a - b).map((i) => column[i]);
}

/** The index of the number nearest to `value` in an ascending list. */
export function nearestIndex(numbers, value) {
  let [low, high] = [0, numbers.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (numbers[middle] <= value) low = middle;
    else high = middle;
  }
  return Math.abs(numbers[high] - value) < Math.abs(numbers[low] - value) ? high : low;
}
