"""Head of an episode as HTML: its task and answer in words, its outcome and scores, and the cost of both.

The page and the HTML file show the same head. All foreign text in it is escaped, cut and in one line; a fold has the
whole reason of a score, and the whole expected answer.
"""

import json
import re
from collections.abc import Iterator, Sequence
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import Any

from lake.documents import parse_json_object
from viewer import plain
from viewer.plain import number, one_line, visible
from viewer.queries import transcripts
from viewer.queries.episodes import ISSUE_FRAME, PREAMBLE, read_answers
from viewer.transcript import blocks, rendering
from viewer.transcript.view_model import EpisodeTranscript

MAX_WORDS = 600
"""Maximum characters of the task, the answer and the expected answer."""
MAX_WHOLE = rendering.MAX_OTHER
"""Maximum characters of a text in a fold."""
_REASONS, _LONGEST_BEGINNING, _SHORTEST_BEGINNING = 240, 110, 20
"""Characters of all reasons next to their scores, and of the beginning of one."""
_MAX_VERDICTS = 340
"""Characters of all scores and reasons that are shown: three lines of a small screen. A fold has the others."""
_REWARD_DETAILS = ("reward_info", "test_result", "report")
"""Keys of `extra`, or of its `info`, under which formats store how an environment computed its reward."""
_EMPHASIS = re.compile(r"\*\*|`+|^#+ ", re.MULTILINE)
_LINK = re.compile(r"\[([^\[\]\n]{1,300})\]\((?:[^()\s]|\([^()\s]*\)){1,2000}\)")
STYLE = Path(__file__).with_name("head.css").read_text()


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
    return _read_words(find_task(transcript.before, first)), _read_words(next(iter(answers), ""))


def _read_words(text: str) -> str:
    """Return the beginning of a text in one line, without the signs of Markdown and the addresses of its links."""
    return one_line(_EMPHASIS.sub("", _LINK.sub(r"\1", text[: 4 * MAX_WORDS])), MAX_WORDS)


def render_head(transcript: EpisodeTranscript) -> str:
    """Return the head of an episode."""
    task, answer = describe_words(transcript)
    says = [
        f'<p class="says {label.lower()}" title="{escape(text)}"><b>{label}</b><span>{escape(text)}</span></p>'
        for label, text in (("Task", task), ("Answer", answer))
        if text
    ]
    says.append(_render_expected(transcript))
    figures = "".join([*_list_verdicts(transcript), *_list_costs(transcript)])
    return f'<section class="trajlake-head">{"".join(says)}<div class="figures">{figures}</div></section>'


def _render_expected(transcript: EpisodeTranscript) -> str:
    """Return the expected answer in one line, which opens all of it; empty without one."""
    document, _ = transcript.read(transcripts.read_document, transcript.episode_id, "ground_truth")
    try:
        expected = json.loads(document or "null")
    except (ValueError, RecursionError):
        expected = document
    if expected in (None, "", [], {}):
        return ""
    text = expected if isinstance(expected, str) else plain.format_json(expected)
    words, texts = one_line(text[: 4 * MAX_WORDS], MAX_WORDS), _render_texts((text, ""))
    summary = f"<summary><b>Expected</b><span>{escape(words)}</span></summary>"
    return f'<details class="says expected fold" title="{escape(words)}">{summary}{texts}</details>'


def _list_verdicts(transcript: EpisodeTranscript) -> Iterator[str]:
    """Yield each score with its reason, the outcome first, and the status if the episode did not complete."""
    facts, (name, value) = transcript.facts, transcript.outcome
    rows = transcript.read(transcripts.read_all_scores, transcript.episode_id).to_dicts()
    if not any(row["scorer"] == name for row in rows) and value is not None:
        details = _find_reward_details(transcript)
        rows.insert(0, {"scorer": name, "value": value, "reason": None, "error": None, "metrics": details})
    verdicts = []
    for row in sorted(rows, key=lambda row: row["scorer"] != name):
        tone = "" if row["value"] is None or row["scorer"] != name else plain.grade(row["value"])
        grade = parse_json_object(row["metrics"]).get("value") if row["value"] is None else None
        text = number(row["value"]) if grade is None else one_line(str(grade), 40)
        verdicts.append((row["scorer"], text, tone, row["reason"] or row["error"], row["metrics"]))
    if facts["status"] != "completed" or facts["error"]:
        tone = "cut" if facts["status"] == "truncated" else "broken"
        verdicts.insert(1, ("status", facts["status"], tone, facts["error"] or facts["stop_reason"], None))
    length = min(_LONGEST_BEGINNING, _REASONS // max(1, sum(bool(reason) for *_, reason, _ in verdicts)))
    length = length if length >= _SHORTEST_BEGINNING else 0
    sizes = accumulate(len(f"{label} {text} {(reason or '')[:length]}") for label, text, _, reason, _ in verdicts)
    count_shown = max(1, sum(size <= _MAX_VERDICTS for size in sizes))
    figures = [_render_figure(*verdict, length) for verdict in verdicts]
    yield from figures[:count_shown]
    if others := figures[count_shown:]:
        summary = f"<summary><b>{len(others)}</b> more score{'s' * (len(others) > 1)}</summary>"
        yield f'<details class="fold others">{summary}<div>{"".join(others)}</div></details>'


def _find_reward_details(transcript: EpisodeTranscript) -> str | None:
    """Return the details of the environment's reward as JSON; None if the record has none."""
    extra = parse_json_object(transcript.read(transcripts.read_document, transcript.episode_id, "extra")[0])
    places = [place for place in (extra, extra.get("info")) if isinstance(place, dict)]
    details = next((place[name] for place in places for name in _REWARD_DETAILS if place.get(name)), None)
    return None if details is None else json.dumps(details, ensure_ascii=False)


def _list_costs(transcript: EpisodeTranscript) -> Iterator[str]:
    facts = transcript.facts
    tokens = [(number(facts[f"{kind}_tokens"]), sign) for kind, sign in (("prompt", "in"), ("completion", "out"))]
    known_tokens = ", ".join(f"{count} {sign}" for count, sign in tokens if count != number(None))
    yield _render_figure("steps", number(transcript.count))
    if known_tokens:
        yield _render_figure("tokens", known_tokens)
    if facts["seconds"] is not None:
        explanation = "From the first time in the record to the last, which may come after the last step."
        yield f'<span title="{explanation}">{_render_figure("duration", plain.seconds(facts["seconds"]))}</span>'
    if facts["cost"] is not None:
        yield _render_figure("cost", number(facts["cost"], 4))


def _render_figure(
    label: str, text: str, tone: str = "", reason: str | None = None, details: str | None = None, length: int = 0
) -> str:
    """Return a figure with at most `length` characters of its reason; a click opens all of it, and details as JSON."""
    name = f"{escape(one_line(label, 40))} <b>{escape(one_line(text))}</b>"
    if not reason and not details:
        return f'<span class="{tone}">{name}</span>'
    beginning = _EMPHASIS.sub("", reason or "")
    words = f" <span>{escape(one_line(beginning, length))}</span>" if reason and length else ""
    texts = _render_texts((reason or "", "assistant"), (plain.format_json(details or ""), ""))
    title = escape(one_line(beginning, 300))
    return f'<details class="fold {tone}" title="{title}"><summary>{name}{words}</summary>{texts}</details>'


def _render_texts(*texts: tuple[str, str]) -> str:
    """Return what a fold shows: texts, each as the transcript draws that of its role (`rendering.detect`)."""
    markups = []
    for text, role in texts:
        cut = text[:MAX_WHOLE]
        markup = rendering.render(cut, rendering.detect(cut, role))
        markups.append(
            f'<div class="drawn">{markup}</div>' if markup else f"<pre>{escape(visible(cut))}</pre>" * bool(cut)
        )
        markups.append(f"<p>The first {MAX_WHOLE:,} of {len(text):,} characters.</p>" * (len(text) > MAX_WHOLE))
    return f'<div class="trajlake-transcript">{"".join(markups)}</div>'
