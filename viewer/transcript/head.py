"""Head of an episode as HTML: its task and answer in words, its outcome and scores, and the cost of both.

The page and the HTML file show the same head. All foreign text in it is escaped, cut and in one line; a fold has the
whole reason of a score.
"""

import re
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

import polars as pl

from viewer import plain
from viewer.plain import number, one_line, visible
from viewer.queries import transcripts
from viewer.queries.episodes import ISSUE_FRAME, PREAMBLE, read_answers
from viewer.transcript import blocks
from viewer.transcript.view_model import EpisodeTranscript

MAX_WORDS = 600
"""Maximum characters of the task and of the answer."""
MAX_REASON = 20_000
"""Maximum characters of a reason."""
_SUCCESS = 1.0
"""Least outcome that counts as success unless the reader chooses another."""
_EMPHASIS = re.compile(r"\*\*|`+|^#+ ", re.MULTILINE)
STYLE = """
.trajlake-head { font-size: 0.92rem; line-height: 1.45; }
.trajlake-head .says { display: flex; gap: 0.6rem; margin: 0; }
.trajlake-head .says b { flex: none; width: 4rem; font-weight: 400; color: var(--trajlake-quiet); }
.trajlake-head .says span { min-width: 0; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.trajlake-head .says.task span { font-weight: 600; }
.trajlake-head .figures { display: flex; flex-wrap: wrap; gap: 0.15rem 1.1rem; margin-top: 0.2rem; position: relative; }
.trajlake-head .figures > * { white-space: nowrap; color: var(--trajlake-quiet); }
.trajlake-head .figures b { font-weight: 600; font-variant-numeric: tabular-nums; color: var(--st-text-color); }
.trajlake-head summary { cursor: pointer; list-style: none;
  text-decoration: underline dotted; text-underline-offset: 0.2em; }
.trajlake-head details[open] > div { position: absolute; z-index: 5; left: 0; top: 100%; max-width: min(60rem, 94vw);
  max-height: 50vh; overflow: auto; padding: 0.5rem 0.8rem; white-space: pre-wrap; overflow-wrap: anywhere;
  color: var(--st-text-color, CanvasText); background: var(--st-secondary-background-color, Canvas);
  border: 1px solid color-mix(in srgb, currentColor 25%, transparent); border-radius: 6px; }
.trajlake-head .good b { color: light-dark(#1c5fa8, #7db7f2); }
.trajlake-head .bad b, .trajlake-head .cut b { color: var(--trajlake-orange); }
.trajlake-head .broken b { color: var(--trajlake-red); }
"""


def find_task(messages: Sequence[Any], state: str | None) -> str:
    """Return what the user wanted: the first words of a user that no program wrote, else the first state."""
    texts = [blocks.extract_text(message) for message in messages if plain.get_role(message) == "user"]
    texts = [re.sub(ISSUE_FRAME, "", text, count=1) for text in texts]
    task = next((text for text in texts if text.strip() and not re.match(PREAMBLE, text)), None)
    return task or state or "".join(texts[:1])


def describe_words(transcript: EpisodeTranscript) -> tuple[str, str]:
    """Return the task and the answer in words, each in one line; empty if there is none."""
    first = transcript.read(transcripts.read_text, transcript.episode_id, 0, "state", MAX_WORDS)
    ends = ((transcript.episode_id, transcript.count),)
    answers = transcript.read(read_answers, ends, 4 * MAX_WORDS)["answer"]
    answer = _EMPHASIS.sub("", next(iter(answers), ""))
    return one_line(find_task(transcript.before, first), MAX_WORDS), one_line(answer, MAX_WORDS)


def render_head(transcript: EpisodeTranscript) -> str:
    """Return the head of an episode."""
    task, answer = describe_words(transcript)
    says = [
        f'<p class="says {label.lower()}" title="{escape(text)}"><b>{label}</b><span>{escape(text)}</span></p>'
        for label, text in (("Task", task), ("Answer", answer))
        if text
    ]
    figures = "".join([*_list_verdicts(transcript), *_list_costs(transcript)])
    return f'<section class="trajlake-head">{"".join(says)}<div class="figures">{figures}</div></section>'


def _list_verdicts(transcript: EpisodeTranscript) -> Iterator[str]:
    """Yield the outcome, the status if the episode did not complete, and each score with its reason."""
    facts, (name, value) = transcript.facts, transcript.outcome
    scores = transcript.read(transcripts.read_all_scores, transcript.episode_id)
    rows = scores.filter(pl.col("step_index").is_null()).to_dicts()
    if not any(row["scorer"] == name for row in rows) and value is not None:
        rows.insert(0, {"scorer": name, "value": value, "reason": None, "error": None})
    for row in sorted(rows, key=lambda row: row["scorer"] != name):
        tone = "" if row["value"] is None or row["scorer"] != name else "good" if row["value"] >= _SUCCESS else "bad"
        yield _render_figure(row["scorer"], number(row["value"]), tone, row["reason"] or row["error"])
    if facts["status"] != "completed" or facts["error"]:
        tone = "cut" if facts["status"] == "truncated" else "broken"
        yield _render_figure("status", facts["status"], tone, facts["error"] or facts["stop_reason"])


def _list_costs(transcript: EpisodeTranscript) -> Iterator[str]:
    facts = transcript.facts
    tokens = [(number(facts[f"{kind}_tokens"]), sign) for kind, sign in (("prompt", "in"), ("completion", "out"))]
    known_tokens = ", ".join(f"{count} {sign}" for count, sign in tokens if count != number(None))
    yield _render_figure("steps", number(transcript.count))
    if known_tokens:
        yield _render_figure("tokens", known_tokens)
    if facts["seconds"] is not None:
        yield _render_figure("duration", plain.seconds(facts["seconds"]))
    if facts["cost"] is not None:
        yield _render_figure("cost", number(facts["cost"], 4))


def _render_figure(label: str, text: str, tone: str = "", explanation: str | None = None) -> str:
    """Return a figure; one with an explanation opens it at a click, and shows its beginning under the pointer."""
    name = f"{escape(one_line(label, 40))} <b>{escape(one_line(text))}</b>"
    if not explanation:
        return f'<span class="{tone}">{name}</span>'
    title = escape(one_line(explanation, 300))
    cut = escape(visible(explanation[:MAX_REASON]))
    return f'<details class="{tone}" title="{title}"><summary>{name}</summary><div>{cut}</div></details>'
