"""Transcripts as one HTML file, drawn by the viewer's scripts without a server or a network.

The file shows one episode at a time. Several have an index, whose links turn to another episode. Episodes that began
at a step, such as sub-agents', fold in their step, within the file's limits, and are in no index. Its policy allows
only the file's script and style, by their hashes, and its images. Foreign text is in a block of JSON, which is not a
script.
"""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from lake import ids
from lake.read.text_table import format_count
from viewer import figures, navigation
from viewer.navigation import Page
from viewer.plain import grade, number, one_line, signed
from viewer.queries import ListWindow, Sort, groups, transcripts
from viewer.transcript import head, view_model
from viewer.transcript.view_model import EpisodeTranscript, ReadQuery, load_transcript

MAX_STEP_BYTES = 40_000_000
"""Maximum bytes of the steps of a file; steps beyond it have only their lines."""
_STEPS_PER_READ = 50
_STYLE = Path(__file__).with_name("page.css").read_text()

MAX_SIBLINGS = 16
"""Maximum siblings of a file."""
MAX_EPISODES = 50
"""Maximum episodes of a file."""


def load_transcripts(
    read: ReadQuery, credit: str | None, episode: str | None, group: str | None
) -> list[EpisodeTranscript]:
    """Return the transcript of an episode, or those of a group's siblings by outcome, `MAX_SIBLINGS` at most.

    Raises:
        LookupError: there is no such episode or group.
        ValueError: an id is invalid.
    """
    if group is None:
        return load_episodes(read, credit, [ids.from_text(episode or "")])
    order = Sort("outcome", descending=True)
    siblings = read(groups.read_siblings, ids.from_text(group), None, ListWindow(MAX_SIBLINGS), None, order)
    return load_episodes(read, credit, siblings["episode_id"].to_list())


def load_episodes(read: ReadQuery, credit: str | None, episode_ids: Sequence[int]) -> list[EpisodeTranscript]:
    """Return the transcripts of episodes, which link to each other only, then those that began at their steps.

    Raises:
        LookupError: there is no such episode.
    """
    present: dict[str, EpisodeTranscript] = {}

    def link(page: Page, /, **parameters: Any) -> str:
        episode = parameters.get("episode")
        return f"#episode-{episode}" if page is Page.EPISODE and episode in present else ""

    queue = list(episode_ids)
    for episode_id in queue:  # it grows
        if (transcript := load_transcript(read, link, episode_id, credit)) is None:
            continue
        present[ids.to_text(episode_id)] = replace(transcript, is_below=episode_id not in episode_ids)
        related = read(transcripts.read_related_episodes, episode_id).filter(~pl.col("is_parent"))
        below = [child for child in related["episode_id"] if child not in queue]
        queue += below[: max(0, MAX_EPISODES - len(queue))]
    if not present:
        raise LookupError
    return list(present.values())


def render_html(loaded: Sequence[EpisodeTranscript]) -> bytes:
    """Return the file: an episode, or several with an index of the chosen ones' tasks and outcomes."""
    indexed = [transcript for transcript in loaded if not transcript.is_below]
    budget = MAX_STEP_BYTES
    episodes: list[dict[str, Any]] = []
    for transcript in loaded:
        data, size = _collect_steps(transcript, budget)
        budget -= size
        episodes.append({"id": _build_id(transcript), "data": data})
    script = view_model.read_script("alone.js")
    style = "\n".join((figures.VARIABLES, view_model.STYLE, head.STYLE, _STYLE))
    policy = f"default-src 'none'; img-src data:; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'"
    name = one_line(navigation.name_episode(indexed[0].facts), navigation.MAX_NAME)
    title = escape(name if len(indexed) == 1 else f"{name} and {format_count(len(indexed) - 1, 'other episode')}")
    # The JSON must not hold the end tag of its element.
    stored = msgspec.json.encode(episodes).decode().replace("<", "\\u003c")
    body = "".join(
        _render_heading(transcript, episode["data"]) for transcript, episode in zip(loaded, episodes, strict=True)
    )
    table = _render_index(indexed) if len(indexed) > 1 else ""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><meta name="referrer" content="no-referrer">'
        f"<title>{title}</title><style>{style}</style></head>\n<body>{table}{body}"
        f'<div id="transcript"></div>\n<script type="application/json" id="data">{stored}</script>\n'
        f'<script type="module">{script}</script></body></html>\n'
    ).encode()


def _collect_steps(transcript: EpisodeTranscript, budget: int) -> tuple[dict[str, Any], int]:
    """Return what the page needs of an episode, and the bytes of its steps; steps beyond the budget are left out."""
    window = ListWindow(view_model.MAX_LINES)
    data = view_model.describe_lines(transcript, window, None)
    indices = [*(end["index"] for end in data["ends"]), *(line["index"] for line in data["lines"])]
    steps_sent: list[dict[str, Any]] = []
    size = 0
    for first in range(0, len(indices), _STEPS_PER_READ):
        steps = view_model.describe_steps(transcript, indices[first : first + _STEPS_PER_READ])
        size += len(msgspec.json.encode(steps))
        if size > budget:
            break
        steps_sent += steps
    data |= {"waterfall": view_model.describe_waterfall(transcript)}
    return data | {"held": steps_sent, "ready": [], "hidden": [], "address": ""}, size


def _render_heading(transcript: EpisodeTranscript, data: dict[str, Any]) -> str:
    """Return the heading of an episode: its name, its head, its credit, and the number of missing texts."""
    count, details = transcript.count, []
    if transcript.credit is not None and data["credited"]:
        details.append(f"Advantages by {one_line(transcript.credit.title, 300)}.")
    steps = sum(0 <= step["index"] < count for step in data["held"])
    if steps < count:
        details.append(f"The texts of {format_count(count - steps, 'step')} are not in this file.")
    name = escape(one_line(navigation.name_episode(transcript.facts), navigation.MAX_NAME))
    words = f"<p>{escape(' '.join(details))}</p>" if details else ""
    return f'<header id="{_build_id(transcript)}"><h1>Episode {name}</h1>{head.render_head(transcript)}{words}</header>'


def _render_index(transcripts: Sequence[EpisodeTranscript]) -> str:
    """Return the table that leads to the episodes; siblings are named by their rollout."""
    are_siblings = len({transcript.facts["group_id"] for transcript in transcripts}) == 1
    rows = []
    for transcript in transcripts:
        facts, credit = transcript.facts, transcript.advantages
        name = navigation.name_sibling(facts) if are_siblings else navigation.name_episode(facts)
        task, answer = head.describe_words(transcript)
        a_episode = signed(credit["a_episode"][0]) if credit.height else number(None)
        outcome = transcript.outcome[1]
        tone = "" if outcome is None else grade(outcome)
        cells = f'<td>{escape(one_line(facts["status"]))}</td><td class="{tone}">{number(outcome)}</td>'
        link = f'<a href="#{_build_id(transcript)}">{escape(one_line(name, navigation.MAX_NAME))}</a>'
        words = escape(one_line(answer if are_siblings else task, 160))
        cells += f"<td>{number(transcript.count)}</td><td>{a_episode}</td>"
        rows.append(f'<tr><td>{link}</td><td class="words">{words}</td>{cells}</tr>')
    names = ("", "Answer" if are_siblings else "Task", "Status", "Outcome", "Steps", "A_E")
    return f'<table class="index"><tr>{"".join(f"<th>{name}</th>" for name in names)}</tr>{"".join(rows)}</table>'


def _build_id(transcript: EpisodeTranscript) -> str:
    return f"episode-{ids.to_text(transcript.episode_id)}"


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
