/* Mouse, pen and wheel on the heat map: hover, click, drag to pan, wheel to zoom. */

import { panned, zoomed } from "./view.js";

const SLACK = 4;

export function attachPointer({ stage, scroller, hit, point, on, setCursor, model, geometry }) {
  let grip = null;

  const local = (event) => {
    const box = stage.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const stepsPerPixel = () => (model().view[1] - model().view[0]) / geometry().panes[0].width;
  const show = (range) => on.view(range);

  function drag(x, y) {
    scroller.scrollTop = grip.scroll - (y - grip.y);
    const { domain, least } = model();
    if (grip.range) show(panned(grip.range, domain, (grip.x - x) * grip.perPixel, least));
  }

  stage.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || !model() || !geometry()) return;
    const [x, y] = local(event);
    const range = model().range;
    grip = { x, y, moved: false, scroll: scroller.scrollTop, range, perPixel: stepsPerPixel(), id: event.pointerId };
  });

  stage.addEventListener("pointermove", (event) => {
    if (!model() || !geometry()) return;
    const [x, y] = local(event);
    if (grip && !grip.moved && Math.hypot(x - grip.x, y - grip.y) > SLACK) {
      grip.moved = true;
      stage.setPointerCapture(grip.id);
      stage.classList.add("dragging");
    }
    if (grip?.moved) {
      point(null);
      drag(x, y);
      return;
    }
    const found = hit(x, y);
    stage.classList.toggle("over-label", found?.area === "label" || found?.marks?.length > 0);
    point(found, event.clientX, event.clientY);
  });

  stage.addEventListener("pointerup", (event) => {
    const was = grip;
    grip = null;
    stage.classList.remove("dragging");
    if (!was || was.moved || event.button !== 0) return;
    const found = hit(...local(event));
    if (!found) return;
    if (found.area === "axis" && found.marks.length) on.finding(found.marks[0]);
    if (found.area === "label") on.label(found, event.shiftKey);
    if (found.area === "cell" && found.index >= 0) {
      setCursor(found, false);
      on.pick(found, event.shiftKey);
    }
  });

  stage.addEventListener("pointercancel", () => (grip = null));
  stage.addEventListener("pointerleave", () => point(null));
  stage.addEventListener("dblclick", (event) => {
    if (hit(...local(event))?.area !== "label") show(null);
  });

  stage.addEventListener(
    "wheel",
    (event) => {
      if (!model() || !geometry()) return;
      const found = hit(...local(event));
      const { range, domain, least, view } = model();
      const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
      const scrolls = scroller.scrollHeight > scroller.clientHeight + 1;
      const zooms = event.ctrlKey || event.metaKey || found?.area === "axis" || (!scrolls && found?.area === "cell");
      if (zooms && !sideways) {
        event.preventDefault();
        const anchor = found && Number.isFinite(found.position) ? found.position : (view[0] + view[1]) / 2;
        show(zoomed(range, domain, Math.exp(-event.deltaY * 0.0016), anchor, least));
      } else if (sideways) {
        event.preventDefault();
        show(panned(range, domain, (event.deltaX || event.deltaY) * stepsPerPixel(), least));
      }
    },
    { passive: false },
  );
}
