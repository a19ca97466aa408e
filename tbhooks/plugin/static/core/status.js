/* The status line: the age of the data, and notes about problems. */

import { html } from "./elements.js";
import { siteKey } from "../map/matrix.js";
import { freshness, runNamed } from "./runs.js";

/** Runs whose modules are not those of the first: what the comparison cannot show. */
export function strangers([first, ...others]) {
  return others.flatMap((other) => {
    const shared = other.sites.filter((site) => first.place.has(siteKey(site))).length;
    const all = first.sites.length + other.sites.length - shared;
    if (shared === all) return [];
    if (shared === 0) return [`${other.run} and ${first.run} have no module in common: these are different models`];
    return [`${other.run} and ${first.run} have ${shared} of ${all} modules in common`];
  });
}

const MOST_NAMES = 4;
const MOST_LINES = 3;

/** The state of all runs on show, in one line for those that are in the same state. */
export function ages(runs, now) {
  const groups = new Map();
  for (const run of runs) {
    const { live, text } = freshness(run, now);
    const group = groups.get(text) ?? { live, names: [] };
    groups.set(text, { live: group.live || live, names: [...group.names, run.name] });
  }
  const lines = [...groups].map(([text, { live, names }]) => {
    const rest = names.length - MOST_NAMES;
    const who = names.slice(0, MOST_NAMES).join(", ") + (rest > 0 ? ` and ${rest} more` : "");
    return { live, text: runs.length > 1 ? `${who}: ${text}` : text };
  });
  const unsaid = [...groups.values()].slice(MOST_LINES).flatMap(({ names }) => names).length;
  return [...lines.slice(0, MOST_LINES), ...(unsaid ? [{ live: false, text: `and ${unsaid} more ${unsaid > 1 ? "runs" : "run"}` }] : [])];
}

export function createStatus({ banner, status }) {
  const troubles = { server: null, gone: null, problem: null };
  let answeredAt = null;
  let said = 0;
  const word = html("span", { class: "said", role: "status" });
  const runs = html("span", { class: "freshness" });
  status.append(runs, word);

  function refresh() {
    const text = troubles.server ?? troubles.gone ?? troubles.problem;
    banner.hidden = text === null;
    if (text !== null && banner.textContent !== text) banner.textContent = text;
  }

  function set(name, text) {
    troubles[name] = text;
    refresh();
  }

  /** Notes about the data that matter for reading the map. */
  function remarks(matrices, model) {
    const differences = model.panes.filter((pane) => pane.difference);
    return [
      ...strangers(matrices),
      matrices.some((matrix) => matrix?.incomplete) ? "more cells hold NaN or Inf than are marked" : null,
      matrices.some((matrix) => matrix?.thinned) ? "too long to show every step" : null,
      ...differences.filter((pane) => pane.steps.length === 0).map((pane) => `${matrices[0].run} and ${matrices[pane.of].run} have no step in common`),
    ].filter(Boolean);
  }

  return {
    answered() {
      answeredAt = new Date();
      set("server", null);
    },
    silent(error) {
      const since = answeredAt ? ` What you see is from ${answeredAt.toLocaleTimeString("en-GB")}.` : "";
      set("server", `${error.message || "TensorBoard does not answer"}; trying again.${since}`);
    },
    gone(names) {
      const text = `${names.join(" and ")} is no longer in the log directory; this is what was read before.`;
      set("gone", names.length ? text : null);
    },
    problem: (text) => set("problem", text),
    /** A message that disappears after a while. */
    say(text) {
      word.textContent = text;
      clearTimeout(said);
      said = setTimeout(() => (word.textContent = ""), 4000);
    },
    show(list, choice, matrices, model) {
      const shown = choice.runs.map((name) => runNamed(list, name)).filter(Boolean);
      const notes = remarks(matrices, model).map((text) => html("span", { class: "remark" }, text));
      const lines = ages(shown, list.now).map(({ live, text }) => html("span", { class: live ? "fresh live" : "fresh" }, text));
      runs.replaceChildren(...lines, ...notes);
    },
  };
}
