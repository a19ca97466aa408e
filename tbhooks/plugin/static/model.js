/* From what the user chose and what was fetched to what the maps show: rows, panes, view, marks. Keeps what takes long. */

import { PICK_COLOURS, usuallyLog } from "./colour.js";
import { siteKey } from "./matrix.js";
import { createPanes } from "./panes.js";
import { buildTree, firstDepth, foundRows, maxDepth, nodeKey, rowFinder, visibleRows } from "./tree.js";
import { domainOf, fitted, leastWidth } from "./view.js";

const ROWS_AT_FIRST = [8, 60];

/** Sites of both runs: those of the first, then what only the second has. */
function unitedSites(a, b) {
  return b ? [...a.shown, ...b.shown.filter((site) => !a.place.has(siteKey(site)))] : a.shown;
}

/** Remembers the tree until the sites change. */
function createTree() {
  let known = { a: null, b: null, root: null, sites: new Map() };
  return (a, b) => {
    if (known.a !== a.sites || known.b !== (b ? b.sites : null)) {
      const sites = unitedSites(a, b);
      const root = buildTree(sites);
      known = {
        a: a.sites,
        b: b ? b.sites : null,
        root,
        deepest: maxDepth(root),
        first: firstDepth(root, ...ROWS_AT_FIRST),
        sites: new Map(sites.map((site) => [siteKey(site), site])),
      };
    }
    return known;
  };
}

export const isLog = (state, stat) => (state.scale === "auto" ? usuallyLog(stat) : state.scale === "log");

/** Marks of findings: in the cell where one began if the shown kind is its kind, else on the step axis. */
function marksOf(groups, kind, rowOf) {
  return groups.flatMap(({ findings }, pane) =>
    findings.map((finding) => {
      const here = finding.site !== null && finding.site.kind === kind;
      return { pane, row: here ? rowOf(finding.site) : -1, step: finding.step, severity: finding.severity, finding };
    }),
  );
}

export function createModel() {
  const treeOf = createTree();
  const panesOf = createPanes();
  let rowsKnown = { key: null, found: null };

  function rowsOf(tree, depth, state) {
    const key = [tree, depth, state.search, state.toggled];
    if (rowsKnown.key === null || key.some((part, i) => part !== rowsKnown.key[i])) {
      const opened = () => ({ rows: visibleRows(tree.root, depth, new Set(state.toggled)), error: null });
      const found = state.search ? foundRows(tree.root, state.search) : opened();
      rowsKnown = { key, found: { ...found, rowOf: rowFinder(tree.root, found.rows) } };
    }
    return rowsKnown.found;
  }

  /** Everything on show for a state and what is held; `groups` are the findings of each run. */
  return function modelOf({ state, choice, held, groups, dark }) {
    const tree = treeOf(held.a, held.b);
    const depth = Math.min(state.depth ?? tree.first, tree.deepest);
    const { rows, error, rowOf } = rowsOf(tree, depth, state);
    const log = isLog(state, choice.stat);
    const panes = panesOf({ a: held.a, b: held.b, rows, log, full: state.range === "full", dark });
    const domain = domainOf(panes);
    const least = leastWidth(panes);
    const range = state.from === null || state.to === null ? null : fitted([state.from, state.to], domain, least);
    const sites = state.picks.map(([path, index]) => tree.sites.get(siteKey({ path, index }))).filter(Boolean);
    const colours = PICK_COLOURS[dark ? "dark" : "light"];
    const chosen = sites.map((site, i) => ({ ...site, colour: colours[i] }));
    return {
      tree,
      depth,
      rows,
      error,
      log,
      panes,
      domain,
      least,
      range,
      view: range ?? domain,
      fit: state.rows === "fit",
      chosen,
      picks: new Map(chosen.map((site) => [nodeKey(site), site.colour])),
      marks: marksOf(groups, choice.kind, rowOf),
    };
  };
}
