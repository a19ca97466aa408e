/* The tooltip. */

import { html } from "../core/elements.js";

export function createTip() {
  const element = html("div", { class: "tip", role: "tooltip", hidden: true });

  function place(x, y, frame) {
    const { width, height } = element.getBoundingClientRect();
    const left = x - frame.left + 16 + width > frame.width ? x - frame.left - width - 14 : x - frame.left + 16;
    const top = Math.min(y - frame.top + 16, frame.height - height - 6);
    element.style.transform = `translate(${Math.max(4, Math.round(left))}px, ${Math.max(4, Math.round(top))}px)`;
  }

  return {
    element,
    show({ title, lines }, x, y, frame) {
      element.replaceChildren(
        html("div", { class: "tip-title" }, title),
        ...lines.map((line) => html("div", { class: line.tone ? `tip-${line.tone}` : null }, line.text)),
      );
      element.hidden = false;
      place(x, y, frame);
    },
    hide() {
      element.hidden = true;
    },
  };
}
