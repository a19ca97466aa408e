/* The half-octave buckets of a histogram, by key: 0 is the one around zero, 1 to 192 are the positive ones from
   2^-64 up, -1 to -192 their mirror images. Edges from the server are clipped to the exact minimum and maximum, so the
   key is read off the middle of a bucket. Knows nothing of pixels. */

import { toNumber } from "../core/numbers.js";

const LOWEST = -64;
export const RANKS = 192;
export const SMALLEST = 2 ** LOWEST;

/** Where a magnitude lies among the buckets: 1 at 2^-64, one more with every bucket; 0 below. */
export function coordinate(magnitude) {
  if (!(magnitude >= SMALLEST)) return 0;
  let exponent = Math.floor(Math.log2(magnitude));
  if (2 ** exponent > magnitude) exponent -= 1; // log2 rounds up just below a power of two
  const fraction = magnitude / 2 ** exponent;
  const inside = fraction < 1.5 ? 2 * (fraction - 1) : 1 + 2 * (fraction - 1.5);
  return Math.min(2 * (exponent - LOWEST) + 1 + inside, RANKS + 0.999);
}

function keyOf(value) {
  const rank = Math.floor(coordinate(Math.abs(value)));
  return value < 0 && rank > 0 ? -rank : rank;
}

function startOf(rank) {
  if (rank > RANKS) return Infinity;
  const exponent = Math.floor((rank - 1) / 2) + LOWEST;
  return (rank - 1) % 2 ? 1.5 * 2 ** exponent : 2 ** exponent;
}

export function boundsOf(key) {
  if (key === 0) return [-SMALLEST, SMALLEST];
  const [low, high] = [startOf(Math.abs(key)), startOf(Math.abs(key) + 1)];
  return key > 0 ? [low, high] : [-high, -low];
}

function keyBetween(low, high) {
  if (low <= 0 && high >= 0) return 0;
  return keyOf(Number.isFinite(low) && Number.isFinite(high) ? low / 2 + high / 2 : Number.isFinite(low) ? high : low);
}

/** The key of every bucket of an answer, in order. */
export function keysOf(edges) {
  const numbers = edges.map(toNumber);
  return numbers.slice(1).map((high, i) => keyBetween(numbers[i], high));
}

/** {counts: key -> count, bounds: key -> [low, high], total} of a histogram; empty buckets are left out. */
export function readHistogram(edges, counts) {
  const found = { counts: new Map(), bounds: new Map(), total: 0 };
  keysOf(edges).forEach((key, i) => {
    if (!(counts[i] > 0)) return;
    found.counts.set(key, (found.counts.get(key) ?? 0) + counts[i]);
    found.bounds.set(key, [toNumber(edges[i]), toNumber(edges[i + 1])]);
    found.total += counts[i];
  });
  return found;
}
