/*
 * The first questions, asked before the page is built: while the browser builds it, the server reads the run. Only what
 * exists is asked for, so the list of runs comes first.
 */

import { api, askAhead, matrixQuestion } from "./api.js";
import { chosen, runNamed } from "./runs.js";
import { pageOf } from "./state.js";

const PATIENCE = 1000; // milliseconds after which the page is built without an answer

/** Resolves to what will be the list of runs: `{ list }`, a promise that may fail. */
export async function firstQuestions(state) {
  const list = api.runs();
  const asked = list.then((known) => pageOf(state) === "map" && askForMap(known, state)).catch(() => {}); // whoever awaits the list hears of it
  await Promise.race([asked, new Promise((resolve) => setTimeout(resolve, PATIENCE))]);
  return { list };
}

function askForMap(list, state) {
  const choice = chosen(list, state);
  for (const run of choice?.runs ?? []) {
    askAhead("matrix", matrixQuestion({ run, kind: choice.kind, stat: choice.stat }));
    askAhead("sites", { run, kind: choice.kind });
    if (runNamed(list, run).findings !== null) askAhead("findings", { run });
    askAhead("scalars", { run });
  }
}
