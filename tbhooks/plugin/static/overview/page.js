/* The overview: a card for every run, the newest first. Fetches what a card needs when its run has new steps. */

import { card } from "./card.js";
import { html } from "../core/elements.js";
import { MOST_RUNS } from "../core/state.js";

const AT_ONCE = 4; // requests
const AT_FIRST = 12; // cards

const markOf = (run) => `${run.last_step}|${run.last_time}|${run.state}`;

/** @param on `{ open(run), unusual(run), finding(run, issue), compare(runs) }` */
export function createOverview(container, { api, on }) {
  const heading = html("h1", {}, "Runs");
  const summary = html("p", { class: "soft" });
  const compare = html("button", { type: "button", class: "button", hidden: true }, "Compare runs");
  const cards = html("div", { class: "cards" });
  const more = html("button", { type: "button", class: "button", hidden: true }, "Show more runs");
  container.append(html("header", { class: "overview-head" }, heading, summary, html("span", { class: "filler" }), compare), cards, more);
  const known = new Map();
  const drawn = new Map();
  let shown = null;
  let most = AT_FIRST;
  let working = 0;

  const newest = (runs) => [...runs].sort((one, other) => other.last_time - one.last_time || one.name.localeCompare(other.name));

  async function fetchOne(run) {
    const mark = markOf(run);
    try {
      const [overview, scalars] = await Promise.all([api.overview({ run: run.name }), api.scalars({ run: run.name })]);
      known.set(run.name, { mark, overview, scalars, error: null });
    } catch (error) {
      known.set(run.name, { ...(known.get(run.name) ?? {}), mark, error: known.get(run.name)?.overview ? null : error.message });
    }
  }

  /** Fetches what is missing, a few runs at a time, and draws after each. */
  async function fill() {
    if (working >= AT_ONCE || !shown) return;
    const next = newest(shown.list.runs).slice(0, most).find((run) => {
      const have = known.get(run.name);
      return !have?.busy && have?.mark !== markOf(run);
    });
    if (!next) return;
    working++;
    known.set(next.name, { ...(known.get(next.name) ?? {}), busy: true });
    fill();
    await fetchOne(next);
    working--;
    draw();
    fill();
  }

  function draw() {
    const { list, muted } = shown;
    const runs = newest(list.runs);
    const visible = runs.slice(0, most);
    const elements = visible.map((run) => {
      const have = known.get(run.name) ?? {};
      const key = JSON.stringify([have.mark, have.error, run.state, Math.floor((list.now - run.last_time) / 60), muted]);
      if (drawn.get(run.name)?.key !== key) drawn.set(run.name, { key, element: card(run, list.now, have, on, muted) });
      return drawn.get(run.name).element;
    });
    if (elements.length !== cards.children.length || elements.some((element, i) => cards.children[i] !== element)) cards.replaceChildren(...elements);
    summary.textContent = `${runs.length} ${runs.length === 1 ? "run" : "runs"} in the log directory${troubled(visible)}`;
    more.hidden = runs.length <= most;
    more.textContent = `Show ${Math.min(AT_FIRST, runs.length - most)} more of ${runs.length} runs`;
    const together = runs.filter(({ kinds }) => kinds.length).slice(0, MOST_RUNS).map(({ name }) => name);
    compare.hidden = together.length < 2;
    compare.textContent = together.length === runs.length ? `Compare all ${together.length} runs` : `Compare the newest ${together.length} runs`;
    compare.onclick = () => on.compare(together);
  }

  function troubled(runs) {
    const level = (wanted) => runs.filter(({ name }) => known.get(name)?.overview?.verdict.level === wanted).length;
    const parts = [[level("error"), "with a problem"], [level("warning"), "with a warning"]].filter(([count]) => count > 0);
    return parts.map(([count, words]) => `, ${count} ${words}`).join("");
  }

  more.addEventListener("click", () => {
    most += AT_FIRST;
    draw();
    fill();
  });

  return {
    show(list, muted) {
      shown = { list, muted };
      draw();
      fill();
    },
  };
}
