/* The two lines of controls above the maps. They report choices of the user and show the current state. */

import { html } from "./elements.js";
import { createMenu, createTicks } from "./menu.js";
import { kindWords, runWords, statWords } from "./runs.js";
import { MOST_RUNS, MOST_SCALARS } from "./state.js";

const PAGES = [
  ["overview", "Overview", "A verdict on every run"],
  ["map", "Map", "One stat of all modules over all steps"],
];
const SCALES = [
  ["log", "Log", "Logarithmic; around zero for numbers of either sign"],
  ["linear", "Linear", "Linear"],
];
const RANGES = [
  ["robust", "1\u201399%", "Colours for all but the lowest and highest hundredth; cells beyond are marked"],
  ["full", "Full", "Colours from the lowest to the highest"],
];
const ROWS = [
  ["auto", "Auto", "As high as suits the number of rows"],
  ["read", "Readable", "Every row high enough for its name"],
  ["fit", "Fit", "All rows at once"],
];
const GROUPS = [
  ["tree", "by path"],
  ["roles", "by role"],
];
const SORTS = [
  ["order", "model order"],
  ["value", "highest value"],
  ["change", "largest change"],
  ["unusual", "20 most unusual"],
];
const SHOWS = [
  ["median", "Median", "A group shows the median of its modules"],
  ["least", "Least", "A group shows the least of its modules"],
  ["most", "Most", "A group shows the most of its modules"],
];
const AGAINST = [
  ["own", "As they are", "Every run with its own numbers"],
  ["first", "Ratio to the first", "The first run, and the others divided by it"],
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
  const spoken = /\w\w/.test(text) ? `${text}: ${label}` : label; // the name has the text that is seen
  const element = html("button", { type: "button", class: "button", title: label, "aria-label": spoken }, text);
  element.addEventListener("click", onClick);
  return element;
}

function createSearch(onChange) {
  const label = "Find modules by text or /regular expression/";
  const hint = "Find modules, or /regex/";
  const box = html("input", { type: "search", placeholder: hint, "aria-label": label, spellcheck: "false", title: "Press / to search" });
  const note = html("span", { class: "search-note", role: "status" });
  box.addEventListener("input", () => onChange(box.value));
  return {
    element: html("div", { class: "search" }, box, note),
    focus: () => box.focus(),
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
const group = (label, ...parts) => html("div", { class: "buttons", role: "group", "aria-label": label }, ...parts);

/** The runs that are compared: boxes to tick, and whether the others are shown as ratios. */
function createCompare(on) {
  const ticks = createTicks(MOST_RUNS - 1, ([vs = "", ...more]) => on.change({ vs, more }));
  const against = createSwitch("Show", AGAINST, (value) => on.change({ against: value }));
  const none = html("p", { class: "soft" }, "There is no other run.");
  const menu = createMenu("Compare", "Up to eleven other runs beside it, on the same scale", ticks.element, none, against.element);
  return {
    element: menu.element,
    set(names, others, value) {
      ticks.set(names, others);
      none.hidden = names.length > 0;
      against.element.hidden = others.length < 2;
      against.set(value);
      menu.text(others.length === 0 ? "Compare" : others.length === 1 ? `Compare: ${others[0]}` : `Compare: ${others.length + 1} runs`);
    },
  };
}

/** @param on `{ change(patch), zoom(factor), all(), png(), csv(), link(), help() }` */
export function createControls(container, on) {
  const change = (name) => (value) => on.change({ [name]: value });
  const another = (name) => (value) => on.change({ [name]: value, toggled: [] }); // a different tree, with its default groups open
  const page = createSwitch("Page", PAGES, change("page"));
  const run = createSelect("Run", "Run to show", another("run"));
  const compare = createCompare(on);
  const kind = createSelect("Kind", "Which tensors", (value) => on.change({ kind: value, toggled: [], depth: null }));
  const stat = createSelect("Stat", "Which number of each tensor", change("stat"));
  const scale = createSwitch("Scale", SCALES, change("scale"));
  const range = createSwitch("Range", RANGES, change("range"));
  const rows = createSwitch("Row height", ROWS, change("rows"));
  const shows = createSwitch("Groups show", SHOWS, change("shows"));
  const grouping = createSelect("Group", "Modules by their path, or those of the same role together", (value) => on.change({ group: value, toggled: [], depth: null }));
  const sort = createSelect("Sort", "Order of the modules; 20 most unusual compares each with the others of its role", change("sort"));
  const search = createSearch(change("search"));
  const depth = createDepth((value) => on.change({ depth: value, toggled: [] }));
  const scalars = createTicks(MOST_SCALARS, (names) => on.change({ scalars: names, strip: names.length ? "open" : "closed" }));
  const scalarsTitle = html("p", { class: "menu-title" }, `Scalars above the map (up to ${MOST_SCALARS})`);
  const view = createMenu("View", "Row height, groups, scalars", rows.element, shows.element, scalarsTitle, scalars.element);
  const zoom = group(
    "Zoom along steps",
    createButton("\u2212", "Zoom out along steps", () => on.zoom(1 / 1.8)),
    createButton("+", "Zoom in along steps (Ctrl + wheel, or the wheel over the step axis)", () => on.zoom(1.8)),
    createButton("All steps", "Show all steps (double click on the map)", on.all),
  );
  const panel = createButton("Panel", "Show or hide findings and details", () => {
    on.change({ panel: panel.getAttribute("aria-pressed") === "true" ? "closed" : "open" });
  });
  const save = createMenu("Save", "Picture, numbers, link", createButton("PNG", "Save the maps as a picture", on.png), createButton("CSV", "Download the shown numbers", on.csv));
  const link = createButton("Copy link", "Copy the address of this view", on.link);
  const help = createButton("?", "Help (press ?)", on.help);
  const ofMap = html("div", { class: "bar-part" }, run.element, compare.element, kind.element, stat.element);
  const lower = html("div", { class: "bar" }, ...[search, grouping, sort, depth, scale, range, view].map((each) => each.element), filler(), zoom);
  const right = html("div", { class: "bar-part" }, save.element, link, panel, help);
  page.element.firstChild.remove(); // the two words need no label
  container.append(html("div", { class: "bar" }, page.element, ofMap, filler(), right), lower);

  return {
    focusSearch: search.focus,
    /** `log`, `depth`, `deepest`, `error` and `count` are the resolved values of the choices in `state`. */
    update({ list, state, choice, log, depth: levels, deepest, error, count, byRole, tags, lines }) {
      const names = list.runs.map((each) => [each.name, runWords(each, list.now)]);
      if (!names.some(([name]) => name === choice.run)) names.unshift([choice.run, `${choice.run} (gone)`]);
      run.set(names, choice.run);
      compare.set(names.filter(([name]) => name !== choice.run), choice.others, state.against);
      kind.set(choice.kinds.map((each) => [each, kindWords(each)]), choice.kind);
      stat.set(choice.stats.map((each) => [each, statWords(each)]), choice.stat);
      scale.set(log ? "log" : "linear");
      range.set(state.range);
      rows.set(state.rows);
      shows.set(state.shows);
      grouping.set(GROUPS, byRole ? "roles" : "tree");
      sort.set(SORTS, state.sort);
      scalarsTitle.hidden = tags.length === 0;
      scalars.set(tags.map((tag) => [tag, tag]), lines);
      search.set(state.search, error, count);
      depth.set(levels, deepest, state.search !== "" || state.sort !== "order");
      panel.setAttribute("aria-pressed", String(state.panel === "open"));
    },
    /** Shows the controls of a page. */
    page(name) {
      page.set(name);
      const map = name === "map";
      lower.hidden = ofMap.hidden = save.element.hidden = panel.hidden = !map;
    },
  };
}
