// The next or previous episode in place of this one. Its conversation, head and bar are one answer of the server
// (screens/episodes.py), which is read ahead. Streamlit draws the rest afterwards; until then navigation.js hides that.

const OPENING = "/opening";
const MOST_OPENINGS = 6;
const openings = new Map();

// What an address shows first, as a promise; of null where the server gives no answer, and Streamlit is to say why.
function opening(view, target) {
  const address = new URL(OPENING + target.search, location.href);
  address.searchParams.set("of", new URL(view.data.asks, location.href).searchParams.get("of"));
  const { href } = address;
  const answer = openings.get(href) ?? fetchOpening(href);
  openings.delete(href);
  openings.set(href, answer);
  if (openings.size > MOST_OPENINGS) openings.delete(openings.keys().next().value);
  return answer;
}

async function fetchOpening(href) {
  const response = await fetch(href).catch(() => null);
  if (response?.ok) return response.json();
  openings.delete(href);
  if (response) console.warn(await response.text());
  return null;
}

// Draws an answer. What Streamlit drew of the bar and the head stays below it, for Streamlit to change.
function turn(view, target, { bar, head, credit, lines }) {
  const { hidden, tells, find } = view.data;
  const address = new URL(view.data.asks, location.href);
  address.searchParams.set("episode", target.searchParams.get("episode"));
  if (credit === null) address.searchParams.delete("credit");
  else address.searchParams.set("credit", credit);
  const asks = address.pathname + address.search;
  const data = { ...lines, hidden, address: target.search, asks, tells, find };
  const parent = view.root.parentElement;
  uncover();
  for (const [name, html] of [[".trajlake-bar", `<div class="trajlake-bar">${bar}</div>`], [".trajlake-head", head]]) {
    const drawn = document.querySelector(name)?.parentElement;
    const cover = drawn?.cloneNode(false);
    cover?.classList.add(COVER);
    if (cover) cover.innerHTML = html;
    drawn?.parentElement.append(cover);
  }
  const next = new Transcript(parent, data, textOf(data), view);
  Object.assign(next, { isAhead: true, again: view.again, lost: view.lost, tell: view.tell });
  parent[VIEW] = next;
  next.start();
}
const COVER = "trajlake-cover";

function uncover() {
  for (const cover of document.querySelectorAll(`.${COVER}`)) cover.remove();
}
