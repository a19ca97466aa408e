/* A small chart of one scalar over the steps, with marks where findings began. Numbers in, an SVG element out. */

import { brief, isFinite, shortStep } from "../core/numbers.js";
import { html, svg } from "../core/elements.js";

const WIDTH = 260;
const HEIGHT = 54;
const PAD = 4;
const LOG_FROM = 50; // times the least value

function scaleOf(values) {
  const finite = values.filter(isFinite);
  if (!finite.length) return null;
  const [low, high] = [finite.reduce((a, b) => Math.min(a, b)), finite.reduce((a, b) => Math.max(a, b))];
  const log = low > 0 && high > LOG_FROM * low;
  const along = log ? Math.log10 : (value) => value;
  const span = along(high) - along(low);
  return { log, y: (value) => HEIGHT - PAD - (span ? (along(value) - along(low)) / span : 0.5) * (HEIGHT - 2 * PAD) };
}

function pathOf({ steps, values }, x, y) {
  let path = "";
  let open = false;
  const stride = Math.max(1, Math.floor(steps.length / (2 * WIDTH)));
  for (let i = 0; i < steps.length; i++) {
    const kept = i % stride === 0 || i === steps.length - 1 || !isFinite(values[i]);
    if (!kept) continue;
    if (isFinite(values[i])) path += `${open ? "L" : "M"}${x(steps[i]).toFixed(1)} ${y(values[i]).toFixed(1)}`;
    open = isFinite(values[i]);
  }
  return path;
}

/** @param series `{ tag, steps, values }`; `marks` are `{ step, severity }` */
export function curve(series, marks, domain) {
  const { tag, steps, values } = series;
  const scale = scaleOf(values);
  const [first, last] = domain;
  const x = (step) => PAD + ((step - first) / Math.max(last - first, 1)) * (WIDTH - 2 * PAD);
  const ends = [values.find(isFinite), values.at(-1)].map(brief);
  const words = `${tag} from ${ends[0]} to ${ends[1]} over steps ${shortStep(steps[0])} to ${shortStep(steps.at(-1))}`;
  const inside = marks.filter(({ step }) => step >= first && step <= last);
  const lines = inside.map(({ step, severity }) => svg("line", { x1: x(step), x2: x(step), y1: 0, y2: HEIGHT, class: `curve-mark ${severity}` }));
  const bad = steps.filter((_, i) => !isFinite(values[i])).map((step) => svg("rect", { x: x(step) - 1, y: 0, width: 2, height: 6, class: "curve-bad" }));
  const line = scale ? svg("path", { d: pathOf(series, x, scale.y), class: "curve-line" }) : null;
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": words, class: "curve-picture" }, ...lines, line, ...bad);
  return html(
    "figure",
    { class: "curve", title: words },
    html("figcaption", {}, html("span", { class: "curve-tag" }, tag), scale?.log ? html("span", { class: "curve-log" }, "log") : null, html("span", { class: isFinite(values.at(-1)) ? "curve-last" : "curve-last bad" }, ends[1])),
    picture,
  );
}
