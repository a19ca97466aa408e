/*
 * The shown numbers: fetched when a choice is made; while a run goes on, only later steps are fetched.
 * Holds a matrix, the findings and the scalars of each shown run. Independent of the page.
 */

import { append, createMatrix, inOrderOf } from "../map/matrix.js";
import { runNamed } from "./runs.js";

const WARM_AFTER = 300; // milliseconds, so that the map is drawn first
const COMPUTED = ["norm", "rms", "abs_max", "zero_fraction", "ratio", "gain", "p50", "p01", "p25", "p75", "p99"]; // which takes the server a while
const MOST_KEPT = 16e6; // numbers of matrices that were shown before: 64 MB

const lastOf = (matrix) => (matrix.steps.length ? matrix.steps[matrix.steps.length - 1] : -1);
const fits = (matrix, choice) => ["run", "kind", "stat"].every((name) => matrix[name] === choice[name]);

/** The entry of a kind in the list of runs; null if there is none. */
const entryOf = (list, { run, kind }) => runNamed(list, run)?.kinds.find((each) => each.kind === kind) ?? null;

/** Gradients are recorded last module first, but shown in the order of the forward pass. */
async function forwardSites(api, { run, kind }, list) {
  const forward = kind === "gradient" ? { run, kind: "activation" } : null;
  return forward && entryOf(list, forward) ? api.sites(forward) : [];
}

/** What changes when a kind of a run has new steps or modules, or when the run is written again. */
function markOf(list, choice) {
  const entry = entryOf(list, choice);
  return JSON.stringify([entry?.sites, entry?.last_step, runNamed(list, choice.run)?.last_time]);
}

/** The matrices that were shown last, so that to go back to one is free; one whose run has gone on is not used again. */
function createKept() {
  const kept = new Map();
  const keyOf = ({ run, kind, stat }) => JSON.stringify([run, kind, stat]);
  return {
    find(choice, list) {
      const found = kept.get(keyOf(choice));
      return found?.mark === markOf(list, choice) ? found.matrix : null;
    },
    add(matrix, mark) {
      kept.delete(keyOf(matrix));
      kept.set(keyOf(matrix), { matrix, mark });
      let held = 0;
      for (const [key, { matrix: each }] of [...kept].reverse()) {
        held += each.sites.length * each.steps.length;
        if (held > MOST_KEPT) kept.delete(key);
      }
    },
  };
}

/** `known`: a matrix of the same run and kind, whose sites are not asked for again. */
async function whole(api, choice, list, known = null) {
  const first = known ? [] : forwardSites(api, choice, list);
  for (let attempt = 0; ; attempt++) {
    const [sites, answer, forward] = await Promise.all([known ? known.sites : api.sites(choice), api.matrix(choice), first]);
    const changed = sites.length !== answer.header.sites; // a module was added meanwhile
    if (changed && known) return whole(api, choice, list);
    if (changed && attempt < 3) continue;
    const matrix = createMatrix(choice, sites, known ? known.shown : inOrderOf(forward, sites));
    append(matrix, answer);
    return matrix;
  }
}

export function createData(api) {
  let sides = [];
  let turn = 0;
  const warmed = new Set();
  const kept = createKept();

  /**
   * Has the server read the histograms of what is shown and compute its other stats, once: the first click on a cell and the
   * choice of another stat then need not wait for that. The answers are short.
   */
  function warm({ matrix }, list) {
    const { run, kind, steps, sites, rows } = matrix;
    const mark = JSON.stringify([run, kind]);
    const seen = sites[rows.findIndex(({ values }) => Number.isFinite(values[steps.length - 1]))];
    const entry = entryOf(list, matrix);
    if (warmed.has(mark) || !seen || !entry) return;
    warmed.add(mark);
    const { path, index } = seen;
    const later = async () => {
      if (entry.histograms) await api.distribution({ run, kind, path, index, step: lastOf(matrix) });
      for (const stat of COMPUTED.filter((name) => name !== matrix.stat && entry.stats.includes(name))) {
        await api.matrix({ run, kind, stat, after: lastOf(matrix) });
      }
    };
    setTimeout(() => later().catch(() => warmed.delete(mark)), WARM_AFTER);
  }

  const findingsOf = async (list, run) => (runNamed(list, run)?.findings === null ? [] : api.findings({ run }));
  const aboutRun = (list, run) => Promise.all([findingsOf(list, run), api.scalars({ run })]);

  async function loadSide(choice, list) {
    const same = sides.find(({ matrix }) => fits(matrix, choice));
    if (same) return same;
    const known = sides.find(({ matrix }) => matrix.run === choice.run);
    const about = known ? [known.findings, known.scalars] : aboutRun(list, choice.run);
    const sameSites = known?.matrix.kind === choice.kind ? known.matrix : null;
    const before = kept.find(choice, list);
    const [matrix, [findings, scalars]] = await Promise.all([before ?? whole(api, choice, list, sameSites), about]);
    kept.add(matrix, markOf(list, choice));
    return { matrix, findings, scalars, requested: null };
  }

  /** New steps of one run; true if anything changed. */
  async function followSide(side, list) {
    const { matrix } = side;
    const entry = entryOf(list, matrix);
    if (!entry) return false;
    const mark = markOf(list, matrix);
    if (side.requested === mark) return false;
    const anew = entry.sites !== matrix.sites.length || entry.last_step < lastOf(matrix);
    const next = anew ? await whole(api, matrix, list) : matrix;
    const answer = anew ? null : await api.matrix({ ...matrix, after: lastOf(matrix) });
    const [findings, scalars] = await aboutRun(list, matrix.run);
    if (side.matrix !== matrix || !sides.includes(side)) return false;
    Object.assign(side, { requested: mark, matrix: next, findings, scalars });
    if (answer && answer.header.sites === matrix.sites.length) append(matrix, answer);
    kept.add(next, mark);
    return true;
  }

  return {
    /** One `{ matrix, findings, scalars }` per shown run. */
    sides: () => sides,
    /** Fetches what is missing for a choice; false if another choice was made meanwhile. */
    async load({ runs, kind, stat }, list) {
      const mine = ++turn;
      const loaded = await Promise.all(runs.map((run) => loadSide({ run, kind, stat }, list)));
      if (mine !== turn) return false;
      sides = loaded;
      for (const side of sides) warm(side, list);
      return true;
    },
    async follow(list) {
      const changed = await Promise.all(sides.map((side) => followSide(side, list)));
      return changed.includes(true);
    },
  };
}
