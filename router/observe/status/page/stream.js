// Follows the router: connects, connects again, and says when what is shown is old.

const STALE_AFTER_MS = 4000;
const CHECK_MS = 500;
const MAX_PAUSE_MS = 5000;

export class Stream {
  /**
   * `onData(data)` hears each event; `onHealth({ ageMs, isStale, isPaused })` twice a
   * second how it goes.
   */
  constructor(url, onData, onHealth) {
    this.url = url;
    this.onData = onData;
    this.onHealth = onHealth;
    this.isPaused = false;
    this.source = null;
    this.heardAt = performance.now();
    this.pauseMs = 1000;
    this.retry = 0;
    this.wantedAt = this.heardAt;
    this.staleAfterMs = STALE_AFTER_MS;
    document.addEventListener("visibilitychange", () => this.#want());
    setInterval(() => this.#check(), CHECK_MS);
    this.#follow();
  }

  pause(isPaused) {
    this.isPaused = isPaused;
    this.#want();
    this.#check();
  }

  #want() {
    this.wantedAt = performance.now();
    this.#follow();
  }

  /** Listens exactly while somebody looks and wants to. */
  #follow() {
    const wanted = !this.isPaused && !document.hidden;
    if (wanted && this.source === null) this.#connect();
    if (!wanted && this.source !== null) this.#close();
  }

  #connect() {
    clearTimeout(this.retry);
    this.connectedAt = performance.now();
    this.source = new EventSource(this.url);
    this.source.onmessage = (event) => {
      this.heardAt = performance.now();
      this.pauseMs = 1000;
      const data = JSON.parse(event.data);
      if (data.tick_s) this.staleAfterMs = Math.max(STALE_AFTER_MS, 3000 * data.tick_s);
      this.onData(data);
      this.#check();
    };
    this.source.onerror = () => {
      this.#close();
      if (!this.isPaused) this.retry = setTimeout(() => this.#follow(), this.pauseMs);
      this.pauseMs = Math.min(2 * this.pauseMs, MAX_PAUSE_MS);
    };
  }

  #close() {
    clearTimeout(this.retry);
    this.source?.close();
    this.source = null;
  }

  #check() {
    const now = performance.now();
    const ageMs = now - this.heardAt;
    const waitedMs = now - Math.max(this.heardAt, this.wantedAt);
    const isStale = !this.isPaused && !document.hidden && waitedMs > this.staleAfterMs;
    // A connection over which nothing comes any more is as good as none.
    if (isStale && this.source !== null && now - this.connectedAt > 2 * this.staleAfterMs) {
      this.#close();
      this.#follow();
    }
    this.onHealth({ ageMs, isStale, isPaused: this.isPaused });
  }
}
