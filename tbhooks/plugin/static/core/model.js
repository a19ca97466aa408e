/* Computes what the maps show from the state and the fetched data: rows, panes, view, marks. Expensive parts are cached. */

import { PICK_COLOURS, usuallyLog } from "../map/colour.js";
import { siteKey } from "../map/matrix.js";
import { ordered } from "../map/order.js";
import { createPanes } from "../map/panes.js";
import { stripOf } from "../map/strip.js";
import { buildRoles, buildTree, firstDepth, matchingRows, maxDepth, nodeKey, orderedRows, rowFinder, visibleRows } from "../map/tree.js";
import { domainOf, fitted, leastWidth } from "../map/view.js";

const ROWS_AT_FIRST = [8, 60];
const MOST_WITHOUT_ROLES = 60;
const DENSE = 240; // rows that can still be distinguished if all of them have to fit

/** Sites of all runs: those of the first, then those that only others have. */
function unitedSites([first, ...others]) {
  const known = new Set(first.shown.map(siteKey));
  const added = others.flatMap(({ shown }) => shown).filter((site) => !known.has(siteKey(site)) && known.add(siteKey(site)));
  return [...first.shown, ...added];
}

/** Whether the rows are grouped by role: on request, or if there are many; single channels are grouped by module. */
function groupsByRole(state, kind, count) {
  const parts = /^(?!eval\.)[a-z_]+\./.test(kind);
  return state.group === "auto" ? count > MOST_WITHOUT_ROLES && !parts : state.group === "roles";
}

/** Caches the tree until the sites or their grouping change. */
function createTree() {
  let known = { sites: null };
  return (matrices, state, kind) => {
    const lists = matrices.map(({ sites }) => sites);
    const same = known.sites !== null && lists.length === known.lists.length && lists.every((list, i) => list === known.lists[i]);
    const sites = same ? known.united : unitedSites(matrices);
    const byRole = groupsByRole(state, kind, sites.length);
    if (!same || known.byRole !== byRole) {
      const root = byRole ? buildRoles(sites) : buildTree(sites);
      const most = byRole || sites.some(({ index }) => index) ? DENSE : ROWS_AT_FIRST[1];
      known = {
        lists,
        united: sites,
        byRole,
        root,
        deepest: maxDepth(root),
        first: firstDepth(root, ROWS_AT_FIRST[0], most),
        sites: new Map(sites.map((site) => [siteKey(site), site])),
      };
    }
    return known;
  };
}

export const isLog = (state, stat) => (state.scale === "auto" ? usuallyLog(stat) : state.scale === "log");

/** Marks of findings: in the cell of their onset if the finding is of the shown kind, else on the step axis. */
function marksOf(groups, kind, rowOf, panes) {
  return groups.flatMap(({ findings }, side) => {
    const pane = panes.findIndex((each) => each.of === side);
    return findings.map((finding) => {
      const here = finding.site !== null && finding.site.kind === kind;
      return { pane, row: here ? rowOf(finding.site) : -1, step: finding.onset, severity: finding.severity, finding };
    });
  }).filter(({ pane }) => pane >= 0);
}

export function createModel() {
  const treeOf = createTree();
  const panesOf = createPanes();
  let rowsKnown = { key: null, found: null };

  function sortedRows(tree, state, matrix, log) {
    const view = state.from === null || state.to === null ? [-Infinity, Infinity] : [state.from, state.to];
    return orderedRows(tree.root, ordered(matrix, state.sort, view, log), state.search);
  }

  function rowsOf(tree, depth, state, matrix, log) {
    const sorted = state.sort !== "order";
    const key = [tree, depth, state.search, state.toggled, state.sort, ...(sorted ? [matrix.version, matrix.born, log] : [])];
    if (rowsKnown.key === null || key.length !== rowsKnown.key.length || key.some((part, i) => part !== rowsKnown.key[i])) {
      const opened = () => ({ rows: visibleRows(tree.root, depth, new Set(state.toggled)), error: null });
      const found = sorted ? sortedRows(tree, state, matrix, log) : state.search ? matchingRows(tree.root, state.search) : opened();
      rowsKnown = { key, found: { ...found, rowOf: rowFinder(tree.root, found.rows) } };
    }
    return rowsKnown.found;
  }

  /** Everything that is shown for a state and its data: `sides` is one `{ matrix, findings, scalars }` per run. */
  return function modelOf({ state, choice, sides, dark }) {
    const matrices = sides.map(({ matrix }) => matrix);
    const tree = treeOf(matrices, state, choice.kind);
    const depth = Math.min(state.depth ?? tree.first, tree.deepest);
    const log = isLog(state, choice.stat);
    const { rows, error, rowOf } = rowsOf(tree, depth, state, matrices[0], log);
    const options = { log, full: state.range === "full", dark, shows: state.shows, against: state.against === "first" };
    const panes = panesOf({ matrices, rows, ...options });
    const domain = domainOf(panes);
    const least = leastWidth(panes);
    const range = state.from === null || state.to === null ? null : fitted([state.from, state.to], domain, least);
    const sites = state.picks.map(([path, index]) => tree.sites.get(siteKey({ path, index }))).filter(Boolean);
    const colours = PICK_COLOURS[dark ? "dark" : "light"];
    const chosen = sites.map((site, i) => ({ ...site, colour: colours[i] }));
    const flat = state.search !== "" || state.sort !== "order";
    const dense = !flat && tree.root.children.some(({ children }) => children.length) && tree.deepest <= 2 && rows.length > 40;
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
      fit: state.rows === "fit" || (state.rows === "auto" && dense && rows.length <= DENSE),
      strip: state.strip === "closed" ? null : stripOf(sides, state.scalars, dark),
      chosen,
      picks: new Map(chosen.map((site) => [nodeKey(site), site.colour])),
      marks: marksOf(sides, choice.kind, rowOf, panes),
      total: matrices[0].sites.length,
    };
  };
}
