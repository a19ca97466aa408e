/* One chart: an SVG that follows the width of its container, a tooltip, and a cursor for pointer and
   keyboard. What is drawn comes from a `paint` function, which returns

     {height, nodes, label,                  the picture and its text alternative
      stops, first, find(x, y), at(i, x),    what the pointer can select: how many, which one, its tooltip
      pick(i)}                               optional: what a click or Enter does

   The old picture stays until the new one is complete, so nothing flickers. */

import { html, svg } from "../core/elements.js";

const MOVES = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 };
const PAGE = 10;

export function createPlot(name) {
  const picture = svg("svg", { role: "img", class: "detail-picture" });
  const marks = svg("g", { class: "detail-marks" });
  const cursor = html("div", { class: "detail-cursor", role: "slider", tabindex: "0", "aria-label": name });
  const tooltip = html("div", { class: "detail-tooltip", hidden: true, "aria-hidden": "true" });
  const element = html("div", { class: "detail-plot" }, picture, cursor, tooltip);
  let paint = null;
  let model = null;
  let width = 0;
  let current = null; // what is pointed at, and the pointer's x if it was the pointer
  let pointed = null;

  function repaint() {
    if (!paint || width < 80) return;
    model = paint(width);
    picture.setAttribute("width", width);
    picture.setAttribute("height", model.height);
    picture.setAttribute("aria-label", model.label);
    element.style.height = `${model.height}px`;
    cursor.hidden = !model.stops;
    cursor.classList.toggle("detail-pickable", Boolean(model.pick));
    picture.replaceChildren(...model.nodes, marks);
    if (current !== null && current < model.stops) point(current, pointed);
    else hide();
    announce(Math.min(current ?? model.first ?? 0, model.stops - 1));
  }

  function announce(index) {
    if (!model.stops) return;
    const { title, rows } = model.at(Math.max(index, 0), null);
    cursor.setAttribute("aria-valuemin", 0);
    cursor.setAttribute("aria-valuemax", model.stops - 1);
    cursor.setAttribute("aria-valuenow", Math.max(index, 0));
    cursor.setAttribute("aria-valuetext", [title, ...rows.map(({ name: what, value }) => `${what} ${value}`)].join(", "));
  }

  function hide() {
    current = null;
    tooltip.hidden = true;
    marks.replaceChildren();
  }

  function point(index, x) {
    [current, pointed] = [index, x];
    const target = model.at(index, x);
    marks.replaceChildren(...target.marks);
    tooltip.replaceChildren(...tooltipNodes(target));
    tooltip.hidden = false;
    placeTooltip(target);
  }

  function placeTooltip({ x, y }) {
    const { offsetWidth, offsetHeight } = tooltip;
    const left = x + 12 + offsetWidth <= width ? x + 12 : Math.max(0, x - 12 - offsetWidth);
    tooltip.style.left = `${Math.min(left, Math.max(0, width - offsetWidth))}px`;
    tooltip.style.top = `${Math.max(0, Math.min(y - offsetHeight / 2, model.height - offsetHeight))}px`;
  }

  function moved(event) {
    const index = model?.find(event.offsetX, event.offsetY) ?? null;
    if (index === null) hide();
    else point(index, event.offsetX);
  }

  function pressed(event) {
    if (!model?.stops || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape" && !tooltip.hidden) {
      event.stopPropagation(); // the first Escape closes the tooltip, not whatever is around it
      return hide();
    }
    if ((event.key === "Enter" || event.key === " ") && model.pick && current !== null) model.pick(current);
    else if (!go(event.key)) return;
    event.preventDefault();
  }

  function go(key) {
    const from = current ?? model.first ?? 0;
    const far = { Home: 0, End: model.stops - 1, PageUp: from - PAGE, PageDown: from + PAGE };
    const to = key in MOVES ? (current === null ? from : from + MOVES[key]) : far[key];
    if (to === undefined) return false;
    const index = Math.max(0, Math.min(model.stops - 1, to));
    point(index, null);
    announce(index);
    return true;
  }

  cursor.addEventListener("pointermove", moved);
  cursor.addEventListener("pointerleave", hide);
  cursor.addEventListener("blur", hide);
  cursor.addEventListener("keydown", pressed);
  cursor.addEventListener("click", (event) => {
    const index = model?.find(event.offsetX, event.offsetY) ?? null;
    if (index !== null) model.pick?.(index);
  });
  new ResizeObserver(([entry]) => {
    const now = Math.floor(entry.contentRect.width);
    if (now === width) return;
    width = now;
    repaint();
  }).observe(element);

  return {
    element,
    draw(how) {
      paint = how;
      repaint();
    },
  };
}

function tooltipNodes({ title, rows }) {
  const list = html("dl");
  for (const { name, value, colour } of rows) {
    const swatch = colour ? html("i", { class: "detail-swatch", colour }) : null;
    list.append(html("dt", {}, swatch, name), html("dd", {}, value));
  }
  return [html("strong", {}, title), list];
}
