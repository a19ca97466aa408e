/* One run on the overview: its state, a verdict, its curves, findings by cause, and what was watched. */

import { curve } from "./curve.js";
import { docsOf, lasting, ruleWords, SIGNS } from "../core/findings.js";
import { countedKind, freshness, signOf, stateOf } from "../core/runs.js";
import { html } from "../core/elements.js";
import { usualScalars } from "../map/strip.js";

const MOST_CAUSES = 4;
const LEVELS = { error: "Problem", warning: "Warning", info: "Notes", ok: "No issues" };

function link(text, label, onClick, look = "link") {
  const button = html("button", { type: "button", class: look, title: label }, text);
  button.addEventListener("click", onClick);
  return button;
}

function head(run, now, overview, on) {
  const state = stateOf(run, now);
  const { text } = freshness(run, now);
  const level = overview ? overview.verdict.level : "";
  return html(
    "header",
    { class: "card-head" },
    html("span", { class: `run-state ${state}`, title: state }, `${signOf(state)} ${state}`),
    html("h2", {}, link(run.name, `Open the map of ${run.name}`, () => on.open(run.name), "card-name")),
    level ? html("span", { class: `level ${level}` }, LEVELS[level]) : null,
    html("span", { class: "card-age" }, text.replace(/^(?:failed|finished|live);? /, "")),
  );
}

/** learning rate 0.1 → update ratio → first layer → NaN; every link leads to its module and step. */
function chainOf(run, cause, on) {
  const parts = cause.chain.map(({ step, what, rule }) => {
    const issue = cause.issues.find((each) => each.rule === rule && each.onset === step) ?? cause.issues.find((each) => each.rule === rule);
    const text = `${what}`;
    const where = html("span", { class: "chain-step" }, `step ${step}`);
    const content = issue ? link(text, `Show ${what} at step ${step}`, () => on.finding(run.name, issue), "chain-link") : html("span", { class: "chain-fact" }, text);
    return html("li", {}, content, where);
  });
  return html("ol", { class: "chain" }, ...parts);
}

function causeOf(run, cause, on) {
  const first = cause.issues[0];
  const sites = new Set(cause.issues.map(({ site }) => site?.name).filter(Boolean)).size;
  const many = cause.issues.length > 1 ? `${cause.issues.length} findings${sites > 1 ? ` in ${sites} modules` : ""}` : "1 finding";
  return html(
    "li",
    { class: `cause ${cause.severity}` },
    html("span", { class: `finding-sign ${cause.severity}`, role: "img", "aria-label": cause.severity }, SIGNS[cause.severity]),
    html(
      "div",
      {},
      chainOf(run, cause, on),
      html("p", { class: "cause-message" }, first.message),
      html("p", { class: "soft" }, `${many}; ${lasting(first)}. `, html("a", { href: docsOf(first.rule), target: "_blank", rel: "noopener" }, `What to do about ${ruleWords(first.rule)}`)),
    ),
  );
}

function causesOf(run, overview, on, muted) {
  const unmuted = overview.verdict.causes
    .map((cause) => ({ ...cause, issues: cause.issues.filter(({ rule }) => !muted.includes(rule)), chain: cause.chain.filter(({ rule }) => !muted.includes(rule)) }))
    .filter(({ issues }) => issues.length);
  const urgent = unmuted.filter(({ severity }) => severity !== "info");
  const shown = (urgent.length ? urgent : unmuted).slice(0, MOST_CAUSES);
  const rest = unmuted.length - shown.length;
  const more = rest > 0 ? link(`${rest} more in the map`, "Open the map with all findings", () => on.open(run.name)) : null;
  return shown.length ? html("div", {}, html("ul", { class: "causes" }, ...shown.map((cause) => causeOf(run, cause, on))), more) : null;
}

function watchedOf({ watched, unwatched, steps }) {
  const kinds = watched.map(({ kind, sites }) => countedKind(sites, kind));
  const logged = steps.count ? `${steps.count} logged steps from ${steps.first} to ${steps.last}` : "no logged step";
  const parts = [html("p", {}, html("b", {}, "Watched: "), `${kinds.join(", ") || "nothing"}; ${logged}.`)];
  if (unwatched.length) parts.push(html("p", {}, html("b", {}, "Not watched: "), `${unwatched.join("; ")}.`));
  return html("div", { class: "watched" }, ...parts);
}

function curvesOf(scalars, overview) {
  const tags = scalars.map(({ tag }) => tag);
  const usual = usualScalars(tags);
  const chosen = usual.map((tag) => scalars.find((each) => each.tag === tag)).filter(({ steps }) => steps.length);
  if (!chosen.length) return html("p", { class: "soft" }, "No scalars in this run: log the loss with w.log({ \"loss\": loss }) or the SummaryWriter to see it here.");
  const ends = chosen.flatMap(({ steps }) => [steps[0], steps.at(-1)]);
  const marks = overview.verdict.causes.filter(({ severity }) => severity !== "info").map(({ onset, severity }) => ({ step: onset, severity }));
  return html("div", { class: "curves" }, ...chosen.map((series) => curve(series, marks, [Math.min(...ends), Math.max(...ends)])));
}

/** @param on `{ open(run), unusual(run), finding(run, issue) }` */
export function card(run, now, { overview, scalars, error }, on, muted) {
  const label = { class: "card", "aria-label": `Run ${run.name}` };
  if (error) return html("article", label, head(run, now, null, on), html("p", { class: "soft" }, error));
  if (!overview) return html("article", { ...label, "aria-busy": "true" }, head(run, now, null, on), html("p", { class: "soft" }, "Loading\u2026"));
  const actions = html(
    "div",
    { class: "card-actions" },
    link("Open map", `Open the map of ${run.name}`, () => on.open(run.name), "button"),
    link("20 most unusual", "Modules that differ most from others of their role", () => on.unusual(run.name), "button"),
  );
  const sentence = html("p", { class: `verdict ${overview.verdict.level}` }, overview.verdict.sentence);
  const left = html("div", { class: "card-main" }, sentence, causesOf(run, overview, on, muted), watchedOf(overview), actions);
  return html("article", { ...label, "data-level": overview.verdict.level }, head(run, now, overview, on), html("div", { class: "card-body" }, left, curvesOf(scalars, overview)));
}
