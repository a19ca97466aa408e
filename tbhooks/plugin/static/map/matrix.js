/*
 * One stat of one kind of one run, one row per site, growing with the run. Also medians and differences of rows.
 * A row is `{ values, bad }`: NaN where the site has no data; `bad` (or null) is 1 where the tensor held NaN or Inf, and 2
 * where the stat is undefined, as the ratio of an update to a weight that is still zero.
 * Independent of colours and the page.
 */

export const siteKey = (site) => `${site.path}\u0000${site.index}`;

let births = 0;

/** An empty matrix for these sites; fill it with `append`. `shown`: the same sites in display order. */
export function createMatrix({ run, kind, stat }, sites, shown = sites) {
  const place = new Map(sites.map((site, row) => [siteKey(site), row]));
  const rows = sites.map(() => ({ values: new Float32Array(0), bad: null }));
  const empty = { steps: [], edges: [], version: 0, incomplete: false, thinned: false };
  return { run, kind, stat, sites, shown, place, rows, born: births++, ...empty };
}

/** These sites in the order of others; sites that are not among those come last. */
export function inOrderOf(others, sites) {
  const place = new Map(others.map((site, i) => [siteKey(site), i]));
  const placeOf = (site) => place.get(siteKey(site)) ?? others.length;
  return others.length ? [...sites].sort((a, b) => placeOf(a) - placeOf(b)) : sites;
}

function grown(array, length, fill) {
  const larger = new array.constructor(Math.max(16, length));
  larger.set(array);
  if (fill !== 0) larger.fill(fill, array.length);
  return larger;
}

function makeRoom(matrix, length, fill) {
  const present = matrix.rows.length ? matrix.rows[0].values.length : 0;
  if (present >= length) return;
  const room = present === 0 ? length : Math.max(length, 2 * present);
  for (const row of matrix.rows) {
    row.values = grown(row.values, room, fill);
    if (row.bad) row.bad = grown(row.bad, room, 0);
  }
}

/** Adds the numbers of a response, of which `added` steps for each site are new, behind those of `start` steps. */
function addValues(matrix, start, added, { header, values }) {
  const [width, length] = [header.sites, header.steps.length];
  const of = (site) => values.subarray((site + 1) * length - added, (site + 1) * length);
  if (start === 0 && width === matrix.rows.length) {
    matrix.rows.forEach((row, site) => (row.values = of(site))); // as they came: nothing is copied
    return;
  }
  makeRoom(matrix, start + added, width < matrix.rows.length ? NaN : 0); // nothing is left to fill if all sites have values
  for (let site = 0; site < width; site++) matrix.rows[site].values.set(of(site), start);
}

/** Appends the steps of a response; true if there were any. */
export function append(matrix, answer) {
  const { header } = answer;
  const start = matrix.steps.length;
  const last = start ? matrix.steps[start - 1] : -Infinity;
  const skipped = header.steps.findIndex((step) => step > last);
  if (skipped < 0) return false;
  const added = header.steps.length - skipped;
  addValues(matrix, start, added, answer);
  const flag = (pairs, as) => {
    for (const [step, site] of pairs ?? []) {
      if (step < skipped) continue;
      const row = matrix.rows[site];
      row.bad ??= new Uint8Array(row.values.length);
      row.bad[start + step - skipped] = as;
    }
  };
  flag(header.undefined, 2);
  flag(header.nonfinite, 1);
  matrix.steps = matrix.steps.concat(header.steps.slice(skipped));
  matrix.edges = cellEdges(matrix.steps);
  matrix.incomplete ||= Boolean(header.nonfinite_more);
  matrix.thinned ||= Boolean(header.thinned);
  matrix.version++;
  return true;
}

/**
 * Where each step's cell begins and ends on the step axis: `[left0, right0, left1, right1, ...]`.
 * Halfway to the neighbours, but never more than twice the distance on the other side: a gap in the run stays a gap.
 */
export function cellEdges(steps) {
  const edges = new Float64Array(2 * steps.length);
  for (let i = 0; i < steps.length; i++) {
    const before = i > 0 ? steps[i] - steps[i - 1] : Infinity;
    const after = i + 1 < steps.length ? steps[i + 1] - steps[i] : Infinity;
    const left = Math.min(before, 2 * after);
    const right = Math.min(after, 2 * before);
    const alone = left === Infinity;
    edges[2 * i] = steps[i] - (alone ? 1 : i === 0 ? after : left) / 2;
    edges[2 * i + 1] = steps[i] + (alone ? 1 : right === Infinity || i + 1 === steps.length ? before : right) / 2;
  }
  return edges;
}

/** Index of the step nearest to a position on the axis; -1 without steps. */
export function nearestStep(steps, position) {
  let low = 0;
  let high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < position) low = middle + 1;
    else high = middle;
  }
  return low > 0 && position - steps[low - 1] <= steps[low] - position ? low - 1 : high < 0 ? -1 : low;
}

export const isUndefined = (row, i) => row.bad !== null && row.bad[i] === 2;
export const isBad = (row, i) => (row.bad !== null && row.bad[i] === 1) || (Math.abs(row.values[i]) === Infinity && !isUndefined(row, i));

const FEW = 24; // so many numbers are sorted faster than they are searched

/** Sorts the first numbers of an array. */
function sortFirst(numbers, count) {
  for (let i = 1; i < count; i++) {
    const number = numbers[i];
    let j = i;
    for (; j > 0 && numbers[j - 1] > number; j--) numbers[j] = numbers[j - 1];
    numbers[j] = number;
  }
}

/** The k-th smallest of the first numbers; afterwards no number before it is larger, and none behind it smaller. */
function select(numbers, count, k) {
  let [low, high] = [0, count - 1];
  while (low < high) {
    const pivot = numbers[(low + high) >> 1];
    let [i, j] = [low, high];
    while (i <= j) {
      while (numbers[i] < pivot) i++;
      while (numbers[j] > pivot) j--;
      if (i > j) break;
      const kept = numbers[i];
      numbers[i++] = numbers[j];
      numbers[j--] = kept;
    }
    if (k <= j) high = j;
    else if (k >= i) low = i;
    else break;
  }
  return numbers[k];
}

function least(numbers, count) {
  let found = numbers[0];
  for (let i = 1; i < count; i++) if (numbers[i] < found) found = numbers[i];
  return found;
}

function most(numbers, count) {
  let found = numbers[0];
  for (let i = 1; i < count; i++) if (numbers[i] > found) found = numbers[i];
  return found;
}

function median(numbers, count) {
  const half = count >> 1;
  if (count <= FEW) sortFirst(numbers, count);
  else select(numbers, count, half);
  if (count % 2) return numbers[half];
  return ((count <= FEW ? numbers[half - 1] : most(numbers, half)) + numbers[half]) / 2;
}

const PICK = { median, least, most };

/** The median, least or most over several rows per step, of finite values; bad where any row is, undefined where all are. */
export function combinedRow(rows, length, which) {
  const values = new Float32Array(length).fill(NaN);
  const bad = new Uint8Array(length);
  const column = new Float32Array(rows.length);
  const pick = PICK[which];
  for (let i = 0; i < length; i++) {
    let seen = 0;
    let undefinedOnes = 0;
    for (let r = 0; r < rows.length; r++) {
      const value = rows[r].values[i];
      if (rows[r].bad !== null || Math.abs(value) === Infinity) {
        if (isBad(rows[r], i)) bad[i] = 1;
        if (isUndefined(rows[r], i)) undefinedOnes++;
        else if (Number.isFinite(value)) column[seen++] = value;
      } else if (value === value) column[seen++] = value;
    }
    if (seen > 0) values[i] = pick(column, seen);
    else if (undefinedOnes > 0 && bad[i] === 0) bad[i] = 2;
  }
  return { values, bad };
}

/** Pairs of indices of the steps that both runs logged. */
export function commonSteps(a, b) {
  const steps = [];
  const pairs = [];
  for (let i = 0, j = 0; i < a.length && j < b.length; ) {
    if (a[i] === b[j]) {
      steps.push(a[i]);
      pairs.push([i++, j++]);
    } else if (a[i] < b[j]) i++;
    else j++;
  }
  return { steps, pairs };
}

/** The ratio to zero: larger than any number, but not non-finite. */
export const FROM_ZERO = Math.fround(3.4e38);

function ratioOf(from, to) {
  if (from === to) return 1;
  const times = to / from;
  return Math.abs(times) === Infinity ? FROM_ZERO : times;
}

/** The second run minus the first (or divided by it); NaN where either has no data. */
export function differenceRow(a, b, pairs, ratio) {
  const values = new Float32Array(pairs.length);
  const bad = new Uint8Array(pairs.length);
  pairs.forEach(([i, j], k) => {
    bad[k] = isBad(a, i) || isBad(b, j) ? 1 : isUndefined(a, i) || isUndefined(b, j) ? 2 : 0;
    const [from, to] = [a.values[i], b.values[j]];
    values[k] = ratio ? ratioOf(from, to) : to - from;
  });
  return { values, bad };
}
