// The line of a step: what it did, its reward and advantage, what is wrong with it; and of repeats that are folded.

function headings(data) {
  const row = el("div", "headings", el("span", "", "Step"), el("span", "", "Action"));
  row.append(el("span", "number", data.rewarded ? "Reward" : ""));
  row.append(el("span", "number", data.credited ? "A" : ""), el("span"));
  row.setAttribute("aria-hidden", "true");
  return row;
}

function lineOf(view, item) {
  const row = el("div", "step");
  row.dataset.step = item.index;
  if (item.fold) {
    row.classList.add("fold");
    row.append(foldHead(view, item));
    return row;
  }
  const isOpen = view.opened.has(item.index);
  row.append(view.lines.has(item.index) ? stepHead(view, item) : endHead(item));
  const head = row.firstChild;
  head.setAttribute("aria-expanded", String(isOpen));
  head.onclick = () => view.toggle(item.index);
  if (view.found.has(item.index)) row.classList.add("found");
  if (isOpen) row.append(bodyOf(view, item.index));
  return row;
}

function stepHead(view, line) {
  const what = el("span", "what");
  if (line.tool !== null) what.append(el("b", "tool", line.tool), " ");
  what.append(line.text);
  if (line.more) what.append(el("i", "", ` and ${line.more} more`));
  const side = el("span", "side", ...line.marks.map(chip), ...line.scores.map(([scorer, value]) => score(scorer, value)));
  const head = el("button", "head", el("span", "index", String(line.index)), el("span", "did", what, side));
  const reward = el("span", "number", view.data.rewarded ? (line.reward ?? "unknown") : "");
  if (view.data.rewarded && line.reward === null) reward.classList.add("unknown");
  head.append(reward, ...advantage(view, line));
  head.type = "button";
  return head;
}

function endHead(end) {
  const head = el("button", "head", el("span", "index", "\u00b7"), el("span", "did", el("span", "what", end.text)));
  head.type = "button";
  return head;
}

function foldHead(view, { fold, parts }) {
  const names = parts.map((line) => [line.tool, line.text].filter(Boolean).join(" ") || "(empty)");
  const what = el("span", "what", `${names.join(" \u2194 ")} `, el("b", "", `\u00d7${fold.times}`));
  const isOpen = view.unfolded.has(fold.first);
  const head = el("button", "head", el("span", "index", `${fold.first}\u2013${fold.last}`), el("span", "did", what));
  head.type = "button";
  head.title = "The same again and again: opens and closes the steps";
  head.setAttribute("aria-expanded", String(isOpen));
  head.onclick = () => view.toggleFold(fold.first);
  return head;
}

function advantage(view, line) {
  if (!view.data.credited) return [el("span"), el("span")];
  if (line.advantage === null) return [el("span", "number unknown", "\u2013"), el("span")];
  const number = el("span", "number", line.advantage.number);
  if (line.advantage.bar === null) number.classList.add("unknown");
  return [number, barOf(line.advantage.bar)];
}

// A bar from the centre: to the right above 0, to the left below; a dashed line where the value is not known.
function barOf(bar) {
  if (bar === null) return el("span", "bar unknown");
  const fill = el("i", bar[0] < 50 ? "negative" : "positive");
  fill.style.left = `${bar[0]}%`;
  fill.style.width = `${bar[1]}%`;
  return el("span", "bar", fill);
}

function chip([label, colour, explanation]) {
  const made = el("span", `chip ${colour}`, label);
  if (explanation) made.title = explanation;
  return made;
}

function score(scorer, value) {
  return el("span", "score", `${scorer} `, el("b", "", value));
}
