/* The available runs, kinds and stats, the defaults among them, and the age of the data. */

const KIND_ORDER = [
  "activation", "gradient", "weight", "weight_gradient", "update", "input", "functional",
  "first_moment", "second_moment", "normalized_gradient", "proposed_update",
];
const FIRST_STAT = {
  gradient: "norm", weight: "norm", weight_gradient: "norm", update: "ratio",
  first_moment: "norm", second_moment: "rms", normalized_gradient: "rms", proposed_update: "rms",
  experts: "mean", heads: "mean",
};
const NAMED = { "channel.experts": "load by expert", "channel.heads": "attention by head" };
const FRESH = 60;
const DAY = 86_400;

/** "weight gradient", "activation (evaluation)", "activation by channel"; any other prefix is written the same way. */
export function kindWords(kind) {
  if (kind in NAMED) return NAMED[kind];
  const part = /^(?!eval\.)([a-z_]+)\.(.+)$/.exec(kind);
  if (part) return `${kindWords(part[2])} by ${part[1].replaceAll("_", " ")}`;
  const plain = kind.replace(/^eval\./, "").replaceAll("_", " ");
  return kind.startsWith("eval.") ? `${plain} (evaluation)` : plain;
}

/** "3 weights", "1 update", "8 activations by channel". */
export function countedKind(count, kind) {
  if (kind in NAMED) return `${count.toLocaleString("en-US")} rows of ${NAMED[kind]}`;
  const [, plain, rest] = /^(.*?)( (?:by|\().*)?$/.exec(kindWords(kind));
  return `${count.toLocaleString("en-US")} ${plain}${count === 1 ? "" : "s"}${rest ?? ""}`;
}

export const statWords = (stat) => stat.replaceAll("_", " ");

function rank(kind) {
  const place = KIND_ORDER.indexOf(kind.replace(/^([a-z_]+\.)/, ""));
  return (place < 0 ? KIND_ORDER.length : place) + (kind.startsWith("eval.") ? 100 : kind.includes(".") ? 50 : 0);
}

export const runNamed = (list, name) => list.runs.find((run) => run.name === name) ?? null;

/** The kinds of one run, or those that it has in common with all others, in display order. */
export function kindsOf(run, others) {
  const names = run.kinds.map((each) => each.kind).sort((one, next) => rank(one) - rank(next));
  const common = names.filter((name) => others.every((other) => other.kinds.some((each) => each.kind === name)));
  return common.length ? common : names;
}

const statsOfKind = (run, kind, all) => run.kinds.find((each) => each.kind === kind)?.stats ?? all;

/** The stats available for a kind. */
export function statsOf(list, run, others, kind) {
  const stats = statsOfKind(run, kind, list.stats);
  return stats.filter((stat) => others.every((other) => statsOfKind(other, kind, list.stats).includes(stat)));
}

/** The run that was written last: the default. */
const latest = (runs) => runs.reduce((best, run) => (run.last_time > best.last_time ? run : best));

/** Resolves a choice: unavailable values are replaced by defaults. Null if there is no run. */
export function chosen(list, choice) {
  if (list.runs.length === 0) return null;
  const run = choice.run ? runNamed(list, choice.run) : latest(list.runs);
  if (!run) return null;
  if (run.kinds.length === 0) return null;
  const wanted = [...new Set([choice.vs, ...choice.more])].filter((name) => name && name !== run.name);
  const others = wanted.map((name) => runNamed(list, name)).filter((other) => other?.kinds.length);
  const kinds = kindsOf(run, others);
  const kind = kinds.includes(choice.kind) ? choice.kind : kinds[0];
  const sharing = others.filter((other) => other.kinds.some((each) => each.kind === kind));
  const stats = statsOf(list, run, sharing, kind);
  const first = FIRST_STAT[kind.replace(/^[a-z_]+\./, "")] ?? "std";
  const stat = [choice.stat, first, "norm", ...stats].find((name) => stats.includes(name));
  const names = sharing.map(({ name }) => name);
  return { run: run.name, others: names, runs: [run.name, ...names], kind, stat, kinds, stats };
}

function duration(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${Math.round(seconds / 3600)} h`;
}

const SIGNS = { running: "\u25b6", failed: "\u2715", finished: "\u2713", ended: "\u25a0" };
export const signOf = (state) => SIGNS[state] ?? "";

/** A run is running while new steps arrive, unless its files say that it has ended. */
export const stateOf = (run, now) => (!run.has_ended && now - run.last_time < FRESH ? "running" : run.state);

/** "✓ baseline": the name of a run, and how it ended. */
export const runWords = (run, now) => [signOf(stateOf(run, now)), run.name].filter(Boolean).join(" ");

/** How fresh a run is: `{ live, text }`. */
export function freshness(run, now) {
  const age = Math.max(0, now - run.last_time);
  if (stateOf(run, now) === "running") return { live: true, text: `live; last step ${run.last_step}` };
  const known = run.state !== "ended";
  const ended = known ? `${run.state} ` : "";
  const last = `last step ${run.last_step}`;
  if (age < DAY) return { live: false, text: known ? `${ended}${duration(age)} ago; ${last}` : `no new step for ${duration(age)}; ${last}` };
  const date = new Date(run.last_time * 1000).toLocaleDateString("en-GB", { day: "numeric", month: "long", year: "numeric" });
  return { live: false, text: known ? `${ended}on ${date}; ${last}` : `${last}, written ${date}` };
}
