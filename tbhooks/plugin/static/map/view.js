/* The visible part of the step axis: zooming, panning, staying at the end of a running training. Pure functions. */

/** From the first cell's left edge to the last one's right, over all panes. */
export function domainOf(panes) {
  const filled = panes.filter((pane) => pane.edges.length);
  if (filled.length === 0) return [0, 1];
  return [Math.min(...filled.map((pane) => pane.edges[0])), Math.max(...filled.map((pane) => pane.edges[pane.edges.length - 1]))];
}

/** The narrowest view: about four cells. */
export function leastWidth(panes) {
  let least = Infinity;
  for (const { steps } of panes) for (let i = 1; i < steps.length; i++) least = Math.min(least, steps[i] - steps[i - 1]);
  return Number.isFinite(least) ? 4 * least : 1;
}

/** A view inside the domain; null, which means all of it, when it covers it. */
export function fitted([low, high], [first, last], least) {
  const width = Math.max(high - low, Math.min(least, last - first));
  if (width >= (last - first) * 0.999) return null;
  const middle = (low + high) / 2;
  const from = Math.min(Math.max(middle - width / 2, first), last - width);
  return [from, from + width];
}

export function zoomed(view, domain, factor, anchor, least) {
  const [low, high] = view ?? domain;
  const width = Math.max((high - low) / factor, least);
  const share = (anchor - low) / (high - low);
  return fitted([anchor - share * width, anchor + (1 - share) * width], domain, least);
}

export function panned(view, domain, by, least) {
  if (view === null) return null;
  return fitted([view[0] + by, view[1] + by], domain, least);
}

/** The view after new steps: one at the end of the run stays at the end, any other stays where it is. */
export function afterNewSteps(view, before, after) {
  if (view === null) return null;
  const atEnd = view[1] >= before[1] - 1e-6 * (before[1] - before[0]);
  const by = atEnd ? after[1] - before[1] : 0;
  return [view[0] + by, view[1] + by];
}

/** A view that has a step in it, moved no more than needed. */
export function showing(view, domain, step, least) {
  if (view === null || (step >= view[0] && step <= view[1])) return view;
  return panned(view, domain, step - (view[0] + view[1]) / 2, least);
}

/** A tenth of the domain, and at least twice the narrowest view, around a step. */
export function around(step, domain, least) {
  const half = Math.max((domain[1] - domain[0]) / 20, least);
  return fitted([step - half, step + half], domain, least);
}

/** Round steps for an axis, about `wanted` of them. */
export function stepTicks([low, high], wanted) {
  const rough = (high - low) / Math.max(2, wanted);
  const decade = 10 ** Math.floor(Math.log10(rough));
  const distances = [1, 2, 5, 10].map((m) => m * decade);
  const above = distances.find((d) => d >= rough);
  const below = distances.findLast((d) => d <= rough);
  const distance = Math.max(1, (high - low) / above < 2 ? below : above);
  const ticks = [];
  for (let k = Math.ceil(low / distance); k * distance <= high; k++) ticks.push(Math.round(k * distance));
  return ticks;
}
