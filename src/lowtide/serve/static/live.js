// The running engine, as `GET v1/lowtide/events` tells it. Not asked while the tab is hidden.

import { ask, eventsOf } from "./api.js";

const RETRY_MS = [500, 1000, 2000, 5000, 10000];

/** Dispatches `model`, `state` and `lost`; has the latest of each. */
class Live extends EventTarget {
  model = null;
  state = null;
  trouble = "";
  #connection = null;

  start() {
    document.addEventListener("visibilitychange", () => this.#follow());
    this.#follow();
  }

  /** Wait for the next state, at most so long. */
  next(limitMs) {
    return new Promise((resolve) => {
      this.addEventListener("state", resolve, { once: true });
      setTimeout(resolve, limitMs);
    });
  }

  #follow() {
    if (document.hidden) {
      this.#connection?.abort();
      this.#connection = null;
    } else if (this.#connection === null) {
      this.#connection = new AbortController();
      this.#listen(this.#connection.signal);
    }
  }

  async #listen(signal) {
    let tries = 0;
    while (!signal.aborted) {
      let waitMs = RETRY_MS[Math.min(tries, RETRY_MS.length - 1)];
      try {
        const response = await ask("v1/lowtide/events", null, signal);
        for await (const [name, data] of eventsOf(response)) {
          tries = 0;
          this[name] = JSON.parse(data);
          this.dispatchEvent(new Event(name));
        }
        this.trouble = "The server has ended.";
      } catch (error) {
        if (signal.aborted) return;
        this.trouble = error.message || "The connection was lost.";
        if (error.retryS) waitMs = 1000 * error.retryS;
      }
      this.dispatchEvent(new Event("lost"));
      tries += 1;
      await new Promise((resolve) => setTimeout(resolve, waitMs));
    }
  }
}

export const live = new Live();

/** Decode base64 to bytes. */
export const bytesOf = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
