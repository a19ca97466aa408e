/* A distribution on a linear axis: the counts of half-octave buckets, spread evenly over bins of equal width. */

import { linearScale } from "./axes.js";
import { crisp, line, tickLabel } from "./frame.js";
import { brief } from "../core/numbers.js";

const BIN = 6; // pixels

/** The counts of one histogram in `count` bins of equal width between two values. */
export function rebinned(counts, bounds, [low, high], count) {
  const bins = new Float64Array(count);
  const width = (high - low) / count;
  for (const [key, amount] of counts) {
    const [from, to] = bounds.get(key).map((edge) => Math.min(Math.max(edge, low), high));
    const first = Math.min(count - 1, Math.max(0, Math.floor((from - low) / width)));
    const last = Math.min(count - 1, Math.max(0, Math.ceil((to - low) / width) - 1));
    if (first >= last || to <= from) {
      bins[first] += amount;
      continue;
    }
    for (let i = first; i <= last; i++) {
      const [left, right] = [Math.max(from, low + i * width), Math.min(to, low + (i + 1) * width)];
      bins[i] += (amount * Math.max(0, right - left)) / (to - from);
    }
  }
  return bins;
}

function inBins(one, range, count) {
  const bins = rebinned(one.counts, one.bounds, range, count);
  const width = (range[1] - range[0]) / count;
  const filled = [...bins.keys()].filter((i) => bins[i] > 0);
  return {
    ...one,
    counts: new Map(filled.map((i) => [i, bins[i]])),
    bounds: new Map([...bins.keys()].map((i) => [i, [range[0] + i * width, range[0] + (i + 1) * width]])),
  };
}

/** How `distributionModel` draws on a linear axis from `range[0]` to `range[1]`. */
export function linearShape(range) {
  const [low, high] = range[1] > range[0] ? range : [range[0] - 0.5, range[0] + 0.5];
  return {
    title: (single) => (single ? "count per bin" : "share of elements per bin"),
    lay(series, left, right) {
      const count = Math.max(8, Math.floor((right - left) / BIN));
      const unit = (right - left) / count;
      const keys = Array.from({ length: count }, (_, i) => i);
      const axis = { left, right, unit, keys, cell: (i) => [left + i * unit, left + (i + 1) * unit] };
      return { axis, series: series.map((one) => inBins(one, [low, high], count)) };
    },
    nodes({ left, right }, bottom) {
      const base = crisp(bottom);
      const { pixel, ticks } = linearScale(low, high, left, right);
      const wanted = Math.max(2, Math.floor((right - left) / 62));
      const stride = Math.ceil(ticks.length / wanted);
      const shown = ticks.filter((_, i) => i % stride === 0);
      const labels = shown.flatMap((tick) => [
        line(crisp(pixel(tick.value) - 0.5), base, crisp(pixel(tick.value) - 0.5), base + 5, "detail-axis"),
        tickLabel(tick, { x: Math.round(pixel(tick.value)), y: base + 17, class: "detail-tick detail-tick-below" }),
      ]);
      return [line(left, base, right, base, "detail-axis"), ...labels];
    },
    words: (_, bounds) => (bounds ? `${brief(bounds[0])} to ${brief(bounds[1])}` : ""),
  };
}
