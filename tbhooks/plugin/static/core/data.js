/*
 * The shown numbers: fetched when a choice is made; while a run goes on, only later steps are fetched.
 * Holds at most two matrices and the findings of their runs. Independent of the page.
 */

import { append, createMatrix, inOrderOf } from "../map/matrix.js";
import { runNamed } from "./runs.js";

const lastOf = (matrix) => (matrix.steps.length ? matrix.steps[matrix.steps.length - 1] : -1);
const fits = (matrix, choice) => matrix !== null && ["run", "kind", "stat"].every((name) => matrix[name] === choice[name]);

/** The entry of a kind in the list of runs; null if there is none. */
const entryOf = (list, { run, kind }) => runNamed(list, run)?.kinds.find((each) => each.kind === kind) ?? null;

/** Gradients are recorded last module first, but shown in the order of the forward pass. */
async function forwardSites(api, { run, kind }, list) {
  const forward = kind === "gradient" ? { run, kind: "activation" } : null;
  return forward && entryOf(list, forward) ? api.sites(forward) : [];
}

async function whole(api, choice, list) {
  const first = forwardSites(api, choice, list);
  for (let attempt = 0; ; attempt++) {
    const [sites, answer, forward] = await Promise.all([api.sites(choice), api.matrix(choice), first]);
    if (sites.length !== answer.header.sites && attempt < 3) continue; // a module was added between the two responses
    const matrix = createMatrix(choice, sites, inOrderOf(forward, sites));
    append(matrix, answer);
    return matrix;
  }
}

export function createData(api) {
  const held = { a: null, b: null, findings: { a: [], b: [] } };
  const requested = { a: null, b: null };
  let turn = 0;

  const findingsOf = async (list, run) => (runNamed(list, run)?.findings === null ? [] : api.findings({ run }));

  async function loadSide(side, choice, list) {
    if (choice === null) return { matrix: null, findings: [] };
    const matrix = fits(held[side], choice) ? held[side] : await whole(api, choice, list);
    const known = held[side]?.run === choice.run;
    return { matrix, findings: known ? held.findings[side] : await findingsOf(list, choice.run) };
  }

  /** New steps of one side; true if anything changed. */
  async function followSide(side, list) {
    const matrix = held[side];
    const entry = matrix && entryOf(list, matrix);
    if (!entry) return false;
    const mark = `${entry.sites}|${entry.last_step}`;
    if (requested[side] === mark) return false;
    const anew = entry.sites !== matrix.sites.length || entry.last_step < lastOf(matrix);
    const next = anew ? await whole(api, matrix, list) : matrix;
    const answer = anew ? null : await api.matrix({ ...matrix, after: lastOf(matrix) });
    const findings = await findingsOf(list, matrix.run);
    if (held[side] !== matrix) return false;
    requested[side] = mark;
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
      const choices = [{ run, kind, stat }, vs ? { run: vs, kind, stat } : null];
      const [a, b] = await Promise.all(choices.map((choice, i) => loadSide(i ? "b" : "a", choice, list)));
      if (mine !== turn) return false;
      for (const [side, { matrix, findings }] of [["a", a], ["b", b]]) {
        if (held[side] !== matrix) requested[side] = null;
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
