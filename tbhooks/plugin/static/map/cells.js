/*
 * Paints cells: from one-byte codes to pixels. If several steps or rows share a pixel, the most extreme one is shown, and
 * a non-finite one always is, so that no outlier is lost by zooming out. Pure functions on arrays.
 */

import { NOT_FINITE, NO_DATA, UNDEFINED } from "./colour.js";

/**
 * Which steps each pixel column shows: `from[x] <= i < to[x]`; from is -1 where there is nothing.
 * Cells of at least `wide` pixels are set apart by a line.
 */
export function columnsOf(edges, [low, high], width, wide) {
  const from = new Int32Array(width).fill(-1);
  const to = new Int32Array(width).fill(-1);
  const perStep = width / (high - low);
  for (let i = 0; 2 * i < edges.length; i++) {
    if (edges[2 * i + 1] <= low || edges[2 * i] >= high) continue;
    const left = Math.min(width - 1, Math.round((edges[2 * i] - low) * perStep)); // the last cell must stay visible
    const right = Math.max(left + 1, Math.round((edges[2 * i + 1] - low) * perStep));
    const line = (edges[2 * i + 1] - edges[2 * i]) * perStep >= wide ? 1 : 0; // not by rounded width, which varies
    for (let x = Math.max(0, left); x < Math.min(width, right - line); x++) {
      if (from[x] < 0) from[x] = i;
      to[x] = i + 1;
    }
  }
  return { from, to };
}

/** The step among those of a pixel column that has a code; the first of them if none has. */
function whichStep(codes, code, from, to) {
  for (let i = from; i < to; i++) if (codes[i] === code) return i;
  return from;
}

/**
 * Writes one code per pixel column into `out`, and optionally its step into `chosen`; true if any is not finite.
 * The most extreme value is the one furthest from the running mean of the row, so that spikes in both directions stay.
 */
export function condensed(codes, { from, to }, out, chosen = null) {
  let level = -1;
  let anyBad = false;
  for (let x = 0; x < from.length; x++) {
    let code = NO_DATA;
    let bad = false;
    let sum = 0;
    let seen = 0;
    let low = 255;
    let high = 0;
    for (let i = from[x]; i < to[x]; i++) {
      code = codes[i];
      if (code > UNDEFINED) {
        sum += code;
        seen++;
        low = Math.min(low, code);
        high = Math.max(high, code);
      } else if (code === NOT_FINITE) bad = true;
    }
    if (seen > 0) {
      const mean = sum / seen;
      if (level < 0) level = mean;
      code = high - level >= level - low ? high : low;
      level += 0.25 * (mean - level);
    }
    if (bad) code = NOT_FINITE;
    anyBad ||= bad;
    out[x] = code;
    if (chosen) chosen[x] = whichStep(codes, code, from[x], to[x]);
  }
  return anyBad;
}

/** Of two rows that share a pixel line. */
function standsOut(one, other, level) {
  if (one === NOT_FINITE || other === NOT_FINITE) return NOT_FINITE;
  if (one === NO_DATA || one === UNDEFINED) return Math.max(one, other);
  if (other === NO_DATA || other === UNDEFINED) return one;
  return Math.abs(one - level) >= Math.abs(other - level) ? one : other;
}

function fillLine(pixels, offset, codes, columns, table) {
  for (let x = 0; x < codes.length; x++) if (columns.from[x] >= 0) pixels[offset + x] = table[codes[x]];
}

/** Stripes over non-finite cells, so that they do not depend on colour vision. */
function stripe(pixels, width, codes, columns, top, bottom, pitch) {
  for (let x = 0; x < width; x++) {
    if (codes[x] !== NOT_FINITE || columns.from[x] < 0) continue;
    for (let y = top; y < bottom; y++) if ((x + y) % (4 * pitch) < pitch) pixels[y * width + x] = 0xff000000;
  }
}

/**
 * Paints rows into pixels.
 * @param {Uint32Array} pixels of width * height, transparent where nothing is painted
 * @param {{width: number, height: number, top: (row: number) => number, first: number, last: number, gap: number,
 *   codes: (row: number) => Uint8Array|null, columns: object, table: Uint32Array, pitch: number}} job
 *   `top` gives a row's first pixel line, `first <= row < last` are painted
 */
export function paintCells(pixels, job) {
  const { width, height, columns, table } = job;
  const line = new Uint8Array(width);
  const shared = new Uint8Array(width);
  let sharedTop = -1;
  for (let row = job.first; row < job.last; row++) {
    const codes = job.codes(row);
    const top = job.top(row);
    const bottom = Math.min(height, Math.max(top + 1, job.top(row + 1) - job.gap));
    if (codes === null || top >= height || bottom <= 0) continue;
    const bad = condensed(codes, columns, line);
    if (top === sharedTop) for (let x = 0; x < width; x++) line[x] = standsOut(line[x], shared[x], 128);
    shared.set(line);
    const begin = Math.max(0, top);
    fillLine(pixels, begin * width, line, columns, table);
    for (let y = begin + 1; y < bottom; y++) pixels.copyWithin(y * width, begin * width, (begin + 1) * width);
    if (bad || top === sharedTop) stripe(pixels, width, line, columns, begin, bottom, job.pitch);
    sharedTop = top;
  }
}
