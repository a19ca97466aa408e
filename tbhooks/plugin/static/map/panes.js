/*
 * The maps side by side: one run, or two on a shared scale with their difference. Gives each row of the tree its numbers
 * and its colours, computed on first use and cached until data or scale change.
 */

import { codesOf, makeScale, palette, sample } from "./colour.js";
import { brief } from "../core/numbers.js";
import { cellEdges, commonSteps, differenceRow, FROM_ZERO, isBad, medianRow, siteKey } from "./matrix.js";
import { sitesBelow } from "./tree.js";

/** Where a row's numbers come from in a matrix: `{ kind: "own" | "median" | "none", rows }`. */
function originOf(matrix, row) {
  const own = row.site ? matrix.place.get(siteKey(row.site)) : undefined;
  if (own !== undefined) return { kind: "own", rows: [matrix.rows[own]] };
  if (!row.group || row.open) return { kind: "none", rows: [] };
  const below = sitesBelow(row.node).map((site) => matrix.place.get(siteKey(site)));
  return { kind: "median", rows: below.filter((place) => place !== undefined).map((place) => matrix.rows[place]) };
}

function numbersOf(matrix, row) {
  const { kind, rows } = originOf(matrix, row);
  if (rows.length === 0) return null;
  return kind === "own" ? rows[0] : medianRow(rows, matrix.steps.length);
}

/** Describes a cell of this row; empty for a module's own value. */
export function originWords(matrix, row) {
  const { kind, rows } = originOf(matrix, row);
  if (kind !== "median") return "";
  return rows.length ? `median of the ${rows.length} below; not watched itself` : "nothing below it in this run";
}

/** Caches the results of a function by row of the tree. */
function remembered(make) {
  const known = new Map();
  return (row) => {
    const key = `${row.key}\u0000${row.group && !row.open}`;
    if (!known.has(key)) known.set(key, make(row));
    return known.get(key);
  };
}

function paneOf(id, title, steps, edges, scale, numbers, rows) {
  const source = remembered(numbers);
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

function differencePane(a, b, shared, options, rows) {
  const { steps, pairs } = commonSteps(a.steps, b.steps);
  const ratio = options.log && !shared.diverging;
  const scale = makeScale(sample(sharedRows(a, b, pairs, ratio), pairs.length), { ...options, ratio, signed: true });
  const numbers = (row) => {
    const [from, to] = [numbersOf(a, row), numbersOf(b, row)];
    return from && to && differenceRow(from, to, pairs, ratio);
  };
  const title = `${b.run} ${ratio ? "\u00f7" : "\u2212"} ${a.run}`;
  return { ...paneOf("difference", title, steps, cellEdges(steps), scale, numbers, rows), ratio, pairs };
}

function build(a, b, options, rows) {
  const parts = [a, b].filter(Boolean);
  const numbers = parts.map((matrix) => sample(matrix.rows, matrix.steps.length, 200_000 / parts.length));
  const all = numbers.length === 1 ? numbers[0] : Float64Array.from([...numbers[0], ...numbers[1]]).sort();
  const scale = makeScale(all, options);
  const panes = parts.map((matrix, i) =>
    paneOf(i ? "b" : "a", matrix.run, matrix.steps, matrix.edges, scale, (row) => numbersOf(matrix, row), rows),
  );
  if (b) panes.push(differencePane(a, b, scale, options, rows));
  return panes;
}

/** Panes that are rebuilt only when their inputs have changed. */
export function createPanes() {
  let known = { key: null, panes: [] };
  let shown = [];
  return ({ a, b, rows, log, full, dark }) => {
    shown = rows;
    const key = [a, a?.version, b, b?.version, log, full];
    if (known.key === null || key.some((part, i) => part !== known.key[i])) {
      known = { key, panes: a ? build(a, b, { log, full }, () => shown) : [] };
    }
    for (const pane of known.panes) pane.table = palette(pane.scale.diverging, dark);
    return known.panes;
  };
}

const amount = (numbers, index) => {
  if (!numbers || index < 0) return "no value";
  const value = numbers.values[index];
  if (isBad(numbers, index)) return Number.isNaN(value) ? "NaN" : brief(value);
  return Number.isNaN(value) ? "no data in this step" : brief(value);
};

function changeWords(value, ratio) {
  if (!ratio) return `${value > 0 ? "+" : ""}${brief(value)}`;
  return value === FROM_ZERO ? "from nothing" : `\u00d7${brief(value)}`;
}

/** A cell as text: its value and notes on it. */
export function cellLines(panes, matrices, row, hit, what) {
  const pane = panes[hit.pane];
  const numbers = pane.numbers(row);
  const step = pane.steps[hit.index];
  const lines = [{ text: `step ${step}` }];
  if (pane.id === "difference") {
    const [i, j] = pane.pairs[hit.index];
    const [from, to] = [amount(panes[0].numbers(row), i), amount(panes[1].numbers(row), j)];
    lines.push({ text: `${what}: ${from} \u2192 ${to}` });
    const value = numbers?.values[hit.index];
    if (numbers && !Number.isNaN(value)) lines.push({ text: changeWords(value, pane.ratio), tone: "value" });
  } else {
    lines.push({ text: `${what} ${amount(numbers, hit.index)}`, tone: "value" });
  }
  if (numbers?.bad?.[hit.index]) lines.push({ text: "holds NaN or Inf", tone: "bad" });
  const origin = originWords(matrices[pane.id === "b" ? 1 : 0], row);
  if (origin) lines.push({ text: origin, tone: "soft" });
  return lines;
}
