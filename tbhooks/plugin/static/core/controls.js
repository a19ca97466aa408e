/* The two lines of controls above the maps. They report choices of the user and show the current state. */

import { html } from "./elements.js";
import { kindWords, statWords } from "./runs.js";

const SCALES = [
  ["log", "Log", "Logarithmic; around zero for numbers of either sign"],
  ["linear", "Linear", "Linear"],
];
const RANGES = [
  ["robust", "1\u201399%", "All but the lowest and highest hundredth"],
  ["full", "Full", "From the lowest to the highest"],
];
const ROWS = [
  ["read", "Readable", "Every row high enough for its name"],
  ["fit", "Fit", "All rows at once"],
];

/** A labelled select. Unchanged options are not replaced, because that would close an open list. */
function createSelect(label, hint, onChange) {
  const box = html("select", { title: hint, "aria-label": label });
  const element = html("label", { class: "control" }, html("span", {}, label), box);
  let shown = "";
  box.addEventListener("change", () => onChange(box.value));
  return {
    element,
    set(options, value) {
      const wanted = JSON.stringify(options);
      if (wanted !== shown) box.replaceChildren(...options.map(([name, text]) => html("option", { value: name }, text)));
      shown = wanted;
      box.value = value;
    },
  };
}

let groups = 0;

/** A few options of which one is chosen. */
function createSwitch(label, options, onChange) {
  const name = `switch-${groups++}`;
  const inputs = options.map(([value]) => html("input", { type: "radio", name, value, class: "unseen" }));
  const parts = options.map(([, text, hint], i) => html("label", { title: hint }, inputs[i], html("span", {}, text)));
  for (const input of inputs) input.addEventListener("change", () => onChange(input.value));
  const choices = html("div", { class: "switch", role: "radiogroup", "aria-label": label }, ...parts);
  const element = html("div", { class: "control" }, html("span", {}, label), choices);
  return { element, set: (value) => inputs.forEach((input) => (input.checked = input.value === value)) };
}

function createButton(text, label, onClick) {
  const element = html("button", { type: "button", class: "button", title: label, "aria-label": label }, text);
  element.addEventListener("click", onClick);
  return element;
}

function createSearch(onChange) {
  const label = "Find modules by text or /regular expression/";
  const hint = "Find modules, or /regex/";
  const box = html("input", { type: "search", placeholder: hint, "aria-label": label, spellcheck: "false" });
  const note = html("span", { class: "search-note", role: "status" });
  box.addEventListener("input", () => onChange(box.value));
  return {
    element: html("div", { class: "search" }, box, note),
    set(value, error, count) {
      if (box.value !== value && document.activeElement !== box) box.value = value;
      box.classList.toggle("invalid", error !== null);
      note.textContent = error !== null ? `not a regular expression yet: ${error}` : value ? `${count} found` : "";
      note.title = note.textContent;
    },
  };
}

function createDepth(onChange) {
  const box = html("input", { type: "range", min: "1", step: "1", "aria-label": "Depth of the module tree" });
  const value = html("output", {});
  box.addEventListener("input", () => onChange(Number(box.value)));
  return {
    element: html("label", { class: "control depth", title: "How many levels are open" }, html("span", {}, "Depth"), box, value),
    set(depth, deepest, off) {
      box.max = String(deepest);
      box.value = String(depth);
      box.disabled = off || deepest < 2;
      value.textContent = `${depth} of ${deepest}`;
    },
  };
}

const filler = () => html("span", { class: "filler" });

/** @param on `{ change(patch), zoom(factor), all(), png(), csv(), link() }` */
export function createControls(container, on) {
  const change = (name) => (value) => on.change({ [name]: value });
  const another = (name) => (value) => on.change({ [name]: value, toggled: [] }); // a different tree, with its default groups open
  const run = createSelect("Run", "Run to show", another("run"));
  const vs = createSelect("Compare", "A second run beside it, on the same scale, with the difference", change("vs"));
  const kind = createSelect("Kind", "Which tensors", another("kind"));
  const stat = createSelect("Stat", "Which number of each tensor", change("stat"));
  const scale = createSwitch("Scale", SCALES, change("scale"));
  const range = createSwitch("Range", RANGES, change("range"));
  const rows = createSwitch("Rows", ROWS, change("rows"));
  const search = createSearch(change("search"));
  const depth = createDepth((value) => on.change({ depth: value, toggled: [] }));
  const zoom = html(
    "div",
    { class: "buttons", role: "group", "aria-label": "Zoom along steps" },
    createButton("\u2212", "Zoom out along steps", () => on.zoom(1 / 1.8)),
    createButton("+", "Zoom in along steps (Ctrl + wheel, or the wheel over the step axis)", () => on.zoom(1.8)),
    createButton("All steps", "Show all steps (double click on the map)", on.all),
  );
  const panel = createButton("Panel", "Show or hide findings and details", () => {
    on.change({ panel: panel.getAttribute("aria-pressed") === "true" ? "closed" : "open" });
  });
  const save = html(
    "div",
    { class: "buttons", role: "group", "aria-label": "Save" },
    createButton("PNG", "Save the maps as a picture", on.png),
    createButton("CSV", "Download the shown numbers", on.csv),
    createButton("Copy link", "Copy the address of this view", on.link),
  );
  container.append(
    html("div", { class: "bar" }, ...[run, vs, kind, stat, scale, range].map((each) => each.element), filler(), save),
    html("div", { class: "bar" }, ...[search, depth, rows].map((each) => each.element), zoom, filler(), panel),
  );

  return {
    /** `log`, `depth`, `deepest`, `error` and `count` are the resolved values of the choices in `state`. */
    update({ list, state, choice, log, depth: levels, deepest, error, count }) {
      const names = list.runs.map((each) => [each.name, each.name]);
      if (!names.some(([name]) => name === choice.run)) names.unshift([choice.run, `${choice.run} (gone)`]);
      run.set(names, choice.run);
      vs.set([["", "no other run"], ...names.filter(([name]) => name !== choice.run)], choice.vs);
      kind.set(choice.kinds.map((each) => [each, kindWords(each)]), choice.kind);
      stat.set(choice.stats.map((each) => [each, statWords(each)]), choice.stat);
      scale.set(log ? "log" : "linear");
      range.set(state.range);
      rows.set(state.rows);
      search.set(state.search, error, count);
      depth.set(levels, deepest, state.search !== "");
      panel.setAttribute("aria-pressed", String(state.panel === "open"));
    },
  };
}
