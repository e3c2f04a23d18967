// Formulas of a text, drawn: maths.py found them and made trees of MathML's names; here they become elements.

const MATHML = "http://www.w3.org/1998/Math/MathML";

// Cuts a text where a formula stands: texts and trees in turn.
function cutAtFormulas(text, maths, isWanted) {
  const written = Object.keys(maths).filter((one) => isWanted(maths[one]));
  if (!written.length) return [text];
  const longestFirst = written.sort((a, b) => b.length - a.length);
  const places = new RegExp(longestFirst.map((one) => one.replace(/[\\^$.*+?()[\]{}|]/g, "\\$&")).join("|"), "g");
  const parts = [];
  let end = 0;
  for (const found of text.matchAll(places)) {
    parts.push(text.slice(end, found.index), maths[found[0]]);
    end = found.index + found[0].length;
  }
  return [...parts, text.slice(end)];
}

function isBlock([, attributes]) {
  return attributes.display === "block";
}

function formulaOf([tag, attributes, children]) {
  const element = document.createElementNS(MATHML, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.map((child) => (typeof child === "string" ? child : formulaOf(child))));
  return element;
}
