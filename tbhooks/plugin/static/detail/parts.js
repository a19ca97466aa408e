/* The parts of the panel besides the distribution: each turns the answers for the chosen cells into one chart or table,
   and keeps the user's choices for it. A cell is {site, distribution, history}; the last two are entries of answers.js. */

import { suitableMode } from "./axes.js";
import { historyOf, kindOf, statHistory, statNames, statsOf } from "./cells.js";
import { brief, isFinite, toNumber } from "../core/numbers.js";
import { bandValues, bandsModel, linesModel } from "./history.js";
import { button, createChoice, html } from "../core/elements.js";
import { ridgesModel, ridgesNote, someRidges, usedKeys } from "./ridges.js";
import { createChartSection, createSection } from "./section.js";
import { MODES, problemsOf, withValue } from "./shared.js";
import { copyText, statsTable, tableText } from "./stats_table.js";

/* ---- History ------------------------------------------------------------------------------------------------ */

/** What the red marks above a history mean. */
function brokenWords(series) {
  const nonFinite = series
    .map(({ name, values }) => ({ name, broken: values.filter((value) => value !== null && !isFinite(value)).length }))
    .filter(({ broken }) => broken > 0)
    .map(({ name, broken }) => `${series.length > 1 ? `${name} ` : ""}at ${broken} ${broken === 1 ? "step" : "steps"}`);
  return nonFinite.length ? [`Red marks: not finite${series.length > 1 ? ":" : ""} ${nonFinite.join(", ")}.`] : [];
}

/** Remembers log or linear for each thing drawn; until the user chooses, the values decide. */
function createModeChoice(rerender) {
  const chosen = new Map();
  let subject = "";
  const choice = createChoice("scale", (value) => {
    chosen.set(subject, value);
    rerender();
  });
  function resolve(name, values) {
    subject = name;
    const mode = chosen.get(name) ?? suitableMode(values);
    choice.set(MODES, mode);
    return mode;
  }
  return { element: choice.element, resolve };
}

const NO_QUANTILES = "No histogram is stored for it, so there are no quantiles: minimum and maximum only.";

export function createBandsPart(rerender, onPick) {
  const section = createChartSection("Quantiles over steps", "bands", "Steps of the quantiles");
  const mode = createModeChoice(rerender);
  section.controls.append(mode.element);

  function render(cells, view) {
    const [{ site, distribution, history }] = cells;
    const hasRange = history.value === null || "min" in historyOf(history.value).stats; // metrics are single numbers
    section.visible(cells.length === 1 && hasRange && (history.error === null || history.error !== distribution.error));
    if (cells.length !== 1 || !hasRange) return;
    section.problems(problemsOf(cells, "history"));
    if (history.value === null || !historyOf(history.value).steps.length) return section.empty();
    const past = historyOf(history.value);
    section.note(past.quantileSteps.length ? null : NO_QUANTILES);
    section.words(...brokenWords([{ name: site.name, values: past.stats.norm ?? [] }]));
    const scale = mode.resolve(view.kind, bandValues(past));
    section.draw((width) => bandsModel(site.name, site.colour, past, view.step, scale, onPick, width));
  }
  return { ...section, render, needs: "history" };
}

export function createRidgesPart(onPick) {
  const section = createChartSection("Distribution over steps", "ridges", "Steps of the ridgeline");

  function render(cells, view) {
    const all = cells.length === 1 && cells[0].history.value !== null ? historyOf(cells[0].history.value).ridges : null;
    section.visible(all !== null);
    if (all === null) return;
    const ridges = someRidges(all, view.step);
    const [{ site }] = cells;
    section.words(ridgesNote(ridges));
    section.draw((width) => ridgesModel(site.name, site.colour, ridges, usedKeys(all), view.step, onPick, width));
  }
  return { ...section, render, needs: "history" };
}

export function createLinesPart(rerender, onPick) {
  const chosen = new Map();
  let kind = "";
  const section = createChartSection("Stat over steps", "lines", "Steps of the stat");
  const mode = createModeChoice(rerender);
  const stat = createChoice("stat", (value) => {
    chosen.set(kind, value);
    rerender();
  });
  section.controls.append(stat.element, mode.element);

  function render(cells, view) {
    kind = view.kind;
    const known = withValue(cells, "history").filter(({ history }) => historyOf(history.value).steps.length);
    section.problems(cells.length > 1 ? problemsOf(cells, "history") : []);
    section.visible(known.length > 0 || cells.length > 1);
    if (!known.length) return section.empty();
    const names = [...new Set(known.flatMap(({ history }) => statNames(history.value, kind)))];
    const wanted = [chosen.get(kind), kindOf(kind).headline, names[0]].find((name) => names.includes(name));
    const series = known
      .map(({ site, history }) => ({ name: site.name, colour: site.colour, ...statHistory(history.value, wanted) }))
      .filter(({ steps }) => steps.length);
    stat.set(names.map((name) => [name, name]), wanted);
    section.title(`${wanted} over steps`);
    const scale = mode.resolve(wanted, series.flatMap(({ values }) => values.filter(isFinite)));
    section.words(...brokenWords(series));
    section.draw((width) => linesModel(wanted, series, view.step, scale, onPick, width));
  }
  return { ...section, render, needs: "history" };
}

/* ---- Table -------------------------------------------------------------------------------------------------- */

/** Which updates are estimates, because the device had no memory for a copy of the whole weight. */
function sampledNote(columns) {
  const sampled = columns.filter(({ sampled }) => typeof sampled === "number");
  if (!sampled.length) return "";
  const read = sampled.map(({ name, sampled: share }) => `${(100 * share).toPrecision(2)} % of ${name}`);
  return `Estimated from a sample of the elements: ${read.join(", ")}. Min and max are of the sample.`;
}

function caption(columns, chosen) {
  const steps = [...new Set(columns.map(({ step }) => step))];
  if (steps.every((step) => step === chosen)) return `At step ${chosen}`;
  return `At step ${steps.join(", ")}, the nearest logged; you chose ${chosen}`;
}

export function createTablePart() {
  const section = createSection("Stats", "stats");
  let shown = [[], ""];
  const copied = html("span", { class: "detail-copied", role: "status" });
  const copy = button("Copy the stats with all digits, tab-separated", "copy", async () => {
    copied.textContent = (await copyText(tableText(...shown))) ? "copied" : "select the table to copy it";
    setTimeout(() => (copied.textContent = ""), 2000);
  });
  section.controls.append(copied, copy);

  function render(cells, view) {
    const columns = withValue(cells, "distribution").map(({ site, distribution }) => ({
      ...{ name: site.name, colour: site.colour, step: distribution.value.row_step, stats: statsOf(distribution.value) },
      sampled: distribution.value.sampled,
    }));
    section.visible(columns.length > 0);
    section.note(sampledNote(columns));
    shown = [columns, view.kind];
    section.body.replaceChildren(statsTable(columns, view.kind, caption(columns, view.step)));
  }
  return { ...section, render, needs: "distribution" };
}

/* ---- Samples ------------------------------------------------------------------------------------------------ */

const headRow = (names) => html("thead", {}, html("tr", {}, ...names.map((name) => html("th", { scope: "col" }, name))));

function table(caption, names, rows) {
  const lines = rows.map(([first, ...rest]) =>
    html("tr", {}, html("th", { scope: "row", title: first }, first), ...rest.map((text) => html("td", {}, text))),
  );
  return html("table", { class: "detail-table" }, html("caption", {}, caption), headRow(names), html("tbody", {}, ...lines));
}

/** The samples with the largest values at a step, and the mean of each group. */
function samplesTables({ step, worst, groups, total }) {
  const [grouped, placed] = [worst.some(([, , group]) => group), worst.some(([, , , position]) => position !== null)];
  const names = ["sample", ...(placed ? ["position"] : []), "value", ...(grouped ? ["group"] : [])];
  const rows = worst.map(([id, value, group, position]) => [
    ...[String(id), ...(placed ? [position === null ? "" : String(position)] : [])],
    ...[brief(toNumber(value)), ...(grouped ? [group] : [])],
  ]);
  const largest = table(`The largest of ${total} values at step ${step}`, names, rows);
  const means = Object.entries(groups).map(([name, [mean, count]]) => [name, brief(toNumber(mean)), String(count)]);
  return means.length ? [largest, table("The mean of each group", ["group", "mean", "values"], means)] : [largest];
}

export function createSamplesPart() {
  const section = createSection("Samples", "samples");

  function render(_cells, view) {
    const { value } = view.ask("samples", { run: view.run, step: view.step });
    const known = value !== null && value.step !== null;
    section.visible(known);
    if (!known) return;
    section.note(value.step === view.step ? null : `Step ${value.step} is the nearest with samples; you chose ${view.step}.`);
    section.body.replaceChildren(...samplesTables(value));
  }
  return { ...section, render, needs: "distribution", asks: true };
}

/** The main number of a kind, for the head of the panel. */
export function headline({ site, distribution }, kind) {
  if (distribution.value === null) return null;
  const { headline: name } = kindOf(kind);
  const value = statsOf(distribution.value)[name];
  return value === undefined ? null : { site, name, text: brief(value) };
}
