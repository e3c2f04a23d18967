"""Transcripts as one HTML file to send: no server, nothing loaded from anywhere, drawn by the scripts of the viewer.

Its policy allows the one script and the one style that it holds, by their hashes, images that are in it, and nothing
else: foreign text is in a block of JSON that is no script, and reaches the page as text nodes.
"""

from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from html import escape
from typing import Any

import msgspec

from lake import ids
from viewer import links, theme
from viewer.plain import number, one_line, signed
from viewer.queries import Sort, Window, groups
from viewer.transcript import drawn, opened
from viewer.transcript.told import Read, Told, told

LARGEST = 40_000_000
"""Bytes of the steps of a file at most; what comes after has lines alone."""
_AT_ONCE = 50
_STYLE = """
:root { color-scheme: light dark; --st-text-color: light-dark(#262730, #fafafa);
  --st-background-color: light-dark(#ffffff, #0e1117); --st-secondary-background-color: light-dark(#f0f2f6, #262730);
  --trajlake-red: light-dark(#b3261e, #ff8a80); --trajlake-orange: light-dark(#9a4b00, #f0a45d);
  --trajlake-accent-text: light-dark(#6443c2, #b39dff); }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem 2rem; max-width: 1500px; font: 14px/1.45 system-ui, sans-serif;
  color: var(--st-text-color); background: var(--st-background-color); }
h1 { font-size: 1.15rem; margin: 0 0 0.4rem; overflow-wrap: anywhere; }
p { margin: 0.2rem 0 0.6rem; opacity: 0.85; overflow-wrap: anywhere; }
table.siblings { border-collapse: collapse; margin: 0.6rem 0 1rem; font-variant-numeric: tabular-nums; }
table.siblings :is(td, th) { padding: 0.25rem 0.8rem; text-align: right;
  border-bottom: 1px solid color-mix(in srgb, currentColor 14%, transparent); }
table.siblings a { color: inherit; }
table.siblings a.chosen { font-weight: 700; }
.trajlake-transcript .toolbar { top: 0; }
.trajlake-transcript .step { scroll-margin-top: 3rem; }
"""


SIBLINGS = 16
"""Siblings of a file at most."""


def of(read: Read, credit: str | None, episode: str | None, group: str | None) -> list[Told]:
    """What a file is of: an episode, or the siblings of a group in the order of their outcomes, `SIBLINGS` at most.

    Raises:
        LookupError: there is no such episode or group.
        ValueError: an id is none.
    """
    if group is None:
        wanted = [ids.from_text(episode or "")]
    else:
        order = Sort("outcome", descending=True)
        found = read(groups.siblings, ids.from_text(group), None, Window(SIBLINGS), None, order)
        wanted = found["episode_id"].to_list()
    transcripts = [one for one in (told(read, _nowhere, one, credit) for one in wanted) if one is not None]
    if not transcripts:
        raise LookupError
    return transcripts


def _nowhere(*_: object, **__: object) -> str:
    """Links to pages of the viewer lead nowhere from a file."""
    return ""


def html(transcripts: Sequence[Told]) -> bytes:
    """The file: an episode, or several siblings with a table of their outcomes.

    Args:
        transcripts: one or more, of one group.
    """
    left = LARGEST
    episodes: list[dict[str, Any]] = []
    for one in transcripts:
        data, size = _held(one, left)
        left -= size
        episodes.append({"id": _name(one), "data": data})
    script, style = drawn.script("alone.js"), f"{theme.VARIABLES}\n{drawn.STYLE}\n{_STYLE}"
    policy = f"default-src 'none'; img-src data:; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'"
    title = escape(one_line(links.episode(transcripts[0].facts), links.NAME))
    # Nothing in the JSON may end its element.
    stored = msgspec.json.encode(episodes).decode().replace("<", "\\u003c")
    body = "".join(_heading(one, episode["data"]) for one, episode in zip(transcripts, episodes, strict=True))
    table = _siblings(transcripts) if len(transcripts) > 1 else ""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><meta name="referrer" content="no-referrer">'
        f"<title>{title}</title><style>{style}</style></head>\n<body>{table}{body}"
        f'<div id="transcript"></div>\n<script type="application/json" id="data">{stored}</script>\n'
        f'<script type="module">{script}</script></body></html>\n'
    ).encode()


def _held(one: Told, budget: int) -> tuple[dict[str, Any], int]:
    """What the page needs of an episode, and the bytes of its steps; those beyond the budget have lines alone."""
    window = Window(drawn.LINES)
    data = drawn.lines(one, window, None)
    wanted = [*(end["index"] for end in data["ends"]), *(line["index"] for line in data["lines"])]
    held: list[dict[str, Any]] = []
    size = 0
    for first in range(0, len(wanted), _AT_ONCE):
        steps = opened.steps(one, wanted[first : first + _AT_ONCE])
        size += len(msgspec.json.encode(steps))
        if size > budget:
            break
        held += steps
    return data | {"held": held, "hidden": [], "address": ""}, size


def _heading(one: Told, data: dict[str, Any]) -> str:
    """What stands above an episode: where it belongs, how it ended, whose advantages these are, what was left out."""
    facts, count = one.facts, one.count
    said = [one_line(facts["status"]), " ".join(_outcome(one)), f"{number(count)} steps"]
    if one.credit is not None:
        said.append(f"advantages by {one_line(one.credit.title, 300)}")
    steps = sum(0 <= step["index"] < count for step in data["held"])
    if steps < count:
        said.append(f"the texts of {number(count - steps)} steps are not in this file")
    name = escape(one_line(links.episode(facts), links.NAME))
    words = escape(" \N{MIDDLE DOT} ".join(said))
    return f'<header id="{_name(one)}"><h1>Episode {name}</h1><p>{words}</p></header>'


def _siblings(transcripts: Sequence[Told]) -> str:
    rows = []
    for one in transcripts:
        facts, credit = one.facts, one.advantages
        a_episode = signed(credit["a_episode"][0]) if credit.height else number(None)
        values = (one_line(facts["status"]), _outcome(one)[1], number(one.count), a_episode)
        cells = "".join(f"<td>{escape(value)}</td>" for value in values)
        rows.append(f'<tr><td><a href="#{_name(one)}">rollout {facts["rollout_index"]}</a></td>{cells}</tr>')
    names = ("", "Status", "Outcome", "Steps", "A_E")
    return f'<table class="siblings"><tr>{"".join(f"<th>{name}</th>" for name in names)}</tr>{"".join(rows)}</table>'


def _outcome(one: Told) -> tuple[str, str]:
    """Its outcome as every page has it: what it is called, and its value."""
    name, value = one.outcome
    return one_line(name, 40), number(value)


def _name(one: Told) -> str:
    return f"episode-{ids.to_text(one.episode_id)}"


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
