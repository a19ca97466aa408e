/* The help dialog: keys, and what the colours and marks mean. Opened with `?`, closed with Escape. */

import { html } from "./elements.js";

const KEYS = [
  ["/", "search for a module"],
  ["?", "this help"],
  ["Esc", "close what is open: help, menu, details"],
  ["o, m", "go to the overview, to the map"],
  ["u", "the 20 most unusual modules, and back"],
  ["arrows", "on the map: from cell to cell; with Ctrl or Shift ten at a time"],
  ["Enter", "on the map: details of the cell; with Shift added to the comparison"],
  ["Space", "on the map: open or close a group"],
  ["+ \u2212 0", "on the map: zoom in, out, show all steps"],
  ["< >", "on the map: earlier, later"],
];
const WORDS = [
  "A row is a module, a column is a logged step, the colour is the chosen number.",
  "Arrow heads at the ends of the colour bar: some cells are beyond its range and have the colour of the arrow head.",
  "Pink stripes: the tensor held NaN or Inf. Grey: no data in this step. Blue grey: the ratio has no reference yet, because the weight was zero.",
  "Diamonds are findings, at the step where they began.",
  "Modules of the same role have the same path but for numbers, as all q_proj of a transformer. A group shows the median of its modules unless View says otherwise.",
];

export function createHelp() {
  const close = html("button", { type: "button", class: "button" }, "Close");
  const keys = KEYS.flatMap(([key, what]) => [html("dt", {}, html("kbd", {}, key)), html("dd", {}, what)]);
  const dialog = html(
    "dialog",
    { class: "help", "aria-labelledby": "help-title" },
    html("h2", { id: "help-title" }, "Help"),
    html("dl", {}, ...keys),
    ...WORDS.map((text) => html("p", {}, text)),
    close,
  );
  document.body.append(dialog);
  close.addEventListener("click", () => dialog.close());
  return { open: () => dialog.open || dialog.showModal(), isOpen: () => dialog.open };
}

const isTyping = (target) => target.closest?.("input:not([type=checkbox]):not([type=radio]):not([type=range]), textarea, select");

/** Keys that work everywhere on the page: `actions` by key. */
export function attachShortcuts(actions) {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    const action = event.key === "Escape" || !isTyping(event.target) ? actions[event.key] : undefined;
    if (!action) return;
    if (event.key !== "Escape") event.preventDefault();
    action(event);
  });
}
