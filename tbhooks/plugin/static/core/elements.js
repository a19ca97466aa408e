/* Creates elements. Text is only ever set as text content, never as markup. */

const SVG = "http://www.w3.org/2000/svg";

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "colour") element.style.setProperty("--c", value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function html(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

/** A labelled <select>. `set` does not rebuild unchanged options, because that would close an open list. */
export function createChoice(label, onChange) {
  const box = html("select", { name: label });
  const element = html("label", { class: "detail-choice" }, html("span", {}, label), box);
  let shown = "";
  box.addEventListener("change", () => onChange(box.value));
  function set(options, value) {
    const wanted = options.map(([name]) => name).join();
    if (wanted !== shown) box.replaceChildren(...options.map(([name, text]) => html("option", { value: name }, text)));
    shown = wanted;
    box.value = value;
  }
  return { element, set };
}

export function button(label, text, onClick) {
  const element = html("button", { type: "button", "aria-label": label, title: label }, text);
  element.addEventListener("click", onClick);
  return element;
}
