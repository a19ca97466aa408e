/* What the parts of the panel share. A cell is {site, distribution, history}; the last two are entries of answers.js. */

export const MODES = [
  ["log", "log"],
  ["linear", "linear"],
];

export const withValue = (cells, what) => cells.filter((cell) => cell[what].value !== null);

/** The server's messages; with several modules, each with the module's name. */
export function problemsOf(cells, what) {
  return cells
    .filter((cell) => cell[what].error !== null)
    .map((cell) => (cells.length > 1 ? `${cell.site.name}: ${cell[what].error}` : cell[what].error));
}
