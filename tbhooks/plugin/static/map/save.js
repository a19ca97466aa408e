/* Exports the view: an image with title, axes and legend, or the shown numbers as CSV. */

import { drawBase, drawOverlay, FONT } from "./draw.js";
import { elide } from "./labels.js";
import { drawKeys, drawLegend } from "./legend.js";
import { html } from "../core/elements.js";

const MARGIN = 20;
const HEAD = 34;
const FOOT = 62;
const DENSITY = 2;
const HIGHEST = 16_000; // pixels: what every browser can draw

/** The shortest text that parses to this float32. */
export function shortest(value) {
  if (Number.isNaN(value)) return "";
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
  for (const digits of [6, 7, 8]) {
    const rounded = Number(value.toPrecision(digits));
    if (Math.fround(rounded) === value) return String(rounded);
  }
  return String(Number(value.toPrecision(9)));
}

/** A text as a CSV field; a leading sign that spreadsheets would take for a formula is escaped. */
export function field(text) {
  const safe = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

/** Steps of all panes within the view, in order. */
function stepsShown(panes, [low, high]) {
  const steps = new Set(panes.flatMap((pane) => pane.steps.filter((step) => step >= low && step <= high)));
  return [...steps].sort((one, other) => one - other);
}

/** One line per row and map: the run, the module, then one column per visible step. */
export function csvText({ panes, rows, view, kind, stat, origin }) {
  const steps = stepsShown(panes, view);
  const lines = [["run", "kind", "stat", "module", "value is", ...steps].join(",")];
  for (const pane of panes) {
    const place = new Map(pane.steps.map((step, i) => [step, i]));
    for (const row of rows) {
      const numbers = pane.numbers(row);
      if (!numbers) continue;
      const cells = steps.map((step) => (place.has(step) ? shortest(numbers.values[place.get(step)]) : ""));
      lines.push([field(pane.title), kind, stat, field(row.full), origin(pane, row), ...cells].join(","));
    }
  }
  return `${lines.join("\n")}\n`;
}

function download(blob, name) {
  const link = html("a", { href: URL.createObjectURL(blob), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

const fileName = (parts, ending) => `${parts.filter(Boolean).join("-").replace(/[^\w.-]+/g, "_").slice(0, 120)}.${ending}`;

export function saveCsv(shown) {
  const runs = shown.panes.filter((pane) => !pane.difference).map((pane) => pane.title);
  download(new Blob([csvText(shown)], { type: "text/csv" }), fileName(["tbhooks", ...runs, shown.kind, shown.stat], "csv"));
}

/** Draws the maps on a context whose own axes are moved: they set their transform themselves, hence a canvas between. */
function mapPicture(g, model, theme, density) {
  const canvas = html("canvas", { width: Math.round(g.width * density), height: Math.round(g.height * density) });
  const over = html("canvas", { width: canvas.width, height: canvas.height });
  const dense = { ...g, dpr: density };
  drawBase(canvas.getContext("2d"), dense, model, theme);
  drawOverlay(over.getContext("2d"), dense, { ...model, cursor: null }, theme, null);
  canvas.getContext("2d").setTransform(1, 0, 0, 1, 0, 0);
  canvas.getContext("2d").drawImage(over, 0, 0);
  return canvas;
}

/** The positions of all rows, also of those that are scrolled out of sight; lower rows if they would be too many pixels. */
export function wholeGeometry(geometry, count) {
  const rowHeight = Math.min(geometry.rowHeight, Math.max(1, (HIGHEST - 400) / Math.max(1, count)));
  const height = Math.ceil(geometry.top + count * rowHeight + 1);
  return { g: { ...geometry, scroll: 0, rowHeight, height, spark: geometry.spark && rowHeight >= 13 }, density: height * DENSITY > HIGHEST ? 1 : DENSITY };
}

/** An image of all rows. */
export function picture({ geometry, model, theme, title, legends, ratio }) {
  const { g, density } = wholeGeometry(geometry, model.rows.length);
  const [width, height] = [g.width + 2 * MARGIN, g.height + 2 * MARGIN + HEAD + FOOT];
  const canvas = html("canvas", { width: Math.round(width * density), height: Math.round(height * density) });
  const context = canvas.getContext("2d");
  context.scale(density, density);
  context.fillStyle = theme.paper;
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.fillStyle = theme.ink;
  context.font = `600 15px ${FONT}`;
  context.fillText(elide(context, title, g.width), MARGIN + 6, MARGIN + 12);
  context.drawImage(mapPicture(g, model, theme, density), MARGIN, MARGIN + HEAD, g.width, g.height);
  const y = MARGIN + HEAD + g.height + 14;
  legends.forEach((legend, i) => {
    drawLegend(context, { x: MARGIN + 16 + i * 280, y, width: 240, title: legend.title }, legend.pane, theme);
  });
  drawKeys(context, { x: MARGIN + 16 + legends.length * 280, y: y + 6, ratio }, legends[0].pane.table, theme);
  return canvas;
}

export function savePng(shown) {
  const { runs, kind, stat } = shown.choice;
  return new Promise((resolve) => {
    picture(shown).toBlob((blob) => {
      download(blob, fileName(["tbhooks", ...runs, kind, stat], "png"));
      resolve();
    }, "image/png");
  });
}

/** Copies a text to the clipboard; false if the browser does not permit it. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const box = html("textarea", { class: "unseen" });
    box.value = text;
    document.body.append(box);
    box.select();
    const copied = document.execCommand("copy");
    box.remove();
    return copied;
  }
}
