/* The signed log axis drawn: base line with breaks, powers of ten below. Shared by the distribution and the ridges. */

import { boundsOf } from "./buckets.js";
import { brief } from "../core/numbers.js";
import { crisp, line, tickLabel } from "./frame.js";
import { svg } from "../core/elements.js";

function breakMark(piece, y) {
  const x = (piece.x0 + piece.x1) / 2;
  return [-2.5, 2.5].map((aside) => line(x + aside - 2, y + 4, x + aside + 2, y - 4, "detail-axis"));
}

function baseLine(piece, y) {
  if (!piece.gap) return [line(piece.x0, y, piece.x1, y, "detail-axis")];
  const middle = (piece.x0 + piece.x1) / 2;
  const ends = [line(piece.x0, y, middle - 3, y, "detail-axis"), line(middle + 3, y, piece.x1, y, "detail-axis")];
  return [...ends, ...breakMark(piece, y)];
}

/** Everything below the plot. */
export function signedAxis(axis, y) {
  const base = crisp(y);
  const { labels, marks } = axis.ticks();
  const nodes = axis.pieces.flatMap((piece) => baseLine(piece, base));
  for (const { x } of marks) nodes.push(line(crisp(x - 0.5), base, crisp(x - 0.5), base + 3, "detail-axis"));
  for (const tick of labels) {
    nodes.push(line(crisp(tick.x - 0.5), base, crisp(tick.x - 0.5), base + 5, "detail-axis"));
    const place = { x: Math.round(tick.x), y: base + 17, class: "detail-tick detail-tick-below" };
    nodes.push(tick.zero ? svg("text", place, "0") : tickLabel(tick, place));
  }
  return nodes;
}

/** "0.25 to 0.375", with the exact ends where the minimum or maximum cuts a bucket. */
export function bucketText(key, bounds) {
  const [low, high] = bounds ?? boundsOf(key);
  if (key === 0) return "zero, or nearer to it than 5.4e\u221220";
  return low === high ? brief(low) : `${brief(low)} to ${brief(high)}`;
}
