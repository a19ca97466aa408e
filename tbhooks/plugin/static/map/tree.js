/*
 * Modules as a collapsible tree, by path or by role, and its visible rows: by depth, by opened and closed groups, by search.
 * Pure functions, independent of the numbers and the page.
 */

import { siteKey } from "./matrix.js";

const NAMELESS = '""';

/** @typedef {{key: string, label: string, full: string, site: object|null, children: Node[], depth: number}} Node */

function childOf(parent, key, label, full) {
  let child = parent.byKey.get(key);
  if (!child) {
    child = { key, label, full, site: null, children: [], byKey: new Map(), depth: 0 };
    parent.byKey.set(key, child);
    parent.children.push(child);
  }
  return child;
}

/** A group whose only child is a group is merged with it into one row. */
function joined(node) {
  let inner = node;
  let label = node.label;
  while (inner.site === null && inner.children.length === 1) {
    inner = inner.children[0];
    label += inner.bare ? inner.label : `.${inner.label}`;
  }
  return { ...inner, label };
}

function settled(node, depth) {
  const children = node.children.map((child) => settled(joined(child), depth + 1));
  return { key: node.key, label: node.label, full: node.full, site: node.site, children, depth };
}

/** The tree of these sites; siblings stand in the order in which they first appear. */
export function buildTree(sites) {
  const root = { key: "", label: "", full: "", site: null, children: [], byKey: new Map() };
  for (const site of sites) {
    let node = root;
    let path = null;
    for (const part of site.path.split(".")) {
      path = path === null ? part : `${path}.${part}`;
      node = childOf(node, path, part || NAMELESS, path || NAMELESS);
    }
    if (site.index) {
      node = childOf(node, siteKey(site), site.index, site.name);
      node.bare = true;
    }
    node.site = site;
  }
  return settled(root, 0);
}

/** What tells a module from the others of its role: the numbers in its path, `3` of `layers.3.q_proj`. */
function numbersIn(name) {
  const numbers = name.match(/(?<![^.])\d+(?=$|[.[:])/g);
  return numbers ? numbers.join(".") : name;
}

/** One group per role with its modules in order of depth; a role with a single module is a row of its own. */
export function buildRoles(sites) {
  const roles = new Map();
  for (const site of sites) {
    const role = site.role ?? site.name;
    if (!roles.has(role)) roles.set(role, []);
    roles.get(role).push(site);
  }
  const leaf = (site, label, depth) => ({ key: nodeKey(site), label, full: site.name, site, children: [], depth });
  const children = [...roles].map(([role, members]) => {
    if (members.length === 1) return leaf(members[0], members[0].name || NAMELESS, 1);
    const inside = members.map((site) => leaf(site, numbersIn(site.name), 2));
    return { key: `role ${role}`, label: `${role} \u00d7${members.length}`, full: role, site: null, role: true, children: inside, depth: 1 };
  });
  return { key: "", label: "", full: "", site: null, children, depth: 0 };
}

export function maxDepth(node) {
  return node.children.reduce((deepest, child) => Math.max(deepest, maxDepth(child)), node.depth);
}

/** Every site at or below a node. */
export function sitesBelow(node) {
  const below = node.children.flatMap(sitesBelow);
  return node.site ? [node.site, ...below] : below;
}

function row(node, open, label = node.label) {
  return {
    key: node.key,
    label,
    full: node.full,
    site: node.site,
    depth: node.depth - 1,
    group: node.children.length > 0,
    role: node.role ?? false,
    open,
    node,
  };
}

/** Is a group open: shallower than the chosen depth, unless it was toggled by hand. */
export const isOpen = (node, depth, toggled) => node.children.length > 0 && node.depth < depth !== toggled.has(node.key);

/** The visible rows. */
export function visibleRows(root, depth, toggled) {
  const rows = [];
  const visit = (node) => {
    const open = isOpen(node, depth, toggled);
    rows.push(row(node, open));
    if (open) node.children.forEach(visit);
  };
  root.children.forEach(visit);
  return rows;
}

/** Parses a search text: `/.../` is a regular expression, anything else matches anywhere, ignoring case. */
export function matcher(text) {
  const pattern = /^\/(.*?)\/?$/s.exec(text);
  if (!pattern) {
    const wanted = text.toLowerCase();
    return { matches: (name) => name.toLowerCase().includes(wanted), error: null };
  }
  try {
    const expression = new RegExp(pattern[1], "i");
    return { matches: (name) => expression.test(name), error: null };
  } catch (error) {
    return { matches: () => true, error: String(error.message).replace(/^Invalid regular expression: /, "") };
  }
}

const alone = (node) => ({ ...row(node, false, node.site.name || NAMELESS), depth: 0, group: false });

/** A flat list of the watched modules whose full name matches. */
export function matchingRows(root, text) {
  const { matches, error } = matcher(text);
  const rows = [];
  const visit = (node) => {
    if (node.site && matches(node.site.name)) rows.push(alone(node));
    node.children.forEach(visit);
  };
  root.children.forEach(visit);
  return { rows, error };
}

/** A flat list of these modules, `[{ site, tag, note }]`, in their order, without those that the search leaves out. */
export function orderedRows(root, sites, text) {
  const { rows, error } = matchingRows(root, text);
  const byKey = new Map(rows.map((each) => [each.key, each]));
  const found = sites.filter(({ site }) => byKey.has(nodeKey(site)));
  return { rows: found.map(({ site, tag, note }) => ({ ...byKey.get(nodeKey(site)), tag, note })), error };
}

/** The nodes from the root (without it) to the node of a key; empty if there is none. */
export function wayTo(root, key) {
  for (const child of root.children) {
    if (child.key === key) return [child];
    const below = wayTo(child, key);
    if (below.length) return [child, ...below];
  }
  return [];
}

/** The toggles that make a node visible, given the current ones. */
export function revealing(root, key, depth, toggled) {
  const opened = new Set(toggled);
  for (const node of wayTo(root, key).slice(0, -1)) {
    if (isOpen(node, depth, opened)) continue;
    if (!opened.delete(node.key)) opened.add(node.key);
  }
  return opened;
}

/** The key of a site in the tree. */
export const nodeKey = (site) => (site.index ? siteKey(site) : site.path);

/** Finds the row that shows a site: its own, or the closed group it is in; -1 if neither is visible. */
export function rowFinder(root, rows) {
  const place = new Map(rows.map((shown, i) => [shown.key, i]));
  const showing = new Map();
  const visit = (node, above) => {
    const here = place.get(node.key) ?? above;
    if (here !== undefined) showing.set(node.key, here);
    node.children.forEach((child) => visit(child, here));
  };
  root.children.forEach((child) => visit(child, undefined));
  return (site) => showing.get(nodeKey(site)) ?? -1;
}

const BARE = 3; // rows that show nothing of a model
const MANY = 240; // rows of which no screen shows more than a part

/** The default depth: the deepest with at most `most` rows; one more if that shows fewer than `least`, and not too many more. */
export function firstDepth(root, least, most) {
  const deepest = maxDepth(root);
  const rowsAt = (depth) => visibleRows(root, depth, new Set()).length;
  let depth = deepest;
  while (depth > 1 && rowsAt(depth) > most) depth--;
  const next = Math.min(depth + 1, deepest);
  return rowsAt(depth) < BARE || (rowsAt(depth) < least && rowsAt(next) <= MANY) ? next : depth;
}
