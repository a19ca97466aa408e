/* Lets the search work on pages that are opened from the file system, where browsers start no workers: the script of
   the worker runs in a hidden frame. The theme looks for the name IFrameWorker. */
(() => {
  if (location.protocol !== "file:") return;

  class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => this.answer(data);
      inside.importScripts = (...urls) =>
        urls.reduce((before, one) => before.then(() => IFrameWorker.load(inside.document, one)), Promise.resolve());
      IFrameWorker.load(inside.document, url).then(() => {
        this.isReady = true;
        for (const data of this.waiting.splice(0)) this.postMessage(data);
      });
    }

    static load(page, url) {
      return new Promise((done, failed) => {
        const script = page.createElement("script");
        script.src = new URL(url, location.href).href;
        script.onload = done;
        script.onerror = () => failed(new Error(`cannot load ${url}`));
        page.body.appendChild(script);
      });
    }

    postMessage(data) {
      if (this.isReady) this.frame.contentWindow.dispatchEvent(new MessageEvent("message", {data}));
      else this.waiting.push(data);
    }

    answer(data) {
      const event = new MessageEvent("message", {data});
      this.dispatchEvent(event);
      if (this.onmessage) this.onmessage(event);
    }

    terminate() {
      this.frame.remove();
    }
  }

  window.IFrameWorker = window.Worker = IFrameWorker;
})();
