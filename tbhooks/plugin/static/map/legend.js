/* The legend above the maps: a colour bar with numbers for each scale, and the colours outside of it. */

import { ABOVE, BELOW, NOT_FINITE, NO_DATA, UNDEFINED, codeAt, css, legendTicks, legendWords } from "./colour.js";
import { FONT } from "./draw.js";
import { elide } from "./labels.js";
import { html } from "../core/elements.js";

const WIDTH = 230;
const BETWEEN = 24;
const KEYS = 96;
const HEIGHT = 42;
const ARROW = 9;

/** One legend per scale; runs share theirs. */
export function legendsOf(panes, what) {
  const own = panes.slice(0, 1).map((pane) => ({ pane, title: what }));
  const difference = panes.find((pane) => pane.difference);
  const others = panes.filter((pane) => pane.difference).length;
  const title = others > 1 ? `${difference.ratio ? "ratio to" : "difference from"} ${panes[0].title}` : difference?.title;
  return difference ? [...own, { pane: difference, title }] : own;
}

/** Arrow heads at the ends of the bar, in the colours of what lies beyond, if anything does. */
function drawArrows(context, x, y, width, { scale, table }) {
  for (const [value, code, from, to] of [[scale.beyond.low, BELOW, x - 2, x - 2 - ARROW], [scale.beyond.high, ABOVE, x + width + 2, x + width + 2 + ARROW]]) {
    if (value === null) continue;
    context.fillStyle = css(table[code]);
    context.strokeStyle = "rgb(128 128 128 / 70%)";
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(from, y);
    context.lineTo(to, y + 5);
    context.lineTo(from, y + 10);
    context.closePath();
    context.fill();
    context.stroke();
  }
}

/** A colour bar with numbers below it. */
export function drawLegend(context, { x, y, width, title }, pane, theme) {
  context.textBaseline = "alphabetic";
  context.font = `11px ${FONT}`;
  context.textAlign = "left";
  context.fillStyle = theme.soft;
  const far = pane.scale.beyond.high === null ? "" : `most ${legendWords(pane.scale, pane.scale.beyond.high)}`;
  const farWidth = far ? context.measureText(far).width + 10 : 0;
  context.fillText(elide(context, title, width - farWidth), x, y + 10);
  if (far) {
    context.textAlign = "right";
    context.fillText(far, x + width + ARROW, y + 10);
  }
  for (let i = 0; i < width; i++) {
    context.fillStyle = css(pane.table[codeAt(i / (width - 1))]);
    context.fillRect(x + i, y + 15, 1.5, 10);
  }
  drawArrows(context, x, y + 15, width, pane);
  const taken = [];
  for (const { at, text } of legendTicks(pane.scale)) {
    const half = context.measureText(text).width / 2;
    const middle = Math.min(Math.max(x + at * width, x + half), x + width - half);
    if (taken.some(([low, high]) => middle + half + 12 > low && middle - half - 12 < high)) continue;
    taken.push([middle - half, middle + half]);
    context.fillStyle = theme.line;
    context.fillRect(x + Math.min(at * width, width - 1), y + 25, 1, 3);
    context.fillStyle = theme.ink;
    context.textAlign = "center";
    context.fillText(text, middle, y + 38);
  }
}

function drawStripes(context, x, top) {
  context.save();
  context.beginPath();
  context.rect(x, top, 12, 12);
  context.clip();
  context.lineWidth = 1.5;
  context.strokeStyle = "#000";
  for (const d of [0, 6, 12, 18]) {
    context.beginPath();
    context.moveTo(x + d, top);
    context.lineTo(x + d - 12, top + 12);
    context.stroke();
  }
  context.restore();
}

/** The keys of the colours outside the scale. `undefined` has one only where a stat can be undefined. */
export function drawKeys(context, { x, y, ratio }, table, theme) {
  context.textBaseline = "middle";
  context.textAlign = "left";
  context.font = `11px ${FONT}`;
  const keys = [["NaN or Inf", NOT_FINITE], ["no data", NO_DATA], ...(ratio ? [["no reference yet", UNDEFINED]] : [])];
  const pitch = keys.length > 2 ? 14 : 18;
  keys.forEach(([text, code], i) => {
    const top = y - (keys.length > 2 ? 5 : 0) + pitch * i;
    context.fillStyle = css(table[code]);
    context.fillRect(x, top, 12, 12);
    if (code === NOT_FINITE) drawStripes(context, x, top);
    context.fillStyle = theme.ink;
    context.fillText(text, x + 18, top + 6.5);
  });
}

function words({ pane, title }) {
  const [first, last] = legendTicks(pane.scale);
  const kind = pane.scale.name.startsWith("linear") ? "linear" : "logarithmic";
  const { low, high } = pane.scale.beyond;
  const named = [low, high].filter((value) => value !== null).map((value) => legendWords(pane.scale, value));
  const beyond = named.length ? `, with values beyond it as far as ${named.join(" and ")}` : "";
  return `${title}: colours from ${first.text} to ${last.text}, ${kind}${beyond}`;
}

export function createLegend(container) {
  const canvas = html("canvas", { class: "legend", role: "img" });
  container.append(canvas);
  return {
    show(legends, theme, ratio) {
      const dpr = window.devicePixelRatio || 1;
      const keys = KEYS + (ratio ? 26 : 0);
      const width = ARROW + 4 + legends.length * (WIDTH + BETWEEN) + keys;
      [canvas.width, canvas.height] = [Math.round(width * dpr), Math.round(HEIGHT * dpr)];
      canvas.style.width = `${width}px`;
      canvas.style.height = `${HEIGHT}px`;
      const outside = `Striped pink is NaN or Inf, grey is no data${ratio ? ", blue grey is no reference yet" : ""}.`;
      canvas.setAttribute("aria-label", `${legends.map(words).join("; ")}. ${outside}`);
      const context = canvas.getContext("2d");
      context.scale(dpr, dpr);
      legends.forEach(({ pane, title }, i) => {
        drawLegend(context, { x: ARROW + 4 + i * (WIDTH + BETWEEN), y: 0, width: WIDTH, title }, pane, theme);
      });
      const place = { x: ARROW + 4 + legends.length * (WIDTH + BETWEEN), y: 6, ratio };
      if (legends.length) drawKeys(context, place, legends[0].pane.table, theme);
    },
  };
}
