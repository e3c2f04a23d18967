"""What a transcript is of: an episode, the versions it is read in, and whose advantages stand beside it.

The page, the answers that it fetches and the file that leaves the viewer all show the same, whichever way they read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import polars as pl

from lake import ids
from lake.judgements.credit import Credit
from lake.judgements.scores import ENV_RETURN
from viewer import links, plain
from viewer.links import Page
from viewer.queries import Reads, Row, Window, episodes, training, transcripts
from viewer.transcript import ledger

P = ParamSpec("P")
T = TypeVar("T")
Link = Callable[..., str]
"""The address of a page: `navigation.href`, or another way to the same."""


class Read(Protocol):
    """The answer of a query of `viewer.queries`: `pinned.read`, or another way to the same versions."""

    def __call__(self, query: Callable[Concatenate[Reads, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Ask it."""
        ...


@dataclass(frozen=True)
class Told:
    """What a transcript is of; what it reads is kept."""

    read: Read
    link: Link
    facts: Row
    """The row of `episodes.episode`."""
    credit: Credit | None
    """The chosen credit; None without."""

    @property
    def episode_id(self) -> int:
        """The episode."""
        return int(self.facts["episode_id"])

    @property
    def chosen(self) -> str | None:
        """What an address calls the credit."""
        return None if self.credit is None else self.credit.text

    @property
    def count(self) -> int:
        """Its number of steps."""
        return int(self.facts["num_steps"])

    def lines(self, window: Window) -> pl.DataFrame:
        """The rows of `transcripts.outline`."""
        return self.read(transcripts.outline, self.episode_id, window)

    @cached_property
    def outcome(self) -> tuple[str, float | None]:
        """What its run goes by, as people read it, and what that says of the episode."""
        return outcome(self.read, self.facts)

    @cached_property
    def advantages(self) -> pl.DataFrame:
        """The rows of `training.advantages`; an empty frame without credit."""
        return pl.DataFrame() if self.credit is None else self.read(training.advantages, self.episode_id, self.credit)

    @cached_property
    def scale(self) -> ledger.Scale:
        """How long the bars of its ledgers are."""
        largest, rewarded = self.read(transcripts.scales, self.episode_id)
        return ledger.scale_of(self.advantages, largest, rewarded=rewarded)

    @cached_property
    def scores(self) -> dict[int, list[Row]]:
        """Scores of steps, by step."""
        return _by_step(self.read(transcripts.scores, self.episode_id))

    @cached_property
    def trained(self) -> dict[int, list[Row]]:
        """The rows of `transcripts.trained`, one at most for each step."""
        return _by_step(self.read(transcripts.trained, self.episode_id))

    @cached_property
    def before(self) -> list[Any]:
        """The messages before the first step."""
        return plain.messages(*self.read(episodes.document, self.episode_id, "initial_messages"))

    @cached_property
    def after(self) -> list[Any]:
        """The messages after the last step."""
        return plain.messages(*self.read(episodes.document, self.episode_id, "final_observation"))

    @cached_property
    def branches(self) -> dict[int, list[dict[str, str]]]:
        """Links to the episodes that came out of a step (sub-agents, forks, continuations), by step."""
        found: dict[int, list[dict[str, str]]] = {}
        related = self.read(episodes.related, self.episode_id).drop_nulls("parent_step_index")
        for row in related.iter_rows(named=True):
            if not row["is_parent"]:
                text = f"{row['relation'] or 'child'}: {row['agent_id'] or links.episode(row)}"
                address = self.link(Page.EPISODE, episode=ids.to_text(row["episode_id"]))
                found.setdefault(row["parent_step_index"], []).append({"text": plain.one_line(text), "href": address})
        return found


def told(read: Read, link: Link, episode_id: int, credit: str | None) -> Told | None:
    """What a transcript is of, from an address; None if there is no such episode.

    Args:
        read: how queries are answered.
        link: how pages are named.
        episode_id: the episode.
        credit: what an address calls the chosen credit (`Credit.text`); None without.
    """
    facts = read(episodes.episode, episode_id)
    if facts is None:
        return None
    return Told(read, link, facts, None if credit is None else read(training.credit_named, credit))


def outcome(read: Read, facts: Row) -> tuple[str, float | None]:
    """As `episodes.outcome`; what the environment recorded is called the outcome, a scorer by its name."""
    name, value = read(episodes.outcome, facts["episode_id"], facts["run_id"])
    return "outcome" if name == ENV_RETURN else name, value


def _by_step(frame: pl.DataFrame) -> dict[int, list[Row]]:
    found: dict[int, list[Row]] = {}
    for row in frame.iter_rows(named=True):
        found.setdefault(row["step_index"], []).append(row)
    return found
