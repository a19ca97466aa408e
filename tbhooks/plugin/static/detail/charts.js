/* The distribution at one step: bars for one module, outlines for several. Numbers in, a plot's model out
   (see plot.js); fetches nothing and keeps no state. */

import { linearScale, logScale, signedLogAxis } from "./axes.js";
import { brief, counted, isFinite, percent, whole } from "../core/numbers.js";
import { LEFT, RIGHT, TOP, crisp, leftAxis, line, short } from "./frame.js";
import { svg } from "../core/elements.js";
import { bucketText, signedAxis } from "./signed.js";

const HEIGHT = 216;
const BELOW = 26;
const SLOT = 34;

const SPECIAL = [
  ["NaN", "nans"],
  ["Inf", "infs"],
];

/** Slots right of the axis, for values that are not on it. */
function specialSlots(series, right) {
  const needed = SPECIAL.filter(([, field]) => series.some((one) => one[field] > 0));
  return needed.map(([name, field], i) => {
    const x1 = right - SLOT * (needed.length - 1 - i);
    return { name, field, x0: x1 - SLOT + 8, x1 };
  });
}

function heights(series, slots) {
  return series.flatMap((one) => {
    const counts = [...one.counts.values(), ...slots.map(({ field }) => one[field])];
    return counts.filter((count) => count > 0).map(one.measure);
  });
}

function countScale(values, mode, single, bottom) {
  const high = values.length ? Math.max(...values) : 1;
  if (mode === "linear") return linearScale(0, high * 1.04, bottom, TOP);
  const low = values.length ? Math.min(...values) : 0.5;
  return logScale(Math.min(single ? 0.6 : low * 0.6, high / 3), high * 1.2, bottom, TOP);
}

/** Ticks in percent; powers of ten too small for that stay powers. */
function shareTick(tick) {
  if (tick.exponent !== undefined && tick.value < 1e-6) return tick;
  return { value: tick.value, text: `${Number((100 * tick.value).toPrecision(3))}%` };
}

function barsPath(one, axis, y, bottom) {
  const gap = axis.unit >= 4 ? 0.5 : 0;
  let path = "";
  for (const [key, count] of one.counts) {
    const cell = axis.cell(key);
    if (cell) path += bar(cell[0] + gap, cell[1] - gap, y(one.measure(count)), bottom);
  }
  return path;
}

const bar = (x0, x1, top, bottom) =>
  `M${short(x0)} ${bottom}V${short(Math.min(top, bottom - 1))}H${short(x1)}V${bottom}Z`;

/** Steps from bucket to bucket, down to the base line where the next one is empty or far away. */
function outlinePath(one, axis, y, bottom) {
  let path = "";
  let end = -Infinity;
  for (const key of axis.keys.filter((shown) => one.counts.has(shown))) {
    const [x0, x1] = axis.cell(key);
    if (x0 - end > 0.01) path += `${path ? `V${bottom}` : ""}M${short(x0)} ${bottom}`;
    path += `V${short(y(one.measure(one.counts.get(key))))}H${short(x1)}`;
    end = x1;
  }
  return path ? `${path}V${bottom}` : "";
}

function drawnSeries(series, axis, y, bottom) {
  if (series.length === 1) {
    return [svg("path", { d: barsPath(series[0], axis, y, bottom), class: "detail-bars", colour: series[0].colour })];
  }
  return series.map((one) =>
    svg("path", { d: outlinePath(one, axis, y, bottom), class: "detail-outline", colour: one.colour }),
  );
}

function drawnSlots(series, slots, y, bottom) {
  return slots.flatMap(({ name, field, x0, x1 }) => {
    const width = (x1 - x0) / series.length;
    const bars = series.map((one, i) =>
      one[field] > 0
        ? svg("path", {
            d: bar(x0 + i * width + 1, x0 + (i + 1) * width - 1, y(one.measure(one[field])), bottom),
            class: series.length === 1 ? "detail-bad-bar" : "detail-bars",
            colour: one.colour,
          })
        : null,
    );
    const place = { x: (x0 + x1) / 2, y: bottom + 17.5, class: "detail-tick detail-tick-below detail-bad" };
    const label = svg("text", place, name);
    return [line(x0 - 2, crisp(bottom), x1 + 2, crisp(bottom), "detail-axis"), ...bars, label];
  });
}

/** Everything the pointer can select, from left to right. */
function stopsOf(axis, slots) {
  const buckets = axis.keys.map((key) => ({ key, x0: axis.cell(key)[0], x1: axis.cell(key)[1] }));
  return [...buckets, ...slots];
}

function tooltipOf(stop, series, y, shape) {
  const count = (one) => (stop.field ? one[stop.field] : one.counts.get(stop.key) ?? 0);
  const rows = series.map((one) => ({
    name: series.length > 1 ? one.name : "elements",
    colour: series.length > 1 ? one.colour : null,
    value: `${whole(count(one))} (${percent(one.elements ? count(one) / one.elements : 0)})`,
  }));
  const exactEnds = series.length === 1 ? series[0].bounds.get(stop.key) : undefined;
  const top = Math.min(...series.map((one) => (count(one) > 0 ? y(one.measure(count(one))) : Infinity)));
  return { title: stop.field ? stop.name : shape.words(stop.key, exactEnds ?? series[0].bounds.get(stop.key)), rows, top };
}

function summary(one) {
  const range = isFinite(one.min) ? `from ${brief(one.min)} to ${brief(one.max)}` : "none of them finite";
  const median = isFinite(one.median) ? `, median ${brief(one.median)}` : "";
  const words = [`${percent(one.zeroShare)} zeros`, counted(one.nans, "NaN"), counted(one.infs, "Inf")].join(", ");
  return `${one.name} at step ${one.step}: ${whole(one.elements)} elements ${range}${median}, ${words}`;
}

/** On the signed log axis, which shows at least the buckets of `keys`. */
export function signedShape(keys) {
  return {
    title: (single) => (single ? "count per half-octave bin" : "share of elements per half-octave bin"),
    lay: (series, left, right) => ({ axis: signedLogAxis(keys, left, right), series }),
    nodes: signedAxis,
    words: bucketText,
  };
}

/** `shape`: signedShape, or linearShape of linear.js. Each of `given`:
    {name, colour, step, counts, bounds, elements, nans, infs, zeroShare, min, max, median}. */
export function distributionModel(given, shape, mode, width) {
  const single = given.length === 1;
  const slots = specialSlots(given, width - RIGHT);
  const { axis, series } = shape.lay(given, LEFT, slots.length ? slots[0].x0 - 16 : width - RIGHT);
  for (const one of series) one.measure = single ? (count) => count : (count) => count / Math.max(one.elements, 1);
  const bottom = HEIGHT - BELOW;
  const scale = countScale(heights(series, slots), mode, single, bottom);
  if (!single) scale.ticks = scale.ticks.map(shareTick);
  const y = (value) => scale.pixel(value);
  const title = shape.title(single);
  const stops = stopsOf(axis, slots);
  const peak = stops.findIndex(({ key }) => key === peakOf(series[0]));
  return {
    height: HEIGHT,
    nodes: [
      ...leftAxis(scale, width - RIGHT, title),
      ...drawnSeries(series, axis, y, bottom),
      ...shape.nodes(axis, bottom),
      ...drawnSlots(series, slots, y, bottom).filter(Boolean),
    ],
    label: `Distribution. ${series.map(summary).join("; ")}.`,
    stops: stops.length,
    first: Math.max(peak, 0),
    find: (x) => stopAt(stops, x),
    at: (i) => pointed(stops[i], series, y, bottom, shape),
  };
}

function peakOf({ counts }) {
  let [best, most] = [null, 0];
  for (const [key, count] of counts) if (count > most) [best, most] = [key, count];
  return best;
}

function stopAt(stops, x) {
  const index = stops.findIndex(({ x0, x1 }) => x >= x0 && x < x1);
  return index < 0 ? null : index;
}

function pointed(stop, series, y, bottom, shape) {
  const { title, rows, top } = tooltipOf(stop, series, y, shape);
  const shade = { x: short(stop.x0), y: TOP, width: short(Math.max(stop.x1 - stop.x0, 1)), height: bottom - TOP };
  return {
    title,
    rows,
    x: (stop.x0 + stop.x1) / 2,
    y: Number.isFinite(top) ? Math.max(top, TOP + 20) : bottom - 40,
    marks: [svg("rect", { ...shade, class: "detail-pointed" })],
  };
}
