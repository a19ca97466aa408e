/*
 * The numbers on show: fetched when a choice is made, followed while a run goes on by asking only for later steps.
 * Holds at most two matrices and the findings of their runs; knows nothing of the page.
 */

import { append, createMatrix, inOrderOf } from "./matrix.js";
import { runNamed } from "./runs.js";

const lastOf = (matrix) => (matrix.steps.length ? matrix.steps[matrix.steps.length - 1] : -1);
const fits = (matrix, wish) => matrix !== null && ["run", "kind", "stat"].every((name) => matrix[name] === wish[name]);

/** What a run's list entry says about a kind; null if it is not there. */
const entryOf = (list, { run, kind }) => runNamed(list, run)?.kinds.find((each) => each.kind === kind) ?? null;

/** Gradients come last module first; they are shown in the order of the forward pass, as everything else is. */
async function forwardSites(api, { run, kind }, list) {
  const forward = kind === "gradient" ? { run, kind: "activation" } : null;
  return forward && entryOf(list, forward) ? api.sites(forward) : [];
}

async function whole(api, wish, list) {
  const first = forwardSites(api, wish, list);
  for (let attempt = 0; ; attempt++) {
    const [sites, answer, forward] = await Promise.all([api.sites(wish), api.matrix(wish), first]);
    if (sites.length !== answer.header.sites && attempt < 3) continue; // a module turned up between the two answers
    const matrix = createMatrix(wish, sites, inOrderOf(forward, sites));
    append(matrix, answer);
    return matrix;
  }
}

export function createData(api) {
  const held = { a: null, b: null, findings: { a: [], b: [] } };
  const asked = { a: null, b: null };
  let turn = 0;

  const findingsOf = async (list, run) => (runNamed(list, run)?.findings === null ? [] : api.findings({ run }));

  async function loadSide(side, wish, list) {
    if (wish === null) return { matrix: null, findings: [] };
    const matrix = fits(held[side], wish) ? held[side] : await whole(api, wish, list);
    const known = held[side]?.run === wish.run;
    return { matrix, findings: known ? held.findings[side] : await findingsOf(list, wish.run) };
  }

  /** New steps of one side; true if anything changed. */
  async function followSide(side, list) {
    const matrix = held[side];
    const entry = matrix && entryOf(list, matrix);
    if (!entry) return false;
    const mark = `${entry.sites}|${entry.last_step}`;
    if (asked[side] === mark) return false;
    const anew = entry.sites !== matrix.sites.length || entry.last_step < lastOf(matrix);
    const next = anew ? await whole(api, matrix, list) : matrix;
    const answer = anew ? null : await api.matrix({ ...matrix, after: lastOf(matrix) });
    const findings = await findingsOf(list, matrix.run);
    if (held[side] !== matrix) return false;
    asked[side] = mark;
    held[side] = next;
    held.findings[side] = findings;
    if (answer && answer.header.sites === matrix.sites.length) append(matrix, answer);
    return true;
  }

  return {
    held,
    /** Fetches what is missing for a choice; false if another choice was made meanwhile. */
    async load({ run, vs, kind, stat }, list) {
      const mine = ++turn;
      const wishes = [{ run, kind, stat }, vs ? { run: vs, kind, stat } : null];
      const [a, b] = await Promise.all(wishes.map((wish, i) => loadSide(i ? "b" : "a", wish, list)));
      if (mine !== turn) return false;
      for (const [side, { matrix, findings }] of [["a", a], ["b", b]]) {
        if (held[side] !== matrix) asked[side] = null;
        held[side] = matrix;
        held.findings[side] = findings;
      }
      return true;
    },
    async follow(list) {
      const changed = await Promise.all([followSide("a", list), followSide("b", list)]);
      return changed.includes(true);
    },
  };
}
