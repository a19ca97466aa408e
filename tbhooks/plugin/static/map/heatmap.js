/*
 * The heat map as a part of the page: two canvases that stay in place inside a scrolling box, a tooltip, a live region.
 * It is given a model (rows, panes, view, marks ...) and reports what the user does; it neither fetches nor stores the view.
 */

import { columnsOf, condensed } from "./cells.js";
import { drawBase, drawOverlay, FONT, SPARK, stepX, xStep } from "./draw.js";
import { attachKeys } from "./keys.js";
import { nearestStep } from "./matrix.js";
import { html } from "../core/elements.js";
import { attachPointer } from "./pointer.js";
import { themeColours } from "../core/theme.js";
import { STRIP_HEIGHT } from "./strip.js";
import { createTip } from "./tip.js";

const HELP =
  "Heat map of modules and steps. Arrow keys move from cell to cell, Enter opens the details of a cell, " +
  "Shift Enter adds it to the comparison, Space opens or closes a group, plus and minus zoom, 0 shows all steps.";
const TOP = 30;
const TITLE = 20;
const BETWEEN = 18;
const RIGHT = 12;
const TALLEST = 30;
const COMFORTABLE = 22;
const NEAR = 6;
const REST = 100; // milliseconds after which somebody who does not move the mouse looks at the cell
const NARROWEST = 150; // the column of names with room for sparklines

/** Width of the column of names: what they need, within limits. */
function labelWidth(context, rows, width) {
  context.font = `12px ${FONT}`;
  let widest = NARROWEST - 36 - SPARK;
  for (const row of rows) widest = Math.max(widest, context.measureText(row.label).width + row.depth * 13);
  return Math.round(Math.min(widest + 36 + SPARK, Math.max(NARROWEST, Math.min(420, width * 0.34))));
}

function rowHeight(room, count, fit) {
  const even = room / Math.max(1, count);
  return Math.min(TALLEST, fit ? even : Math.max(17, even));
}

/** The positions of all parts. */
export function layout({ width, height, dpr, labels, model, scroll }) {
  const count = model.panes.length;
  const title = count > 1 ? TITLE : 0;
  const strip = model.strip ? { top: title + 4, height: STRIP_HEIGHT } : null;
  const top = TOP + title + (strip ? STRIP_HEIGHT : 0);
  const between = count > 4 ? 6 : BETWEEN;
  const room = width - labels - RIGHT - between * (count - 1);
  const each = Math.max(10, Math.floor(room / Math.max(1, count)));
  const panes = model.panes.map((_, p) => ({ x: labels + p * (each + between), width: each }));
  const high = rowHeight(height - top - 4, model.rows.length, model.fit);
  const spark = high >= 13 && labels >= NARROWEST;
  return { width, height, dpr, labels, top, left: 6, panes, scroll, rowHeight: high, strip, spark, font: FONT };
}

/**
 * @param {HTMLElement} container
 * @param on what the user does: `view(range or null)`, `pick(hit, add)`, `toggle(row)`, `label(hit, add)`, `finding(mark)`,
 *   `rest(hit)` when the mouse rests on a cell; `describe(hit)` gives `{ title, lines }`
 */
export function createHeatmap(container, on) {
  const base = html("canvas", { class: "map-base", "aria-hidden": "true" });
  const over = html("canvas", { class: "map-over", "aria-hidden": "true" });
  const role = { role: "application", "aria-roledescription": "heat map", "aria-label": HELP };
  const stage = html("div", { class: "map-stage", tabindex: "0", ...role }, base, over);
  const body = html("div", { class: "map-body" }, stage);
  const scroller = html("div", { class: "map-scroll", tabindex: "-1" }, body);
  const live = html("div", { class: "unseen", "aria-live": "polite" });
  const tip = createTip();
  container.append(html("div", { class: "map" }, scroller, tip.element, live));

  let model = null;
  let g = null;
  let resting = 0;
  let hover = null;
  let cursor = null;
  let measured = { rows: null, width: 0, labels: 0 };
  let pending = { frame: 0, base: false };

  function resolve(mark) {
    if (!mark || !model) return null;
    const row = model.rows.findIndex((each) => each.key === mark.key);
    const pane = Math.max(0, model.panes.findIndex((each) => each.id === mark.pane));
    const index = model.panes.length ? nearestStep(model.panes[pane].steps, mark.step) : -1;
    return row < 0 || index < 0 ? null : { row, pane, index };
  }

  function measure() {
    const width = scroller.clientWidth;
    const height = scroller.clientHeight;
    if (measured.rows !== model.rows || measured.width !== width) {
      measured = { rows: model.rows, width, labels: labelWidth(base.getContext("2d"), model.rows, width) };
    }
    g = layout({ width, height, dpr: window.devicePixelRatio || 1, labels: measured.labels, model, scroll: scroller.scrollTop });
    const total = `${Math.max(height, Math.ceil(g.top + g.rowHeight * model.rows.length + 4 - 1e-6))}px`;
    if (body.style.height !== total) body.style.height = total;
    stage.style.height = `${height}px`;
    g.scroll = scroller.scrollTop;
    for (const canvas of [base, over]) {
      const [w, h] = [Math.round(width * g.dpr), Math.round(height * g.dpr)];
      if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
    }
  }

  function draw() {
    pending.frame = 0;
    if (!model || scroller.clientWidth === 0) return;
    const theme = themeColours();
    if (pending.base) {
      const began = performance.now();
      measure();
      drawBase(base.getContext("2d"), g, model, theme);
      base.dataset.drawMs = (performance.now() - began).toFixed(1);
      base.dataset.layout = JSON.stringify({ top: g.top, rowHeight: g.rowHeight, panes: g.panes, view: model.view });
      pending.base = false;
    }
    drawOverlay(over.getContext("2d"), g, { ...model, cursor: resolve(cursor) }, theme, hover);
  }

  function schedule(withBase) {
    pending.base ||= withBase;
    pending.frame ||= requestAnimationFrame(draw);
  }

  /** The step that a pixel of a row shows; if several share it, the painted one. */
  function stepAt(row, p, x) {
    const codes = model.panes[p].codes(row);
    const left = Math.round(g.panes[p].x * g.dpr);
    const pixels = Math.round((g.panes[p].x + g.panes[p].width) * g.dpr) - left;
    const columns = columnsOf(model.panes[p].edges, model.view, pixels, Infinity);
    const at = Math.min(pixels - 1, Math.max(0, Math.round(x * g.dpr) - left));
    if (codes === null || columns.from[at] < 0) return -1;
    const chosen = new Int32Array(pixels);
    condensed(codes, columns, new Uint8Array(pixels), chosen);
    return chosen[at];
  }

  /** Findings that are marked on the step axis, where those of other kinds are, or in the strip, which has all. */
  function marksAt(pane, x, inStrip) {
    const away = (mark) => Math.abs(stepX(g.panes[pane], model.view, mark.step) - x);
    return model.marks.filter((mark) => (inStrip || mark.row < 0) && mark.pane === pane && away(mark) < NEAR);
  }

  /** What is at a position of the map. */
  function hit(x, y) {
    if (!g || !model) return null;
    const pane = g.panes.findIndex((each) => x >= each.x && x < each.x + each.width);
    const position = pane < 0 ? NaN : xStep(g.panes[pane], model.view, x);
    const inStrip = g.strip !== null && y >= g.strip.top && y < g.strip.top + g.strip.height;
    if (y < g.top) return { area: "axis", row: -1, pane, index: -1, position, inStrip: inStrip && pane >= 0, marks: marksAt(pane, x, inStrip) };
    const row = Math.floor((y - g.top + g.scroll) / g.rowHeight);
    if (row >= model.rows.length) return null;
    if (x < g.labels) return { area: "label", row, pane: -1, index: -1, position };
    if (pane < 0) return null;
    return { area: "cell", row, pane, index: stepAt(row, pane, x), position };
  }

  function point(found, x, y) {
    hover = found && (found.row >= 0 || found.inStrip || found.marks.length) ? found : null;
    if (hover) tip.show(on.describe(hover), x, y, container.getBoundingClientRect());
    else tip.hide();
    clearTimeout(resting);
    if (hover?.index >= 0) resting = setTimeout(() => on.rest(found), REST);
    schedule(false);
  }

  /** Scrolls to a hidden row: just far enough, or to the middle. */
  function reveal(row, middle) {
    if (!g) return;
    const y = row * g.rowHeight;
    const room = g.height - g.top - g.rowHeight;
    const at = scroller.scrollTop;
    if (y >= at && y <= at + room) return;
    scroller.scrollTop = middle ? y - room / 2 : y < at ? y : y - room + 4;
  }

  function setCursor(found, announce) {
    const pane = found && model.panes[found.pane];
    cursor = found && { key: model.rows[found.row].key, pane: pane.id, step: pane.steps[found.index] };
    if (announce && found) {
      const { title, lines } = on.describe(found);
      live.textContent = [title, ...lines.map((line) => line.text)].join(", ");
      reveal(found.row, false);
    }
    schedule(false);
  }

  const now = { cursor: () => resolve(cursor), model: () => model, geometry: () => g };
  const parts = { stage, scroller, hit, point, on, setCursor, ...now };
  attachPointer(parts);
  attachKeys(parts);
  scroller.addEventListener("scroll", () => schedule(true), { passive: true });
  new ResizeObserver(() => schedule(true)).observe(scroller);

  return {
    update(next) {
      if (model && next.rows !== model.rows) this.hideTip(); // what it described may be elsewhere, or gone
      model = next;
      schedule(true);
    },
    /** Puts the cursor on a cell and scrolls to it, at once. */
    goTo(mark) {
      cursor = mark;
      if (pending.base && model && scroller.clientWidth) measure();
      const found = resolve(cursor);
      if (found) reveal(found.row, true);
      schedule(true);
    },
    hideTip() {
      hover = null;
      tip.hide();
    },
    /** The height that all rows need, each high enough for its name. */
    wantedFor: (next) => layout({ width: 900, height: 0, dpr: 1, labels: 200, model: next, scroll: 0 }).top + COMFORTABLE * next.rows.length + 8,
    focus: () => stage.focus(),
    redraw: () => schedule(true),
    geometry: () => g,
    scrollToTop: () => (scroller.scrollTop = 0),
  };
}
