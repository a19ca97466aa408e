/*
 * The maps side by side: one run, two on a shared scale with their difference, or up to twelve, as they are or as ratios
 * to the first. Gives each row of the tree its numbers and its colours, computed on first use and cached until data or
 * scale change.
 */

import { codesOf, legendWords, makeScale, palette, sample, sideOf } from "./colour.js";
import { brief } from "../core/numbers.js";
import { SIDES } from "../core/state.js";
import { cellEdges, combinedRow, commonSteps, differenceRow, FROM_ZERO, isBad, isUndefined, siteKey } from "./matrix.js";
import { sitesBelow } from "./tree.js";

const MOST_SAMPLED = 60_000; // values whose quantiles are the ends of the colours

/** Where a row's numbers come from in a matrix: `{ kind: "own" | "group", rows }`. */
function originOf(matrix, row) {
  const own = row.site ? matrix.place.get(siteKey(row.site)) : undefined;
  if (own !== undefined) return { kind: "own", rows: [matrix.rows[own]] };
  if (!row.group) return { kind: "own", rows: [] };
  const below = sitesBelow(row.node).map((site) => matrix.place.get(siteKey(site)));
  return { kind: "group", rows: below.filter((place) => place !== undefined).map((place) => matrix.rows[place]) };
}

const computed = new WeakMap();

/** What `make` returns for a matrix, kept until the matrix grows: it takes longer than to draw the map again. */
function kept(matrix, name, make) {
  let known = computed.get(matrix);
  if (known?.version !== matrix.version) computed.set(matrix, (known = { version: matrix.version, results: new Map() }));
  if (!known.results.has(name)) known.results.set(name, make());
  return known.results.get(name);
}

function numbersOf(matrix, row, shows) {
  const { kind, rows } = originOf(matrix, row);
  if (rows.length === 0) return null;
  if (kind === "own") return rows[0];
  return kept(matrix, `${shows}\u0000${rows.length}\u0000${row.key}`, () => combinedRow(rows, matrix.steps.length, shows));
}

const sampled = (matrix, limit) => kept(matrix, `sample of ${limit}`, () => sample(matrix.rows, matrix.steps.length, limit));

/** Describes a cell of this row; empty for a module's own value. */
export function originWords(matrix, row, shows) {
  const { kind, rows } = originOf(matrix, row);
  if (kind !== "group") return "";
  const why = row.role ? "" : "; not watched itself";
  return rows.length ? `${shows} of the ${rows.length} ${row.role ? "modules of this role" : "below"}${why}` : "nothing below it in this run";
}

/** Caches the results of a function by row. */
function remembered(make) {
  const known = new Map();
  return (row) => {
    const key = `${row.key}\u0000${row.group}`;
    if (!known.has(key)) known.set(key, make(row));
    return known.get(key);
  };
}

function paneOf(id, title, matrix, scale, numbers, rows) {
  const source = remembered(numbers);
  const { steps, edges } = matrix;
  const codes = remembered((row) => {
    const found = source(row);
    return found && codesOf(found, steps.length, scale);
  });
  return { id, title, steps, edges, scale, numbers: source, codes: (row) => codes(rows()[row]), table: null };
}

/** Rows of the sites that both have, for the scale of the difference. */
function sharedRows(a, b, pairs, ratio) {
  const both = a.sites.filter((site) => b.place.has(siteKey(site)));
  const stride = Math.max(1, Math.ceil((both.length * pairs.length) / 400_000));
  const chosen = both.filter((_, i) => i % stride === 0);
  const rowIn = (matrix, site) => matrix.rows[matrix.place.get(siteKey(site))];
  return chosen.map((site) => differenceRow(rowIn(a, site), rowIn(b, site), pairs, ratio));
}

const united = (lists) => (lists.length === 1 ? lists[0] : Float64Array.from(lists.flatMap((list) => [...list])).sort());

/** Maps of the others against the first, on a scale of their own. */
function differences(matrices, shared, options, rows) {
  const [a, ...others] = matrices;
  const ratio = options.log && !shared.diverging;
  const common = others.map((b) => commonSteps(a.steps, b.steps));
  const samples = others.map((b, i) => sample(sharedRows(a, b, common[i].pairs, ratio), common[i].pairs.length, MOST_SAMPLED / others.length));
  const scale = makeScale(united(samples), { ...options, ratio, signed: true });
  return others.map((b, i) => {
    const { steps, pairs } = common[i];
    const numbers = (row) => {
      const [from, to] = [a, b].map((matrix) => numbersOf(matrix, row, options.shows));
      return from && to && differenceRow(from, to, pairs, ratio);
    };
    const title = `${b.run} ${ratio ? "\u00f7" : "\u2212"} ${a.run}`;
    const pane = paneOf(others.length === 1 ? "difference" : `difference-${SIDES[i + 1]}`, title, { steps, edges: cellEdges(steps) }, scale, numbers, rows);
    return { ...pane, of: i + 1, difference: true, ratio, pairs };
  });
}

function build(matrices, options, rows) {
  const samples = matrices.map((matrix) => sampled(matrix, MOST_SAMPLED / matrices.length));
  const scale = makeScale(united(samples), options);
  const own = matrices.map((matrix, i) => ({
    ...paneOf(SIDES[i], matrix.run, matrix, scale, (row) => numbersOf(matrix, row, options.shows), rows),
    of: i,
  }));
  if (matrices.length === 2) return [...own, ...differences(matrices, scale, options, rows)];
  if (matrices.length > 2 && options.against) return [own[0], ...differences(matrices, scale, options, rows)];
  return own;
}

/** Panes that are rebuilt only when their inputs have changed. */
export function createPanes() {
  let known = { key: null, panes: [] };
  let shown = [];
  return ({ matrices, rows, log, full, dark, shows, against }) => {
    shown = rows;
    const key = JSON.stringify([matrices.map(({ run, kind, stat, version, born }) => [run, kind, stat, version, born]), log, full, shows, against]);
    if (known.key !== key) {
      known = { key, panes: matrices.length ? build(matrices, { log, full, shows, against }, () => shown) : [] };
    }
    for (const pane of known.panes) pane.table = palette(pane.scale.diverging, dark);
    return known.panes;
  };
}

const amount = (numbers, index) => {
  if (!numbers || index < 0) return "no value";
  const value = numbers.values[index];
  if (isUndefined(numbers, index)) return "undefined";
  if (isBad(numbers, index)) return Number.isNaN(value) ? "NaN" : brief(value);
  return Number.isNaN(value) ? "no data in this step" : brief(value);
};

function changeWords(value, ratio) {
  if (!ratio) return `${value > 0 ? "+" : ""}${brief(value)}`;
  return value === FROM_ZERO ? "from nothing" : `\u00d7${brief(value)}`;
}

/** Notes on a value that its colour alone does not tell. */
function notes(pane, numbers, index) {
  if (!numbers) return [];
  if (isUndefined(numbers, index)) return [{ text: "no reference yet: the weight was zero before this update", tone: "soft" }];
  if (numbers.bad?.[index] === 1) return [{ text: "holds NaN or Inf", tone: "bad" }];
  const side = Number.isFinite(numbers.values[index]) ? sideOf(numbers.values[index], pane.scale) : 0;
  if (side === 0) return [];
  const end = legendWords(pane.scale, pane.scale.back(side > 0 ? pane.scale.to : pane.scale.from));
  return [{ text: `${side > 0 ? "above" : "below"} the range of the colours, which ends at ${end}`, tone: "soft" }];
}

/** A cell as text: its value and notes on it. */
export function cellLines(panes, matrices, row, hit, what, shows) {
  const pane = panes[hit.pane];
  const numbers = pane.numbers(row);
  const step = pane.steps[hit.index];
  const lines = [{ text: `step ${step}` }];
  if (pane.difference) {
    const [i, j] = pane.pairs[hit.index];
    const ofRun = (at, index) => amount(numbersOf(matrices[at], row, shows), index);
    lines.push({ text: `${what}: ${ofRun(0, i)} \u2192 ${ofRun(pane.of, j)}` });
    const value = numbers?.values[hit.index];
    if (numbers && !Number.isNaN(value)) lines.push({ text: changeWords(value, pane.ratio), tone: "value" });
  } else {
    lines.push({ text: `${what} ${amount(numbers, hit.index)}`, tone: "value" });
  }
  lines.push(...notes(pane, numbers, hit.index));
  if (row.note) lines.push({ text: row.note, tone: "soft" });
  const origin = originWords(matrices[pane.of], row, shows);
  if (origin) lines.push({ text: origin, tone: "soft" });
  return lines;
}
