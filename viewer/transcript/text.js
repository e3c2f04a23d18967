// Foreign text as nodes: plain, Markdown of a safe subset (links and images are words), a terminal's colours, JSON.
// Only text nodes and elements made here reach the page, and no more of them than the limits say.

const MARKDOWN_LONGEST = 20000;
const MOST_BLOCKS = 300;
const MOST_PIECES = 600;
const MOST_LEAVES = 300;

function read(text, form, block) {
  if (!text) return [el("span", "empty", "(empty)")];
  if (form === "json" && block.value !== null) return [treeOf(block.value, 0, { left: MOST_LEAVES })];
  if (form === "markdown" && text.length <= MARKDOWN_LONGEST) return [markdown(text, block.maths)];
  return [form === "ansi" ? terminal(text) : el("pre", "", text.replace(COLOURS, ""))];
}

// ---------------------------------------------------------------- Markdown

const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const HEADING = /^(#{1,6}) +(.*)$/;
const ITEM = /^( {0,8})([-*+]|\d{1,3}[.)]) +(.*)$/;
const QUOTE = /^> ?(.*)$/;
const INLINE = /`([^`\n]+)`|\*\*([^*\n]+)\*\*|\*([^*\s][^*\n]*)\*|!?\[([^\]\n]*)\]\(([^)\s]*)\)/g;

function markdown(text, maths) {
  const root = el("div", "prose");
  const budget = { left: MOST_PIECES, maths };
  for (const part of cutAtFormulas(text, maths, isBlock)) {
    if (typeof part === "string") appendBlocks(root, part, budget);
    else root.append(el("div", "formula", formulaOf(part)));
  }
  return root;
}

function appendBlocks(root, text, budget) {
  const lines = text.split("\n");
  let place = 0;
  const while_ = (test) => {
    const first = place;
    while (place < lines.length && test(lines[place])) place++;
    return lines.slice(first, place);
  };
  while (place < lines.length) {
    if (root.childNodes.length >= MOST_BLOCKS) {
      root.append(el("pre", "", lines.slice(place).join("\n")));
      break;
    }
    const line = lines[place];
    const fence = FENCE.exec(line)?.[1];
    if (fence) {
      place++;
      root.append(el("pre", "code", while_((one) => !one.trimStart().startsWith(fence)).join("\n")));
      place++;
    } else if (HEADING.test(line)) {
      root.append(el("p", "heading", ...inline(HEADING.exec(line)[2], budget)));
      place++;
    } else if (ITEM.test(line)) {
      root.append(listOf(while_((one) => ITEM.test(one)), budget));
    } else if (QUOTE.test(line)) {
      const quoted = while_((one) => QUOTE.test(one)).map((one) => QUOTE.exec(one)[1]);
      root.append(el("blockquote", "", ...inline(quoted.join("\n"), budget)));
    } else if (!line.trim()) {
      place++;
    } else {
      const isPlain = (one) => one.trim() && ![FENCE, HEADING, ITEM, QUOTE].some((form) => form.test(one));
      root.append(el("p", "", ...inline(while_(isPlain).join("\n"), budget)));
    }
  }
}

function listOf(lines, budget) {
  const list = el("div", "items");
  for (const line of lines) {
    const [, indent, sign, text] = ITEM.exec(line);
    const item = el("div", "", el("span", "sign", /\d/.test(sign) ? sign : "\u2022"), " ", ...inline(text, budget));
    item.style.marginLeft = `${indent.length / 2}em`;
    list.append(item);
  }
  return list;
}

// Code is what it is; everything else may hold formulas, also what is bold.
function inline(text, budget) {
  const isInline = (tree) => !isBlock(tree);
  const pieces = text.split(/(`[^`\n]+`)/).flatMap((piece) =>
    piece.startsWith("`") ? [piece] : cutAtFormulas(piece, budget.maths, isInline),
  );
  const trees = pieces.filter((piece) => typeof piece !== "string");
  // A formula is one letter to the marks around it.
  const joined = pieces.map((piece) => (typeof piece === "string" ? piece.replaceAll(FORMULA, "") : FORMULA)).join("");
  const nodes = marked(joined, budget);
  return trees.length ? nodes.flatMap((node) => withFormulas(node, trees)) : nodes;
}

const FORMULA = "\ufdd0";

function withFormulas(node, trees) {
  if (typeof node !== "string") {
    node.replaceChildren(...[...node.childNodes].flatMap((child) => withFormulas(child.data, trees)));
    return [node];
  }
  return node.split(FORMULA).flatMap((piece, place) => (place ? [formulaOf(trees.shift()), piece] : [piece]));
}

function marked(text, budget) {
  const nodes = [];
  let end = 0;
  for (const found of text.matchAll(INLINE)) {
    if (budget.left-- <= 0) break;
    nodes.push(text.slice(end, found.index));
    end = found.index + found[0].length;
    const [whole, code, bold, slanted, name, address] = found;
    if (code !== undefined) nodes.push(el("code", "", code));
    else if (bold !== undefined) nodes.push(el("strong", "", bold));
    else if (slanted !== undefined) nodes.push(el("em", "", slanted));
    else nodes.push(whole.startsWith("!") ? whole : name, ...(whole.startsWith("!") ? [] : [el("span", "address", ` (${address})`)]));
  }
  return [...nodes, text.slice(end)];
}

// ---------------------------------------------------------------- A terminal's colours

const COLOURS = /\x1b\[([0-9;]{0,40})m/g;

function terminal(text) {
  const pre = el("pre", "terminal");
  const state = {};
  let end = 0;
  let left = MOST_PIECES;
  for (const found of text.matchAll(COLOURS)) {
    if (left-- <= 0) break;
    pre.append(coloured(text.slice(end, found.index), state));
    end = found.index + found[0].length;
    paint(state, found[1].split(";").map(Number));
  }
  pre.append(coloured(text.slice(end).replace(COLOURS, ""), state));
  return pre;
}

function coloured(text, state) {
  if (!Object.keys(state).length) return text;
  const piece = el("span", Object.keys(state).filter((name) => state[name] === true).join(" "), text);
  for (const name of ["color", "backgroundColor"]) if (state[name]) piece.style[name] = state[name];
  return piece;
}

const STYLES = { 1: "bold", 2: "dim", 3: "slanted", 4: "underlined" };
const SIXTEEN = "#5c6370 #d04545 #3f9142 #b58900 #2f80d0 #a355b9 #2a9aa0 #9aa0a8 #808892 #e06c6c #5bb55e #d3a72c #62a5e8 #c678dd #56b6c2 #c8ccd2".split(" ");

function paint(state, codes) {
  for (let place = 0; place < codes.length; place++) {
    const code = codes[place];
    if (code === 0) for (const name of Object.keys(state)) delete state[name];
    else if (STYLES[code]) state[STYLES[code]] = true;
    else if (code === 39) delete state.color;
    else if (code === 49) delete state.backgroundColor;
    else if (code >= 30 && code <= 37) state.color = SIXTEEN[code - 30];
    else if (code >= 90 && code <= 97) state.color = SIXTEEN[code - 82];
    else if (code >= 40 && code <= 47) state.backgroundColor = SIXTEEN[code - 40];
    else if (code >= 100 && code <= 107) state.backgroundColor = SIXTEEN[code - 92];
    else if (code === 38 || code === 48) {
      const [colour, used] = extended(codes.slice(place + 1));
      if (colour) state[code === 38 ? "color" : "backgroundColor"] = colour;
      place += used;
    }
  }
}

// One of 256 colours, or three bytes: the colour, and how many codes told it.
function extended([kind, ...rest]) {
  if (kind === 2) return [`rgb(${rest.slice(0, 3).map((one) => Math.min(255, one || 0)).join(",")})`, 4];
  if (kind !== 5) return [undefined, 1];
  const number = Math.min(255, rest[0] || 0);
  if (number < 16) return [SIXTEEN[number], 2];
  if (number >= 232) return [`rgb(${Array(3).fill(8 + 10 * (number - 232)).join(",")})`, 2];
  const cube = number - 16;
  const steps = [Math.floor(cube / 36), Math.floor(cube / 6) % 6, cube % 6];
  return [`rgb(${steps.map((one) => (one ? 55 + 40 * one : 0)).join(",")})`, 2];
}

// ---------------------------------------------------------------- JSON

// Line breaks inside strings are line breaks.
function treeOf(value, depth, budget) {
  if (value === null || typeof value !== "object") {
    return el("span", typeof value === "string" ? "string" : "literal", typeof value === "string" ? value : String(value));
  }
  const isList = Array.isArray(value);
  const entries = Object.entries(value);
  const rows = el("div", "tree");
  for (const [name, one] of entries) {
    if (budget.left-- <= 0) {
      rows.append(el("div", "size", "more: as written"));
      break;
    }
    const isInner = one !== null && typeof one === "object" && Object.keys(one).length > 0;
    rows.append(el("div", "entry", el("span", "key", isList ? `${name}.` : `${name}:`), " ", isInner ? inner(one, depth, budget) : leaf(one, depth, budget)));
  }
  if (!entries.length) rows.append(isList ? "[]" : "{}");
  return rows;
}

function leaf(value, depth, budget) {
  if (value !== null && typeof value === "object") return el("span", "literal", Array.isArray(value) ? "[]" : "{}");
  return treeOf(value, depth, budget);
}

function inner(value, depth, budget) {
  const count = Object.keys(value).length;
  const made = el("details", "", el("summary", "", Array.isArray(value) ? `[${count}]` : `{${count}}`));
  made.open = depth < 2 && count <= 20;
  made.append(treeOf(value, depth + 1, budget));
  return made;
}
