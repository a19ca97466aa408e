/* Number formats: JSON values of the server to numbers, numbers to short or exact text. Independent of the DOM. */

const WORDS = { nan: NaN, inf: Infinity, "-inf": -Infinity };
const MINUS = "\u2212";

/** The number of a JSON value; null if there is none. */
export function toNumber(value) {
  if (typeof value === "number") return value;
  return typeof value === "string" && value in WORDS ? WORDS[value] : null;
}

export function isFinite(value) {
  return typeof value === "number" && Number.isFinite(value);
}

function nonFinite(value) {
  if (value === null || value === undefined) return "\u2013";
  if (Number.isNaN(value)) return "NaN";
  return value > 0 ? "Inf" : `${MINUS}Inf`;
}

const typographic = (text) => text.replaceAll("-", MINUS);

/** Three significant digits. */
export function brief(value) {
  if (!isFinite(value)) return nonFinite(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e-3 && size < 999.5) return typographic(value.toPrecision(3));
  if (size >= 999.5 && size < 1e5) return typographic(Number(value.toPrecision(3)).toLocaleString("en-US"));
  return typographic(value.toExponential(2).replace("e+", "e"));
}

/** A stat as text; a quantile inside the bucket around zero has no better precision than that bucket. */
export function nearZero(name, value) {
  return /^p\d/.test(name) && value !== 0 && Math.abs(value) < 2 ** -64 ? "\u22480" : brief(value);
}

/** Every digit, in plain ASCII so that it can be pasted into a program. */
export function exact(value) {
  if (value === null || value === undefined) return "";
  if (Number.isNaN(value)) return "nan";
  return Number.isFinite(value) ? String(value) : value > 0 ? "inf" : "-inf";
}

const GROUPED = new Intl.NumberFormat("en-US"); // making one takes 20 ms

export function whole(value) {
  if (!isFinite(value)) return nonFinite(value);
  return typographic(GROUPED.format(Math.round(value)));
}

/** A fraction in percent; never rounded to 0 % or 100 % if it is not. */
export function percent(share) {
  if (!isFinite(share)) return nonFinite(share);
  if (share === 0) return "0%";
  if (share < 1e-4) return "<0.01%";
  if (share === 1) return "100%";
  if (share > 0.9995) return ">99.9%";
  return `${Number((100 * share).toPrecision(3))}%`;
}

/** Steps on an axis: 500, 12000, 150k, 1.5M. */
export function shortStep(step) {
  if (Math.abs(step) < 1e5) return typographic(String(step));
  const [unit, letter] = Math.abs(step) < 1e6 ? [1e3, "k"] : Math.abs(step) < 1e9 ? [1e6, "M"] : [1e9, "G"];
  return typographic(`${Number((step / unit).toPrecision(4))}${letter}`);
}

/** A tick of a linear axis: as many decimals as the distance between ticks needs. */
export function tickText(value, distance) {
  if (value === 0) return "0";
  if (Math.abs(value) >= 1e5 || distance < 1e-4) {
    const digits = Math.max(0, Math.floor(Math.log10(Math.abs(value)) + 1e-9) - Math.floor(Math.log10(distance) + 1e-9));
    return typographic(value.toExponential(Math.min(digits, 3)).replace("e+", "e"));
  }
  const decimals = Math.max(0, -Math.floor(Math.log10(distance) + 1e-9));
  return typographic(value.toFixed(decimals));
}

/** "3 NaN", "no NaN". */
export function counted(count, word) {
  if (!isFinite(count)) return `${word} unknown`;
  return count === 0 ? `no ${word}` : `${whole(count)} ${word}`;
}
