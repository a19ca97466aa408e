/* A button that opens a small box below it. Escape or a click elsewhere closes it and returns the focus. */

import { html } from "./elements.js";

let boxes = 0;

/** @returns `{ element, text(words), close() }`; `content` are the elements inside. */
export function createMenu(label, hint, ...content) {
  const id = `menu-${boxes++}`;
  const button = html("button", { type: "button", class: "button menu-button", title: hint, "aria-expanded": "false", "aria-controls": id });
  const words = html("span", {}, label);
  button.append(words, html("span", { class: "menu-arrow", "aria-hidden": "true" }, "\u25be"));
  const box = html("div", { class: "menu-box", id, role: "group", "aria-label": label, hidden: true }, ...content);
  const element = html("div", { class: "menu" }, button, box);

  function set(open) {
    box.hidden = !open;
    button.setAttribute("aria-expanded", String(open));
    if (!open) return;
    box.style.removeProperty("right");
    if (box.getBoundingClientRect().right > document.documentElement.clientWidth - 4) box.style.right = "0";
  }

  button.addEventListener("click", () => set(box.hidden));
  element.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || box.hidden) return;
    event.stopPropagation();
    set(false);
    button.focus();
  });
  document.addEventListener("pointerdown", (event) => !box.hidden && !element.contains(event.target) && set(false));
  element.addEventListener("focusout", (event) => {
    if (event.relatedTarget && !element.contains(event.relatedTarget)) set(false);
  });

  return { element, box, text: (text) => (words.textContent = text), close: () => set(false) };
}

/** Boxes to tick, of which at most `most` can be on. `onChange(names)` gets the ticked ones in the order of ticking. */
export function createTicks(most, onChange) {
  const element = html("div", { class: "ticks" });
  let shown = "";
  let ticked = [];

  function tick(name, on) {
    ticked = on ? [...ticked, name] : ticked.filter((each) => each !== name);
    onChange(ticked);
  }

  return {
    element,
    /** @param {[string, string][]} options name and text */
    set(options, values) {
      ticked = values;
      const wanted = JSON.stringify(options);
      if (wanted !== shown) {
        element.replaceChildren(
          ...options.map(([name, text]) => {
            const box = html("input", { type: "checkbox", value: name });
            box.addEventListener("change", () => tick(name, box.checked));
            return html("label", { class: "tick", title: text }, box, html("span", {}, text));
          }),
        );
        shown = wanted;
      }
      for (const box of element.querySelectorAll("input")) {
        box.checked = values.includes(box.value);
        box.disabled = !box.checked && values.length >= most;
      }
    },
  };
}
