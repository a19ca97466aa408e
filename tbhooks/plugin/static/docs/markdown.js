/*
 * The part of Markdown that docs/rules.md uses, as elements: headings with anchors, paragraphs, lists, tables, code. Text
 * is only ever set as text content.
 */

import { html } from "../core/elements.js";

/** `code`, **bold** and plain text. */
function inline(text) {
  return text.split(/(`[^`]+`|\*\*[^*]+\*\*)/).filter(Boolean).map((part) => {
    if (part.startsWith("`")) return html("code", {}, part.slice(1, -1));
    return part.startsWith("**") ? html("b", {}, part.slice(2, -2)) : part;
  });
}

const cells = (line) => line.replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());

function table([head, , ...lines]) {
  const row = (line, name) => html("tr", {}, ...cells(line).map((cell) => html(name, {}, ...inline(cell))));
  return html("table", {}, html("thead", {}, row(head, "th")), html("tbody", {}, ...lines.map((line) => row(line, "td"))));
}

const anchor = (text) => text.replaceAll("`", "").trim().replaceAll(" ", "-");

/** Each kind of block by how its first line looks. */
const BLOCKS = [
  [/^#{1,4} /, (lines) => {
    const [, marks, text] = /^(#+) (.*)$/.exec(lines[0]);
    return html(`h${marks.length}`, { id: anchor(text) }, ...inline(text));
  }],
  [/^\|/, table],
  [/^- /, (lines) => html("ul", {}, ...lines.map((line) => html("li", {}, ...inline(line.replace(/^- /, "")))))],
  [/./, (lines) => html("p", {}, ...inline(lines.join(" ")))],
];

/** The elements of a text. */
export function elementsOf(text) {
  const found = [];
  for (const [i, part] of text.split(/^```.*$/m).entries()) {
    if (i % 2) {
      found.push(html("pre", {}, html("code", {}, part.trim())));
      continue;
    }
    for (const block of part.split(/\n\s*\n|(?<=^#+ .*)\n/m).map((each) => each.trim()).filter(Boolean)) {
      const [, make] = BLOCKS.find(([looks]) => looks.test(block));
      found.push(make(block.split("\n")));
    }
  }
  return found;
}
