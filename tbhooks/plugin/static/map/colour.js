/*
 * From numbers to colours: robust ranges, log and linear scales, colour-blind-safe palettes, legend ticks.
 * A number becomes a code in one byte: 0 no data, 1 not finite, 2 undefined, 3 below the range of the colours, 4..254 from
 * one end of the range to the other, 255 above it.
 * Pure functions, independent of the page and the canvas.
 */

import { brief } from "../core/numbers.js";
import { FROM_ZERO, isBad, isUndefined } from "./matrix.js";

export const NO_DATA = 0;
export const NOT_FINITE = 1;
export const UNDEFINED = 2;
export const BELOW = 3;
export const ABOVE = 255;
const LOWEST = 4;
const LEVELS = 250;

/** The Okabe-Ito palette, safe for colour-blind readers: colours of the compared modules. */
export const PICK_COLOURS = {
  light: ["#0072b2", "#e69f00", "#009e73", "#cc79a7"],
  dark: ["#56b4e9", "#e69f00", "#1fc596", "#e294c3"],
};

const SEQUENTIAL = "440154 482475 414487 355f8d 2a788e 21918c 22a884 44bf70 7ad151 bddf26 fde725";
const PALETTES = {
  light: {
    sequential: SEQUENTIAL,
    diverging: "053061 2166ac 67a9cf c6dfee f3f1ed fcd5a5 f0993a c45c05 7f3b08",
    beyond: { sequential: ["19002b", "f57c00"], diverging: ["00122b", "3a1500"] },
    notSeen: "d9dce1",
    undefined: "b4c3d9",
    notFinite: "ff2d8f",
  },
  dark: {
    sequential: SEQUENTIAL,
    diverging: "9ccbff 559fe8 3c79b8 4b637d 5b5e63 7e6349 b5732b ef9435 ffd596",
    beyond: { sequential: ["0d0014", "ff8f1f"], diverging: ["e6f3ff", "fff6e6"] },
    notSeen: "474a4f",
    undefined: "5c6a80",
    notFinite: "ff4da3",
  },
};

const rgb = (hex) => [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16));
const packed = ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;

/** The colour at a position 0..1 of a palette. */
function interpolated(anchors, t) {
  const at = t * (anchors.length - 1);
  const left = Math.min(Math.floor(at), anchors.length - 2);
  return anchors[left].map((from, channel) => Math.round(from + (at - left) * (anchors[left + 1][channel] - from)));
}

/** 256 colours, one for each code, as canvas pixels. */
export function palette(diverging, dark) {
  const colours = PALETTES[dark ? "dark" : "light"];
  const name = diverging ? "diverging" : "sequential";
  const anchors = colours[name].split(" ").map(rgb);
  const table = new Uint32Array(256);
  table[NO_DATA] = packed(rgb(colours.notSeen));
  table[NOT_FINITE] = packed(rgb(colours.notFinite));
  table[UNDEFINED] = packed(rgb(colours.undefined));
  [table[BELOW], table[ABOVE]] = colours.beyond[name].map((colour) => packed(rgb(colour)));
  for (let level = 0; level <= LEVELS; level++) table[LOWEST + level] = packed(interpolated(anchors, level / LEVELS));
  return table;
}

export const css = (pixel) => `rgb(${pixel & 255} ${(pixel >> 8) & 255} ${(pixel >> 16) & 255})`;

/**
 * Finite values out of many rows in order, at most about `limit` of them, evenly chosen; the lowest, the highest and the
 * lowest positive one are always among them, so that the full range is the true one.
 */
export function sample(rows, length, limit = 200_000) {
  const stride = Math.max(1, Math.ceil((rows.length * length) / limit));
  const found = new Float64Array(Math.ceil((rows.length * length) / stride) + 3);
  const ends = Float64Array.of(Infinity, -Infinity, Infinity);
  let count = 0;
  let next = 0;
  for (const row of rows) {
    if (stride > 1) widen(ends, row, length);
    const taken = take(found, count, row, next, length, stride);
    next = Math.max(0, next + (taken - count) * stride - length);
    count = taken;
  }
  if (stride > 1) for (const end of ends) if (Number.isFinite(end)) found[count++] = end;
  return found.slice(0, count).sort();
}

/** Puts every so many finite value of a row behind those that were found; the result is how many there are now. */
function take(found, count, { values, bad }, next, length, stride) {
  for (let at = next; at < length; at = Math.max(at + 1, next)) {
    const value = values[at];
    if (value - value !== 0 || (bad !== null && bad[at] !== 0)) continue; // not finite
    found[count++] = value;
    next += stride;
  }
  return count;
}

/** Widens the lowest, the highest and the lowest positive value by the finite ones of a row. */
function widen(ends, { values, bad }, length) {
  let low = ends[0];
  let high = ends[1];
  let positive = ends[2];
  for (let at = 0; at < length; at++) {
    const value = values[at]; // no comparison with NaN is true
    if (value < low && value !== -Infinity && (bad === null || bad[at] === 0)) low = value;
    if (value > high && value !== Infinity && (bad === null || bad[at] === 0)) high = value;
    if (value < positive && value > 0 && (bad === null || bad[at] === 0)) positive = value;
  }
  ends[0] = low;
  ends[1] = high;
  ends[2] = positive;
}

export function quantile(sorted, q) {
  const at = q * (sorted.length - 1);
  const left = Math.floor(at);
  const right = Math.min(left + 1, sorted.length - 1);
  return sorted[left] + (at - left) * (sorted[right] - sorted[left]);
}

/** The ends of the scale: all data, or all but one percent at either end. */
function ends(sorted, full) {
  if (sorted.length === 0) return [0, 0];
  return full ? [sorted[0], sorted[sorted.length - 1]] : [quantile(sorted, 0.01), quantile(sorted, 0.99)];
}

function widened(low, high, by) {
  const apart = high - low > 1e-12 * Math.max(Math.abs(low), Math.abs(high));
  return apart ? [low, high] : [low - by, high + by];
}

function linear(sorted, full) {
  const [low, high] = ends(sorted, full);
  const [from, to] = widened(low, high, Math.abs(low) / 10 || 0.5);
  return { diverging: false, from, to, along: (v) => v, back: (u) => u };
}

function linearAroundZero(sorted, full) {
  const [low, high] = ends(sorted, full);
  const reach = Math.max(Math.abs(low), Math.abs(high)) || 1;
  return { diverging: true, from: -reach, to: reach, along: (v) => v, back: (u) => u };
}

const power = (u) => 10 ** u;

function logarithmic(sorted, full) {
  const positive = sorted.subarray(sorted.findIndex((value) => value > 0));
  const usable = sorted.length && sorted[sorted.length - 1] > 0 ? positive : Float64Array.of(1);
  const [low, high] = ends(usable, full).map(Math.log10);
  const [from, to] = widened(low, high, 0.5);
  return { diverging: false, from, to, along: Math.log10, back: power };
}

/** Linear near zero, logarithmic away from it, for data of either sign. */
function logarithmicAroundZero(sorted, full) {
  const [low, high] = ends(sorted, full);
  const reach = Math.max(Math.abs(low), Math.abs(high)) || 1;
  const sizes = sorted.map(Math.abs).filter((size) => size > 0).sort();
  const bend = Math.max(sizes.length ? quantile(sizes, 0.1) : reach / 10, reach * 1e-6);
  const along = (v) => Math.sign(v) * Math.log10(1 + Math.abs(v) / bend);
  const back = (u) => Math.sign(u) * (10 ** Math.abs(u) - 1) * bend;
  return { diverging: true, from: -along(reach), to: along(reach), along, back, bend };
}

/** A scale for ratios: 1 in the middle, 0.1 and 10 at the same distance. */
function ratios(sorted, full) {
  const positive = sorted.filter((value) => value > 0 && value < FROM_ZERO);
  const [low, high] = ends(positive.length ? positive : Float64Array.of(1), full).map(Math.log10);
  const reach = Math.max(Math.abs(low), Math.abs(high), 0.01);
  return { diverging: true, from: -reach, to: reach, along: Math.log10, back: power };
}

const SHAPES = { linear, linearAroundZero, log: logarithmic, logAroundZero: logarithmicAroundZero, ratio: ratios };

/**
 * A scale for these sorted numbers.
 * @param {Float64Array} sorted
 * @param {{log: boolean, full: boolean, ratio?: boolean, signed?: boolean}} options
 */
export function makeScale(sorted, { log, full, ratio = false, signed = sorted.length > 0 && sorted[0] < 0 }) {
  const name = ratio ? "ratio" : (log ? "log" : "linear") + (signed ? "AroundZero" : "");
  const shape = SHAPES[name](sorted, full);
  return { ...shape, name, beyond: beyondOf(shape, sorted), place: (value) => Math.min(1, Math.max(0, share(value, shape))) };
}

const share = (value, { along, from, to }) => (along(value) - from) / (to - from);
const SLACK = 1e-6; // of the range: rounding puts the ends themselves no further

/** The lowest and highest value if the colours do not reach it, else null. */
function beyondOf(shape, sorted) {
  const isUsable = shape.along === Math.log10 ? (value) => value > 0 && value < FROM_ZERO : () => true;
  const [low, high] = [sorted.find(isUsable), sorted.findLast(isUsable)];
  if (low === undefined) return { low: null, high: null };
  return { low: share(low, shape) < -SLACK ? low : null, high: share(high, shape) > 1 + SLACK ? high : null };
}

/** -1 if a value is below the range of the colours, 1 if it is above, else 0. Zero has no place on a log scale: 0. */
export function sideOf(value, scale) {
  const at = share(value, scale);
  return at > 1 + SLACK ? 1 : at < -SLACK && at !== -Infinity ? -1 : 0;
}

function codeOf(at) {
  if (at > 1 + SLACK) return ABOVE;
  if (at < -SLACK && at !== -Infinity) return BELOW;
  return LOWEST + Math.round(LEVELS * Math.min(1, Math.max(0, at)));
}

/** The codes of the first `length` cells of a row. */
export function codesOf(row, length, scale) {
  const codes = new Uint8Array(length);
  for (let i = 0; i < length; i++) {
    const value = row.values[i];
    if (isBad(row, i)) codes[i] = NOT_FINITE;
    else if (isUndefined(row, i)) codes[i] = UNDEFINED;
    else if (value === value) codes[i] = codeOf(share(value, scale));
  }
  return codes;
}

export const codeAt = (t) => LOWEST + Math.round(LEVELS * t);

/** A short number without trailing zeros. */
const tickWords = (value) => brief(value).replace(/(\.\d*?)0+(?=e|$)/, "$1").replace(/\.(?=e|$)/, "");
const ratioWords = (value) => `\u00d7${tickWords(value)}`;

/** Round numbers for the inside of a legend, largest steps first. */
function roundValues(scale) {
  if (scale.name.startsWith("linear")) return [0.5, 0.25, 0.75].map((t) => scale.from + t * (scale.to - scale.from));
  const signed = scale.name === "logAroundZero";
  const [low, high] = signed ? [scale.bend, scale.back(scale.to)].map(Math.log10) : [scale.from, scale.to];
  const decades = [];
  for (let k = Math.ceil(low); k <= Math.floor(high); k++) decades.push(k);
  const thinned = decades.filter((k) => k % Math.max(1, Math.ceil(decades.length / 6)) === 0).map(power);
  const middle = { logAroundZero: [0], ratio: [1] }[scale.name] ?? [];
  return [...middle, ...thinned, ...(signed ? thinned.map((value) => -value) : [])];
}

/** Ticks of a legend, the most important first: `{ at: 0..1, text }`. */
export function legendTicks(scale) {
  const text = (value) => legendWords(scale, value);
  const tick = (value) => ({ at: scale.place(value), text: text(value) });
  const last = { at: 1, text: text(scale.back(scale.to)) };
  const first = { at: 0, text: text(scale.back(scale.from)) };
  return [first, last, ...roundValues(scale).map(tick)];
}

/** A value as the legend writes it. */
export const legendWords = (scale, value) => (scale.name === "ratio" ? ratioWords : tickWords)(value);

/** Whether a stat is usually shown on a log scale; fractions and counts of NaN are not. */
export const usuallyLog = (stat) => !/fraction|^nan_count$|^inf_count$|^count$/.test(stat);
