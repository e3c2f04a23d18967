// The conversation: every message once, in order, with its role and number; a section a step, and in the margin the
// step's number and advantage. What a step's ledger says stands next to its messages once the reader opens it.

const VIEWS = ["conversation", "outline"];
const STORED_VIEW = "trajlake.view";
const PREVIEW = 160;
// A folded output, and folded reasoning, show their first lines.
const PREVIEW_LINES = 4;
const PREVIEW_OUTPUT = 600;
const ESCAPES = /\\x1b\[[0-9;?]*[A-Za-z]/g;

// The address wins over what the reader chose last; a file has no address that could name a view.
function chooseView(data) {
  const named = data.held ? null : new URL(location.href).searchParams.get("view");
  let stored = null;
  try {
    stored = localStorage.getItem(STORED_VIEW);
  } catch {
    // A browser may forbid storage.
  }
  return [named, stored].find((name) => VIEWS.includes(name)) ?? VIEWS[0];
}

function rememberView(view) {
  try {
    localStorage.setItem(STORED_VIEW, view.mode);
  } catch {
    // A browser may forbid storage.
  }
  if (view.data.held) return;
  const here = new URL(location.href);
  here.searchParams.set("view", view.mode);
  history.replaceState(history.state, "", here);
}

function viewSwitch(view) {
  const buttons = VIEWS.map((name) => {
    const made = button(name[0].toUpperCase() + name.slice(1), `Show the ${name} (key v)`);
    made.setAttribute("aria-pressed", String(view.mode === name));
    made.onclick = () => view.mode !== name && view.switchView();
    return made;
  });
  return el("span", "views", ...buttons);
}

function turnOf(view, item) {
  const row = el("div", view.lines.has(item.index) ? "step turn" : "step turn end");
  row.dataset.step = item.index;
  row.append(marginOf(view, item), bodyOf(view, item.index));
  if (view.found.has(item.index)) row.classList.add("found");
  return row;
}

function marginOf(view, item) {
  const line = view.lines.get(item.index);
  const head = el("button", "head margin", el("span", "index", line ? String(item.index) : ""));
  head.type = "button";
  if (!line) {
    head.setAttribute("aria-label", item.text);
    return head;
  }
  const number = view.data.credited ? `, advantage ${line.advantage?.number ?? "unknown"}` : "";
  head.title = `Step ${item.index}${number}. A click shows its ledger.`;
  head.setAttribute("aria-label", `Step ${item.index}${number}`);
  head.setAttribute("aria-expanded", String(view.opened.has(item.index)));
  if (view.data.credited) head.append(barOf(line.advantage?.bar ?? null));
  head.onclick = () => view.toggle(item.index);
  return head;
}

function fillTurn(view, index, body, content) {
  const first = view.item(index).number;
  const texts = el("div", "texts", ...messagesOf(view, index, content, first));
  const isOpen = view.opened.has(index) && content.ledger;
  if (isOpen && content.strips) texts.append(...content.strips.map(stripOf));
  body.replaceChildren(texts, ...(isOpen ? [asideOf(view, content)] : []));
  body.classList.toggle("alone", !isOpen);
  view.asking.next(Array.from({ length: BATCH }, (_, ahead) => index + 1 + ahead));
}

function messagesOf(view, index, content, first) {
  const messages = [];
  let last = null;
  for (const block of content.blocks) {
    if (block.is_repeated) continue;
    const number = block.place === null ? null : first + block.place;
    if (block.kind === "result") {
      joinResult(last.message, messageBlock(view, index, block, [`${block.label} `, numberOf(number)]));
    } else if (block.kind === "message" || block.kind === "state") {
      last = null;
      const name = block.kind === "state" ? block.label : block.role;
      const made = messageBlock(view, index, block, [el("b", "role", name), " ", numberOf(number)]);
      messages.push(el("section", `speech by-${roleOf(block)}`, made));
    } else {
      last ??= decisionOf(view, index, content, number, messages);
      const made = messageBlock(view, index, block, block.kind === "call" ? [el("b", "tool", block.label)] : [block.label]);
      last.message.append(block.kind === "call" ? el("div", "pair", made) : made);
    }
  }
  messages.push(...(content.branches ?? []).map((branch) => branchOf(view, branch)));
  return messages;
}

function decisionOf(view, index, content, number, messages) {
  const scores = view.lines.get(index)?.scores ?? [];
  const who = el("div", "who", el("b", "role", "assistant"), " ", numberOf(number), ...content.badges.map(chip));
  who.append(...scores.map(([scorer, value]) => score(scorer, value)));
  const message = el("section", "speech by-assistant", who);
  messages.push(message);
  return { message };
}

function roleOf({ kind, role }) {
  if (kind === "state" || role === "tool" || role === "function" || role === "environment") return "tool";
  return ["user", "assistant"].includes(role) ? role : "system";
}

function numberOf(number) {
  return el("span", "index", number === null ? "" : `#${number}`);
}

// A block that keeps whether the reader folded it, and shows its beginning while it is folded.
function messageBlock(view, index, block, name) {
  const made = blockOf(view, index, block, name);
  const key = `${index}/${block.name}`;
  const [summary] = made.children;
  made.open = view.folds.get(key) ?? view.allUnfolded ?? !block.is_folded;
  const preview = el("span", "preview");
  preview.dataset.text = beginningOf(block);
  summary.append(preview);
  summary.onclick = () => view.folds.set(key, !made.open);
  return made;
}

function beginningOf(block) {
  if (!["result", "reasoning"].includes(block.kind) && roleOf(block) !== "tool") return block.text.slice(0, PREVIEW);
  const lines = block.text.slice(0, PREVIEW_OUTPUT).replace(ESCAPES, "").split("\n");
  return lines.filter((line) => line.trim()).slice(0, PREVIEW_LINES).join("\n");
}

// An episode that began at the step, such as a sub-agent's: a fold with its conversation, which is asked for when it is
// opened. A file that does not hold the episode only names it.
function branchOf(view, { text, words, href, episode }) {
  const name = el("b", "role", text);
  const preview = el("span", "preview");
  preview.dataset.text = words;
  if (!href) return el("section", "speech branch", name, " ", preview);
  const link = el("a", "", "own page");
  link.href = href;
  const made = el("details", "speech branch", el("summary", "", name, " ", preview, " ", link));
  const path = `${view.path}/${episode}`; // episodes that name each other as parents do not open each other
  made.ontoggle = async () => {
    if (!made.open) view.branches.delete(path);
    if (!made.open || made.querySelector(".trajlake-transcript")) return;
    const asks = new URL(view.data.asks, location.href);
    asks.searchParams.set("episode", episode);
    const lines = view.branches.get(path) ?? (await view.asking.other({ lines: 1, episode })).lines;
    if (!lines || !made.isConnected) return;
    view.branches.set(path, lines);
    const data = { ...lines, asks: asks.href, address: href, hidden: view.data.hidden };
    new Transcript(made, data, "", undefined, view, path);
  };
  made.open = view.branches.has(path);
  return made;
}
