/*
 * Rows by value, by change over the steps, or by how unusual a module is within its role. Pure functions.
 * A score compares modules of the same stat only. NaN and Inf are the most unusual of all.
 */

import { isBad } from "./matrix.js";

export const MOST_UNUSUAL = 20;
const FEWEST = 4; // a role with fewer members has no usual value; such modules are compared with each other
const MOST_STEPS = 128;
const NORMAL = 1.4826; // times the median absolute deviation: the standard deviation of a normal distribution

function middle(sorted) {
  const half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

const median = (numbers) => (numbers.length ? middle(Float64Array.from(numbers).sort()) : NaN);

/** Indices of the steps inside a view, evenly thinned out. */
function stepsWithin(steps, [low, high]) {
  const inside = [];
  steps.forEach((step, i) => step >= low && step <= high && inside.push(i));
  const stride = Math.max(1, inside.length / MOST_STEPS);
  return Array.from({ length: Math.min(inside.length, MOST_STEPS) }, (_, k) => inside[Math.floor(k * stride)]);
}

/** Sizes are compared by their logarithm: a layer with a hundredth is as unusual as one with a hundredfold. */
function transformOf(matrix, log) {
  if (!log) return (value) => value;
  const negative = matrix.rows.some(({ values }) => values.some((value) => value < 0));
  return negative ? (value) => value : (value) => Math.log(Math.max(value, 1e-30));
}

function groupsOf(matrix) {
  const roles = new Map();
  matrix.sites.forEach((site, i) => {
    const role = site.role ?? site.name;
    if (!roles.has(role)) roles.set(role, []);
    roles.get(role).push(i);
  });
  const large = [...roles.values()].filter((members) => members.length >= FEWEST);
  const small = [...roles.values()].filter((members) => members.length < FEWEST).flat();
  return small.length ? [...large, small] : large;
}

/** Robust z-scores of some values; at least a hundredth of the median counts as spread, so that rounding is not unusual. */
export function robustZ(values) {
  const known = values.filter(Number.isFinite);
  if (known.length < 2) return values.map(() => 0);
  const centre = median(known);
  const deviation = NORMAL * median(known.map((value) => Math.abs(value - centre)));
  const spread = Math.max(deviation, 0.01 * Math.abs(centre), 1e-12);
  return values.map((value) => (Number.isFinite(value) ? (value - centre) / spread : 0));
}

/** For each site `{ score, step }`: the largest |z| within its role that lasts for a tenth of the steps, and when it is largest. */
export function unusualness(matrix, view, log) {
  const steps = stepsWithin(matrix.steps, view);
  const along = transformOf(matrix, log);
  const found = matrix.sites.map(() => ({ scores: [], step: null, most: -1, bad: false }));
  for (const members of groupsOf(matrix)) {
    for (const i of steps) {
      const z = robustZ(members.map((site) => along(matrix.rows[site].values[i])));
      members.forEach((site, k) => {
        const bad = isBad(matrix.rows[site], i);
        const size = bad ? Infinity : Math.abs(z[k]);
        const one = found[site];
        one.scores.push(size);
        if (size > one.most) [one.most, one.step] = [size, matrix.steps[i]];
      });
    }
  }
  return found.map(({ scores, step }) => {
    const sorted = scores.sort((a, b) => b - a);
    return { score: sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(sorted.length / 10))] : 0, step };
  });
}

function lastValue({ values }, within) {
  for (let k = within.length - 1; k >= 0; k--) if (Number.isFinite(values[within[k]])) return values[within[k]];
  return -Infinity;
}

/** How much a row changes from the first quarter of the view to the last: as a ratio for sizes, else as a difference. */
function changeOf(row, within, along) {
  const quarter = Math.max(1, within.length >> 2);
  const numbers = (some) => some.map((i) => row.values[i]).filter(Number.isFinite).map(along);
  const [from, to] = [numbers(within.slice(0, quarter)), numbers(within.slice(-quarter))];
  if (within.some((i) => isBad(row, i))) return Infinity;
  return from.length && to.length ? Math.abs(median(to) - median(from)) : -Infinity;
}

const score = (value) => (value >= 100 ? "over 100" : value.toFixed(1));

const ORDERS = {
  value: (matrix, view) => {
    const within = stepsWithin(matrix.steps, view);
    return matrix.rows.map((row) => ({ score: lastValue(row, within), note: "" }));
  },
  change: (matrix, view, log) => {
    const within = stepsWithin(matrix.steps, view);
    const along = transformOf(matrix, log);
    return matrix.rows.map((row) => ({ score: changeOf(row, within, along), note: "" }));
  },
  unusual: (matrix, view, log) =>
    unusualness(matrix, view, log).map(({ score: z, step }, i) => {
      const role = matrix.sites[i].role ?? "the model";
      const what = z === Infinity ? "not finite" : `${score(z)} robust deviations from the median of ${role}`;
      return { score: z, tag: z === Infinity ? "NaN" : `z ${score(z)}`, note: `${what}, most at step ${step}`, step };
    }),
};

/** Sites of a matrix in an order, each with its score: `[{ site, score, tag, note }]`, highest first. */
export function ordered(matrix, order, view, log) {
  const scores = ORDERS[order](matrix, view, log);
  const all = matrix.sites.map((site, i) => ({ site, ...scores[i] }));
  all.sort((one, other) => (other.score === one.score ? 0 : other.score - one.score));
  return order === "unusual" ? all.slice(0, MOST_UNUSUAL) : all;
}

