/* The keyboard on the heat map: a cursor that moves from cell to cell. */

import { panned, showing, zoomed } from "./view.js";

const within = (value, last) => Math.min(Math.max(value, 0), last);

/** One step to the right of the last step is the first step of the next map. */
function sideways(at, by, panes) {
  const index = at.index + by;
  const [before, here, after] = [-1, 0, 1].map((away) => panes[at.pane + away]?.steps.length ?? 0);
  if (index >= here && after) return { ...at, pane: at.pane + 1, index: 0 };
  if (index < 0 && before) return { ...at, pane: at.pane - 1, index: before - 1 };
  return { ...at, index: within(index, here - 1) };
}

/** How each key moves the cursor. */
const MOVES = {
  ArrowLeft: (at, { panes }, fast) => sideways(at, fast ? -10 : -1, panes),
  ArrowRight: (at, { panes }, fast) => sideways(at, fast ? 10 : 1, panes),
  ArrowUp: (at, { rows }, fast) => ({ ...at, row: within(at.row - (fast ? 10 : 1), rows.length - 1) }),
  ArrowDown: (at, { rows }, fast) => ({ ...at, row: within(at.row + (fast ? 10 : 1), rows.length - 1) }),
  PageUp: (at, { rows }, _, page) => ({ ...at, row: within(at.row - page, rows.length - 1) }),
  PageDown: (at, { rows }, _, page) => ({ ...at, row: within(at.row + page, rows.length - 1) }),
  Home: (at, _, fast) => (fast ? { ...at, row: 0 } : { ...at, index: 0 }),
  End: (at, { rows, panes }, fast) => {
    return fast ? { ...at, row: rows.length - 1 } : { ...at, index: panes[at.pane].steps.length - 1 };
  },
};

export function attachKeys({ stage, on, setCursor, cursor, model, geometry }) {
  const start = () => {
    const first = model().panes.findIndex((pane) => pane.steps.length);
    return first < 0 || model().rows.length === 0 ? null : { row: 0, pane: first, index: model().panes[first].steps.length - 1 };
  };

  function move(event) {
    const { range, domain, least, panes } = model();
    const at = cursor();
    const page = Math.max(1, Math.floor((geometry().height - geometry().top) / geometry().rowHeight) - 1);
    const next = at ? MOVES[event.key](at, model(), event.ctrlKey || event.shiftKey, page) : start();
    if (!next) return;
    const shown = showing(range, domain, panes[next.pane].steps[next.index], least);
    if (shown !== range) on.view(shown);
    setCursor(next, true);
  }

  function zoom(factor) {
    const { range, domain, least, view, panes } = model();
    const at = cursor();
    const anchor = at ? panes[at.pane].steps[at.index] : (view[0] + view[1]) / 2;
    on.view(zoomed(range, domain, factor, Math.min(Math.max(anchor, view[0]), view[1]), least));
  }

  const shift = (by) => {
    const { range, domain, least, view } = model();
    on.view(panned(range, domain, by * (view[1] - view[0]), least));
  };

  const ACTIONS = {
    Enter: (event) => cursor() && on.pick(cursor(), event.shiftKey),
    " ": () => cursor() && model().rows[cursor().row].group && on.toggle(model().rows[cursor().row]),
    "+": () => zoom(1.6),
    "=": () => zoom(1.6),
    "-": () => zoom(1 / 1.6),
    0: () => on.view(null),
    "<": () => shift(-0.5),
    ">": () => shift(0.5),
    Escape: () => setCursor(null, false),
  };

  stage.addEventListener("keydown", (event) => {
    if (!model() || !geometry() || event.altKey || event.metaKey) return;
    const action = event.key in MOVES ? move : event.ctrlKey ? undefined : ACTIONS[event.key];
    if (!action) return;
    if (event.key !== "Escape") event.preventDefault(); // which also closes the details
    action(event);
  });

  stage.addEventListener("focus", () => {
    if (stage.matches(":focus-visible") && model() && geometry() && !cursor() && start()) setCursor(start(), true);
  });
}
