// Questions to the server (route.py). Steps that are asked for together go together, one question of them at a time, and
// what the reader may open next (under the pointer, beside an opened step) goes when nothing else is asked for.

const BATCH = 10;
const AGAIN_MS = 500;
const RARELY_MS = 5000;
const GONE = 410;

class Asking {
  constructor(view) {
    Object.assign(this, { view, wanted: new Set(), ahead: [], asked: new Set() });
  }

  step(index) {
    if (this.asked.has(index)) return;
    this.wanted.add(index);
    this.soon();
  }

  // Only what was named last is worth reading ahead.
  next(indices) {
    const { contents, lines } = this.view;
    this.ahead = indices.filter((index) => lines.has(index) && !contents.has(index) && !this.asked.has(index));
    if (this.ahead.length) this.soon();
  }

  soon() {
    queueMicrotask(() => this.send());
  }

  async send() {
    if (this.asked.size) return;
    // A reader who scrolls fast has left what was asked for first: it is asked for again when it comes back.
    const isWanted = (index) => this.view.row(index)?.querySelector(".body")?.isFilled;
    this.wanted = new Set([...this.wanted].filter(isWanted));
    const steps = [...new Set([...this.wanted, ...this.ahead])].slice(0, BATCH);
    if (!steps.length) return;
    this.ahead = [];
    this.asked = new Set(steps);
    for (const index of steps) this.wanted.delete(index);
    const answer = await this.other({ steps: steps.join() });
    this.asked = new Set();
    this.view.take(answer.steps ?? []);
    this.send();
  }

  // The answer to a question; empty if there is none to be had, or the page has gone on.
  async other(question) {
    const address = new URL(this.view.data.asks, location.href);
    for (const [name, value] of Object.entries(question)) address.searchParams.set(name, value);
    for (let pause = AGAIN_MS; this.view.root.isConnected; pause = Math.min(2 * pause, RARELY_MS)) {
      const response = await fetch(address).catch(() => null);
      if (response?.ok) return response.json();
      if (response?.status === GONE) this.view.lose();
      else if (response) return {};
      // The server is away, or was started anew and is told which versions this page shows.
      await new Promise((resolve) => setTimeout(resolve, pause));
    }
    return {};
  }
}

// In a file that leaves the viewer nobody answers: what there is to know of the steps is in it.
class Held {
  constructor(view) {
    this.view = view;
  }

  step() {}

  next() {}

  async other({ find, shared, waterfall, lines, episode }) {
    if (lines !== undefined) return { lines: stored.find(({ id }) => id === `episode-${episode}`)?.data };
    if (waterfall !== undefined) return { waterfall: this.view.data.waterfall };
    if (shared !== undefined) return { shared: this.view.contents.get(shared)?.shared };
    if (find === undefined) return {};
    const terms = termsOf(find);
    // A result is a message of the next step too, and a first state may be the text of a message before it.
    const isCounted = (index, { kind, is_repeated }) => kind !== "result" && !(kind === "state" && is_repeated && index === 0);
    const countedOf = ({ index, blocks }) => blocks.filter((block) => isCounted(index, block));
    const textsOf = (step) => countedOf(step).map(({ label, text }) => `${label}\n${text}`);
    const textOf = (step) => textsOf(step).join("\n").toLowerCase();
    const steps = [...this.view.contents.values()].map((step) => [step.index, textOf(step)]);
    const holds = ([, text]) => terms.every((term) => text.includes(term));
    return { find: terms.length ? steps.filter(holds).map(([index]) => index).sort((a, b) => a - b) : [] };
  }
}
