/* Polling: every few seconds, rarely while the tab is hidden, and at once when it is shown again. */

const OFTEN = 5_000;
const SELDOM = 30_000;

const unseen = () => document.hidden || document.documentElement.clientWidth === 0;

/** Runs `task` repeatedly; it resolves to true if the server responded. Returns a function that runs it at once. */
export function pollForever(task) {
  let timer = 0;
  let busy = false;
  let failures = 0;

  async function turn() {
    clearTimeout(timer);
    if (busy) return;
    busy = true;
    failures = (await task()) ? 0 : failures + 1;
    busy = false;
    const wait = unseen() ? SELDOM : Math.min(SELDOM, OFTEN * 2 ** Math.max(0, failures - 3));
    timer = setTimeout(turn, wait);
  }

  const look = () => unseen() || turn();
  document.addEventListener("visibilitychange", look);
  let width = document.documentElement.clientWidth;
  new ResizeObserver(() => {
    const now = document.documentElement.clientWidth;
    if (width === 0 && now > 0) look(); // TensorBoard hides a tab by setting its width to 0
    width = now;
  }).observe(document.documentElement);
  return turn;
}
