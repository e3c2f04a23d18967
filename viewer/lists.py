"""Lists as a whole, filtered and ordered as their pages show them: read in parts, for downloads.

What a list is of stands in the address of its download, under the names that its page has for it; a filter of episodes
stands in one of them (`viewer.choices.LIST`).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial

import polars as pl

from lake import ids
from lake.cli.options import readable
from lake.errors import UsageError
from lake.judgements.credit import Credit
from viewer import choices
from viewer.queries import Reads, Sort, Window, anchors, annotations, groups, lineage, sql, training
from viewer.queries.groups import GroupFilter, Signal

Given = Mapping[str, str]
"""Parameters of an address."""
Page = Callable[[Window, Sort | None], pl.DataFrame]


@dataclass(frozen=True, slots=True)
class Listed:
    """A list that can be taken as a whole."""

    page: Callable[[Reads, Given], Page]
    """A part of it: what the address asks for, then which rows, in which order."""
    part: int = 10_000
    """Rows that are in memory at a time."""


def parts(lake: Reads, name: str, given: Given) -> Iterator[pl.DataFrame]:
    """The rows of a list, ids as text; there is one part at least.

    Raises:
        UsageError: there is no such list, or no such credit.
        ValueError: an id is none.
    """
    if name not in LISTS:
        raise UsageError(f"there is no list {name!r}; valid: {', '.join(LISTS)}")
    page, rows = LISTS[name].page(lake, given), LISTS[name].part
    order = Sort.named(given.get("sort"))
    offset, found = 0, rows
    while found == rows:
        part = page(Window(rows, offset), order)
        found, offset = part.height, offset + rows
        if found or offset == rows:
            yield readable(part)


def _groups(lake: Reads, given: Given) -> Page:
    having, _ = choices.unpacked(given.get(choices.LIST))
    signal = given.get("signal")
    wanted = GroupFilter(having, None if signal is None else Signal(signal), given.get("grouping"))
    return lambda window, order: groups.page(lake, wanted, window, order)


def _siblings(lake: Reads, given: Given) -> Page:
    group_id, credit = ids.from_text(given.get("group", "")), _credit(lake, given) if given.get("credit") else None
    return lambda window, order: groups.siblings(lake, group_id, credit, window, given.get("score"), order)


def _shared_states(lake: Reads, given: Given) -> Page:
    group_id, credit = ids.from_text(given.get("group", "")), _credit(lake, given)
    return lambda window, order: anchors.page(lake, group_id, credit, window, order)


def _anchors(lake: Reads, given: Given) -> Page:
    credit = _credit(lake, given)
    # All advantages are gone through for the states, so once, and not for each part.
    states = cache(partial(anchors.explored_states, lake, credit))
    return lambda window, order: anchors.with_texts(lake, credit, states(order).slice(window.offset, window.limit))


def _jobs(lake: Reads, given: Given) -> Page:
    return lambda window, order: lineage.jobs_page(lake, given.get("kind"), given.get("state"), window, order)


def _rejects(lake: Reads, given: Given) -> Page:
    return lambda window, order: lineage.rejects_page(lake, given.get("reason"), given.get("run"), window, order)


def _annotations(lake: Reads, _: Given) -> Page:
    return lambda window, order: annotations.page(lake, window, order)


def _answer(lake: Reads, given: Given) -> Page:
    rows = sql.rows(lake, given.get("q", ""))
    return lambda window, _: rows.slice(window.offset, window.limit)


def _credit(lake: Reads, given: Given) -> Credit:
    found = training.credit_named(lake, given.get("credit"))
    if found is None:
        raise UsageError(f"this lake holds no credit {given.get('credit', '')!r}")
    return found


LISTS: Mapping[str, Listed] = {
    "groups": Listed(_groups),
    "siblings": Listed(_siblings),
    "shared-states": Listed(_shared_states),
    # The texts of a sample of each state's steps are read, which lie all over their table: of a thousand states that
    # takes as long as of a hundred.
    "anchors": Listed(_anchors, 1_000),
    "jobs": Listed(_jobs),
    "annotations": Listed(_annotations),
    "rejects": Listed(_rejects),
    "sql": Listed(_answer),
}
"""Every list but that of episodes, which `viewer.queries.whole` has."""
