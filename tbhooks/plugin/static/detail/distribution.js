/* The part of the panel with the distribution at one step: on a linear or a signed log axis, of one or several modules,
   over another step or another run, with a slider over all steps that have a histogram. */

import { boundsOf } from "./buckets.js";
import { histogramOf, historyOf, seriesOf, statsOf } from "./cells.js";
import { distributionModel, signedShape } from "./charts.js";
import { linearShape } from "./linear.js";
import { createScrubber } from "./scrubber.js";
import { nearestIndex } from "./frame.js";
import { counted, isFinite, percent, whole } from "../core/numbers.js";
import { createChoice, html } from "../core/elements.js";
import { usedKeys } from "./ridges.js";
import { createChartSection } from "./section.js";
import { MODES, problemsOf, withValue } from "./shared.js";

const EXTENTS = [
  ["history", "all steps"],
  ["step", "this step"],
];
const AXES = [
  ["linear", "linear"],
  ["log", "signed log"],
];
const OVER = ["#e69f00", "#cc79a7"]; // of what is drawn over the chosen one

function ridgeKeys(cells) {
  return withValue(cells, "history").flatMap(({ history }) => {
    const { ridges } = historyOf(history.value);
    return ridges ? usedKeys(ridges) : [];
  });
}

function histogramNote({ distribution }, chosen) {
  const { histogram_step: step } = distribution.value;
  if (step === chosen) return null;
  if (step === null || step === undefined) return "no histogram is stored for it";
  return `histogram of step ${step}, the nearest logged one with a histogram; you chose ${chosen}`;
}

/** A note that applies to all modules is shown once. */
function histogramNotes(cells, chosen) {
  const notes = cells.map((cell) => histogramNote(cell, chosen));
  if (new Set(notes).size <= 1) return notes[0] ?? null;
  return notes.flatMap((note, i) => (note ? [`${cells[i].site.name}: ${note}`] : [])).join("\n");
}

/** "16,384 elements, 48.1% zeros (7,880), no NaN, no Inf". */
function countWords({ site, distribution }, view, several) {
  const { count, zero_fraction: zeros, nan_count: nans, inf_count: infs } = statsOf(distribution.value);
  if (!isFinite(count)) return null;
  const when = distribution.value.row_step === view.step ? "" : ` at step ${distribution.value.row_step}`;
  const zeroWords = zeros ? `${percent(zeros)} zeros (${whole(zeros * count)})` : "no zeros";
  const bad = (number, word) => html("span", { class: number > 0 ? "detail-bad" : null }, counted(number, word));
  const swatch = several ? html("i", { class: "detail-swatch", colour: site.colour }) : null;
  const start = `${whole(count)} elements${when}, ${zeroWords}, `;
  return html("span", {}, swatch, start, bad(nans, "NaN"), ", ", bad(infs, "Inf"));
}

/** A stored histogram of the history as a series. */
function ridgeSeries(ridges, index, name, colour) {
  const counts = new Map(ridges.keys.map((key, column) => [key, ridges.counts[index][column]]).filter(([, count]) => count > 0));
  const zeros = ridges.totals[index] ? (counts.get(0) ?? 0) / ridges.totals[index] : 0;
  return {
    ...{ name, colour, step: ridges.steps[index], counts, nans: 0, infs: 0, elements: ridges.totals[index], zeroShare: zeros },
    bounds: new Map([...counts.keys()].map((key) => [key, boundsOf(key).map((edge) => Math.min(Math.max(edge, -3.4e38), 3.4e38))])),
    ...{ min: null, max: null, median: null },
  };
}

const ends = (numbers) => numbers.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);

/** From the lowest to the highest value: of what is drawn, or of all steps. */
function rangeOf(series, cells, extent) {
  const drawn = series.flatMap(({ bounds, counts }) => [...counts.keys()].flatMap((key) => bounds.get(key)));
  const past = withValue(cells, "history").flatMap(({ history }) => {
    const { stats } = historyOf(history.value);
    return [...(stats.min ?? []), ...(stats.max ?? [])];
  });
  const [low, high] = ends([...drawn, ...(extent === "history" ? past : [])].filter(isFinite));
  return low <= high ? [low, high] : [-1, 1];
}

export function createDistributionPart(rerender, onPickStep, first = "linear") {
  const options = { axis: first, mode: { linear: "linear", log: "log" }, extent: { linear: "step", log: "history" }, over: "" };
  const section = createChartSection("Distribution", "distribution", "Buckets of the distribution");
  let scrubbed = null; // index among the steps with a histogram, while the slider moves
  let steps = [];
  let subject = "";
  const choose = (field) => (value) => {
    options[field] = value;
    rerender();
  };
  const scrubber = createScrubber({
    move(index) {
      scrubbed = index;
      rerender();
    },
    settle(index) {
      scrubbed = null;
      onPickStep(steps[index]);
    },
  });
  const chooseOfAxis = (field) => (value) => {
    options[field][options.axis] = value;
    rerender();
  };
  const [mode, extent] = [createChoice("counts", chooseOfAxis("mode")), createChoice("range", chooseOfAxis("extent"))];
  const [axis, over] = [createChoice("axis", choose("axis")), createChoice("over it", choose("over"))];
  section.controls.append(axis.element, extent.element, mode.element, over.element);
  section.element.append(scrubber.element);

  function render(cells, view) {
    const now = JSON.stringify([view.run, view.kind, cells.map(({ site }) => site.name)]);
    if (now !== subject) {
      scrubber.stop();
      [subject, scrubbed] = [now, null];
    }
    const ridges = cells.length === 1 && cells[0].history.value !== null ? historyOf(cells[0].history.value).ridges : null;
    steps = ridges?.steps ?? [];
    scrubber.set(steps, scrubbed ?? (steps.length ? nearestIndex(steps, view.step) : 0));
    axis.set(AXES, options.axis);
    mode.set(MODES, options.mode[options.axis]);
    extent.set(EXTENTS, options.extent[options.axis]);
    const others = cells.length === 1 ? (view.others ?? []) : [];
    const choices = [["", "nothing"], ...(steps.length > 1 ? [["first", "first step"]] : []), ...others.map((run) => [`run ${run}`, run])];
    if (!choices.some(([name]) => name === options.over)) options.over = "";
    over.set(choices, options.over);
    over.element.hidden = choices.length < 2;
    const known = withValue(cells, "distribution");
    section.visible(!view.kind.startsWith("element.")); // a metric is one number
    section.problems(problemsOf(cells, "distribution"));
    const stored = known.map(({ site, distribution, history }) => seriesOf(site, distribution.value, history.value)).filter(Boolean);
    const own = scrubbed !== null && ridges ? [ridgeSeries(ridges, scrubbed, cells[0].site.name, cells[0].site.colour)] : stored;
    const series = [...own, ...overlaid(cells, view, ridges)];
    if (own.length) draw(cells, known, series);
    else section.empty();
    section.words(...known.map((cell) => countWords(cell, view, cells.length > 1)).filter(Boolean));
    section.note(scrubbed === null ? histogramNotes(known, view.step) : null);
  }

  /** What is drawn over the chosen one: its first step, or the same module in another run. */
  function overlaid(cells, view, ridges) {
    if (options.over === "first" && ridges) return [ridgeSeries(ridges, 0, `step ${ridges.steps[0]}`, OVER[0])];
    if (!options.over.startsWith("run ")) return [];
    const run = options.over.slice(4);
    const { site } = cells[0];
    const answer = view.ask("distribution", { run, kind: view.kind, path: site.path, index: site.index, step: scrubbed === null ? view.step : steps[scrubbed] });
    const found = answer.value && seriesOf({ ...site, name: run, colour: OVER[1] }, answer.value, null);
    return found ? [found] : [];
  }

  function draw(cells, known, series) {
    const own = known.flatMap(({ distribution }) => [...histogramOf(distribution.value).counts.keys()]);
    const drawn = series.flatMap(({ counts }) => [...counts.keys()]);
    const reach = options.extent[options.axis];
    const keys = [...new Set([...own, ...drawn, ...(reach === "step" ? [] : ridgeKeys(cells))])];
    const shape = options.axis === "log" ? signedShape(keys) : linearShape(rangeOf(series, cells, reach));
    section.draw((width) => distributionModel(series, shape, options.mode[options.axis], width));
  }
  return { ...section, render, needs: "distribution", asks: true };
}
