// The call of a step as it was recorded, and the waterfall of the episode: a bar for each call and span, on one axis.

function callButton(view, index) {
  const made = button("Call", "The model call as it was recorded: request, response, tokens, latency, finish reason");
  made.onclick = async () => {
    const { call } = await view.asking.other({ call: index });
    if (call) addPanel(view, index, { call });
  };
  return made;
}

// Panels stand below the texts of a step, each kind once.
function addPanel(view, index, ...panels) {
  const content = view.contents.get(index);
  const body = view.row(index)?.querySelector(".body");
  if (!content) return;
  const isCall = (panel) => Boolean(panel?.call);
  content.strips = [...(content.strips ?? []).filter((panel) => isCall(panel) !== isCall(panels[0])), ...panels];
  if (body?.isFilled) fillBody(view, index, body);
}

function callOf({ title, facts, texts }) {
  const list = el("div", "facts", ...facts.map(([name, fact]) => el("span", "fact", el("span", "label", name), ` ${fact}`)));
  const parts = texts.map(({ label, text, html, length }) => {
    const size = el("span", "size", `${length.toLocaleString("en")} characters`);
    const made = el("details", "block", el("summary", "", `${label} `, size), ...read(text, html));
    made.open = /^(response|output)/.test(label);
    return made;
  });
  return el("div", "strip call-panel", el("b", "", title), list, ...parts);
}

function waterfallButton(view) {
  const made = button("Waterfall", "Every call and span of the episode over time");
  made.setAttribute("aria-pressed", "false");
  made.onclick = async () => {
    const present = view.root.querySelector(".waterfall");
    made.setAttribute("aria-pressed", String(!present));
    if (present) return closeWaterfall(view, present);
    const { waterfall } = await view.asking.other({ waterfall: 1 });
    if (!waterfall || made.getAttribute("aria-pressed") === "false") return;
    const panel = waterfallOf(view, waterfall);
    const index = view.order[view.firstOnScreen()];
    panel.former = { index, top: view.row(index)?.getBoundingClientRect().top };
    view.bar.after(panel);
    panel.scrollIntoView({ block: "nearest" });
  };
  return made;
}

// Leads back to where the reader opened it, or stays where a bar of it led.
function closeWaterfall(view, panel) {
  if (panel.getBoundingClientRect().bottom < view.bar.getBoundingClientRect().bottom) return view.keepInView(() => panel.remove());
  panel.remove();
  const { index, top } = panel.former;
  const goBack = () => scrollerOf(view).scrollBy(0, (view.reveal(index)?.getBoundingClientRect().top ?? top) - top);
  goBack();
  requestAnimationFrame(() => requestAnimationFrame(goBack)); // steps near it are drawn, and have their own heights
}

function waterfallOf(view, { bars, ticks, total, notes, judges }) {
  const axis = el("div", "axis", ...ticks.map(([label, left]) => placed(el("span", "", label), left)));
  const head = total === null ? "" : el("div", "row", el("b", "", `Total ${total}`), axis, el("span", "number", "took"));
  const rows = bars.map((bar) => {
    const track = el("span", "track", ...ticks.map(([, left]) => placed(el("s"), left)));
    if (bar.span) {
      const fill = placed(el("i", bar.error ? "failed" : bar.kind === "call" ? "" : "other"), bar.span[0]);
      fill.style.width = `max(2px, ${bar.span[1]}%)`;
      track.append(fill);
    }
    const name = el("button", "name", `${bar.step === null ? "episode" : bar.step} \u00b7 ${bar.kind === "call" ? "" : `${bar.kind} `}${bar.name}`);
    name.type = "button";
    name.title = bar.error ?? name.textContent;
    const row = el("div", "row", name, track, el("span", bar.took === "unknown" ? "number unknown" : "number", bar.took));
    name.onclick = bar.call === null ? () => view.select(bar.step) : () => toggleCall(name, row, bar.call);
    track.onclick = name.onclick;
    return row;
  });
  const asked = judges.map(({ head: label, answer, html }) => el("details", "block", el("summary", "", label), ...read(answer, html)));
  const later = judges.length ? [el("b", "", "Judges asked about this episode"), ...asked] : [];
  return el("section", "waterfall", head, ...rows, ...notes.map((note) => el("div", "size", note)), ...later);
}

// A call that no step has, such as a judge's, is shown below its bar.
function toggleCall(name, row, call) {
  const panel = row.nextElementSibling;
  const isShown = name.getAttribute("aria-expanded") === "true";
  name.setAttribute("aria-expanded", String(!isShown));
  if (isShown) panel.remove();
  else row.after(callOf(call));
}

function placed(element, left) {
  element.style.left = `${left}%`;
  return element;
}
