/* All stats of one step as a real table, one column per module; copied as tab-separated exact numbers. */

import { hasMeaning } from "./cells.js";
import { exact, isFinite, nearZero, percent, whole } from "../core/numbers.js";
import { html } from "../core/elements.js";

const GROUPS = [
  ["Update", ["ratio"]],
  ["Size", ["mean", "std", "rms", "norm"]],
  ["Range", ["min", "max", "abs_max"]],
  ["Quantiles", ["p01", "p25", "p50", "p75", "p99"]],
  ["Shape", ["skewness", "kurtosis"]],
  ["Depth", ["gain"]],
  ["Elements", ["count", "zero_fraction", "nan_count", "inf_count"]],
];

const MEANING = {
  ratio: "size of the update over size of the weight",
  std: "standard deviation of the population",
  rms: "root of the mean square",
  norm: "root of the sum of squares",
  abs_max: "largest magnitude",
  p50: "the median",
  skewness: "mean cube of the deviations over std\u00b3: 0 if symmetric",
  kurtosis: "mean fourth power of the deviations over std\u2074: 3 if normal, more with outliers",
  gain: "rms of the gradient at the previous module of the same role over that at this one",
  dead_fraction: "share of units that are zero for every sample",
  write_ratio: "rms of what the module changes over rms of its input",
  zero_fraction: "share of elements that are exactly zero",
};

const FORMS = { count: whole, nan_count: whole, inf_count: whole, zero_fraction: percent };
const BAD = new Set(["nan_count", "inf_count"]);

/** Groups that have something to show; unlisted stats come last. */
function grouped(columns, kind) {
  const known = new Set(columns.flatMap(({ stats }) => Object.keys(stats)).filter((name) => hasMeaning(name, kind)));
  const listed = new Set(GROUPS.flatMap(([, names]) => names));
  const others = [...known].filter((name) => !listed.has(name));
  return [...GROUPS, ["Metrics", others]]
    .map(([title, names]) => [title, names.filter((name) => known.has(name))])
    .filter(([, names]) => names.length);
}

function cell(name, value) {
  const text = name in FORMS ? FORMS[name](value) : nearZero(name, value);
  const bad = (BAD.has(name) && value > 0) || (typeof value === "number" && !isFinite(value));
  return html("td", { title: exact(value), class: bad ? "detail-bad" : null }, text);
}

function headOf(columns) {
  const names = columns.map(({ name, colour, step }) =>
    html(
      "th",
      { scope: "col", title: `${name}, step ${step}` },
      columns.length > 1 ? html("i", { class: "detail-swatch", colour }) : null,
      columns.length > 1 ? lastPart(name) : `step ${step}`,
    ),
  );
  return html("thead", {}, html("tr", {}, html("th", { scope: "col" }, "stat"), ...names));
}

/** The last part of a path; the full path is in the title and in the header of the panel. */
function lastPart(name) {
  return name.length <= 40 ? name : `\u2026${name.slice(-39)}`;
}

function bodyOf([title, names], columns) {
  const heading = html("th", { scope: "rowgroup", colspan: columns.length + 1 }, title);
  const rows = names.map((name) => {
    const about = html("th", { scope: "row", title: MEANING[name] }, name);
    return html("tr", {}, about, ...columns.map(({ stats }) => cell(name, stats[name])));
  });
  return html("tbody", {}, html("tr", { class: "detail-group" }, heading), ...rows);
}

/** `columns`: [{name, colour, step, stats}]. */
export function statsTable(columns, kind, caption) {
  const bodies = grouped(columns, kind).map((group) => bodyOf(group, columns));
  return html("table", { class: "detail-table" }, html("caption", {}, caption), headOf(columns), ...bodies);
}

export function tableText(columns, kind) {
  const names = grouped(columns, kind).flatMap(([, stats]) => stats);
  const lines = names.map((name) => [name, ...columns.map(({ stats }) => exact(stats[name]))]);
  const head = ["stat", ...columns.map(({ name, step }) => `${name} @ step ${step}`.replaceAll(/[\t\n\r]/g, " "))];
  return [head, ...lines].map((line) => line.join("\t")).join("\n");
}

/** Copies a text; pages that are not served securely have no clipboard, so they copy a selection. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const box = html("textarea", { class: "detail-offscreen" });
    box.value = text;
    document.body.append(box);
    box.select();
    const done = document.execCommand("copy");
    box.remove();
    return done;
  }
}
