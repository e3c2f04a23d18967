"""Episodes side by side: aligned on the states that they share, with the first divergence and what each did there."""

from collections.abc import Callable

import polars as pl
import streamlit as st  # noqa: TID253 - this is a Streamlit page

from lake import ids
from lake.judgements.credit import Covering, Credit, covering
from viewer import choices, gone, links, siblings
from viewer import components as ui
from viewer import side_by_side as drawn
from viewer.alignment import Line, Parting, Stretch, align, first_divergence, folded, parting
from viewer.links import Page, given, given_ids
from viewer.navigation import changed, href
from viewer.pinned import read
from viewer.plain import chip, number
from viewer.queries import Row, episodes, outcomes, side_by_side
from viewer.queries.episodes import EpisodeFilter
from viewer.transcript import outline

# Lines of a page. (A string here would be printed: Streamlit shows stray expressions of its scripts.)
_LINES = 40
# Value of `open` that folds nothing.
_ALL = "all"


def show() -> None:
    """The page."""
    facts, score, chosen = _chosen()
    ui.header(f"Side by side {chip(_common_name(facts), links.NAME)}")
    groups = {row["group_id"] for row in facts}
    with st.container(horizontal=True, vertical_alignment="bottom"):
        if len(groups) == 1:
            siblings.choose(facts[0]["group_id"], score, [row["episode_id"] for row in facts], leads=True)
        credit = choices.credit(chosen, "compare")
    with st.container(horizontal=True, vertical_alignment="center"):
        for group in sorted(groups):
            ui.link(
                Page.GROUP,
                "Group" if len(groups) == 1 else f"Group {ids.to_text(group)}",
                "workspaces",
                group=ids.to_text(group),
                score=score,
            )
    found = tuple(row["episode_id"] for row in facts)
    facts = _in_order(read(side_by_side.facts, found, credit, score), found)
    _aligned(facts, found, credit, score)


def _chosen() -> tuple[list[Row], str | None, list[Covering]]:
    """The episodes that the address names, the outcome, and the credit that covers them all.

    Of one alone: with the siblings whose comparison with it says most.
    """
    try:
        wanted = list(dict.fromkeys(given_ids("episode")))
    except ValueError:
        ui.not_found("The address names an episode by what is no id.", Page.EPISODES, "All episodes")
    if not wanted:
        ui.not_found("The address names no episodes (`?episode=...&episode=...`).", Page.EPISODES, "All episodes")
    score = given("score")
    first = read(episodes.episode, wanted[0])
    if len(wanted) == 1 and first is not None:
        score = read(outcomes.of_run, first["run_id"], score)
        wanted = read(side_by_side.contrast, first["group_id"], score, wanted[0])
    if len(wanted) > side_by_side.MOST:
        ui.missing(f"{len(wanted)} episodes were asked for; these are the first {side_by_side.MOST}.")
        wanted = wanted[: side_by_side.MOST]
    facts = _in_order(read(side_by_side.facts, tuple(wanted), None, score), tuple(wanted))
    held = {row["episode_id"] for row in facts}
    lost = [one for one in wanted if one not in held]
    if not facts:
        ui.not_found(gone.episodes(lost), Page.EPISODES, "All episodes")
    if lost:
        ui.missing(gone.episodes(lost))
    if len(facts) < 2:
        alone = f"There is no other to show beside episode {chip(ids.to_text(facts[0]['episode_id']))}."
        ui.not_found(alone, Page.EPISODES, "All episodes")
    cover = [{one.credit.text: one for one in read(covering, episode_id=row["episode_id"])} for row in facts]
    shared = [one for text, one in cover[0].items() if all(text in others for others in cover)]
    return facts, score, shared


def _in_order(frame: pl.DataFrame, wanted: tuple[int, ...]) -> list[Row]:
    rows = {row["episode_id"]: row for row in frame.iter_rows(named=True)}
    return [rows[one] for one in wanted if one in rows]


def _common_name(facts: list[Row]) -> str:
    """What the episodes have in common: run, task and round."""
    same = {
        name: values.pop()
        for name in ("run_id", "task_id", "collection_round")
        if len(values := {row[name] for row in facts}) == 1
    }
    return links.group(same | {name: None for name in ("run_id", "task_id") if name not in same})


def _aligned(facts: list[Row], found: tuple[int, ...], credit: Credit | None, score: str | None) -> None:
    by_episode = read(side_by_side.walks, found, credit).partition_by("episode_id", as_dict=True)
    walks = [by_episode[(episode,)] for episode in found if (episode,) in by_episode]
    columns = [row for row in facts if (row["episode_id"],) in by_episode]
    choices_ = [walk["choice"].to_list() for walk in walks]
    keys = [walk["key"].to_list() for walk in walks]
    lines = align(keys)
    divergence = first_divergence(lines, choices_)
    stretches = _unfolded(folded(lines, choices_))
    why = None if divergence is None else parting(lines, choices_, keys, divergence)
    _summary(lines, stretches, divergence, why)
    shown = _page(stretches)
    cells = _cells(walks, lines, shown)
    st.html(
        drawn.table(
            [_column(row, found, columns, credit, score) for row in columns],
            lines,
            shown,
            cells,
            divergence=divergence,
            unfold=lambda stretch: changed(open=stretch.first),
        )
    )


def _unfolded(stretches: list[Stretch]) -> list[Stretch]:
    """With the stretch opened that the address names, or all."""
    opened = given("open")
    found = []
    for stretch in stretches:
        if opened in (_ALL, str(stretch.first)):
            found += [Stretch(line, line) for line in range(stretch.first, stretch.last + 1)]
        else:
            found.append(stretch)
    return found


def _summary(lines: list[Line], stretches: list[Stretch], divergence: int | None, why: Parting | None) -> None:
    """How much they share, where they part, and why."""
    shared = sum(line.is_shared for line in lines)
    steps = sum(len(line.steps) - line.steps.count(None) for line in lines)
    together = sum(len(line.steps) - line.steps.count(None) for line in lines if line.is_shared)
    with st.container(horizontal=True, gap="medium", vertical_alignment="center"):
        if divergence is None:
            ui.fact("they", "**never part**: the same states and actions to the end")
        else:
            index = next(i for i, stretch in enumerate(stretches) if stretch.first <= divergence <= stretch.last)
            page = index // _LINES + 1
            first = next(step for step in lines[divergence].steps if step is not None)
            where = changed(page=None if page == 1 else page)
            st.markdown(f":gray[first divergence] **[step {first}]({where})**: {why}", width="content")
        ui.fact("states shared", f"**{number(shared)}**")
        ui.fact("steps in them", f"**{number(together)} of {number(steps)}**")
        if any(stretch.first != stretch.last for stretch in stretches):
            st.markdown(f"[Unfold all]({changed(open=_ALL)})", width="content")
    st.caption(
        "A shaded line is a state that several passed, and who; below it what each did there, with a mark on the words "
        "that differ. Dotted cells were taken from states of their own. Every cell opens its step."
    )


def _page(stretches: list[Stretch]) -> list[Stretch]:
    window = ui.pager(len(stretches), "lines", rows=_LINES)
    return stretches[window.offset : window.offset + window.limit]


def _cells(walks: list[pl.DataFrame], lines: list[Line], shown: list[Stretch]) -> Callable[[int, int], drawn.Cell]:
    """The steps of the lines that are shown."""
    places = [
        (number_, step)
        for stretch in shown
        if stretch.first == stretch.last
        for number_, step in enumerate(lines[stretch.first].steps)
        if step is not None
    ]
    keys = {place: walks[place[0]].row(place[1], named=True) for place in places}
    named = tuple((row["episode_id"], row["step_index"]) for row in keys.values())
    texts = {
        (row["episode_id"], row["step_index"]): row for row in read(side_by_side.texts, named).iter_rows(named=True)
    }

    def cell(column: int, position: int) -> drawn.Cell:
        row = keys[column, position]
        said = texts[row["episode_id"], row["step_index"]]
        action = drawn.done(said["action"], said["tool_calls"])
        marks = tuple(mark for mark in outline.answered(said) if mark[1] != "gray")  # the state stands there to read
        return drawn.Cell(row["step_index"], action, said["state"], row["choice"], row["advantage"], marks)

    return cell


def _column(
    row: Row, found: tuple[int, ...], columns: list[Row], credit: Credit | None, score: str | None
) -> drawn.Column:
    one_group = len({other["group_id"] for other in columns}) == 1
    rest = [ids.to_text(other) for other in found if other != row["episode_id"]]
    here = choices.packed(EpisodeFilter(group=row["group_id"], score=score))
    text = None if credit is None else credit.text

    def address(step: int | None) -> str:
        return href(Page.EPISODE, episode=ids.to_text(row["episode_id"]), step=step, credit=text, list=here)

    title = siblings.name(row) if one_group else links.episode(row)
    return drawn.Column(title, row, address, changed(episode=rest, page=None, open=None) if len(rest) > 1 else None)


show()
