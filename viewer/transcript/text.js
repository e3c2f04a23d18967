// Foreign text as nodes: as it was written, or in the markup that rendering.py made of it.

// The markup holds listed elements and classes only: the server cleans it, and no other string of a page is markup.
function read(text, html) {
  if (!text) return [el("span", "empty", "(empty)")];
  if (!html) return [watched(el("pre", "", text))];
  const drawn = el("div", "drawn");
  drawn.innerHTML = html;
  for (const box of drawn.querySelectorAll(BOXES)) watched(box);
  return [drawn];
}

// A high box is cut, with a button for the whole: it does not scroll, because the wheel would then stop in it.
const BOXES = ".code, .terminal, .diff, .string.long";
const boxes = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    if (!target.isConnected) boxes.unobserve(target);
    else if (target.scrollHeight > target.clientHeight + 1 && !target.matches(".cut, .whole")) cut(target);
  }
});

function watched(box) {
  boxes.observe(box);
  return box;
}

function cut(box) {
  const isPartial = [...(box.closest(".partial")?.querySelectorAll(BOXES) ?? [])].at(-1) === box;
  const label = `all ${box.innerText.trimEnd().split("\n").length.toLocaleString("en")} ${isPartial ? "loaded " : ""}lines`;
  const made = button(label, "Show the whole");
  made.classList.add("uncut");
  made.onclick = (event) => {
    event.preventDefault();
    const isWhole = box.classList.toggle("whole");
    box.classList.toggle("cut", !isWhole);
    made.textContent = isWhole ? "fewer lines" : label;
    if (!isWhole) box.scrollIntoView({ block: "nearest" });
  };
  box.classList.add("cut");
  box.after(made);
}
