/* The words for what is under the mouse or the keyboard cursor: a name, a cell, a step of the strip, a mark. */

import { cellLines, originWords } from "./panes.js";
import { stripLines } from "./strip.js";

const MOST_MESSAGES = 3;

const messages = (marks) => marks.slice(0, MOST_MESSAGES).map((mark) => ({ text: mark.finding.message, tone: "finding" }));

/** @param from `{ model(), matrices(), what(), shows() }`; the result maps a hit to `{ title, lines }`. */
export function createDescribe({ model, matrices, what, shows }) {
  function axis(hit) {
    const step = hit.inStrip ? Math.round(hit.position) : hit.marks[0].step;
    const scalars = hit.inStrip ? stripLines(model(), hit.pane, hit.position) : [];
    return { title: `step ${step}`, lines: [...scalars, ...messages(hit.marks)] };
  }

  function name(hit, row) {
    const missing = hit.area === "cell" && row.site && !model().panes[hit.pane].numbers(row);
    const text = missing ? "not in this run" : row.note || (row.group ? originWords(matrices()[0], row, shows()) : "");
    return { title: row.full, lines: text ? [{ text, tone: "soft" }] : [] };
  }

  return (hit) => {
    if (hit.area === "axis") return axis(hit);
    const row = model().rows[hit.row];
    if (hit.index < 0) return name(hit, row);
    const lines = cellLines(model().panes, matrices(), row, hit, what(), shows());
    const step = model().panes[hit.pane].steps[hit.index];
    const near = model().marks.filter((mark) => mark.pane === hit.pane && mark.row === hit.row && mark.step === step);
    return { title: row.full, lines: [...lines, ...messages(near)] };
  };
}
