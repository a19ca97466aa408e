/* One part of the panel: heading, choices, a note, the chart or table, and the server's sentence when it failed. */

import { html } from "../core/elements.js";
import { createPlot } from "./plot.js";

let made = 0;

export function createSection(title, name) {
  const id = `detail-title-${(made += 1)}`;
  const heading = html("h3", { id }, title);
  const controls = html("div", { class: "detail-controls" });
  const words = html("p", { class: "detail-words", hidden: true });
  const note = html("p", { class: "detail-note", hidden: true });
  const problems = html("div", { class: "detail-problems", role: "alert", hidden: true });
  const body = html("div", { class: "detail-body" });
  const element = html(
    "section",
    { class: `detail-section detail-${name}`, "aria-labelledby": id },
    html("header", {}, heading, controls),
    ...[words, note, problems, body],
  );
  const fill = (place, content) => {
    place.replaceChildren(...content);
    place.hidden = !content.length;
  };
  return {
    element,
    body,
    controls,
    title: (text) => (heading.textContent = text),
    words: (...content) => fill(words, content),
    note: (text) => fill(note, text ? [text] : []),
    problems: (sentences) => fill(problems, [...new Set(sentences)].map((sentence) => html("p", {}, sentence))),
    busy: (is) => element.setAttribute("aria-busy", String(is)),
    visible: (is) => (element.hidden = !is),
  };
}

/** A section whose body is a chart. */
export function createChartSection(title, name, cursorName) {
  const section = createSection(title, name);
  const plot = createPlot(cursorName);
  section.body.append(plot.element);
  return {
    ...section,
    draw(paint) {
      section.body.hidden = section.controls.hidden = false;
      plot.draw(paint);
    },
    empty() {
      section.body.hidden = section.controls.hidden = true;
      section.words();
    },
  };
}
