// An opened step: its texts, and beside them its ledger, what is known of it, and its scores.

const ALL = 500000;
const COPIED_MS = 1200;

function bodyOf(view, index) {
  const body = el("div", "body");
  body.style.minHeight = `${view.heightOf(index)}px`;
  view.within(body, () => fillBody(view, index, body));
  return body;
}

// Fills the body of a step; false while its texts are asked for, and until then it keeps its height.
function fillBody(view, index, body) {
  const content = view.contents.get(index);
  if (!content) {
    body.replaceChildren(el("div", "waiting", view.data.held ? "This step is not in the file." : "Reading the step"));
    view.asking.step(index);
    return false;
  }
  body.style.minHeight = "";
  if (view.isConversation) {
    fillTurn(view, index, body, content);
    view.heights.set(index, body.offsetHeight);
    highlight(view);
    return true;
  }
  const texts = el("div", "texts", ...paired(content.blocks.map((block) => blockOf(view, index, block))));
  if (!content.blocks.length) texts.append(el("div", "waiting", "(empty)"));
  if (content.strips) texts.append(...content.strips.map(stripOf));
  body.replaceChildren(texts, ...(content.ledger ? [asideOf(view, content)] : []));
  body.classList.toggle("alone", !content.ledger);
  view.heights.set(index, body.offsetHeight);
  highlight(view);
  return true;
}

// A call and its result are one block.
function paired(blocks) {
  const texts = el("div");
  for (const block of blocks) {
    if (block.classList.contains("result")) joinResult(texts, block);
    else texts.append(block.classList.contains("call") ? el("div", "pair", block) : block);
  }
  return texts.children;
}

// The result of an action that is no call is a block of its own.
function joinResult(texts, result) {
  if (texts.lastChild?.classList.contains("pair")) texts.lastChild.append(result);
  else texts.append(el("div", "pair", result));
}

function blockOf(view, index, block, title) {
  const made = el("details", `block ${block.kind}`);
  // The outline opens a step for its call: what the step before has shown is folded, and what failed is not.
  const isOutline = title === undefined;
  const isFolded = block.is_folded || (isOutline && isKnown(block, index) && block.length > LONG_OUTPUT);
  made.open = !isFolded || (isOutline && block.is_failed);
  const name = title ?? (block.kind === "call" ? [el("b", "tool", block.label)] : [labelOf(block, index)]);
  const long = isFolded ? [el("span", "size", `${block.length.toLocaleString("en")} characters`)] : [];
  const tools = el("span", "tools");
  const text = el("div", "text");
  made.append(el("summary", "", ...name, " ", ...(block.badges ?? []).map(chip), ...long), tools, text);
  let { text: whole, html } = block;
  let isWritten = !html;
  const isCut = () => whole === block.text && block.shown < block.length && (isWritten || !block.is_whole);
  const show = () => {
    text.replaceChildren(...read(whole, isWritten ? "" : html), ...block.images.map(imageOf));
    text.classList.toggle("partial", isCut() || (whole !== block.text && block.length > ALL));
    if (isCut()) text.append(view.data.held ? el("div", "size", cutOff(block)) : more(block, load));
    if (whole !== block.text && block.length > ALL) text.append(el("div", "size", beyond(block)));
    highlight(view);
  };
  const load = async () => {
    const answer = await view.asking.other({ whole: index, block: block.name });
    if (answer.whole) ({ text: whole, html } = answer.whole);
    text.classList.add("all");
    show();
  };
  const isLoaded = () => whole !== block.text || block.shown === block.length || view.data.held;
  if (html) tools.append(switchOf((isPlain) => show((isWritten = isPlain))));
  tools.append(copyOf(async () => (isLoaded() ? undefined : load()), () => whole));
  show();
  return made;
}

// In the outline, what an earlier step has shown says that it is the reply to the step before.
function labelOf(block, index) {
  return isKnown(block, index) ? `${block.label}: the reply to step ${index - 1}` : block.label;
}

function isKnown(block, index) {
  return ["state", "message"].includes(block.kind) && block.is_repeated && index > 0;
}

function more(block, load) {
  const [all, length] = [ALL, block.length].map((number) => number.toLocaleString("en"));
  const made = button(block.length > ALL ? `Show ${all} of ${length} characters` : `Show all ${length} characters`);
  made.onclick = load;
  return made;
}

function cutOff(block) {
  const [shown, length] = [block.shown, block.length].map((number) => number.toLocaleString("en"));
  return `The first ${shown} of ${length} characters; the viewer has the rest.`;
}

function beyond(block) {
  const [all, length] = [ALL, block.length].map((number) => number.toLocaleString("en"));
  return `The first ${all} of ${length} characters; trajlake sql has the rest.`;
}

function switchOf(show) {
  const made = button("as written", "Show the text as it was written");
  let isPlain = false;
  made.onclick = (event) => {
    event.preventDefault();
    isPlain = !isPlain;
    made.textContent = isPlain ? "formatted" : "as written";
    show(isPlain);
  };
  return made;
}

function copyOf(prepare, text) {
  const made = button("copy", "Copy the text");
  made.onclick = async (event) => {
    event.preventDefault();
    await prepare();
    await navigator.clipboard.writeText(text());
    made.textContent = "copied";
    setTimeout(() => (made.textContent = "copy"), COPIED_MS);
  };
  return made;
}

function imageOf(address) {
  const image = el("img");
  image.src = address;
  image.alt = "image of the message";
  image.loading = "lazy";
  return image;
}

function asideOf(view, content) {
  const aside = el("div", "aside");
  const ledger = el("div", content.disagree ? "ledger disagree" : "ledger");
  for (const { label, number, bar } of content.ledger) {
    const shown = el("span", bar === null ? "number unknown" : "number", number);
    ledger.append(el("span", "label", ...subscripts(label)), shown, barOf(bar));
  }
  aside.append(ledger);
  if (content.marks.length) aside.append(el("div", "chips", ...content.marks.map(chip)));
  const links = [content.shared, ...content.branches].filter(Boolean).map(({ text, href }) => {
    const link = el(href ? "a" : "span", "", text);
    if (href) link.href = href;
    return link;
  });
  aside.append(...links);
  if (content.shared) doubt(view, content, links[0]);
  for (const { scorer, value, why } of content.scores) {
    aside.append(el("div", "judged", el("b", "", scorer), ` ${value} `, el("span", "why", why)));
  }
  for (const [name, value] of content.facts) aside.append(el("div", "fact", el("span", "label", name), ` ${value}`));
  if (!view.data.held) aside.append(el("div", "chips", linkOf(view, content.index), callButton(view, content.index), tokensButton(view, content.index)));
  return aside;
}

// How many ways lead into the shared state is read from its siblings' steps, which takes longer than the step.
async function doubt(view, content, link) {
  content.doubt ??= view.asking.other({ shared: content.index });
  link.textContent = (await content.doubt).shared?.text ?? link.textContent;
}

function linkOf(view, index) {
  const address = new URL(view.data.address || "?", location.href);
  address.searchParams.set("step", index);
  return copyLabelled("copy link", () => address.href);
}

function copyLabelled(label, text) {
  const made = copyOf(async () => undefined, text);
  made.textContent = label;
  return made;
}

// A name like A_E with its index below the line.
function subscripts(label) {
  return label.split(/(_[A-Z])/).map((part) => (/^_[A-Z]$/.test(part) ? el("sub", "", part[1]) : part));
}
