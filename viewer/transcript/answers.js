// Carries a transcript's questions to the server and the answers back (component.py says why it stands alone).

const ANSWERS = Symbol.for("trajlake.answers");

export default function ({ data, setStateValue }) {
  window[ANSWERS] ??= new EventTarget();
  const line = window[ANSWERS];
  line.ask = (question) => setStateValue("asked", question);
  if (data.answer) line.dispatchEvent(new CustomEvent("answer", { detail: data.answer }));
}
