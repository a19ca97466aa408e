/* Computes what the maps show from the state and the fetched data: rows, panes, view, marks. Expensive parts are cached. */

import { PICK_COLOURS, usuallyLog } from "../map/colour.js";
import { siteKey } from "../map/matrix.js";
import { createPanes } from "../map/panes.js";
import { buildTree, firstDepth, matchingRows, maxDepth, nodeKey, rowFinder, visibleRows } from "../map/tree.js";
import { domainOf, fitted, leastWidth } from "../map/view.js";

const ROWS_AT_FIRST = [8, 60];

/** Sites of both runs: those of the first, then those that only the second has. */
function unitedSites(a, b) {
  return b ? [...a.shown, ...b.shown.filter((site) => !a.place.has(siteKey(site)))] : a.shown;
}

/** Caches the tree until the sites change. */
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

/** Marks of findings: in the first cell if the finding is of the shown kind, else on the step axis. */
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
      const found = state.search ? matchingRows(tree.root, state.search) : opened();
      rowsKnown = { key, found: { ...found, rowOf: rowFinder(tree.root, found.rows) } };
    }
    return rowsKnown.found;
  }

  /** Everything that is shown for a state and its data; `groups` are the findings of each run. */
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
