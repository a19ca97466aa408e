/* Above the details: the modules that are compared, each with its colour, a way to add more, and a hint while there are none. */

import { html } from "../core/elements.js";
import { MOST_PICKS } from "../core/state.js";

const HINT = "Click a cell to see its distribution, its history and all its numbers.";

function named(kind, text, label, onClick) {
  const element = html("button", { type: "button", class: kind, "aria-label": label, title: label }, text);
  element.addEventListener("click", onClick);
  return element;
}

/** @param on `{ remove(site), adding(on), open(row) }` */
export function createCompared(container, on) {
  let about = null;
  let shows = "median";
  let shown = "";

  const chip = (site) =>
    html(
      "li",
      { class: "chip", colour: site.colour, title: site.name },
      html("i", { class: "chip-dot" }),
      html("span", { class: "chip-name" }, site.name || '""'),
      named("chip-close", "\u00d7", `Stop comparing ${site.name}`, () => on.remove(site)),
    );

  function explanation(row) {
    const open = html("button", { type: "button", class: "button" }, "Open it");
    open.addEventListener("click", () => {
      about = null;
      on.open(row);
    });
    const why = row.role ? "is a role" : "is not watched itself";
    const text = `${row.full} ${why}: its row shows the ${shows} of ${row.role ? "its modules" : "what is below"}. `;
    return html("p", { class: "hint" }, text, row.open ? null : open);
  }

  function adder(count, adding) {
    const full = count >= MOST_PICKS;
    const title = full ? `Up to ${MOST_PICKS} modules can be compared` : "Add the next cell you click (or hold Shift)";
    const text = adding ? "Click cells to add" : "+ Compare";
    const button = html("button", { type: "button", class: "button", "aria-pressed": String(adding), title }, text);
    button.disabled = full && !adding;
    button.addEventListener("click", () => on.adding(!adding));
    return button;
  }

  return {
    /** Shows why a row has no details, until something is chosen. */
    explain(row, which) {
      [about, shows] = [row, which];
    },
    show(sites, adding) {
      const names = JSON.stringify(sites);
      if (!shown.startsWith(names)) about = shown === "" || about === null ? about : null;
      const wanted = `${names}${adding}${about?.key ?? ""}${about?.open ?? ""}`;
      if (wanted === shown) return; // keeps the focus
      shown = wanted;
      const hint = about ? [explanation(about)] : sites.length === 0 ? [html("p", { class: "hint" }, HINT)] : [];
      const several = sites.length > 1;
      const chips = several ? html("ul", { class: "chips", "aria-label": "Compared modules" }, ...sites.map(chip)) : null;
      const bar = sites.length ? [html("div", { class: "compared-bar" }, chips, adder(sites.length, adding))] : [];
      container.replaceChildren(...hint, ...bar);
    },
  };
}
