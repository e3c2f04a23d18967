// Find in all steps and in the messages before and after them, unopened ones included: the server tells which hold the
// text; the page marks it where it is drawn.

const MOST_MARKS = 200; // of a step
const MOST_TERMS = 20;
const FOUND = "trajlake-found";
const SLOW_MS = 300; // a status that changes sooner would flicker

function findField(view) {
  const field = el("input");
  field.type = "search";
  field.placeholder = "Find in the episode";
  field.setAttribute("aria-label", "Find in the episode");
  field.value = view.asked;
  view.findStatus = el("span", "status");
  view.findStatus.setAttribute("role", "status");
  view.findNext = button("Next hit", "Go to the next step with the text (Enter in the field)");
  view.findNext.hidden = true;
  view.findNext.onclick = () => goToFound(view, 1);
  // One question at a time: letters that are typed before its answer are asked for together.
  let isAsking = false;
  field.oninput = async () => {
    if (isAsking) return;
    isAsking = true;
    try {
      for (let text = null; text !== field.value; ) await ask(view, (text = field.value));
    } finally {
      isAsking = false;
    }
  };
  field.onkeydown = (event) => {
    if (event.key === "Escape") {
      event.preventDefault();
      if (!field.value) return field.blur();
      field.value = "";
      field.oninput();
    }
    if (event.key !== "Enter") return;
    if (view.needle === field.value) goToFound(view, event.shiftKey ? -1 : 1);
    else ask(view, field.value);
  };
  return el("span", "find", field, view.findStatus, view.findNext);
}

// The terms of a text as the server reads it (list_terms in transcripts.py): words, and texts in quotes.
function termsOf(text) {
  const matches = [...text.matchAll(/"([^"]+)"?|([^\s"]+)/g)].map(([, quoted, word]) => quoted ?? word);
  const terms = [...new Set(matches.map((term) => term.trim().replace(/\s+/g, " ").toLowerCase()))];
  const words = terms.filter((term) => /[\p{L}\p{N}_]/u.test(term));
  if (words.length && words.length <= MOST_TERMS) return words;
  return text.trim() ? [text.toLowerCase()] : [];
}

// isAtFirst: the reader came with this text, to a step or to the top, and stays there.
async function ask(view, text, isAtFirst = false) {
  view.asked = text;
  clearTimeout(view.slow);
  view.slow = setTimeout(() => (view.findStatus.textContent = "searching"), SLOW_MS);
  const answer = text.trim() ? await view.asking.other({ find: text }) : { find: [] };
  if (view.asked !== text) return;
  clearTimeout(view.slow);
  if (answer.find) showFound(view, text, answer, isAtFirst);
  else view.findStatus.textContent = "no answer";
}

function showFound(view, text, { find: steps, is_name: isName }, isAtFirst) {
  view.needle = text;
  view.hits = steps;
  view.found = new Set(steps);
  view.hit = isAtFirst ? steps.indexOf(view.step) : -1;
  view.layout();
  highlight(view);
  if (text && steps.length && !isAtFirst) goToFound(view, 1);
  else if (!text) view.findStatus.textContent = "";
  else if (steps.length) view.findStatus.textContent = whichHit(view);
  else view.findStatus.textContent = isName ? "only as an id of this episode, its group or its task" : "nowhere in this episode";
  view.findNext.hidden = !steps.length;
}

function whichHit(view) {
  const count = view.hits.length;
  const noun = view.hits.every((index) => view.lines.has(index)) ? "step" : "place";
  const places = `${count} ${count === 1 ? noun : `${noun}s`}`;
  if (view.hit >= 0) return `${view.hit + 1} of ${places}`;
  const [first] = view.hits;
  const isAfter = view.data.ends.some(({ index }) => index === first);
  return `in ${places}, first ${first < 0 ? "before the steps" : isAfter ? "after the steps" : `at step ${first}`}`;
}

function goToFound(view, by) {
  if (!view.hits?.length) return;
  view.hit = (view.hit + by + view.hits.length) % view.hits.length;
  view.findStatus.textContent = whichHit(view);
  const index = view.hits[view.hit];
  if (!view.isConversation) view.opened.add(index);
  const row = view.reveal(index);
  if (!row) return;
  if (!row.querySelector(".body")) row.replaceWith(view.draw(view.item(index)));
  view.pinned = index;
  highlight(view);
  view.row(index).scrollIntoView({ block: "start" });
}

// Marks are ranges that the browser paints, not elements.
function highlight(view) {
  if (!CSS.highlights) return;
  CSS.highlights.delete(FOUND);
  const terms = termsOf(view.needle ?? "");
  if (!terms.length) return;
  const ranges = [];
  const phrase = [view.needle.trim().toLowerCase()];
  const long = terms.filter((term) => term.length > 1);
  const words = long.length ? long : terms;
  // A step with the text as one shows where; in another that counts, all its words are marked, not letters of others.
  for (const place of view.list.querySelectorAll(".texts")) {
    const isCounted = terms.length === 1 || view.rowOf(place)?.classList.contains("found");
    const marks = markTexts(place, phrase);
    ranges.push(...(marks.length || !isCounted ? marks : markTexts(place, words)));
  }
  CSS.highlights.set(FOUND, new Highlight(...ranges));
  if (view.hit < 0) return; // a search of the list came along, and the reader has not gone to a hit
  for (const range of ranges) {
    const { parentElement: place } = range.startContainer;
    const block = place.closest("details");
    if (block) block.open = true;
    place.closest(BOXES)?.classList.add("whole");
  }
}

function markTexts(place, texts) {
  const ranges = [];
  const walker = document.createTreeWalker(place, NodeFilter.SHOW_TEXT);
  while (ranges.length < MOST_MARKS && walker.nextNode()) for (const text of texts) mark(walker.currentNode, text, ranges);
  return ranges;
}

function mark(node, needle, ranges) {
  const text = node.data.toLowerCase();
  if (text.length !== node.data.length) return;
  for (let at = text.indexOf(needle); at >= 0 && ranges.length < MOST_MARKS; at = text.indexOf(needle, at + needle.length)) {
    const range = new Range();
    range.setStart(node, at);
    range.setEnd(node, at + needle.length);
    ranges.push(range);
  }
}
