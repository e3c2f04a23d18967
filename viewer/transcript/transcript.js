// The transcript of an episode, as a conversation (conversation.js) or as an outline: a line a step, opened on demand.
// component.py sends the lines; what a step shows is asked for when it comes into view (asking.js), and taken off the page
// when it has left it: so a thousand open steps are as light as a screenful.
//
// All text is foreign and reaches the page as text nodes. The files beside this one are parts of the same script.

const VIEW = Symbol.for("trajlake.transcript");
const CHUNK = 30;
const LINE_HEIGHT = 31;
const BODY_HEIGHT = 160;
const TURN_HEIGHT = 220;
const LONG_OUTPUT = 700; // as in blocks.py
const KEPT = 400;
// Of what component.py sends, what may change while the transcript stays as it is: which step the page speaks of.
const SPOKEN_OF = { selected: null, ready: [], tells: false };

export default function mount({ parentElement, data, setTriggerValue }) {
  const text = textOf(data);
  const present = parentElement[VIEW];
  const again = () => mount({ parentElement, data, setTriggerValue });
  // Streamlit still draws the episode before: the reader is at the next one.
  if (present?.isAhead && present.root.isConnected && present.episode !== episodeOf(data)) {
    present.again = again;
    return;
  }
  const isHere = present?.text === text && present.root.isConnected && !present.isElsewhere(data);
  const view = isHere ? present : new Transcript(parentElement, data, text, present);
  Object.assign(view, { data, again, isAhead: false, lost: () => setTriggerValue("lost", true), tell: (step) => setTriggerValue("step", step) });
  parentElement[VIEW] = view;
  if (!isHere) {
    uncover();
    view.start();
  }
  view.tellStep();
}

function episodeOf({ asks }) {
  return new URL(asks, location.href).searchParams.get("episode");
}

function textOf(data) {
  return JSON.stringify({ ...data, ...SPOKEN_OF });
}

class Transcript {
  // `outer` is the transcript at whose step this one, of a sub-agent, is drawn; `path` names the sub-agents down to it.
  constructor(parent, data, text, former, outer = null, path = "") {
    Object.assign(this, { data, text, outer, path });
    const isSame = former?.data.name === data.name;
    this.isNew = !isSame || former.isElsewhere(data);
    this.step = this.isNew ? data.selected : former.step;
    this.mode = outer ? VIEWS[0] : isSame ? former.mode : chooseView(data);
    this.opened = new Set([...(isSame ? former.opened : []), ...(this.isNew && data.selected !== null ? [data.selected] : [])]);
    this.unfolded = new Set(isSame ? former.unfolded : []);
    this.folds = new Map(isSame ? former.folds : []);
    this.branches = outer?.branches ?? new Map(isSame ? former.branches : []);
    this.allUnfolded = isSame ? former.allUnfolded : undefined;
    this.contents = new Map([...data.ready, ...(data.held ?? [])].map((step) => [step.index, step]));
    this.heights = new Map();
    this.lines = new Map(data.lines.map((line) => [line.index, line]));
    this.found = new Set();
    // What the reader looks for stays while episodes are read one after the other.
    this.asked = (former?.data.find === data.find ? former?.asked : null) ?? data.find ?? "";
    this.asking = data.held ? new Held(this) : new Asking(this);
    this.root = el("div", ["trajlake-transcript", ...data.hidden.map((kind) => `without-${kind}`)].join(" "));
    this.root.classList.toggle("without-credit", !data.credited);
    this.root.classList.toggle("without-reward", !data.rewarded);
    this.scroller = document.querySelector("[data-testid=stMain]");
    this.within = windows(this.scroller);
    this.list = el("div", "list");
    new ResizeObserver(() => this.stay()).observe(this.list);
    for (const kind of ["pointerover", "focusin"]) this.list.addEventListener(kind, (event) => this.expect(event.target));
    this.bar = outer?.bar ?? toolbar(this);
    this.root.append(...(outer ? [] : [this.bar, overview(this), headings(data)]), this.list);
    former?.root.remove();
    parent.append(this.root);
    if (outer) return this.layout();
    // The toolbar stays above what is read, in as many rows as it needs.
    const measure = () => this.root.style.setProperty("--tools", `${this.bar.offsetHeight}px`);
    measure();
    new ResizeObserver(measure).observe(this.bar);
    this.layout();
    document[VIEW] = this;
    keys();
  }

  get episode() {
    return episodeOf(this.data);
  }

  opening(target) {
    return opening(this, target);
  }

  turn(target, answer) {
    turn(this, target, answer);
  }

  // Streamlit has drawn the page of the address, and gives the same data only once.
  land() {
    uncover();
    if (this.root.isConnected && this.episode !== new URL(location.href).searchParams.get("episode")) this.again();
  }

  // Whether data speak of a step that is neither the one opened last nor the one that they spoke of before.
  isElsewhere({ selected }) {
    return selected !== null && selected !== this.step && selected !== this.data.selected;
  }

  tellStep() {
    if (this.data.tells && this.step !== this.data.selected) this.tell(this.step);
  }

  // The server has forgotten the versions. A page that the reader has left does not say so: it would be drawn again.
  lose() {
    if (this.outer) this.outer.lose();
    else if (this.episode === new URL(location.href).searchParams.get("episode")) this.lost();
  }

  start() {
    if (this.asked) ask(this, this.asked, true);
    if (!this.isNew) return;
    if (this.data.selected === null) {
      this.scroller?.scrollTo(0, 0);
      return;
    }
    this.select(this.data.selected);
    this.pinned = this.data.selected;
    requestAnimationFrame(() => this.select(this.data.selected));
  }

  // What stands in the list, in order: lines, folded repeats, and what is before and after the steps.
  items() {
    const [before, after] = [this.data.ends.filter((end) => end.index < 0), this.data.ends.filter((end) => end.index >= 0)];
    const items = [...before];
    if (this.isConversation) return [...before, ...this.data.lines, ...after];
    const folds = new Map(this.data.repeats.map((fold) => [fold.first, fold]));
    const { lines } = this.data;
    for (let place = 0; place < lines.length; place++) {
      const fold = folds.get(lines[place].index);
      if (fold) items.push({ fold, index: `fold-${fold.first}`, parts: lines.slice(place, place + fold.period) });
      if (fold && !this.unfolded.has(fold.first)) place += fold.period * fold.times - 1;
      else items.push(lines[place]);
    }
    return [...items, ...after];
  }

  get isConversation() {
    return this.mode === "conversation";
  }

  // The line of a step, or of the messages before or after the steps.
  item(index) {
    return this.lines.get(index) ?? this.data.ends.find((end) => end.index === index);
  }

  // Shows the other view; the step in view stays where it is.
  switchView() {
    this.mode = VIEWS.find((name) => name !== this.mode);
    rememberView(this);
    this.heights.clear();
    this.bar.querySelector(".views").replaceWith(viewSwitch(this));
    this.bar.querySelector(".all-open").textContent = this.isConversation && this.allUnfolded ? "Close all" : "Open all";
    this.keepInView(() => this.layout());
    highlight(this);
  }

  // Sections above the step that was gone to are drawn later, and are higher or lower than they were taken to be.
  stay() {
    if (this.pinned != null) this.row(this.pinned)?.scrollIntoView({ block: "start" });
  }

  keepInView(change) {
    const isAtTop = this.list.getBoundingClientRect().top >= this.bar.getBoundingClientRect().bottom;
    const index = this.order[this.firstOnScreen()];
    change();
    if (isAtTop) return;
    this.pinned = index;
    this.reveal(index)?.scrollIntoView({ block: "start" });
  }

  layout() {
    this.root.classList.toggle("conversation", this.isConversation);
    const items = this.items();
    this.order = items.map((item) => item.index);
    this.chunks = [];
    for (let first = 0; first < items.length; first += CHUNK) {
      const part = items.slice(first, first + CHUNK);
      const chunk = el("div", "chunk");
      const height = part.map(({ index }) => (this.isConversation || this.opened.has(index) ? this.heightOf(index) : 0));
      const lines = this.isConversation ? 0 : part.length * LINE_HEIGHT;
      chunk.style.minHeight = `${lines + height.reduce((sum, one) => sum + one, 0)}px`;
      this.chunks.push({ chunk, indices: new Set(part.map((item) => item.index)) });
      this.within(chunk, () => chunk.append(...part.map((item) => this.draw(item))));
    }
    this.list.replaceChildren(...this.chunks.map(({ chunk }) => chunk));
  }

  // The height of a step's body: as it was drawn last, else an estimate.
  heightOf(index) {
    return this.heights.get(index) ?? (this.isConversation ? this.estimate(index) : BODY_HEIGHT);
  }

  // The height of a step in the conversation, from the characters of its texts; output is folded where it is long.
  estimate(index) {
    const size = this.lines.get(index)?.size;
    if (!size) return TURN_HEIGHT;
    const [said, replied] = size;
    const reply = replied > LONG_OUTPUT ? 5 : replied && 1 + Math.ceil(replied / 60);
    return 110 + 20 * Math.ceil(said / Math.max(40, this.list.clientWidth / 8)) + 18 * reply;
  }

  draw(item) {
    return this.isConversation ? turnOf(this, item) : lineOf(this, item);
  }

  row(index) {
    return this.list.querySelector(`:scope > .chunk > [data-step="${index}"]`);
  }

  // The step of this transcript that an element belongs to; steps of sub-agents lie within one.
  rowOf(element) {
    const row = element?.closest?.("[data-step]");
    return !row || row.parentElement.parentElement === this.list ? row : this.rowOf(row.parentElement);
  }

  // The line of a step, drawn and unfolded wherever it is.
  reveal(index) {
    const fold = !this.isConversation && this.data.repeats.find(({ first, last }) => first <= index && index <= last);
    if (fold && !this.unfolded.has(fold.first)) {
      this.unfolded.add(fold.first);
      this.layout();
    }
    this.chunks.find(({ indices }) => indices.has(index))?.chunk.fill();
    return this.row(index);
  }

  select(index) {
    const row = this.reveal(index);
    if (!row) return;
    this.list.querySelector(".selected")?.classList.remove("selected");
    row.classList.add("selected");
    row.scrollIntoView({ block: "start" });
    row.firstChild.focus({ preventScroll: true });
  }

  // To the last line, which stays on the screen while those above it are drawn.
  toEnd() {
    const last = this.order.at(-1);
    this.reveal(last)?.scrollIntoView({ block: "start" });
    this.pinned = last;
  }

  toggle(index, isOpen = !this.opened.has(index)) {
    if (isOpen) this.opened.add(index);
    else this.opened.delete(index);
    const row = this.row(index);
    if (!row) return;
    row.replaceWith(this.draw(this.item(index)));
    this.row(index).firstChild.focus({ preventScroll: true });
    this.row(index).querySelector(".body")?.fill();
    if (isOpen && this.lines.has(index) && !this.data.held && !this.outer) {
      const here = new URL(location.href);
      here.searchParams.set("step", index);
      history.replaceState(history.state, "", here);
      this.step = index;
      this.tellStep();
    }
  }

  toggleFold(first) {
    if (!this.unfolded.delete(first)) this.unfolded.add(first);
    this.layout();
    this.chunks.find(({ indices }) => indices.has(`fold-${first}`)).chunk.fill();
    this.row(`fold-${first}`).firstChild.focus({ preventScroll: true });
  }

  toggleAll() {
    if (this.isConversation) {
      this.allUnfolded = this.allUnfolded ? undefined : true;
      this.folds.clear();
      this.keepInView(() => this.layout());
      return this.allUnfolded;
    }
    const all = [...this.lines.keys()];
    const isOpen = !all.every((index) => this.opened.has(index));
    this.opened = new Set(isOpen ? all : []);
    this.layout();
    return isOpen;
  }

  // The next or previous line, from the one that has the focus or else is the first on the screen.
  move(by) {
    const focused = this.rowOf(document.activeElement);
    const top = this.list.getBoundingClientRect().top;
    // In the conversation, messages outside the steps have nothing to open.
    const order = this.isConversation ? this.order.filter((index) => this.lines.has(index)) : this.order;
    let place = focused && this.root.contains(focused) ? order.findIndex((index) => String(index) === focused.dataset.step) + by : -1;
    if (place < 0 && !focused && top <= 0) {
      const first = this.firstOnScreen();
      place = order.findIndex((index) => this.order.indexOf(index) >= first);
      if (place < 0) place = order.length;
    }
    place = Math.max(0, Math.min(place, order.length - 1));
    const index = order[place];
    if (index === undefined) return;
    this.chunks.find(({ indices }) => indices.has(index)).chunk.fill();
    const row = this.row(index);
    row.firstChild.focus({ preventScroll: true });
    row.scrollIntoView({ block: this.isConversation ? "start" : "nearest" });
  }

  place(step) {
    return this.order.findIndex((index) => String(index) === step);
  }

  firstOnScreen() {
    const rows = [...this.list.querySelectorAll(":scope > .chunk > [data-step]")];
    const top = this.bar.getBoundingClientRect().bottom;
    const first = rows.find((row) => row.getBoundingClientRect().bottom > top + 8);
    return first ? this.place(first.dataset.step) : 0;
  }

  // What the reader may open next: the line under the pointer or the focus; beside an opened one, its neighbours.
  expect(element) {
    const index = Number(this.rowOf(element)?.dataset.step);
    if (Number.isNaN(index)) return;
    this.asking.next(this.opened.has(index) ? [index + 1, index - 1] : [index]);
  }

  take(steps) {
    for (const step of steps) {
      this.contents.set(step.index, step);
      const body = this.row(step.index)?.querySelector(".body");
      if (body?.isFilled) fillBody(this, step.index, body);
    }
    for (const index of this.contents.keys()) {
      if (this.contents.size <= KEPT) break;
      if (!this.row(index)?.querySelector(".body")?.isFilled) this.contents.delete(index);
    }
  }
}

// Sections that are drawn while they are near the screen, and keep their height while they are not.
function windows(root) {
  const seen = (entries) => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) target.fill();
      else target.drop();
    }
  };
  const observer = new IntersectionObserver(seen, { root, rootMargin: "600px 0px" });
  return (section, draw) => {
    section.fill = () => {
      if (section.isFilled) return;
      section.isFilled = true;
      if (draw() !== false) section.style.minHeight = "";
    };
    section.drop = () => {
      if (!section.isFilled || section.contains(document.activeElement)) return;
      section.style.minHeight = `${section.offsetHeight}px`;
      section.replaceChildren();
      section.isFilled = false;
    };
    observer.observe(section);
  };
}

function keys() {
  if (document[KEYS]) return;
  document[KEYS] = true;
  // The step that was gone to stays in place until the reader moves.
  for (const kind of ["wheel", "touchmove", "pointerdown", "keydown"]) {
    document.addEventListener(kind, () => (document[VIEW].pinned = null), { passive: true, capture: true });
  }
  // What a fold of the head shows lies above the page, until Escape or a click elsewhere.
  for (const kind of ["click", "keydown"]) {
    document.addEventListener(kind, ({ key, target }) => {
      for (const fold of document.querySelectorAll(".trajlake-head .fold[open]")) {
        if (key === "Escape" && fold.contains(document.activeElement)) fold.firstChild.focus();
        if (key === "Escape" || (!key && !fold.contains(target))) fold.open = false;
      }
    });
  }
  document.addEventListener("keydown", (event) => {
    const view = document[VIEW];
    const isTyping = event.target.closest?.("input, textarea, select, [contenteditable=true]");
    if (!view?.root.isConnected || isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
    const actions = {
      j: () => view.move(1),
      k: () => view.move(-1),
      o: () => view.bar.querySelector(".all-open").click(),
      v: () => view.switchView(),
      "/": () => view.root.querySelector("input").focus(),
      End: () => view.toEnd(),
      Home: () => scrollerOf(view).scrollTo(0, 0),
    };
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  });
}
const KEYS = Symbol.for("trajlake.transcript.keys");

// What scrolls: a part of the viewer's page, or a file's document.
function scrollerOf(view) {
  return view.scroller ?? document.scrollingElement;
}

function toolbar(view) {
  const all = button("Open all", "Open or fold all texts (key o)");
  all.classList.add("all-open");
  all.onclick = () => (all.textContent = view.toggleAll() ? "Close all" : "Open all");
  const bar = el("div", "toolbar", viewSwitch(view), findField(view), all);
  bar.append(waterfallButton(view));
  const others = view.data.held ? "" : " \u00b7 n p episodes \u00b7 ? keys";
  bar.append(el("span", "hint", `j k steps \u00b7 Enter opens \u00b7 v view \u00b7 o all \u00b7 / find${others}`));
  return bar;
}

function el(tag, name, ...children) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  element.append(...children);
  return element;
}

function button(label, title) {
  const made = el("button", "plain", label);
  made.type = "button";
  if (title) made.title = title;
  return made;
}
