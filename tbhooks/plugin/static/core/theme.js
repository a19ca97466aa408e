/* Follows TensorBoard's light or dark theme; reads the canvas colours from the style sheet. */

/** The window of the TensorBoard page, or our own if we may not access that. */
export function outerWindow() {
  try {
    return window.parent.document ? window.parent : window;
  } catch {
    return window;
  }
}

const preferred = () => window.matchMedia("(prefers-color-scheme: dark)");

function isDark() {
  const outer = outerWindow();
  return outer === window ? preferred().matches : outer.document.body.classList.contains("dark-mode");
}

/** Sets the class `dark` now and whenever TensorBoard's theme changes; then calls `onChange`. */
export function followTheme(onChange) {
  const apply = () => {
    const dark = isDark();
    const changed = document.documentElement.classList.contains("dark") !== dark;
    document.documentElement.classList.toggle("dark", dark);
    if (changed) onChange();
  };
  document.documentElement.classList.toggle("dark", isDark());
  const outer = outerWindow();
  if (outer === window) preferred().addEventListener("change", apply);
  else new MutationObserver(apply).observe(outer.document.body, { attributes: true, attributeFilter: ["class"] });
}

export function themeColours() {
  const style = getComputedStyle(document.documentElement);
  const value = (name) => style.getPropertyValue(name).trim();
  return {
    dark: document.documentElement.classList.contains("dark"),
    ink: value("--ink"),
    soft: value("--ink-soft"),
    line: value("--line"),
    paper: value("--paper"),
    panel: value("--panel"),
    accent: value("--accent"),
    bad: value("--bad"),
    warn: value("--warn"),
  };
}
