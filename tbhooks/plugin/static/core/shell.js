/* The layout of the page: containers for controls, maps, findings and details, a banner, and the page without data. */

import { html } from "./elements.js";

const LINE = 'tbhooks.watch(model, SummaryWriter("runs/mine"), every=100)';

const WHAT =
  "This tab shows the activations, gradients, weights and updates of every module over a whole training. " +
  "Add one line before the training loop:";
const WHEN = "The tab fills by itself as soon as the first steps are written into TensorBoard's log directory.";

function emptyPage() {
  const code = html("pre", {}, html("code", {}, `import tbhooks\nfrom torch.utils.tensorboard import SummaryWriter\n\n${LINE}`));
  return html(
    "main",
    { class: "empty", hidden: true },
    html("h1", {}, "No run here was watched yet"),
    html("p", {}, WHAT),
    code,
    html("p", { class: "soft" }, WHEN),
  );
}

/** Adds the style sheet of all parts of the page; resolves when it is there. */
export function addStyle() {
  const style = html("link", { rel: "stylesheet", href: new URL("../tab.css", import.meta.url).href });
  document.head.append(style);
  return new Promise((resolve) => ["load", "error"].forEach((event) => style.addEventListener(event, resolve)));
}

export function createShell() {
  document.documentElement.lang = "en";
  document.title = "tbhooks";
  const parts = {
    banner: html("div", { class: "banner", role: "status", hidden: true }),
    controls: html("header", { class: "controls" }),
    status: html("div", { class: "status" }),
    legend: html("div", { class: "legends" }),
    maps: html("div", { class: "maps", id: "map" }),
    findings: html("section", { class: "findings", "aria-label": "Findings" }),
    compared: html("div", { class: "compared" }),
    detail: html("div", { class: "detail-place" }),
    empty: emptyPage(),
    overview: html("main", { class: "overview", hidden: true, "aria-label": "Overview of all runs" }),
  };
  const role = { role: "separator", "aria-orientation": "vertical", "aria-label": "Width of the panel", "aria-valuenow": "32", "aria-valuemin": "10", "aria-valuemax": "70" };
  const grip = html("div", { class: "grip", tabindex: "0", ...role });
  const details = html("section", { class: "details", "aria-label": "Details" }, parts.compared, parts.detail);
  parts.panel = html("aside", { class: "panel", "aria-label": "Findings and details" }, parts.findings, details);
  parts.loading = html("p", { class: "loading", role: "status", hidden: true }, "Loading\u2026");
  const under = html("div", { class: "under" }, parts.status, parts.legend);
  const middle = html("main", { class: "middle" }, html("h1", { class: "unseen" }, "Map of all modules over the steps"), under, parts.maps, parts.loading);
  parts.panel.prepend(grip);
  const work = html("div", { class: "work" }, middle, parts.panel);
  parts.work = work;
  parts.skip = html("a", { class: "skip", href: "#map" }, "Skip to the map");
  parts.app = html("div", { class: "app", hidden: true }, parts.controls, parts.overview, work);
  parts.controls.append(parts.skip);
  document.body.append(parts.banner, parts.app, parts.empty);
  makeResizable(grip, parts.panel);
  return { ...parts, grip };
}

/** The border between maps and panel can be dragged, or moved with the arrow keys. */
function makeResizable(grip, panel) {
  const set = (width) => {
    const within = Math.min(Math.max(width, 260), window.innerWidth * 0.7);
    panel.style.setProperty("--panel-width", `${Math.round(within)}px`);
  };
  grip.addEventListener("pointerdown", (event) => grip.setPointerCapture(event.pointerId));
  grip.addEventListener("pointermove", (event) => {
    if (grip.hasPointerCapture(event.pointerId)) set(document.documentElement.clientWidth - event.clientX);
  });
  grip.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: 24, ArrowRight: -24 }[event.key];
    if (by) set(panel.getBoundingClientRect().width + by);
  });
}
