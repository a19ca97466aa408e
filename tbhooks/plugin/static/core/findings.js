/* The list of findings by severity, each with its first step. Clicking one calls `onPick`. */

import { html } from "./elements.js";
import { kindWords } from "./runs.js";

const SIGNS = { error: "\u25cf", warning: "\u25b2", info: "\u25a0" };
const ORDER = Object.keys(SIGNS);
const NAMES = { error: "error", warning: "warning", info: "note" };

/** "2 errors, 1 warning". */
export function tally(findings) {
  const counts = ORDER.map((severity) => [severity, findings.filter((each) => each.severity === severity).length]);
  const present = counts.filter(([, count]) => count > 0);
  return present.map(([severity, count]) => `${count} ${NAMES[severity]}${count === 1 ? "" : "s"}`).join(", ");
}

const lasting = ({ step, last_step: last }) => (last > step ? `step ${step}\u2013${last}` : `step ${step}`);

/** Errors first, then by first step. */
const before = (one, other) => ORDER.indexOf(one.severity) - ORDER.indexOf(other.severity) || one.step - other.step;

function entry(finding, run, onPick) {
  const where = finding.site ? finding.site.name || '""' : "whole run";
  const sign = { class: `finding-sign ${finding.severity}`, role: "img", "aria-label": finding.severity };
  const place = finding.site ? `${where} \u00b7 ${kindWords(finding.site.kind)}` : where;
  const head = html(
    "span",
    { class: "finding-head" },
    html("span", sign, SIGNS[finding.severity] ?? SIGNS.info),
    html("span", { class: "finding-rule" }, finding.rule.replaceAll("_", " ")),
    run ? html("span", { class: "finding-run" }, run) : null,
    html("span", { class: "finding-step" }, lasting(finding)),
  );
  const button = html(
    "button",
    { type: "button", class: "finding" },
    head,
    html("span", { class: "finding-where", title: where }, place),
    html("span", { class: "finding-message" }, finding.message),
  );
  button.addEventListener("click", () => onPick(finding));
  return html("li", {}, button);
}

/**
 * @param {HTMLElement} container
 * @param {(finding: object, side: "a"|"b") => void} onPick
 */
export function createFindings(container, onPick) {
  const count = html("span", { class: "findings-count" });
  const list = html("ul", { class: "findings-list" });
  container.append(html("h2", {}, "Findings", count), list);
  let shown = "";

  return {
    /** @param {{side: "a"|"b", run: string, findings: object[]}[]} groups one per shown run */
    show(groups) {
      const wanted = JSON.stringify(groups);
      if (wanted === shown) return;
      shown = wanted;
      const all = groups.flatMap((group) => group.findings);
      const entries = groups
        .flatMap(({ side, run, findings }) => findings.map((finding) => ({ side, run, finding })))
        .sort((one, other) => before(one.finding, other.finding));
      count.textContent = tally(all);
      const several = groups.length > 1;
      const items = entries.map(({ side, run, finding }) => entry(finding, several ? run : null, () => onPick(finding, side)));
      list.replaceChildren(...(items.length ? items : [html("li", { class: "findings-none" }, "No issues found.")]));
    },
  };
}
