/*
 * The strip of scalars above the maps, on their step axis: loss, gradient norm, learning rate or others of the run. Each
 * scalar has a scale of its own, which all runs share. Chooses the scalars, draws them, and finds their values at a step.
 */

import { brief, shortStep } from "../core/numbers.js";
import { nearestStep } from "./matrix.js";
import { elide } from "./labels.js";

export const STRIP_HEIGHT = 58;
const LINE = 15;
const COLOURS = { light: ["#0b57d0", "#b3261e", "#00796b", "#7b4fc9"], dark: ["#8ab4f8", "#ff9d94", "#4fd1c0", "#c9a8ff"] };
const USUAL = [/(^|[/._-])(train[/._-]?)?loss$/i, /loss/i, /^train\.grad_norm$/, /grad.*norm/i, /^train\.lr|(^|[/._-])lr$|learning.?rate/i];
const AT_FIRST = 3;

/** The scalars that are shown unless others were chosen: a loss, a norm of the gradients, a learning rate. */
export function usualScalars(tags) {
  const found = [];
  const kinds = [USUAL.slice(0, 2), USUAL.slice(2, 4), USUAL.slice(4)];
  for (const patterns of kinds) {
    const tag = patterns.map((pattern) => tags.find((each) => pattern.test(each))).find(Boolean);
    if (tag && !found.includes(tag)) found.push(tag);
  }
  return found.length ? found : tags.slice(0, 1);
}

export const tagsOf = (sides) => [...new Set(sides.flatMap(({ scalars }) => scalars.map(({ tag }) => tag)))];

function rangeOf(series) {
  let [low, high, positive] = [Infinity, -Infinity, true];
  for (const { values } of series) {
    for (const value of values) {
      if (!Number.isFinite(value)) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
      positive &&= value > 0;
    }
  }
  if (low > high) return null;
  const log = positive && high > 50 * low;
  const along = log ? Math.log10 : (value) => value;
  const [from, to] = [along(low), along(high)];
  const place = (value) => (to > from ? (along(value) - from) / (to - from) : 0.5);
  return { low, high, log, place };
}

/** `{ tags, lines }`; a line is `{ tag, colour, scale, series: [{ steps, values } | null per run] }`. Null without scalars. */
export function stripOf(sides, wanted, dark) {
  const tags = tagsOf(sides);
  const chosen = wanted.filter((tag) => tags.includes(tag));
  const shown = chosen.length ? chosen : usualScalars(tags).slice(0, AT_FIRST);
  const lines = shown.map((tag, i) => {
    const series = sides.map(({ scalars }) => scalars.find((each) => each.tag === tag) ?? null);
    return { tag, colour: COLOURS[dark ? "dark" : "light"][i % 4], scale: rangeOf(series.filter(Boolean)), series };
  });
  return lines.length ? { tags, lines } : null;
}

const xOf = (pane, view, step) => pane.x + ((step - view[0]) / (view[1] - view[0])) * pane.width;

/** A line through the values in view; at most a few points per pixel, NaN and Inf as marks at the upper edge. */
function drawLine(context, box, view, { scale, colour }, { steps, values }, theme) {
  const bottom = box.top + box.height - 4;
  const y = (value) => bottom - scale.place(value) * (box.height - 10);
  context.strokeStyle = colour;
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  context.beginPath();
  let [column, low, high, open] = [-1, 0, 0, false];
  const broken = [];
  for (let i = 0; i < steps.length; i++) {
    if (steps[i + 1] < view[0] || steps[i - 1] > view[1]) continue;
    const x = xOf(box, view, steps[i]);
    if (!Number.isFinite(values[i])) {
      broken.push(x);
      open = false;
      continue;
    }
    const at = y(values[i]);
    if (!open) context.moveTo(x, at);
    else if (Math.floor(x) !== column || at < low || at > high) context.lineTo(x, at);
    if (Math.floor(x) !== column) [column, low, high] = [Math.floor(x), at, at];
    [low, high, open] = [Math.min(low, at), Math.max(high, at), true];
  }
  context.stroke();
  context.fillStyle = theme.bad;
  for (const x of broken) context.fillRect(Math.round(x) - 1, box.top, 2, 5);
}

/** The value of a scalar at a step or just before it. */
function valueAt({ steps, values }, step) {
  const near = nearestStep(steps, step);
  return near < 0 ? null : { step: steps[near], value: values[near] };
}

const lastOf = (series) => series && series.values[series.values.length - 1];

function drawNames(context, g, strip, theme, step) {
  context.textAlign = "left";
  context.textBaseline = "middle";
  context.font = `11px ${g.font}`;
  strip.lines.forEach((line, i) => {
    const y = g.strip.top + 8 + i * LINE;
    const series = line.series[0];
    const found = series && step !== null ? valueAt(series, step)?.value : lastOf(series);
    const number = found === undefined || found === null ? "" : brief(found);
    const numberWidth = context.measureText(number).width;
    context.fillStyle = line.colour;
    context.fillRect(g.left + 4, y - 1.5, 10, 3);
    context.fillStyle = theme.ink;
    context.fillText(elide(context, line.tag, g.labels - g.left - 36 - numberWidth), g.left + 20, y);
    context.textAlign = "right";
    context.fillStyle = theme.soft;
    context.fillText(number, g.labels - 10, y);
    context.textAlign = "left";
  });
}

/** Draws the strip of every pane; a pane of differences shows its run over the first one. */
export function drawStrip(context, g, model, theme) {
  const { strip, view } = model;
  if (!strip) return;
  drawNames(context, g, strip, theme, null);
  model.panes.forEach((pane, p) => {
    const box = { ...g.panes[p], top: g.strip.top, height: g.strip.height };
    context.save();
    context.beginPath();
    context.rect(box.x, box.top - 1, box.width, box.height + 1);
    context.clip();
    context.fillStyle = theme.panel;
    context.fillRect(box.x, box.top, box.width, box.height);
    for (const line of strip.lines) {
      const series = line.series[pane.of];
      context.globalAlpha = pane.difference ? 0.35 : 1;
      if (pane.difference && line.series[0] && line.scale) drawLine(context, box, view, line, line.series[0], theme);
      context.globalAlpha = 1;
      if (series && line.scale) drawLine(context, box, view, line, series, theme);
    }
    context.restore();
  });
}

/** What the strip shows at a step: lines of the tooltip. */
export function stripLines(model, paneIndex, step) {
  const pane = model.panes[paneIndex];
  if (!model.strip || !pane) return [];
  return model.strip.lines.flatMap(({ tag, series }) => {
    const found = series[pane.of] && valueAt(series[pane.of], step);
    if (!found) return [];
    const when = found.step === Math.round(step) ? "" : ` (step ${shortStep(found.step)})`;
    return [{ text: `${tag} ${brief(found.value)}${when}` }];
  });
}
