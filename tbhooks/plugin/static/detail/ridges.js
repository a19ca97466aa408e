/* The distribution over steps as a ridgeline: one outline a step, later ones in front, on the signed log axis.
   Zero has no neighbours on a log axis, so its share is shown as a shade of its own. */

import { signedLogAxis } from "./axes.js";
import { keysOf } from "./buckets.js";
import { percent, shortStep, whole } from "../core/numbers.js";
import { LEFT, RIGHT, TOP, nearestIndex, short } from "./frame.js";
import { svg } from "../core/elements.js";
import { bucketText, signedAxis } from "./signed.js";

const BELOW = 26;
const MOST = 31; // ridges that can be distinguished
const PEAK = 56; // pixels a high ridge rises
const CUT = 1.3 * PEAK; // no ridge rises more
const LABEL = 13; // pixels a step's label needs

/** {steps, keys, counts, totals, shares}: shares of each step's finite elements, step by step. */
export function readRidges({ steps, edges, counts }) {
  const totals = counts.map((row) => row.reduce((sum, n) => sum + n, 0));
  const shares = counts.map((row, i) => row.map((n) => (totals[i] ? n / totals[i] : 0)));
  return { steps, keys: keysOf(edges), counts, totals, shares };
}

/** Buckets that hold something at one of the steps. */
export function usedKeys({ keys, counts }) {
  return keys.filter((_, column) => counts.some((row) => row[column] > 0));
}

/** As many ridges as can be distinguished, evenly chosen, the one nearest to `step` among them. */
export function someRidges({ keys, ...rows }, step) {
  const { steps } = rows;
  const count = Math.min(MOST, steps.length);
  const wanted = Array.from({ length: count }, (_, i) => Math.round((i * (steps.length - 1)) / Math.max(count - 1, 1)));
  const nearest = nearestIndex(steps, step);
  wanted[nearestIndex(wanted, nearest)] = nearest;
  const kept = Object.entries(rows).map(([name, list]) => [name, wanted.map((row) => list[row])]);
  return { keys, ...Object.fromEntries(kept) };
}

/** What height and shade mean. */
export function ridgesNote(ridges) {
  const zeros = usedKeys(ridges).includes(0) ? "; shade at 0: share of zeros" : "";
  const cut = CUT * (usualHeight(ridges) / PEAK);
  const higher = ridges.shares.some((row) => row.some((share, i) => share > cut && ridges.keys[i] !== 0));
  const said = higher ? `, cut off at ${percent(cut)}` : "";
  return `Height: share of elements in a bucket${said}${zeros}.`;
}

/** The height nine of ten ridges stay below: one spike, such as a first update, must not flatten all others. */
function usualHeight({ keys, shares }) {
  const heights = shares.map((row) => row.reduce((most, share, i) => (keys[i] === 0 ? most : Math.max(most, share)), 0));
  const used = heights.filter((height) => height > 0).sort((a, b) => a - b);
  return used.length ? used[Math.ceil(0.9 * used.length) - 1] : 1;
}

function pieceColumns(axis, keys) {
  const columns = new Map(keys.map((key, column) => [key, column]));
  return axis.pieces
    .filter((piece) => piece.sign)
    .map((piece) => ({
      piece,
      cells: axis.keys
        .filter((key) => Math.sign(key) === piece.sign && Math.abs(key) >= piece.first && Math.abs(key) <= piece.last)
        .map((key) => ({ x: (axis.cell(key)[0] + axis.cell(key)[1]) / 2, column: columns.get(key) })),
    }));
}

/** The outline of one step over one piece of the axis; where it has nothing there is no line either. */
function outline({ piece, cells }, row, base, rise) {
  const share = (i) => row[cells[i]?.column] ?? 0;
  const edge = (i) => (i < 0 ? piece.x0 : i >= cells.length ? piece.x1 : cells[i].x);
  let path = "";
  for (let i = 0; i < cells.length; i += 1) {
    if (!(share(i) > 0)) continue;
    if (!(share(i - 1) > 0)) path += `M${short(edge(i - 1))} ${short(base)}`;
    path += `L${short(edge(i))} ${short(base - Math.min(share(i) * rise, CUT))}`;
    if (!(share(i + 1) > 0)) path += `L${short(edge(i + 1))} ${short(base)}`;
  }
  return path;
}

function ridge(pieces, row, base, rise, look) {
  const paths = pieces.map((one) => outline(one, row, base, rise)).join("");
  return svg("path", { d: paths, class: look });
}

function zeroShade(axis, share, y, height) {
  if (!(share > 0)) return null;
  const [x0, x1] = axis.cell(0);
  const opacity = short(0.12 + 0.88 * share);
  const place = { x: short(x0 + 1), y: short(y), width: short(x1 - x0 - 2), height: short(height) };
  return svg("rect", { ...place, class: "detail-zero", opacity });
}

/** The chosen step is always named, then first and last, then others, each where there is room. */
function stepLabels(steps, base, chosen) {
  const every = Math.max(1, Math.round(steps.length / 6));
  const others = steps.map((_, row) => row).filter((row) => row % every === 0);
  const placed = [];
  for (const row of [chosen, 0, steps.length - 1, ...others]) {
    if (placed.every((other) => Math.abs(base(other) - base(row)) >= LABEL)) placed.push(row);
  }
  return placed.map((row) => {
    const look = row === chosen ? "detail-tick detail-tick-left detail-chosen-label" : "detail-tick detail-tick-left";
    return svg("text", { x: LEFT - 6, y: short(base(row) + 3), class: look }, shortStep(steps[row]));
  });
}

/** The first base line lies as low as the ridges above it need. */
function layout({ keys, shares }, rise) {
  const count = shares.length;
  const distance = Math.max(3.5, Math.min(18, 216 / count));
  const height = (row) => Math.min(CUT, Math.max(...row.map((share, i) => (keys[i] === 0 ? 0 : share * rise)), distance));
  const top = TOP + Math.max(...shares.map((row, i) => height(row) - i * distance));
  const bottom = top + distance * Math.max(count - 1, 0);
  return { distance, bottom, height: Math.ceil(bottom + BELOW + 4), base: (row) => top + row * distance };
}

/** `ridges` from readRidges, or some of them; `shown` are the keys its axis must have. */
export function ridgesModel(name, colour, ridges, shown, step, onPick, width) {
  const { steps, shares } = ridges;
  const rise = PEAK / usualHeight(ridges);
  const { distance, bottom, height, base } = layout(ridges, rise);
  const axis = signedLogAxis(shown, LEFT, width - RIGHT);
  const pieces = pieceColumns(axis, ridges.keys);
  const zero = ridges.keys.indexOf(0);
  const chosen = nearestIndex(steps, step);
  const marked = steps[chosen] === step ? "" : `; marked is ${steps[chosen]}, the nearest one drawn`;
  const rows = shares.flatMap((row, i) => [
    ridge(pieces, row, base(i), rise, "detail-ridge"),
    zeroShade(axis, row[zero], base(i) - distance, distance),
  ]);
  const front = ridge(pieces, shares[chosen], base(chosen), rise, "detail-ridge detail-ridge-chosen");
  return {
    height,
    nodes: [
      svg("text", { x: 0, y: 10, class: "detail-axis-title" }, `step${marked}`),
      svg("g", { colour }, ...rows, front),
      ...stepLabels(steps, base, chosen),
      ...signedAxis(axis, bottom + 4),
    ],
    label: ridgesLabel(name, ridges, zero),
    ...ridgeStops(ridges, axis, base, distance, chosen, pieces, rise, onPick),
  };
}

function ridgesLabel(name, { steps, shares, keys, totals }, zero) {
  const peak = (row) => {
    if (totals[row] === 0) return "no finite element";
    const column = shares[row].reduce((best, share, i) => (share > shares[row][best] ? i : best), 0);
    return `most common bucket ${bucketText(keys[column])} with ${percent(shares[row][column])}`;
  };
  const zeros = (row) => (zero < 0 || totals[row] === 0 ? "" : `, zeros ${percent(shares[row][zero])}`);
  const last = steps.length - 1;
  const at = (row) => `At step ${steps[row]}: ${peak(row)}${zeros(row)}.`;
  return `Distribution of ${name} at ${steps.length} steps. ${at(0)} ${at(last)}`;
}

function ridgeStops(ridges, axis, base, distance, chosen, pieces, rise, onPick) {
  const { steps, shares, keys, counts, totals } = ridges;
  const rowsAt = (i, key) => {
    const column = key === null ? -1 : keys.indexOf(key);
    const count = column < 0 ? 0 : counts[i][column];
    const all = { name: "finite elements", value: whole(totals[i]) };
    if (key === null) return [all];
    return [{ name: bucketText(key), value: `${whole(count)} (${percent(totals[i] ? count / totals[i] : 0)})` }, all];
  };
  return {
    stops: steps.length,
    first: chosen,
    find: (_, y) => Math.max(0, Math.min(steps.length - 1, Math.ceil((y - base(0)) / distance))),
    pick: (i) => onPick(steps[i]),
    at(i, x) {
      const key = x === null ? null : axis.keyAt(x);
      const marks = [ridge(pieces, shares[i], base(i), rise, "detail-ridge detail-ridge-pointed")];
      return { title: `step ${steps[i]}`, rows: rowsAt(i, key), x: x ?? axis.right - 120, y: base(i) - 30, marks };
    },
  };
}
