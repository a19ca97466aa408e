/*
 * The choices of the user, and how they are written to and read from the address of the TensorBoard page:
 * `#tbhooks&p.tbhooks.run=...&p.tbhooks.stat=...`. Only what differs from the default is written.
 */

import { outerWindow } from "./theme.js";

export const MOST_PICKS = 4;
export const SIDES = [..."abcdefghijkl"]; // one letter for each run that can be shown at once
export const MOST_RUNS = SIDES.length;
export const MOST_SCALARS = 4;
const TAB = "tbhooks";
const PREFIX = "p.tbhooks.";

const text = { standard: "", read: (word) => word, write: (value) => value };
const oneOf = (...words) => ({ ...text, standard: words[0], read: (word) => (words.includes(word) ? word : words[0]) });
const number = {
  standard: null,
  read: (word) => (word !== "" && Number.isFinite(Number(word)) ? Number(word) : null),
  write: (value) => String(Math.round(value * 100) / 100),
};

function parsed(word) {
  try {
    const list = JSON.parse(word);
    return Array.isArray(list) ? list : [];
  } catch {
    return [];
  }
}

const isText = (value) => typeof value === "string";
const list = (fits, most = Infinity) => ({
  standard: [],
  read: (word) => parsed(word).filter(fits).slice(0, most),
  write: (value) => JSON.stringify(value),
});

/**
 * Everything the address holds. `vs` is the second run and `more` are the others that are compared, `picks` are
 * [path, index] of the modules in the detail panel, `muted` are rules whose findings are not shown.
 */
const FIELDS = {
  page: oneOf("", "overview", "map"),
  run: text,
  vs: text,
  more: list(isText, MOST_RUNS - 2),
  against: oneOf("own", "first"),
  kind: text,
  stat: text,
  scale: oneOf("auto", "log", "linear"),
  range: oneOf("robust", "full"),
  rows: oneOf("auto", "read", "fit"),
  group: oneOf("auto", "tree", "roles"),
  shows: oneOf("median", "least", "most"),
  sort: oneOf("order", "value", "change", "unusual"),
  scalars: list(isText, MOST_SCALARS),
  strip: oneOf("open", "closed"),
  muted: list(isText),
  search: text,
  depth: number,
  toggled: list(isText),
  from: number,
  to: number,
  picks: list((pair) => Array.isArray(pair) && pair.length === 2 && pair.every(isText), MOST_PICKS),
  side: oneOf(...SIDES),
  step: number,
  panel: oneOf("open", "closed"),
};

/** The page a state shows: an address with a kind is that of a map, as links were before there was an overview. */
export const pageOf = (state) => state.page || (state.kind ? "map" : "overview");

export function initialState() {
  return Object.fromEntries(Object.entries(FIELDS).map(([name, field]) => [name, field.standard]));
}

const isStandard = (value, standard) => value === standard || (Array.isArray(value) && value.length === 0);

function decoded(word) {
  try {
    return decodeURIComponent(word);
  } catch {
    return "";
  }
}

/** Parts of an address: the tab's name, our own values, and everything else. */
function partsOf(hash) {
  const parts = hash.replace(/^#/, "").split("&").filter(Boolean);
  const tab = parts.find((part) => !part.includes("=")) ?? "";
  const pairs = parts.filter((part) => part.includes("="));
  const name = (part) => decoded(part.slice(0, part.indexOf("=")));
  const own = pairs.filter((part) => name(part).startsWith(PREFIX));
  const values = new Map(own.map((part) => [name(part).slice(PREFIX.length), decoded(part.slice(part.indexOf("=") + 1))]));
  return { tab, values, others: pairs.filter((part) => !own.includes(part)) };
}

/** The state in an address; null if it is that of another tab. */
export function stateFrom(hash) {
  const { values } = partsOf(hash);
  if (values.size === 0) return null;
  const state = initialState();
  for (const [name, field] of Object.entries(FIELDS)) if (values.has(name)) state[name] = field.read(values.get(name));
  return state;
}

/** The address with this state; parts that are not ours are kept. */
export function hashWith(hash, state) {
  const own = Object.entries(FIELDS)
    .filter(([name, field]) => !isStandard(state[name], field.standard))
    .map(([name, field]) => `${PREFIX}${name}=${encodeURIComponent(field.write(state[name]))}`);
  return `#${[TAB, ...partsOf(hash).others, ...own].join("&")}`;
}

/** Keeps the address of the TensorBoard page and the state in sync. Adds nothing to the browser history. */
export function shareState(onChange) {
  const outer = outerWindow();
  let written = null;
  let timer = 0;

  const ours = () => {
    const { tab } = partsOf(outer.location.hash);
    return tab === TAB || (tab === "" && document.documentElement.clientWidth > 0);
  };

  /** The whole address: a bare `#...` would be taken relative to the page's base, which is not its address. */
  function addressOf(state) {
    const url = new URL(outer.location.href);
    url.hash = hashWith(outer.location.hash, state);
    return url;
  }

  function writeNow(state) {
    if (!ours()) return;
    const url = addressOf(state);
    written = url.hash;
    if (written !== outer.location.hash) outer.history.replaceState(outer.history.state, "", url);
  }

  outer.addEventListener("hashchange", () => {
    if (!ours() || outer.location.hash === written) return;
    clearTimeout(timer); // the pending address is outdated
    written = outer.location.hash;
    onChange(stateFrom(outer.location.hash));
  });

  return {
    read: () => (ours() ? stateFrom(outer.location.hash) : null),
    write(state) {
      clearTimeout(timer);
      timer = setTimeout(writeNow, 150, state);
    },
    address: (state) => addressOf(state).href,
  };
}
