"""Episodes side by side: aligned on shared states, with their first divergence and the action of each."""

from collections.abc import Callable

import polars as pl
import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

from lake import ids
from lake.judgements import outcomes
from lake.judgements.credit import Covering, Credit, find_covering
from viewer import changed_data, filters, navigation, side_by_side
from viewer import components as ui
from viewer.navigation import Page, change_address, get_ids, get_parameter, href
from viewer.plain import chip, number
from viewer.queries import ListWindow, Row, transcripts
from viewer.queries.episodes import EpisodeFilter
from viewer.session import read
from viewer.side_by_side import AlignmentLine, Parting, StepCell, Stretch
from viewer.transcript import outline
from viewer.transcript.view_model import MAX_LINES

_PAGE_LINES = 40
# Value of `open` that folds nothing.
_UNFOLD_ALL = "all"


def show_side_by_side() -> None:
    """Draw episodes side by side."""
    facts, score, covering = _read_episodes()
    ui.draw_header(f"Side by side {chip(_build_title(facts), navigation.MAX_NAME)}")
    groups = {row["group_id"] for row in facts}
    with st.container(horizontal=True, vertical_alignment="bottom"):
        if len(groups) == 1:
            side_by_side.choose_siblings(
                facts[0]["group_id"], score, [row["episode_id"] for row in facts], changes_address=True
            )
        credit = filters.choose_credit(covering, "compare")
    with st.container(horizontal=True, vertical_alignment="center"):
        for group in sorted(groups):
            ui.draw_link(
                Page.GROUP,
                "Group" if len(groups) == 1 else f"Group {ids.to_text(group)}",
                "workspaces",
                group=ids.to_text(group),
                score=score,
            )
    episode_ids = tuple(row["episode_id"] for row in facts)
    facts = _order_rows(read(transcripts.read_facts, episode_ids, credit, score), episode_ids)
    prompts = read(transcripts.read_system_prompts, episode_ids)
    named = [
        (_name_column(row, len(groups) == 1), prompts[row["episode_id"]])
        for row in facts
        if row["episode_id"] in prompts
    ]
    if note := side_by_side.describe_prompts(named):
        st.info(note, icon=":material/difference:")
    _draw_aligned(facts, episode_ids, credit, score)


def _name_column(row: Row, is_one_group: bool) -> str:
    return navigation.name_sibling(row) if is_one_group else navigation.name_episode(row)


def _read_episodes() -> tuple[list[Row], str | None, list[Covering]]:
    """Return the episodes that the address names, the outcome, and the credits that cover all of them.

    A single episode is compared with the siblings that differ from it most.
    """
    try:
        episode_ids = list(dict.fromkeys(get_ids("episode")))
    except ValueError:
        ui.end_with_not_found("The address names an episode by an invalid id.", Page.EPISODES, "All episodes")
    if not episode_ids:
        ui.end_with_not_found(
            "The address names no episodes (`?episode=...&episode=...`).", Page.EPISODES, "All episodes"
        )
    score = get_parameter("score")
    first = read(transcripts.read_episode, episode_ids[0])
    if len(episode_ids) == 1 and first is not None:
        score = read(outcomes.choose_score_of_run, first["run_id"], score)
        episode_ids = read(transcripts.choose_contrast, first["group_id"], score, episode_ids[0])
    if len(episode_ids) > transcripts.MOST_SIDE_BY_SIDE:
        ui.warn_of_missing(
            f"The address names {len(episode_ids)} episodes; these are the first {transcripts.MOST_SIDE_BY_SIDE}."
        )
        episode_ids = episode_ids[: transcripts.MOST_SIDE_BY_SIDE]
    facts = _order_rows(read(transcripts.read_facts, tuple(episode_ids), None, score), tuple(episode_ids))
    lost = sorted(set(episode_ids) - {row["episode_id"] for row in facts}, key=episode_ids.index)
    if not facts:
        ui.end_with_not_found(changed_data.describe_deleted_episodes(lost), Page.EPISODES, "All episodes")
    if lost:
        ui.warn_of_missing(changed_data.describe_deleted_episodes(lost))
    if len(facts) < 2:
        alone = f"There is no other episode to compare with {chip(ids.to_text(facts[0]['episode_id']))}."
        ui.end_with_not_found(alone, Page.EPISODES, "All episodes")
    covering = [
        {credit.credit.text: credit for credit in read(find_covering, episode_id=row["episode_id"])} for row in facts
    ]
    shared = [credit for text, credit in covering[0].items() if all(text in by_text for by_text in covering)]
    return facts, score, shared


def _order_rows(frame: pl.DataFrame, episode_ids: tuple[int, ...]) -> list[Row]:
    rows = {row["episode_id"]: row for row in frame.iter_rows(named=True)}
    return [rows[episode_id] for episode_id in episode_ids if episode_id in rows]


def _build_title(facts: list[Row]) -> str:
    """Return the common name of the episodes: run, task and round."""
    same = {
        name: values.pop()
        for name in ("run_id", "task_id", "collection_round")
        if len(values := {row[name] for row in facts}) == 1
    }
    return navigation.name_group(same | {name: None for name in ("run_id", "task_id") if name not in same})


def _draw_aligned(facts: list[Row], episode_ids: tuple[int, ...], credit: Credit | None, score: str | None) -> None:
    by_episode = read(transcripts.read_walks, episode_ids, credit).partition_by("episode_id", as_dict=True)
    walks = [by_episode[(episode,)] for episode in episode_ids if (episode,) in by_episode]
    columns = [row for row in facts if (row["episode_id"],) in by_episode]
    choices_ = [walk["choice"].to_list() for walk in walks]
    keys = [walk["key"].to_list() for walk in walks]
    lines = side_by_side.align(keys)
    divergence = side_by_side.find_first_divergence(lines, choices_)
    stretches = _unfold(side_by_side.fold_alike_lines(lines, choices_))
    why = None if divergence is None else side_by_side.explain_parting(lines, choices_, keys, divergence)
    _draw_summary(lines, stretches, divergence, why)
    window = ui.draw_pager(len(stretches), "lines", rows=_PAGE_LINES)
    page = stretches[window.offset : window.offset + window.limit]
    cells = _build_cells(walks, lines, page)
    st.html(
        side_by_side.render_comparison(
            [_build_column(row, episode_ids, columns, credit, score) for row in columns],
            lines,
            page,
            cells,
            divergence=divergence,
            unfold=lambda stretch: change_address(open=stretch.first),
        )
    )


def _unfold(stretches: list[Stretch]) -> list[Stretch]:
    """Replace the stretch that the address names, or all of them, by their lines."""
    address_stretch = get_parameter("open")
    unfolded = []
    for stretch in stretches:
        if address_stretch in (_UNFOLD_ALL, str(stretch.first)):
            unfolded += [Stretch(line, line) for line in range(stretch.first, stretch.last + 1)]
        else:
            unfolded.append(stretch)
    return unfolded


def _draw_summary(
    lines: list[AlignmentLine], stretches: list[Stretch], divergence: int | None, why: Parting | None
) -> None:
    """Draw how much the episodes share, where they diverge, and why."""
    shared = sum(line.is_shared for line in lines)
    steps = sum(len(line.steps) - line.steps.count(None) for line in lines)
    together = sum(len(line.steps) - line.steps.count(None) for line in lines if line.is_shared)
    with st.container(horizontal=True, gap="medium", vertical_alignment="center"):
        meeting = next((line.steps for line in lines if line.is_shared and None not in line.steps), None)
        starts_apart = meeting is not None and meeting != lines[0].steps
        if meeting is not None and starts_apart:
            ui.draw_fact("start", f"in different states; the first state of all is at **step {meeting[0]}**")
        if divergence is None:
            end = "from there to the end" if starts_apart else "to the end"
            ui.draw_fact("divergence", f"**none**: the same states and actions {end}")
        else:
            index = next(i for i, stretch in enumerate(stretches) if stretch.first <= divergence <= stretch.last)
            page = index // _PAGE_LINES + 1
            first = next(step for step in lines[divergence].steps if step is not None)
            where = change_address(page=None if page == 1 else page)
            label = "first divergence after the start" if starts_apart else "first divergence"
            st.markdown(f":gray[{label}] **[step {first}]({where})**: {why}", width="content")
        ui.draw_fact("states shared", f"**{number(shared)}**")
        ui.draw_fact("steps in them", f"**{number(together)} of {number(steps)}**")
        if any(stretch.first != stretch.last for stretch in stretches):
            st.markdown(f"[Unfold all]({change_address(open=_UNFOLD_ALL)})", width="content")
    st.caption(
        "A shaded line is a state that several episodes passed. Below it are their actions, with marks on the "
        "words that differ. Dotted cells start from states of one episode only. Every cell opens its step."
    )


def _build_cells(
    walks: list[pl.DataFrame], lines: list[AlignmentLine], page: list[Stretch]
) -> Callable[[int, int], StepCell]:
    """Return a function from column and line to the cell, for the lines of the page."""
    steps = [
        (column, step)
        for stretch in page
        if stretch.first == stretch.last
        for column, step in enumerate(lines[stretch.first].steps)
        if step is not None
    ]
    rows = {(column, step): walks[column].row(step, named=True) for column, step in steps}
    ids_of_steps = tuple((row["episode_id"], row["step_index"]) for row in rows.values())
    frame = read(transcripts.read_step_texts, ids_of_steps)
    texts = {(row["episode_id"], row["step_index"]): row for row in frame.iter_rows(named=True)}
    quiet = {
        episode: outline.find_quiet_steps(read(transcripts.read_outline, episode, ListWindow(MAX_LINES)))
        for episode in frame.filter("reply_is_empty")["episode_id"].unique()
    }

    def cell(column: int, position: int) -> StepCell:
        row = rows[column, position]
        step_texts = texts[row["episode_id"], row["step_index"]]
        action = side_by_side.describe_action(step_texts["action"], step_texts["tool_calls"])
        faults = outline.list_reply_faults(step_texts, quiet.get(row["episode_id"], {}))
        marks = tuple(mark for mark in faults if mark[1] != "gray")  # the cell shows the state
        return StepCell(row["step_index"], action, step_texts["state"], row["choice"], row["advantage"], marks)

    return cell


def _build_column(
    row: Row, episode_ids: tuple[int, ...], columns: list[Row], credit: Credit | None, score: str | None
) -> side_by_side.EpisodeColumn:
    one_group = len({column["group_id"] for column in columns}) == 1
    other_ids = [ids.to_text(episode_id) for episode_id in episode_ids if episode_id != row["episode_id"]]
    packed_filter = filters.pack_filter(EpisodeFilter(group=row["group_id"], score=score))
    text = None if credit is None else credit.text

    def address(step: int | None) -> str:
        return href(Page.EPISODE, episode=ids.to_text(row["episode_id"]), step=step, credit=text, list=packed_filter)

    away = change_address(episode=other_ids, page=None, open=None) if len(other_ids) > 1 else None
    return side_by_side.EpisodeColumn(_name_column(row, one_group), row, address, away)
