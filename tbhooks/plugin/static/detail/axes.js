/* Axes: from numbers to pixels, and which ticks fit. The signed log axis gives every half-octave bucket the same
   width, mirrors the negative side, and leaves long empty stretches out as breaks. Draws nothing. */

import { RANKS, coordinate } from "./buckets.js";
import { tickText } from "../core/numbers.js";

const LONGEST_EMPTY = 12; // buckets; a longer empty stretch becomes a break
const FEWEST = 8; // buckets: a little more than a decade, so that a power of ten is always in sight
const BREAK = 18;
const ZERO = 10;
const BUCKETS_A_DECADE = 2 * Math.log2(10);

function segmentsOf(ranks) {
  const segments = [];
  for (const rank of ranks) {
    const last = segments.at(-1);
    if (last && rank - last.last <= LONGEST_EMPTY) last.last = rank;
    else segments.push({ first: rank, last: rank });
  }
  if (segments.length && segments[0].first <= LONGEST_EMPTY) segments[0].first = 1;
  return widened(segments);
}

function widened(segments) {
  const length = segments.reduce((sum, { first, last }) => sum + last - first + 1, 0);
  if (!segments.length || length >= FEWEST) return segments;
  const missing = FEWEST - length;
  segments.at(-1).last = Math.min(RANKS, segments.at(-1).last + Math.ceil(missing / 2));
  segments[0].first = Math.max(1, segments[0].first - Math.floor(missing / 2));
  return segments;
}

/** One side keeps what is needed up to its own outermost bucket. */
function sideOf(segments, sign, outermost) {
  return segments
    .filter(({ first }) => first <= outermost)
    .map(({ first, last }) => ({ sign, first, last: Math.min(last, Math.max(outermost, first + FEWEST - 1)) }));
}

const ONE = Math.floor(coordinate(1));

/** With nothing but zeros to show, the neighbourhood of -1 and 1 stands in: an axis needs a sense of size. */
function piecesOf(wanted) {
  const keys = wanted.some((key) => key !== 0) ? wanted : [-ONE, 0, ONE];
  const ranks = [...new Set(keys.map(Math.abs))].filter((rank) => rank > 0).sort((a, b) => a - b);
  const segments = segmentsOf(ranks);
  const outermost = (sign) => Math.max(0, ...keys.map((key) => key * sign));
  const outwards = (sign) =>
    sideOf(segments, sign, outermost(sign)).flatMap((piece) => (piece.first === 1 ? [piece] : [{ gap: true }, piece]));
  return [...outwards(-1).reverse(), { zero: true }, ...outwards(1)];
}

function laidOut(pieces, left, right) {
  const buckets = pieces.reduce((sum, piece) => sum + (piece.sign ? piece.last - piece.first + 1 : 0), 0);
  const room = right - left - BREAK * pieces.filter((piece) => piece.gap).length;
  const unit = Math.max(room / (buckets + 1) < ZERO ? (room - ZERO) / Math.max(buckets, 1) : room / (buckets + 1), 0.1);
  const zero = Math.max(unit, ZERO);
  let x = left;
  for (const piece of pieces) {
    piece.x0 = x;
    x += piece.gap ? BREAK : piece.zero ? zero : unit * (piece.last - piece.first + 1);
    piece.x1 = x;
  }
  return unit;
}

/** The signed log axis that shows all `keys` between two pixels. */
export function signedLogAxis(keys, left, right) {
  const pieces = piecesOf(keys);
  const unit = laidOut(pieces, left, right);
  const holds = (piece, rank) => piece.first <= rank && rank <= piece.last;
  const pieceOf = (key) =>
    pieces.find((piece) => (key === 0 ? piece.zero : piece.sign === Math.sign(key) && holds(piece, Math.abs(key))));
  const along = (piece, distance) => (piece.sign > 0 ? piece.x0 + distance * unit : piece.x1 - distance * unit);

  function cell(key) {
    const piece = pieceOf(key);
    if (!piece) return null;
    if (key === 0) return [piece.x0, piece.x1];
    const [a, b] = [along(piece, Math.abs(key) - piece.first), along(piece, Math.abs(key) - piece.first + 1)];
    return a < b ? [a, b] : [b, a];
  }

  const shown = pieces.flatMap((piece) => {
    if (piece.gap) return [];
    if (piece.zero) return [0];
    const ranks = Array.from({ length: piece.last - piece.first + 1 }, (_, i) => piece.first + i);
    return piece.sign > 0 ? ranks : ranks.reverse().map((rank) => -rank);
  });

  function keyAt(x) {
    return shown.find((key) => x >= cell(key)[0] && x < cell(key)[1]) ?? null;
  }

  return { pieces, unit, left, right, cell, keys: shown, keyAt, ticks: () => signedTicks(pieces, unit, along) };
}

function decades(piece, along) {
  const found = [];
  for (let exponent = -19; exponent <= 10; exponent += 1) {
    const distance = coordinate(10 ** exponent) - piece.first;
    const inside = distance >= 0 && distance <= piece.last - piece.first + 1;
    if (inside) found.push({ x: along(piece, distance), sign: piece.sign, exponent, piece });
  }
  return found;
}

const labelWidth = ({ sign, exponent }) =>
  exponent === undefined ? 8 : (sign < 0 ? 7 : 0) + (exponent === 0 ? 7 : exponent < 0 ? 25 : exponent === 1 ? 14 : 20);

/** {labels, marks}: powers of ten with their sign and pixel; what would touch another label is only a mark. */
function signedTicks(pieces, unit, along) {
  const zero = pieces.find((piece) => piece.zero);
  const all = pieces.filter((piece) => piece.sign).flatMap((piece) => decades(piece, along));
  const decade = BUCKETS_A_DECADE * unit;
  const stride = [1, 2, 3, 5, 10, 20].find((n) => n * decade >= 42) ?? 20;
  const labels = [{ x: (zero.x0 + zero.x1) / 2, zero: true }];
  const fits = (tick) =>
    labels.every((other) => Math.abs(other.x - tick.x) >= (labelWidth(other) + labelWidth(tick)) / 2 + 6);
  const regular = all.filter((tick) => tick.exponent % stride === 0);
  for (const tick of regular) if (fits(tick)) labels.push(tick);
  for (const tick of all) {
    if (!labels.some((label) => label.piece === tick.piece) && fits(tick)) labels.push(tick);
  }
  return { labels, marks: decade >= 5 ? all : labels.filter((label) => !label.zero) };
}

/* ---- Linear and log value axes ------------------------------------------------------------------------------ */

function niceDistance(span, wanted) {
  const rough = span / Math.max(wanted, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const times = rough / power;
  return power * (times < Math.SQRT2 ? 1 : times < Math.sqrt(10) ? 2 : times < Math.sqrt(50) ? 5 : 10);
}

function linearTicks(low, high, wanted) {
  const distance = niceDistance(high - low, wanted);
  const ticks = [];
  for (let i = Math.ceil(low / distance - 1e-9); i * distance <= high + distance * 1e-9; i += 1) ticks.push(i * distance);
  return ticks.map((value) => ({ value, text: tickText(value, distance) }));
}

export function stepTicks(first, last, wanted) {
  if (first === last) return [first];
  const distance = Math.max(1, niceDistance(last - first, wanted));
  const ticks = [];
  for (let i = Math.ceil(first / distance); i * distance <= last; i += 1) ticks.push(i * distance);
  return ticks;
}

function powersBetween(low, high, multiples) {
  const ticks = [];
  for (let exponent = Math.floor(Math.log10(low)); exponent <= Math.ceil(Math.log10(high)); exponent += 1) {
    for (const multiple of multiples) {
      const value = Number(`${multiple}e${exponent}`);
      if (value >= low * 0.999999 && value <= high * 1.000001) {
        ticks.push(multiple === 1 ? { value, exponent, sign: 1 } : { value, text: tickText(value, 10 ** exponent) });
      }
    }
  }
  return ticks;
}

/** Powers of ten; with too few of them also 2 and 5; with too few of those what a linear axis would have. */
function logTicks(low, high, wanted) {
  const powers = powersBetween(low, high, [1]);
  if (powers.length >= 2) return thinned(powers, wanted);
  const finer = powersBetween(low, high, [1, 2, 5]);
  if (finer.length >= 3) return finer;
  return linearTicks(low, high, Math.min(wanted, 5)).filter(({ value }) => value > 0);
}

function thinned(powers, wanted) {
  const stride = [1, 2, 3, 5, 10, 20].find((n) => powers.length / n <= wanted) ?? 20;
  return powers.filter(({ exponent }) => exponent % stride === 0);
}

function scaleFrom(forward, low, high, bottom, top, ticks) {
  const [a, b] = [forward(low), forward(high)];
  const pixel = (value) => bottom + ((forward(value) - a) / (b - a)) * (top - bottom);
  const inside = (y) => y <= bottom + 0.5 && y >= top - 0.5;
  return { pixel, ticks: ticks.filter(({ value }) => inside(pixel(value))), low, high };
}

export function linearScale(low, high, bottom, top) {
  const alike = high - low <= 1e-12 * Math.max(Math.abs(low), Math.abs(high)); // ticks closer than that cannot be counted
  if (alike) [low, high] = low === 0 ? [-1, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
  const wanted = Math.max(2, Math.floor((bottom - top) / 28));
  return scaleFrom((value) => value, low, high, bottom, top, linearTicks(low, high, wanted));
}

export function logScale(low, high, bottom, top) {
  if (!(high > low * 1.02)) [low, high] = [low / 1.5, high * 1.5];
  const wanted = Math.max(2, Math.floor((bottom - top) / 22));
  const forward = (value) => Math.log10(Math.max(value, low * 0.5));
  return scaleFrom(forward, low, high, bottom, top, logTicks(low, high, wanted));
}

/** Log on both sides of zero, straight between -threshold and threshold. */
function bothSidesScale(low, high, threshold, bottom, top) {
  const forward = (value) =>
    Math.abs(value) <= threshold ? value / threshold : Math.sign(value) * (1 + Math.log10(Math.abs(value) / threshold));
  const room = Math.abs(bottom - top) / Math.max(forward(high) - forward(low), 1e-9);
  const stride = [1, 2, 3, 5, 10, 20].find((n) => n * room >= 20) ?? 20;
  const ticks = [{ value: 0, text: "0" }];
  for (let exponent = Math.round(Math.log10(threshold)), i = 0; exponent <= 38; exponent += 1, i += 1) {
    if (i % stride || (i === 0 && room < 18)) continue;
    for (const sign of [1, -1]) ticks.push({ value: sign * 10 ** exponent, exponent, sign });
  }
  return scaleFrom(forward, low, high, bottom, top, ticks);
}

/** The scale that suits all `values`; log falls back to both sides of zero where a value is not positive. */
export function valueScale(values, mode, bottom, top) {
  if (!values.length) return linearScale(0, 1, bottom, top);
  const [low, high] = [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];
  if (mode === "linear") {
    const margin = (high - low) * 0.04;
    return linearScale(low === 0 ? 0 : low - margin, high + margin, bottom, top);
  }
  if (low > 0) return logScale(low / 1.15, high * 1.15, bottom, top);
  const sizes = values.map(Math.abs).filter((size) => size > 0).sort((a, b) => a - b);
  if (!sizes.length) return linearScale(0, 0, bottom, top);
  const usual = Math.max(sizes[Math.floor(sizes.length / 10)], sizes.at(-1) * 1e-12);
  const threshold = 10 ** Math.floor(Math.log10(usual));
  return bothSidesScale(low * 1.15, high * 1.15, threshold, bottom, top);
}

/** Log where it shows more: values of one sign over more than a factor of 50, or outliers far from the usual size. */
export function suitableMode(values) {
  const sizes = values.map(Math.abs).filter((size) => size > 0).sort((a, b) => a - b);
  if (sizes.length < 2) return "linear";
  if (values.every((value) => value > 0)) return sizes.at(-1) > 50 * sizes[0] ? "log" : "linear";
  return sizes.at(-1) > 100 * sizes[Math.floor(sizes.length / 2)] ? "log" : "linear";
}
