/*
 * The list of findings by severity. A card tells when it began, was worst and was last seen, and how often; it leads to
 * its module, zooms to its onset, opens the page of its rule, and can be muted with all of its rule.
 */

import { html } from "./elements.js";
import { kindWords } from "./runs.js";

export const SIGNS = { error: "\u25cf", warning: "\u25b2", info: "\u25a0" };
const ORDER = Object.keys(SIGNS);
const NAMES = { error: "error", warning: "warning", info: "note" };

/** The page of a rule in the documentation, which the plugin serves itself. */
export const docsOf = (rule) => new URL(`../docs.html#${encodeURIComponent(rule)}`, import.meta.url).href;

/** "2 errors, 1 warning". */
export function tally(findings) {
  const counts = ORDER.map((severity) => [severity, findings.filter((each) => each.severity === severity).length]);
  const present = counts.filter(([, count]) => count > 0);
  return present.map(([severity, count]) => `${count} ${NAMES[severity]}${count === 1 ? "" : "s"}`).join(", ");
}

export const ruleWords = (rule) => rule.replaceAll("_", " ");

/** "since step 9, worst at 41, last at 241, 24 times"; what would repeat the onset is left out. */
export function lasting({ onset, peak, last, count }) {
  const parts = [`since step ${onset}`];
  if (peak !== onset) parts.push(`worst at ${peak}`);
  if (last !== onset) parts.push(`last at ${last}`);
  if (count > 1) parts.push(`${count} times`);
  return parts.join(", ");
}

/** Errors first, then by onset. */
const before = (one, other) => ORDER.indexOf(one.severity) - ORDER.indexOf(other.severity) || one.onset - other.onset;

function action(text, label, onClick) {
  const button = html("button", { type: "button", class: "finding-action", title: label, "aria-label": `${text.replace(" \u00d7", "")}: ${label}` }, text);
  button.addEventListener("click", onClick);
  return button;
}

function entry(finding, run, on, side) {
  const where = finding.site ? finding.site.name || '""' : "whole run";
  const rule = ruleWords(finding.rule);
  const sign = { class: `finding-sign ${finding.severity}`, role: "img", "aria-label": finding.severity };
  const head = html(
    "span",
    { class: "finding-head" },
    html("span", sign, SIGNS[finding.severity] ?? SIGNS.info),
    html("span", { class: "finding-rule" }, rule),
    run ? html("span", { class: "finding-run" }, run) : null,
    html("span", { class: "finding-step" }, `step ${finding.onset}`),
  );
  const button = html(
    "button",
    { type: "button", class: "finding" },
    head,
    html("span", { class: "finding-where", title: where }, finding.site ? `${where} \u00b7 ${kindWords(finding.site.kind)}` : where),
    html("span", { class: "finding-message" }, finding.message),
    html("span", { class: "finding-when" }, lasting(finding)),
  );
  button.addEventListener("click", () => on.pick(finding, side));
  const actions = html(
    "div",
    { class: "finding-actions" },
    action("Zoom to onset", `step ${finding.onset}, where ${rule} began`, () => on.zoom(finding, side)),
    html("a", { class: "finding-action", href: docsOf(finding.rule), target: "_blank", rel: "noopener", title: `What ${rule} means and what to do` }, "What to do"),
    action("Mute", `do not show findings of ${rule}`, () => on.mute(finding.rule)),
  );
  return html("li", { class: "finding-card" }, button, actions);
}

/** @param on `{ pick(finding, side), zoom(finding, side), mute(rule), unmute(rule) }` */
export function createFindings(container, on) {
  const count = html("span", { class: "findings-count" });
  const list = html("ul", { class: "findings-list" });
  const silent = html("div", { class: "muted", hidden: true });
  container.append(html("h2", {}, "Findings", count), list, silent);
  let shown = "";

  function showMuted(rules, hidden) {
    silent.hidden = rules.length === 0;
    const buttons = rules.map((rule) => action(`${ruleWords(rule)} \u00d7`, `show its findings again`, () => on.unmute(rule)));
    silent.replaceChildren(html("span", {}, `Muted${hidden ? ` (${hidden})` : ""}:`), ...buttons);
  }

  return {
    /** @param {{side: string, run: string, findings: object[]}[]} groups one per shown run; muted ones are not in it */
    show(groups, muted, hidden) {
      const wanted = JSON.stringify([groups, muted, hidden]);
      if (wanted === shown) return;
      shown = wanted;
      const entries = groups
        .flatMap(({ side, run, findings }) => findings.map((finding) => ({ side, run, finding })))
        .sort((one, other) => before(one.finding, other.finding));
      count.textContent = tally(entries.map(({ finding }) => finding));
      const items = entries.map(({ side, run, finding }) => entry(finding, groups.length > 1 ? run : null, on, side));
      list.replaceChildren(...(items.length ? items : [html("li", { class: "findings-none" }, "No issues found.")]));
      showMuted(muted, hidden);
    },
  };
}
