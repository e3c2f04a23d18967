// Links that are real and keep the session.
//
// Every link of the viewer is an <a href>: a middle click, ctrl-click or "copy link" does what it does everywhere. A
// plain click would load the whole application anew, so it is taken here: the address becomes an entry of the
// browser's history, one, and Streamlit is told as if the reader had gone there with Back or Forward, which it
// follows by running the page that the address names. (Streamlit's own links with query parameters make two entries.)
//
// Links of the menu are taken, too: Streamlit's own way takes filters of the page that is left along, in a second entry.
// They carry nothing but the older state that the reader looks at.
//
//   data-opened   the id of what a row opens; it is put into the address left behind, where the list marks that row
//   data-key      the key that follows the link from anywhere but a text field; ? lists these keys and the other ones

// The next and the previous episode are shown in place at once (transcript/turn.js); Streamlit is told a moment later,
// and what it draws is hidden until a run for that episode has ended. A reader who annotates goes Streamlit's way, because
// the form and its keys are of the episode that Streamlit drew.

// Streamlit remembers the theme that its menu chooses for the page that was loaded; here it is kept for all pages.
//
// Mounted with `run`, which differs from run to run of the script, and the `episode` of its address: what is there was
// drawn for the address once another run has come than that from which a link led away, and has ended. Until it begins, the
// old page looks finished.
// Mounted with `visit`, an address and a number, it goes there, once for each number.
// Mounted with `here`, a name, the page is scrolled to where it stands, once for each name.

const NAME = Symbol.for("trajlake.navigation");
const TRANSCRIPT = Symbol.for("trajlake.transcript");
const APP = "[data-testid=stApp]";
const OURS = "[data-testid=stHtml], [data-testid=stMarkdown], .trajlake-transcript";
const MENU = "[data-testid=stTopNavLink]";
const AS_OF = "as_of"; // of addresses: the older state that they show
const CONNECTION = "data-test-connection-state";
const AWAY_MS = 1500; // a connection that is lost for less is not worth a word
const PATIENCE_MS = 60000;
const AHEAD_MS = 150; // how long Streamlit waits for what the reader may open next
const FOLLOWING = "trajlake-following";
// What else hears keys, while it is on the page.
const KEYS = {
  ".trajlake-transcript": { "j k": "next and previous step", Enter: "open the step", v: "conversation or outline", o: "open or close all", "/": "find in the episode", "Home End": "first and last message" },
  ".st-key-query": { "Ctrl+Enter": "run the query", "Ctrl+Space": "list names", "Tab Enter": "take a name" },
};
const THEME = "stActiveTheme-"; // of the keys in the browser's storage: then the path that was loaded, then a version

export default function ({ data, parentElement }) {
  const state = (window[NAME] ??= start());
  if (data.run && data.run !== state.run) {
    Object.assign(state, { run: data.run, isLeft: state.ahead !== null && state.ahead !== data.episode });
    settled(state).then(() => (window.requestIdleCallback ?? setTimeout)(() => expectTurns()));
  }
  if (data.pages) state.pages = new Set(data.pages);
  if (data.command) state.command = data.command;
  if (data.visit && data.visit.number !== state.visited) {
    state.visited = data.visit.number;
    visit(new URL(data.visit.target, location.href), state);
  }
  if (data.here) showHere(state, data.here, parentElement);
}

function start() {
  const state = {
    pages: new Set(),
    run: null,
    isLeft: true, // whether the address has changed since the run began
    ahead: null, // the episode that is shown before Streamlit has drawn its page
    turns: 0,
    pressed: [], // keys whose links are not followed yet
    opening: null, // of the episode that is to be shown in place
    here: null,
    visited: null,
    theme: `${THEME}${location.pathname}-`,
    isSettled: () => !state.isLeft && document.querySelector(APP)?.dataset.testScriptState === "notRunning",
  };
  document.addEventListener("click", (event) => follow(event, state), true);
  document.addEventListener("keydown", (event) => press(event, state), true);
  window.addEventListener("popstate", (event) => {
    state.isLeft = true;
    if (!event.isTrusted) return;
    showOpened(state);
    const target = new URL(location.href);
    if (canTurn(target)) turn(target, state, true);
    else giveWay(state);
  });
  document.addEventListener("click", (event) => event.target.closest?.("[role=menuitemradio]") && keepTheme(state));
  const app = document.querySelector(APP);
  new MutationObserver(() => watchServer(state, app)).observe(app, { attributeFilter: [CONNECTION] });
  new MutationObserver(() => keepFocus(app)).observe(document.body, { subtree: true, attributeFilter: ["inert"] });
  return state;
}

function follow(event, state) {
  if (event.button !== 0 || isModified(event)) return;
  const link = event.target.closest?.("a[href]");
  const isOfMenu = link?.matches(MENU);
  if (!isOfMenu && !link?.closest(OURS)) return;
  const target = new URL(link.href, location.href);
  if (target.origin !== location.origin || !state.pages.has(target.pathname)) return;
  event.preventDefault();
  event.stopPropagation();
  const older = new URL(location.href).searchParams.get(AS_OF);
  if (isOfMenu && older) target.searchParams.set(AS_OF, older);
  if (link.dataset.opened) {
    const here = new URL(location.href);
    here.searchParams.set("opened", link.dataset.opened);
    history.replaceState(history.state, "", here);
  }
  if (target.pathname !== location.pathname || link.dataset.key) {
    document.querySelector("[data-testid=stMain]")?.scrollTo(0, 0);
  }
  if (canTurn(target)) turn(target, state);
  else visit(target, state);
}

function visit(target, state) {
  giveWay(state);
  history.pushState({}, "", target);
  tell();
}

function tell() {
  window.dispatchEvent(new PopStateEvent("popstate", { state: {} }));
}

function canTurn(target) {
  const view = document[TRANSCRIPT];
  if (!view?.root.isConnected || view.data.tells || target.pathname !== location.pathname) return false;
  const [wanted, here] = [target, new URL(view.data.address, location.href)].map((url) => url.searchParams);
  if (wanted.has("step") || (view.data.find && wanted.get("list") !== here.get("list"))) return false;
  return Boolean(wanted.get("episode")) && wanted.get("episode") !== view.episode;
}

// `isThere`: the browser's Back or Forward led there, which Streamlit knows.
async function turn(target, state, isThere = false) {
  const number = ++state.turns;
  const view = document[TRANSCRIPT];
  view.root.ariaBusy = "true";
  if (isThere) document.body.classList.add(FOLLOWING); // Streamlit may be first
  state.opening = view.opening(target);
  const answer = await state.opening;
  if (number !== state.turns) return; // the reader has gone on
  if (!answer || !canTurn(target)) return isThere ? giveWay(state) : visit(target, state);
  Object.assign(state, { ahead: target.searchParams.get("episode"), isLeft: !isThere || state.isLeft });
  document.body.classList.add(FOLLOWING);
  if (!isThere) history.pushState({}, "", target);
  document[TRANSCRIPT].turn(target, answer);
  keepPlace(state, state.ahead);
  await nextFrame();
  await Promise.race([expectTurns(), pause(AHEAD_MS)]);
  if (number !== state.turns) return;
  if (!isThere) tell();
  await land(state, number);
}

// Streamlit decides again what is shown: the reader leads it elsewhere.
function giveWay(state) {
  const number = ++state.turns;
  if (document.body.classList.contains(FOLLOWING)) land(state, number);
  state.ahead = null;
  if (document[TRANSCRIPT]) document[TRANSCRIPT].isAhead = false;
}

// Shows what Streamlit drew around the conversation, once it is of the address.
async function land(state, number) {
  do await settled(state);
  while (number === state.turns && !state.isSettled()); // the server may be away for long
  await nextFrame(); // Streamlit's last elements
  await nextFrame();
  if (number !== state.turns) return;
  Object.assign(state, { ahead: null, turns: state.turns + 1 });
  document.body.classList.remove(FOLLOWING);
  document[TRANSCRIPT].land();
}

// Reads ahead what n and p lead to.
async function expectTurns() {
  for (const link of ["n", "p"].map(linkOf)) {
    const target = link && new URL(link.href, location.href);
    if (target && canTurn(target)) await document[TRANSCRIPT].opening(target);
  }
}

// What Streamlit draws above the conversation does not move it.
async function keepPlace(state, episode) {
  const top = ({ root, scroller }) => root.getBoundingClientRect().top + scroller.scrollTop;
  let before = top(document[TRANSCRIPT]);
  for (let isEnd = false; !isEnd; ) {
    await nextFrame();
    const view = document[TRANSCRIPT];
    isEnd = state.ahead !== episode;
    if (!view.root.isConnected || (isEnd && state.ahead !== null)) return;
    const now = top(view);
    view.scroller.scrollTop += now - before;
    before = now;
  }
}

// A key that is pressed while the page still changes waits for it, so that the link followed is the new page's. A key that
// is held down follows one link at a time.
async function press(event, state) {
  const field = event.target.closest?.("input, textarea, select, [contenteditable=true]");
  if (!field && event.key === "?" && !event.ctrlKey && !event.metaKey && !event.altKey) return showKeys();
  if (field || isModified(event) || event.shiftKey || !linkOf(event.key)) return;
  event.preventDefault();
  if (event.repeat && state.pressed.length) return;
  if (state.pressed.push(event.key) > 1) return;
  for (; state.pressed.length; state.pressed.shift()) {
    if (state.ahead === null && !state.isSettled()) await settled(state);
    linkOf(state.pressed[0])?.click();
    await state.opening?.catch(() => null);
  }
}

function showKeys() {
  const dialog = element("dialog", "trajlake-keys", element("h2", "", "Keys"));
  const list = element("dl", "");
  const links = shownLinks("a[data-key]").map((link) => [link.dataset.key, link.textContent.trim()]);
  const others = Object.entries(KEYS).flatMap(([part, keys]) => (document.querySelector(part) ? Object.entries(keys) : []));
  for (const [key, does] of [...others, ...links, ["?", "this list"], ["Esc", "close"]]) {
    list.append(element("dt", "", ...key.split(" ").flatMap((one) => [element("kbd", "", one), " "])), element("dd", "", does));
  }
  dialog.append(list);
  dialog.onclick = dialog.onclose = () => dialog.remove();
  document.querySelector(APP).append(dialog);
  dialog.showModal();
}

// Streamlit would name its own command, which starts no viewer.
function watchServer(state, app) {
  clearTimeout(state.away);
  const isAway = app.getAttribute(CONNECTION) !== "CONNECTED";
  if (!isAway) {
    document.body.classList.remove("trajlake-away");
    document.querySelector(".trajlake-stopped")?.remove();
    if (state.isLeft) tell(); // Streamlit drops what it is told while the server is away
  } else if (!document.querySelector(".trajlake-stopped")) {
    state.away = setTimeout(() => {
      document.body.classList.add("trajlake-away");
      keepFocus(app);
      const words = "The viewer's server has stopped. Start it again; this page then goes on by itself.";
      const command = `${state.command} --no-browser --port ${location.port || 80}`;
      const bar = element("div", "trajlake-stopped", element("div", "", words), element("code", "", command));
      bar.setAttribute("role", "alert");
      document.body.append(bar);
    }, AWAY_MS);
  }
}

// The dialog that Streamlit opens then is not shown, and must not take the focus from what is read.
function keepFocus(app) {
  if (!document.body.classList.contains("trajlake-away")) return;
  for (let shell = app.closest("[inert]"); shell; shell = app.closest("[inert]")) shell.inert = false;
}

function element(tag, name, ...children) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  made.append(...children);
  return made;
}

function linkOf(key) {
  return shownLinks(`a[data-key="${CSS.escape(key)}"]`)[0];
}

function shownLinks(selector) {
  return [...document.querySelectorAll(selector)].filter((link) => link.getClientRects().length);
}

function isModified(event) {
  return event.ctrlKey || event.metaKey || event.shiftKey || event.altKey;
}

async function keepTheme(state) {
  await new Promise((resolve) => setTimeout(resolve)); // Streamlit writes after the click
  for (const key of Object.keys(localStorage).filter((name) => name.startsWith(state.theme))) {
    for (const page of state.pages) {
      localStorage.setItem(`${THEME}${page}-${key.slice(state.theme.length)}`, localStorage.getItem(key));
    }
  }
}

async function showOpened(state) {
  await settled(state);
  document.querySelector("tr.opened")?.scrollIntoView({ block: "center" });
}

async function showHere(state, here, place) {
  const wanted = location.pathname + here;
  if (wanted === state.here) return;
  state.here = wanted;
  await settled(state);
  place.host.style.scrollMarginTop = "5rem"; // the bar of the pages stays above
  place.host.scrollIntoView({ block: "start" });
}

async function settled(state) {
  const end = Date.now() + PATIENCE_MS;
  do {
    await pause(40);
  } while (!state.isSettled() && Date.now() < end);
}

function pause(milliseconds) {
  return new Promise((resolve) => setTimeout(resolve, milliseconds));
}

function nextFrame() {
  return new Promise((resolve) => requestAnimationFrame(resolve));
}
