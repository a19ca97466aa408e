/*
 * The routes of the plugin, one function each. URLs are relative to this file, so that a path prefix is kept.
 * Holds nothing but responses that were asked for ahead.
 */

import { toNumber } from "./numbers.js";

const BASE = new URL("..", import.meta.url);

/** An error response of the server; `status` is 0 if there was no response. */
export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

function addressOf(route, parameters) {
  const url = new URL(route, BASE);
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== undefined && value !== null) url.searchParams.set(name, value);
  }
  return url.href;
}

async function responseOf(url) {
  let response;
  try {
    response = await fetch(url, { cache: "no-store" });
  } catch {
    throw new ApiError("TensorBoard does not answer", 0);
  }
  if (!response.ok) throw new ApiError((await response.text()).slice(0, 500) || `status ${response.status}`, response.status);
  return response;
}

const ahead = new Map();

/** Asks for what will be needed soon: the next request with this address gets this response. */
export function askAhead(route, parameters) {
  const url = addressOf(route, parameters);
  const response = responseOf(url);
  response.catch(() => {}); // whoever takes it hears of it
  ahead.set(url, response);
}

/** Responses that nobody has taken would be old when somebody does. */
export const forgetAhead = () => ahead.clear();

function request(route, parameters = {}) {
  const url = addressOf(route, parameters);
  const response = ahead.get(url) ?? responseOf(url);
  ahead.delete(url);
  return response;
}

/** Values that are not finite are words in JSON. */
const numbered = ({ tag, steps, values }) => ({ tag, steps, values: values.map((value) => toNumber(value) ?? NaN) });

const json = async (route, parameters) => (await request(route, parameters)).json();

const binary = async (route, parameters) => (await request(route, parameters)).arrayBuffer();

/** The parts of a binary response: the length of a header, the header as JSON padded to 8 bytes, and float32 numbers. */
function decoded(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  return { header, values: new Float32Array(buffer, 4 + length) };
}

/** What a matrix is asked for with: the numbers of a site are to be next to each other. */
export const matrixQuestion = ({ run, kind, stat, after }) => ({ run, kind, stat, after, order: "site" });

/** Header and numbers of a matrix, which are in the order site, step. */
export function decodeMatrix(buffer) {
  const { header, values } = decoded(buffer);
  return { header, values: values.subarray(0, header.steps.length * header.sites) };
}

/** A history as lists of numbers by stat: those of the stats come first, then those of the quantiles. */
export function decodeHistory(buffer) {
  const { header, values } = decoded(buffer);
  let at = 0;
  const next = (length) => Array.from(values.subarray(at, (at += length)));
  const known = ([name, unknown]) => {
    const list = next(header.steps.length);
    for (const i of unknown) list[i] = null;
    return [name, list];
  };
  const stats = Object.fromEntries(header.stats.map(known));
  const quantiles = Object.fromEntries(header.quantiles.map((name) => [name, next(header.quantile_steps.length)]));
  return { ...header, stats, quantiles };
}

export const api = {
  runs: () => json("runs"),
  sites: async ({ run, kind }) => (await json("sites", { run, kind })).sites,
  matrix: async (question) => decodeMatrix(await binary("matrix", matrixQuestion(question))),
  findings: async ({ run }) => (await json("findings", { run })).findings,
  scalars: async ({ run }) => (await json("scalars", { run })).scalars.map(numbered),
  samples: ({ run, step }) => json("samples", { run, step }),
  overview: ({ run }) => json("overview", { run }),
  distribution: ({ run, kind, path, index, step }) => json("distribution", { run, kind, path, index, step }),
  history: async ({ run, kind, path, index }) => decodeHistory(await binary("history", { run, kind, path, index, form: "binary" })),
};
