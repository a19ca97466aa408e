/* The detail panel: all data on up to four chosen cells of the heat map. Queries the server, and puts the
   parts (parts.js) together; each part is drawn again only when every answer it needs is here, so that a chart is
   never half of the old cell and half of the new one. */

import { createAnswers, isSettled } from "./answers.js";
import { historyOf, kindOf } from "./cells.js";
import { nearestIndex } from "./frame.js";
import { button, html } from "../core/elements.js";
import { createDistributionPart } from "./distribution.js";
import { createBandsPart, createLinesPart, createRidgesPart, createSamplesPart, createTablePart, headline } from "./parts.js";

const MOST = 4;
const HISTORY_WAIT = 250; // milliseconds the distribution waits for the history, whose range its axis shares

/** The style of the panel, unless the page has it already: alone, or as a part of the tab's. */
function addStyle() {
  const [own, whole] = ["panel.css", "../tab.css"].map((path) => new URL(path, import.meta.url).href);
  const there = [...document.querySelectorAll('link[rel="stylesheet"]')].some(({ href }) => href === own || href === whole);
  if (!there) document.head.append(html("link", { rel: "stylesheet", href: own }));
}

/** A path that breaks after its dots if it must. */
const breakable = (name) => name.split(/(?<=\.)/).flatMap((part) => [part, html("wbr")]);

function questionsFor(view, answers) {
  return view.sites.slice(0, MOST).map((site) => {
    const where = { run: view.run, kind: view.kind, path: site.path, index: site.index };
    const distribution = answers.request("distribution", { ...where, step: view.step });
    return { site, distribution, history: answers.request("history", where) };
  });
}

function createHead(onClose, onPickStep) {
  const names = html("ul", { class: "detail-names" });
  const about = html("p", { class: "detail-about" });
  const step = html("span", { class: "detail-step" });
  let steps = [];
  let chosen = null;
  const go = (by) => () => {
    const near = nearestIndex(steps, chosen);
    const to = steps[near] === chosen ? near + by : steps[near] > chosen === by > 0 ? near : near + by;
    if (to >= 0 && to < steps.length) onPickStep(steps[to]);
  };
  const [before, after] = [button("previous logged step", "\u2039", go(-1)), button("next logged step", "\u203a", go(1))];
  const close = button("Close the detail panel", "\u00d7", () => onClose());
  close.classList.add("detail-close");
  const walk = html("div", { class: "detail-walk", role: "group", "aria-label": "step" }, before, step, after);
  const who = html("div", { class: "detail-who" }, names, about);
  const element = html("header", { class: "detail-head" }, who, walk, close);

  function nameOf(cell, kind, several) {
    const { site } = cell;
    const most = headline(cell, kind);
    const swatch = html("i", { class: "detail-swatch", colour: site.colour });
    const number = most ? html("span", { class: "detail-headline" }, `${most.name} ${most.text}`) : null;
    const name = html("span", { class: "detail-name" }, ...breakable(site.name));
    return html("li", { title: site.name }, several ? swatch : null, name, number);
  }

  function render(cells, view) {
    names.replaceChildren(...cells.map((cell) => nameOf(cell, view.kind, cells.length > 1)));
    about.textContent = `${kindOf(view.kind).words}, run ${view.run}`;
    step.textContent = `step ${view.step}`;
    chosen = view.step;
    const known = cells.find(({ history }) => history.value !== null);
    steps = known ? historyOf(known.history.value).steps : [];
    before.disabled = !steps.length || chosen <= steps[0];
    after.disabled = !steps.length || chosen >= steps.at(-1);
  }
  return { element, render };
}

/** The panel inside `container`; see the parts for what it shows. */
export function createDetail(container, { api, onClose, onPickStep, axis = "linear" }) {
  addStyle();
  const answers = createAnswers(api, answered);
  const rerender = () => update(false, parts, true);
  const head = createHead(onClose, onPickStep);
  const parts = [
    createLinesPart(rerender, onPickStep),
    createDistributionPart(rerender, onPickStep, axis),
    createBandsPart(rerender, onPickStep),
    createRidgesPart(onPickStep),
    createTablePart(),
    createSamplesPart(),
  ];
  const elements = parts.map(({ element }) => element);
  const column = (from, to) => html("div", { class: "detail-column" }, ...elements.slice(from, to));
  const waiting = html("p", { class: "detail-waiting", role: "status" }, "Loading\u2026");
  const grid = html("div", { class: "detail-grid" }, column(0, 3), column(3));
  const about = { class: "detail", "aria-label": "Detail of the chosen modules" };
  const root = html("section", about, head.element, waiting, grid);
  const drawnFrom = new Map(); // what each part was drawn from
  let shown = null;
  let drawing = null;
  let timer = 0;

  const allSettled = (what) => shown.cells.every((cell) => isSettled(cell[what]));

  /** What the picture of a part depends on besides its own choices; the distribution shares its axis with the history. */
  function sourcesOf({ needs }) {
    const of = ({ distribution, history }) => [history.value, history.error, distribution.error, needs === "distribution" && distribution.value];
    return [shown, ...shown.cells.flatMap(of)];
  }

  /** Whether a part has to be drawn again. */
  function hasNews(part) {
    const [before, now] = [drawnFrom.get(part), sourcesOf(part)];
    drawnFrom.set(part, now);
    return before?.length !== now.length || now.some((source, i) => source !== before[i]);
  }

  /** Draws what can be drawn; a distribution alone waits a moment for the history, lest its axis move at once. */
  function update(waits = true, which = parts, always = false) {
    clearTimeout(timer);
    if (shown === null) return;
    head.render(shown.cells, shown.view);
    const histories = allSettled("history");
    for (const part of which) {
      const drawn = allSettled(part.needs) && (histories || part.needs === "history" || !waits);
      part.busy(!drawn);
      if (!drawn || !(hasNews(part) || always)) continue;
      drawing = part;
      part.render(shown.cells, shown.view);
      root.classList.add("detail-filled");
    }
    if (waits && !histories) timer = setTimeout(() => update(false), HISTORY_WAIT);
  }

  function answered(entry) {
    if (shown?.cells.some((cell) => cell.distribution === entry || cell.history === entry)) update();
    for (const { answer, by } of shown?.asked.values() ?? []) if (answer === entry) update(false, [...by], true);
  }

  /** A question of a part besides those for the chosen cells; asked once each time something is shown, however often
      the part is drawn: a question that fails would otherwise be asked again by the drawing that its failure causes. */
  function ask(route, question) {
    const key = JSON.stringify([route, question]);
    if (!shown.asked.has(key)) shown.asked.set(key, { answer: answers.request(route, question), by: new Set() });
    shown.asked.get(key).by.add(drawing);
    return shown.asked.get(key).answer;
  }

  return {
    /** Called again whenever anything changes; what is drawn stays until its successor is complete. */
    show(view) {
      if (!view.sites.length) return this.clear();
      shown = { view: { ...view, ask }, cells: questionsFor(view, answers), asked: new Map() };
      root.classList.toggle("detail-several", shown.cells.length > 1);
      root.style.colorScheme = view.dark ? "dark" : "light";
      if (root.parentNode !== container) container.replaceChildren(root);
      update();
    },
    /** Asks for the history of a cell that may be chosen next. */
    prepare(where) {
      answers.request("history", where);
    },
    clear() {
      clearTimeout(timer);
      shown = null;
      root.remove();
      root.classList.remove("detail-filled");
    },
  };
}
