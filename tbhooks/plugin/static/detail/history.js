/* History over steps: quantile bands of one module, or one stat of several as lines. Numbers in, a plot's model out
   (see plot.js); fetches nothing and keeps no state. */

import { valueScale } from "./axes.js";
import { brief, isFinite, nearZero } from "../core/numbers.js";
import { BOTTOM, LEFT, RIGHT, TOP, bandPath, chosenStep, crisp, leftAxis, line, linePath } from "./frame.js";
import { nearestIndex, short, stepAxis, stepScale, thinnedToColumns } from "./frame.js";
import { svg } from "../core/elements.js";

const HEIGHT = 190;
const LABELS = 34; // room right of the lines, for their names

const BANDS = [
  ["p01", "p99", "detail-band detail-band-wide"],
  ["p25", "p75", "detail-band detail-band-narrow"],
];

function allFinite(lists) {
  return lists.flatMap((list) => list.filter(isFinite));
}

/** From the first to the last step; the chosen one is always in sight. */
function stepRange(lists, chosen) {
  const ends = lists.filter((steps) => steps.length).flatMap((steps) => [steps[0], steps.at(-1)]);
  if (isFinite(chosen)) ends.push(chosen);
  return [Math.min(...ends), Math.max(...ends)];
}

function plotFrame(width, steps, chosen, values, mode, title, room) {
  const bottom = HEIGHT - BOTTOM;
  const x = stepScale(...stepRange(steps, chosen), LEFT + 4, width - RIGHT - room);
  const y = valueScale(values, mode, bottom, TOP);
  return { x, y, bottom, nodes: [...leftAxis(y, x.right, title), ...stepAxis(x, bottom)] };
}

/** Steps whose value is not a number have a mark above the plot: a line cannot show them. */
function brokenMarks(steps, values, x) {
  let path = "";
  values.forEach((value, i) => {
    if (value !== null && value !== undefined && !isFinite(value)) path += `M${short(x.pixel(steps[i]))} ${TOP - 4}v7`;
  });
  return path ? [svg("path", { d: path, class: "detail-broken" })] : [];
}

/** Labels at the right end, pushed apart until none touches another. */
function endLabels(wanted, x, top, bottom) {
  const placed = wanted.filter(({ y }) => isFinite(y)).sort((a, b) => a.y - b.y);
  placed.forEach((label, i) => {
    label.at = Math.max(label.y, i ? placed[i - 1].at + 11 : top);
  });
  for (let i = placed.length - 1, limit = bottom; i >= 0; i -= 1, limit = placed[i + 1].at - 11) {
    placed[i].at = Math.min(placed[i].at, limit);
  }
  return placed.map(({ at, text, name }) =>
    svg("text", { x: x + 5, y: short(at + 3.5), class: `detail-tick ${name}` }, text),
  );
}

function lastFinite(list) {
  for (let i = list.length - 1; i >= 0; i -= 1) if (isFinite(list[i])) return list[i];
  return null;
}

function zipped(steps, lists, x, y) {
  const height = (value) => (isFinite(value) ? y.pixel(value) : null);
  return thinnedToColumns(steps.map((step, i) => [x.pixel(step), ...lists.map((list) => height(list[i]))]));
}

/* ---- Quantile bands ----------------------------------------------------------------------------------------- */

const OUTER = [
  ["max", "detail-extreme"],
  ["min", "detail-extreme"],
];

function bandNodes({ steps, stats, quantileSteps, quantiles }, x, y) {
  const extremes = OUTER.map(([name, look]) => linePath(zipped(steps, [stats[name] ?? []], x, y), { class: look }));
  const bands = BANDS.map(([low, high, look]) =>
    bandPath(zipped(quantileSteps, [quantiles[low], quantiles[high]], x, y), { class: look }),
  );
  const median = linePath(zipped(quantileSteps, [quantiles.p50], x, y), { class: "detail-median" });
  return [...bands, ...extremes, median];
}

function bandLabels({ stats, quantiles }, x, y, bottom) {
  const at = (list) => (list && lastFinite(list) !== null ? y.pixel(lastFinite(list)) : null);
  const labels = [
    { text: "max", y: at(stats.max), name: "detail-soft" },
    { text: "p99", y: at(quantiles.p99), name: "detail-soft" },
    { text: "p75", y: at(quantiles.p75), name: "detail-soft" },
    { text: "median", y: at(quantiles.p50), name: "detail-strong" },
    { text: "p25", y: at(quantiles.p25), name: "detail-soft" },
    { text: "p01", y: at(quantiles.p01), name: "detail-soft" },
    { text: "min", y: at(stats.min), name: "detail-soft" },
  ];
  const enough = labels.filter((label) => label.text === "median" || !crowded(label, labels));
  return endLabels(enough, x.right, TOP + 4, bottom - 2);
}

/** Names that would all lie on one spot are left out; the median's stays. */
function crowded(label, labels) {
  const median = labels.find(({ text }) => text === "median");
  const inner = label.text === "p25" || label.text === "p75";
  return inner && isFinite(median.y) && Math.abs(median.y - label.y) < 9;
}

function bandRows(history, step) {
  const { steps, stats, quantileSteps, quantiles } = history;
  const row = nearestIndex(steps, step);
  const column = quantileSteps.length ? nearestIndex(quantileSteps, step) : -1;
  const found = { max: stats.max?.[row], min: stats.min?.[row] };
  for (const name of ["p99", "p75", "p50", "p25", "p01"]) found[name] = quantiles[name][column];
  const rows = ["max", "p99", "p75", "p50", "p25", "p01", "min"]
    .filter((name) => found[name] !== null && found[name] !== undefined)
    .map((name) => ({ name: name === "p50" ? "median" : name, value: nearZero(name, found[name]) }));
  const elsewhere = column >= 0 && quantileSteps[column] !== step;
  return elsewhere ? [...rows, { name: "quantiles of step", value: String(quantileSteps[column]) }] : rows;
}

function bandSummary(name, { steps, stats, quantiles }) {
  const shown = ["p01", "p50", "p99"]
    .filter((quantile) => lastFinite(quantiles[quantile] ?? []) !== null)
    .map((quantile) => `${quantile === "p50" ? "median" : quantile} ${brief(lastFinite(quantiles[quantile]))}`);
  const ends = `${steps.length} steps from ${steps[0]} to ${steps.at(-1)}`;
  const [low, high] = [lastFinite(stats.min ?? []), lastFinite(stats.max ?? [])];
  const last = [...shown, `minimum ${brief(low)}`, `maximum ${brief(high)}`];
  return `Quantiles of ${name} over ${ends}. At the end: ${last.join(", ")}.`;
}

/** What the bands span: the values their scale is chosen by. */
export function bandValues({ stats, quantiles }) {
  return allFinite([stats.min ?? [], stats.max ?? [], ...Object.values(quantiles)]);
}

export function bandsModel(name, colour, history, step, mode, onPick, width) {
  const { x, y, bottom, nodes } = plotFrame(width, [history.steps], step, bandValues(history), mode, "value", LABELS);
  const broken = brokenMarks(history.steps, history.stats.norm ?? [], x);
  const drawn = svg("g", { colour }, ...bandNodes(history, x, y), ...broken);
  return {
    height: HEIGHT,
    nodes: [...nodes, drawn, ...bandLabels(history, x, y, bottom), ...chosenStep(x, step, TOP, bottom)],
    label: bandSummary(name, history),
    ...stepStops(history.steps, x, bottom, step, onPick, (at) => ({ rows: bandRows(history, at), dots: [] })),
  };
}

/* ---- Lines of one stat -------------------------------------------------------------------------------------- */

function lineNodes({ steps, values, colour }, x, y) {
  const points = zipped(steps, [values], x, y);
  const nodes = [linePath(points, { class: "detail-line", colour })];
  if (steps.length <= 40) {
    const dots = points.filter(([, at]) => at !== null).map(([px, py]) => `M${short(px)} ${short(py)}h0.01`);
    nodes.push(svg("path", { d: dots.join(""), class: "detail-dots", colour }));
  }
  return [...nodes, ...brokenMarks(steps, values, x)];
}

function lineSummary(stat, { name, steps, values }) {
  const finite = values.filter(isFinite);
  const broken = values.filter((value) => typeof value === "number" && !isFinite(value)).length;
  if (!finite.length) return `${name}: no finite value`;
  const [low, high] = [finite.reduce((a, b) => Math.min(a, b)), finite.reduce((a, b) => Math.max(a, b))];
  const range = `from ${brief(low)} to ${brief(high)}`;
  const bad = broken ? `, not finite at ${broken} steps` : "";
  return `${name}: ${stat} ${range} over steps ${steps[0]} to ${steps.at(-1)}, last ${brief(lastFinite(values))}${bad}`;
}

function valueAt({ steps, values }, step) {
  const index = nearestIndex(steps, step);
  return steps[index] === step ? values[index] : null;
}

function lineTold(series, y, step) {
  const all = series.map((one) => ({ ...one, value: valueAt(one, step) }));
  const shown = all.filter(({ value }) => value !== null && value !== undefined);
  return {
    rows: shown.map(({ name, colour, value }) => ({ name, value: brief(value), colour: series.length > 1 ? colour : null })),
    dots: shown.filter(({ value }) => isFinite(value)).map(({ colour, value }) => ({ colour, y: y.pixel(value) })),
  };
}

/** `series`: [{name, colour, steps, values}]. */
export function linesModel(stat, series, step, mode, onPick, width) {
  const values = allFinite(series.map((one) => one.values));
  const { x, y, bottom, nodes } = plotFrame(width, series.map((one) => one.steps), step, values, mode, "", 0);
  const steps = [...new Set(series.flatMap((one) => one.steps))].sort((a, b) => a - b);
  return {
    height: HEIGHT,
    nodes: [...nodes, ...series.flatMap((one) => lineNodes(one, x, y)), ...chosenStep(x, step, TOP, bottom)],
    label: `History of ${stat}. ${series.map((one) => lineSummary(stat, one)).join("; ")}.`,
    ...stepStops(steps, x, bottom, step, onPick, (at) => lineTold(series, y, at)),
  };
}

/* ---- Pointing at steps -------------------------------------------------------------------------------------- */

function stepStops(steps, x, bottom, chosen, onPick, describe) {
  const toStep = (pixel) => x.first + ((pixel - x.left) / (x.right - x.left)) * (x.last - x.first);
  return {
    stops: steps.length,
    first: nearestIndex(steps, chosen),
    find: (px) => (px < x.left - 12 || px > x.right + 12 ? null : nearestIndex(steps, toStep(px))),
    pick: (i) => onPick(steps[i]),
    at(i) {
      const at = x.pixel(steps[i]);
      const { rows, dots } = describe(steps[i]);
      const hair = line(crisp(at), TOP, crisp(at), bottom, "detail-hair");
      const circles = dots.map(({ y, colour }) =>
        svg("circle", { cx: short(at), cy: short(y), r: 3, class: "detail-dot", colour }),
      );
      return { title: `step ${steps[i]}`, rows, x: at, y: TOP + 40, marks: [hair, ...circles] };
    },
  };
}
