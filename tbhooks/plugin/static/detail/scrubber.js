/* A slider over the steps that have a histogram, with a button that plays them. */

import { html } from "../core/elements.js";

const PAUSE = 140; // milliseconds between two steps

/** @param on `{ move(index), settle(index) }`: while it moves, and when the user lets go or the end is reached */
export function createScrubber(on) {
  const slider = html("input", { type: "range", min: "0", step: "1", "aria-label": "Step of the distribution" });
  const play = html("button", { type: "button", "aria-label": "Play the distribution over the steps", title: "Play" }, "\u25b6");
  const words = html("output", { class: "scrubber-step" });
  const element = html("div", { class: "scrubber" }, play, slider, words);
  let steps = [];
  let timer = 0;

  const at = () => Number(slider.value);

  function show() {
    words.textContent = steps.length ? `step ${steps[at()]}` : "";
    slider.setAttribute("aria-valuetext", words.textContent);
  }

  function stop() {
    if (!timer) return;
    clearInterval(timer);
    timer = 0;
    play.textContent = "\u25b6";
    play.setAttribute("aria-label", "Play the distribution over the steps");
  }

  function forward() {
    if (at() >= steps.length - 1) {
      stop();
      on.settle(at());
      return;
    }
    slider.value = String(at() + 1);
    show();
    on.move(at());
  }

  play.addEventListener("click", () => {
    if (timer) {
      stop();
      on.settle(at());
      return;
    }
    if (at() >= steps.length - 1) slider.value = "0";
    play.textContent = "\u275a\u275a";
    play.setAttribute("aria-label", "Pause");
    timer = setInterval(forward, PAUSE);
  });
  slider.addEventListener("input", () => {
    show();
    on.move(at());
  });
  slider.addEventListener("change", () => on.settle(at()));

  return {
    element,
    stop,
    /** Shows these steps, with one of them chosen; hidden with fewer than two. */
    set(next, index) {
      element.hidden = next.length < 2;
      steps = next;
      slider.max = String(Math.max(0, next.length - 1));
      if (!timer) slider.value = String(index);
      show();
    },
    isPlaying: () => timer !== 0,
  };
}
