/* From the server's answers to what charts and tables take: numbers instead of words, histograms by bucket. Each
   answer is read once. Knows no DOM. */

import { SMALLEST, readHistogram } from "./buckets.js";
import { toNumber } from "../core/numbers.js";
import { readRidges } from "./ridges.js";

const read = new WeakMap();

function once(answer, reader) {
  if (!read.has(answer)) read.set(answer, reader(answer));
  return read.get(answer);
}

function mapped(object, change) {
  return Object.fromEntries(Object.entries(object ?? {}).map(([name, value]) => [name, change(value)]));
}

const KINDS = {
  activation: { words: "activations", headline: "std" },
  gradient: { words: "gradients of activations", headline: "norm" },
  weight: { words: "weights", headline: "norm" },
  weight_gradient: { words: "weight gradients", headline: "norm" },
  update: { words: "weight updates", headline: "ratio" },
  input: { words: "inputs", headline: "std" },
  functional: { words: "results of functions", headline: "std" },
  "channel.experts": { words: "load by expert", headline: "mean" },
  "channel.heads": { words: "attention by head", headline: "mean" },
};

/** {base, words, headline} of a kind; an unknown one is shown by its name. */
export function kindOf(kind) {
  const part = /^(?!eval\.)([a-z_]+)\.(.+)$/.exec(kind);
  if (part && !(kind in KINDS)) {
    const whole = kindOf(part[2]);
    return { ...whole, words: `${whole.words} by ${part[1]}` };
  }
  const evaluation = kind.startsWith("eval.");
  const base = evaluation ? kind.slice(5) : kind;
  const { words, headline } = KINDS[base] ?? { words: base, headline: "std" };
  return { base, headline, words: evaluation ? `${words} in evaluation` : words };
}

/** Only updates have a `ratio`: their norm over that of the weight. */
export function hasMeaning(stat, kind) {
  return stat !== "ratio" || kindOf(kind).base === "update";
}

function readDistribution(answer) {
  return { stats: mapped(answer.stats, toNumber), histogram: readHistogram(answer.edges ?? [], answer.counts ?? []) };
}

export const statsOf = (distribution) => once(distribution, readDistribution).stats;
export const histogramOf = (distribution) => once(distribution, readDistribution).histogram;

const NO_QUANTILES = { p01: [], p25: [], p50: [], p75: [], p99: [] };

/** A quantile inside the bucket around zero is shown as zero: on a log axis its noise would dominate. */
function toQuantile(value) {
  const number = toNumber(value);
  return Math.abs(number) < SMALLEST && number !== null ? 0 : number;
}

/** {steps, stats, quantileSteps, quantiles, ridges or null} of a history answer. */
export function historyOf(history) {
  return once(history, (answer) => ({
    steps: answer.steps ?? [],
    stats: mapped(answer.stats, (list) => list.map(toNumber)),
    quantileSteps: answer.quantile_steps ?? [],
    quantiles: { ...NO_QUANTILES, ...mapped(answer.quantiles, (list) => list.map(toQuantile)) },
    ridges: answer.ridges?.steps?.length ? readRidges(answer.ridges) : null,
  }));
}

/** The stats of one step; from the history if the distribution is that of another step. */
function statsAt(step, distribution, history) {
  if (distribution.row_step === step) return statsOf(distribution);
  const row = history ? historyOf(history).steps.indexOf(step) : -1;
  return row < 0 ? {} : mapped(historyOf(history).stats, (list) => list[row]);
}

/** A series of the distribution chart, or null if there is no histogram. */
export function seriesOf(site, distribution, history) {
  const step = distribution.histogram_step;
  if (step === null || step === undefined) return null;
  const { counts, bounds, total } = histogramOf(distribution);
  const stats = statsAt(step, distribution, history);
  const [nans, infs] = [stats.nan_count ?? 0, stats.inf_count ?? 0];
  return {
    ...{ name: site.name, colour: site.colour, step, counts, bounds, nans, infs },
    elements: total + nans + infs,
    zeroShare: stats.zero_fraction ?? (total ? (counts.get(0) ?? 0) / total : 0),
    min: stats.min ?? null,
    max: stats.max ?? null,
    median: stats.p50 ?? null,
  };
}

/** Steps and values of one stat; quantiles live on the steps that have histograms. */
export function statHistory(history, stat) {
  const { steps, stats, quantileSteps, quantiles } = historyOf(history);
  if (stat in stats) return { steps, values: stats[stat] };
  return { steps: quantileSteps, values: quantiles[stat] ?? [] };
}

export function statNames(history, kind) {
  const { stats, quantiles, quantileSteps } = historyOf(history);
  const names = [...Object.keys(stats), ...(quantileSteps.length ? Object.keys(quantiles) : [])];
  return [...new Set(names)].filter((name) => hasMeaning(name, kind));
}
