/* The available runs, kinds and stats, the defaults among them, and the age of the data. */

const KIND_ORDER = ["activation", "gradient", "weight", "weight_gradient", "update", "input", "functional"];
const FIRST_STAT = { gradient: "norm", weight: "norm", weight_gradient: "norm", update: "ratio" };
const FRESH = 60;
const DAY = 86_400;

/** "weight gradient", "activation (evaluation)", "activation by channel". */
export function kindWords(kind) {
  if (kind.startsWith("channel.")) return `${kindWords(kind.slice(8))} by channel`;
  const plain = kind.replace(/^eval\./, "").replaceAll("_", " ");
  return kind.startsWith("eval.") ? `${plain} (evaluation)` : plain;
}

export const statWords = (stat) => stat.replaceAll("_", " ");

function rank(kind) {
  const place = KIND_ORDER.indexOf(kind.replace(/^eval\./, ""));
  return (place < 0 ? KIND_ORDER.length : place) + (kind.startsWith("eval.") ? 100 : 0);
}

export const runNamed = (list, name) => list.runs.find((run) => run.name === name) ?? null;

/** The kinds of one run, or those that two have in common, in display order. */
export function kindsOf(run, other) {
  const names = run.kinds.map((each) => each.kind).sort((one, next) => rank(one) - rank(next));
  if (!other) return names;
  const common = names.filter((name) => other.kinds.some((each) => each.kind === name));
  return common.length ? common : names;
}

const statsOfKind = (run, kind, all) => run.kinds.find((each) => each.kind === kind)?.stats ?? all;

/** The stats available for a kind. */
export function statsOf(list, run, other, kind) {
  const stats = statsOfKind(run, kind, list.stats);
  return other ? stats.filter((stat) => statsOfKind(other, kind, list.stats).includes(stat)) : stats;
}

/** The run that was written last: the default. */
const latest = (runs) => runs.reduce((best, run) => (run.last_time > best.last_time ? run : best));

/** Resolves a choice: unavailable values are replaced by defaults. Null if there is no run. */
export function chosen(list, choice) {
  if (list.runs.length === 0) return null;
  const run = choice.run ? runNamed(list, choice.run) : latest(list.runs);
  if (!run) return null;
  const other = choice.vs && choice.vs !== run.name ? runNamed(list, choice.vs) : null;
  const kinds = kindsOf(run, other);
  const kind = kinds.includes(choice.kind) ? choice.kind : kinds[0];
  const stats = statsOf(list, run, other, kind);
  const first = FIRST_STAT[kind.replace(/^eval\./, "")] ?? "std";
  const stat = [choice.stat, first, "norm", ...stats].find((name) => stats.includes(name));
  return { run: run.name, vs: other ? other.name : "", kind, stat, kinds, stats };
}

function duration(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${Math.round(seconds / 3600)} h`;
}

/** How fresh a run is: `{ live, text }`. */
export function freshness(run, now) {
  const age = Math.max(0, now - run.last_time);
  if (age < FRESH) return { live: true, text: `live; last step ${run.last_step}` };
  if (age < DAY) return { live: false, text: `no new step for ${duration(age)}; last step ${run.last_step}` };
  const date = new Date(run.last_time * 1000).toLocaleDateString("en-GB", { day: "numeric", month: "long", year: "numeric" });
  return { live: false, text: `last step ${run.last_step}, written ${date}` };
}
