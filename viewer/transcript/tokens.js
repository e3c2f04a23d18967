// The token strip: a column a token, a row for each thing that is known of it, on a canvas however many there are.
// The pointer, or the arrow keys on the strip, tell one token in words.

const CELL = 7;
const TRACK = 9;
const GAP = 5;
const LOWEST = -5;
const FARTHEST = 0.7;
const MOST_ENTROPY = 3;
const STRENGTH = { stopped: 1, masked: 0.5, limited: 0.7, kept: 0.12 };

function tokensButton(view, index) {
  const made = button("Tokens", "The tokens of the action: log-probabilities and masks");
  made.onclick = async () => {
    const answer = await view.asking.other({ tokens: index });
    const content = view.contents.get(index);
    const body = view.row(index)?.querySelector(".body");
    if (!answer.tokens || !content) return;
    content.strips = answer.tokens.length ? answer.tokens : [null];
    if (body?.isFilled) fillBody(view, index, body);
  };
  return made;
}

function stripOf(strip) {
  if (strip === null) return el("div", "strip", "The lake holds no tokens of this step.");
  const canvas = el("canvas");
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", strip.title);
  const said = el("div", "said", "Point at a token, or walk with the arrow keys.");
  said.setAttribute("role", "status");
  const state = { at: -1 };
  const draw = () => paintTokens(canvas, strip, state);
  const tell = (place) => {
    state.at = Math.max(0, Math.min(place, strip.ids.length - 1));
    said.textContent = words(strip, state.at);
    draw();
  };
  canvas.onmousemove = (event) => tell(tokenAt(canvas, strip, event.offsetX, event.offsetY));
  canvas.onkeydown = (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns(canvas), ArrowDown: columns(canvas) }[event.key];
    if (by === undefined || !strip.ids.length) return;
    event.preventDefault();
    tell(state.at + by);
  };
  new ResizeObserver(draw).observe(canvas);
  const legend = [...strip.tracks.map(({ label }) => label), "sampled by the policy"].join(" \u00b7 ");
  const [facts, notes] = [strip.facts, strip.notes].map((lines) => lines.map((line) => el("div", "size", line)));
  const above = el("div", "size", `From above: ${legend}`);
  return el("div", "strip", el("div", "", strip.title), ...facts, above, canvas, said, ...notes);
}

function columns(canvas) {
  return Math.max(1, Math.floor(canvas.clientWidth / CELL));
}

function tall(strip) {
  return (strip.tracks.length + 1) * TRACK + GAP;
}

function tokenAt(canvas, strip, x, y) {
  return Math.floor(y / tall(strip)) * columns(canvas) + Math.min(Math.floor(x / CELL), columns(canvas) - 1);
}

function words(strip, place) {
  const known = strip.tracks.map(({ label, kind, values, names }) => {
    const value = values[place];
    if (kind === "fate") return `${label}: ${names[value] ?? "carried no loss"}`;
    if (value === null || value === undefined) return `${label} unknown`;
    return kind === "ratio" ? `${label} ${value.toFixed(3)} (ratio ${Math.exp(value).toFixed(3)})` : `${label} ${value.toFixed(3)}`;
  });
  const masks = [strip.sampled[place] ? "sampled" : "not sampled by the policy", strip.constrained?.[place] && "choice constrained"];
  return [`token ${place}: id ${strip.ids[place]}`, ...known, ...masks].filter(Boolean).join(", ");
}

function paintTokens(canvas, strip, state) {
  const across = columns(canvas);
  const height = Math.max(1, Math.ceil(strip.ids.length / across)) * tall(strip);
  const ratio = window.devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  canvas.width = canvas.clientWidth * ratio;
  canvas.height = height * ratio;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const style = getComputedStyle(canvas);
  const colour = Object.fromEntries(["positive", "negative", "unknown", "accent"].map((name) => [name, style.getPropertyValue(`--trajlake-${name}`)]));
  for (let place = 0; place < strip.ids.length; place++) {
    const left = (place % across) * CELL;
    const top = Math.floor(place / across) * tall(strip);
    strip.tracks.forEach((track, row) => paintCell(pen, colour, track, track.values[place], left, top + row * TRACK));
    pen.globalAlpha = 1;
    pen.fillStyle = strip.constrained?.[place] ? colour.negative : colour.accent;
    const under = top + strip.tracks.length * TRACK;
    if (strip.sampled[place]) pen.fillRect(left, under + 2, CELL - 1, TRACK - 5);
    if (place === state.at) pen.fillRect(left, under + TRACK - 2, CELL - 1, 3);
  }
}

// Darker is less likely, or less sure; blue above the policy that sampled, orange below; of a clip orange is what has no
// gradient, blue what counts with a weight at its limit; a thin line where nothing is known.
function paintCell(pen, colour, { kind, tones }, value, left, top) {
  if (value === null || value === undefined) {
    pen.globalAlpha = 1;
    pen.fillStyle = colour.unknown;
    pen.fillRect(left, top + TRACK / 2 - 0.5, CELL - 1, 1);
    return;
  }
  const [ink, size] = {
    logprob: () => [colour.negative, value / LOWEST],
    ratio: () => [value >= 0 ? colour.positive : colour.negative, Math.abs(value) / FARTHEST],
    entropy: () => [colour.accent, value / MOST_ENTROPY],
    fate: () => [/limited|kept/.test(tones[value]) ? colour.positive : colour.negative, STRENGTH[tones[value]]],
  }[kind]();
  pen.fillStyle = ink;
  pen.globalAlpha = kind === "fate" ? size : 0.12 + 0.88 * Math.max(0, Math.min(size, 1));
  pen.fillRect(left, top, CELL - 1, TRACK - 1);
}
