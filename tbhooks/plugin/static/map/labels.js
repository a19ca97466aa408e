/*
 * Names shortened to the room there is. Two different names never become the same text, and a shortened name keeps whole
 * parts of its path where it can: `layers…q_proj`, not `la…oj`. Pure functions; widths come from the caller.
 */

const DOTS = "\u2026";
const known = new Map();

/** Whole parts from both ends of a path, as many as fit; the last part matters most. Empty if not even that fits. */
function byParts(text, fits) {
  const parts = text.split(/(?<=\.)/); // a part keeps its dot
  for (let kept = parts.length - 1; kept >= 1; kept--) {
    const head = Math.floor(kept / 2);
    const short = `${parts.slice(0, head).join("")}${DOTS}${parts.slice(parts.length - (kept - head)).join("")}`;
    if (fits(short)) return short;
  }
  return "";
}

/** As many characters as fit: `head` of them, of ten, from the beginning. */
function byCharacters(text, fits, head) {
  const cut = (kept) => {
    const front = Math.round((kept * head) / 10);
    return `${text.slice(0, front)}${DOTS}${text.slice(text.length - (kept - front))}`;
  };
  let [low, high] = [0, text.length - 1];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (fits(cut(middle))) low = middle;
    else high = middle - 1;
  }
  return cut(low);
}

/** One shortened name, for a title or a chip. */
export function shortened(text, fits) {
  if (fits(text)) return text;
  return byParts(text, fits) || byCharacters(text, fits, 4);
}

/** The ways to shorten a name, the most readable first. */
function* candidates(text, fits) {
  if (fits(text)) yield text;
  const parts = byParts(text, fits);
  if (parts) yield parts;
  for (const head of [4, 2, 0, 6, 8, 10]) yield byCharacters(text, fits, head);
}

/**
 * Shortened texts for several names, by name: different names get different texts. If there is no room for that, a
 * number tells them apart.
 */
export function distinct(names, fits) {
  const all = [...new Set(names)];
  const taken = new Map();
  const given = new Map();
  for (const name of all.filter(fits)) {
    taken.set(name, name);
    given.set(name, name);
  }
  for (const name of all) {
    if (given.has(name)) continue;
    let short = null;
    for (const text of candidates(name, fits)) {
      if (!taken.has(text)) {
        short = text;
        break;
      }
    }
    for (let number = 2; short === null; number++) {
      const text = `${byCharacters(name, (cut) => fits(`${cut} ${number}`), 4)} ${number}`;
      if (!taken.has(text) || number > names.length) short = text;
    }
    taken.set(short, name);
    given.set(name, short);
  }
  return given;
}

/** Text shortened for a canvas context with its current font. */
export function elide(context, text, room) {
  const key = `${context.font}|${Math.round(room)}|${text}`;
  if (!known.has(key)) {
    if (known.size > 5000) known.clear();
    known.set(key, shortened(text, (short) => context.measureText(short).width <= room));
  }
  return known.get(key);
}
