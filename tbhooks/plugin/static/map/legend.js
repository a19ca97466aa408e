/* The legend above the maps: a colour bar with numbers for each scale, and the two colours outside of it. */

import { legendTicks } from "./colour.js";
import { drawKeys, drawLegend } from "./draw.js";
import { html } from "../core/elements.js";

const WIDTH = 230;
const BETWEEN = 24;
const KEYS = 90;
const HEIGHT = 42;

/** One legend per scale; runs share theirs. */
export function legendsOf(panes, what) {
  const own = panes.filter((pane) => pane.id === "a").map((pane) => ({ pane, title: what }));
  const difference = panes.filter((pane) => pane.id === "difference").map((pane) => ({ pane, title: pane.title }));
  return [...own, ...difference];
}

function words({ pane, title }) {
  const [first, last] = legendTicks(pane.scale);
  const kind = pane.scale.name.startsWith("linear") ? "linear" : "logarithmic";
  return `${title}: colours from ${first.text} to ${last.text}, ${kind}`;
}

export function createLegend(container) {
  const canvas = html("canvas", { class: "legend", role: "img" });
  container.append(canvas);
  return {
    show(legends, theme) {
      const dpr = window.devicePixelRatio || 1;
      const width = legends.length * (WIDTH + BETWEEN) + KEYS;
      [canvas.width, canvas.height] = [Math.round(width * dpr), Math.round(HEIGHT * dpr)];
      canvas.style.width = `${width}px`;
      canvas.style.height = `${HEIGHT}px`;
      canvas.setAttribute("aria-label", `${legends.map(words).join("; ")}. Striped pink is NaN or Inf, grey is no data.`);
      const context = canvas.getContext("2d");
      context.scale(dpr, dpr);
      legends.forEach(({ pane, title }, i) => {
        drawLegend(context, { x: i * (WIDTH + BETWEEN), y: 0, width: WIDTH, title }, pane, theme);
      });
      if (legends.length) drawKeys(context, { x: legends.length * (WIDTH + BETWEEN), y: 6 }, legends[0].pane.table, theme);
    },
  };
}
