"""The list of episodes and the page of one episode: facts, scores, and the transcript with the ledger of its credit."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from html import escape
from typing import Any

import polars as pl
import streamlit as st  # noqa: TID253 - loaded by the viewer's process only
from starlette.requests import Request
from starlette.responses import Response

from lake import ids
from lake.errors import TrajlakeError
from lake.judgements.credit import Credit, describe_outdated, find_covering
from lake.read.text_table import format_count
from lake.search import quote_words
from viewer import annotations, changed_data, download, filters, navigation, tables
from viewer import components as ui
from viewer.navigation import Page, anchor, change_address, get_int, get_parameter, href, remember_run
from viewer.plain import chip, name_rollout, number, one_line, signed, word
from viewer.queries import PAGE_ROWS, ListWindow, Row, episodes, runs, training, transcripts
from viewer.queries import annotations as annotation_queries
from viewer.queries.episodes import ORDERS
from viewer.session import read
from viewer.transcript import component, head, outline, view_model
from viewer.transcript.view_model import EpisodeTranscript

_TOLD_COLUMNS = {
    "request": tables.excerpt("Task", "The first text of the user."),
    "answer": tables.excerpt("Answer", "The last action."),
    "outcome": tables.outcome("Outcome"),
    "status": tables.text("Status", under="outcome"),
    "stop_reason": tables.text("Stopped by", under="outcome"),
}
_TEXTS = ("request", "answer")
"""Columns that stay where they are empty: an answer that no episode has is a finding."""
_COLUMNS = {
    "num_steps": tables.value("Steps"),
    "completion_tokens": tables.value("Tokens", "Completion tokens."),
    "started_at": tables.time("When (UTC)", "Start of the rollout."),
    "seconds": tables.duration("Duration", under="started_at"),
    "run_id": tables.text("Run"),
    "task_id": tables.text("Task id", under="run_id"),
    "rollout_index": tables.value("Rollout", under="run_id"),
    "collection_round": tables.value("Round", under="run_id"),
    "policy_version": tables.value("Version", "Version of the policy.", under="run_id"),
}
_ID_COLUMNS = {"episode_id": tables.ident("Episode"), "group_id": tables.ident("Group", under="episode_id")}


def show_episodes() -> None:
    """Draw the filtered list of episodes; the address holds the filter, the order and the page."""
    ui.draw_header("Episodes")
    if not read(runs.count_runs):
        ui.draw_empty("This lake holds no episodes yet.", "trajlake ingest FILE --lake LAKE      # or: trajlake demo")
        return
    line, order = filters.draw_filter_line(), tables.read_order()
    episode_filter = line.episode_filter
    filters.draw_filter_chips(filters.build_parameters(episode_filter))
    filters.run_searches(episode_filter)
    filters.draw_facets(
        episode_filter, lambda facet, limit: read(episodes.count_facet_values, facet, episode_filter, limit)
    )
    totals = read(episodes.compute_totals, episode_filter)
    if not totals["episodes"]:
        st.info("No episode matches these filters.", icon=":material/filter_alt_off:")
        return
    with line.aside:
        download.draw_download_menu(episode_filter, order, totals["episodes"])
        annotations.draw_queue_button(episode_filter, order)
    groups = format_count(totals["groups"], "group")
    has_outcomes = totals["scored"] > 0 or episode_filter.unscored or episode_filter.score is not None
    scored_share = f", mean outcome {number(totals['mean_return'])} ({number(totals['scored'])} scored)"
    window = ui.draw_pager(
        totals["episodes"],
        f"episodes in {groups}{scored_share if has_outcomes else ''}, mean steps {number(totals['mean_steps'], 1)}",
    )
    frame = read(episodes.read_page, episode_filter, order, window)
    scores = read(episodes.read_scores, tuple(frame["episode_id"]))
    frame, scored = tables.add_score_columns(frame, scores, episode_filter.score)
    columns = _TOLD_COLUMNS | scored | _COLUMNS | _ID_COLUMNS
    filled = tables.select_filled(frame, columns, order)
    filled |= {name: columns[name] for name in _TEXTS}
    columns = {n: column for n, column in columns.items() if (has_outcomes if n == "outcome" else n in filled)}
    if episode_filter.text is not None:
        if quote_words(episode_filter.text) is not None:
            st.caption("The words may stand anywhere in a step. In quotes, they are found only side by side.")
        hits = tuple(frame.select("episode_id", "found_step").rows())
        excerpts = read(episodes.read_excerpts, episode_filter.text, hits)
        frame = frame.join(excerpts, on="episode_id", how="left", maintain_order="left")
        hit_columns = {
            "found_step": tables.value("Step", "The first step with a hit. A dash: a message of the episode."),
            "found_steps": tables.value("Hits", "Steps with a hit, and messages of the episode."),
            "found_in": tables.text("In"),
            "excerpt": tables.wide("Excerpt", hits=episodes.compile_hits(episode_filter.text)),
        }
        columns = hit_columns | columns
    packed_filter = filters.pack_filter(episode_filter, order)

    def link_row(row: Row) -> str:
        # The page opens at its head and names the first hit; only a hit beyond the first lines needs its step.
        step = row.get("found_step")
        step = step if step is not None and step >= view_model.MAX_LINES else None
        return href(Page.EPISODE, episode=row["episode_id"], step=step, list=packed_filter)

    tables.draw_table(frame, columns, label="Episodes", href=link_row, key="episode_id", sortable=ORDERS)


# Largest number of links to related episodes.
_MOST_RELATED = 20


def show_episode() -> None:
    """Draw one episode."""
    episode_id = ui.read_required_id("episode", Page.EPISODES, "All episodes")
    facts = read(transcripts.read_episode, episode_id)
    if facts is None:
        ui.end_with_not_found(changed_data.describe_deleted_episodes([episode_id]), Page.EPISODES, "All episodes")
    remember_run(facts["run_id"])
    ui.name_tab(f"Episode {navigation.name_episode(facts)}")
    episode = EpisodeTranscript(read, href, facts, None)
    ui.draw_bar(_build_path(episode) + _build_list_links(episode, get_parameter(filters.LIST), change_address))
    top = st.container()
    with st.container(horizontal=True, vertical_alignment="center", gap="small", key="episode-controls"):
        covering = read(find_covering, episode_id=episode_id)
        credit = filters.choose_credit(covering, "episode") if covering or get_parameter("credit") else None
        rows = read(training.read_advantages, episode_id, credit) if credit else pl.DataFrame()
        with st.popover("Details", icon=":material/info:"):
            _draw_facts(facts)
            _draw_credit_figures(credit, rows)
            kinds = {"reasoning": "Reasoning", "tools": "Tool calls"}
            hidden = [
                kind for kind, label in kinds.items() if not st.toggle(label, value=True, key=kind, bind="query-params")
            ]
        if read(transcripts.has_siblings, facts["group_id"]):
            ui.draw_link(Page.COMPARE, "Compare with siblings", "view_column", episode=ids.to_text(episode_id))
        download.draw_html_link(credit, episode=ids.to_text(episode_id))
        follows_step = annotations.draw_annotations(episode_id, get_int("step"))
    transcript = replace(episode, credit=credit)
    top.html(f"<style>{head.STYLE}</style>{head.render_head(transcript)}")
    # A container that is always there: what it holds does not move the transcript to another place of the script.
    with st.container(key="episode-notes"):
        _draw_related(facts)
        if credit is not None and (changed := read(describe_outdated, credit, episode_id=episode_id)) is not None:
            changed_data.draw_stale_warning(changed)
        window, selected = _choose_window(facts)
    find = filters.read_carried_filter()[0].text or ""
    component.draw_transcript(transcript, window, selected, hidden, reruns=follows_step, find=find)


def answer_request(request: Request) -> Response:
    """Answer with what an episode's page shows first: the bar, the head and the conversation.

    The address has the parameters of the page, and `of` (`component.answer_about_episode`).
    """
    packed = request.query_params.get(filters.LIST)
    parameters = {name: request.query_params.getlist(name) for name in request.query_params if name != "of"}

    def describe(episode: EpisodeTranscript) -> dict[str, Any]:
        covering = episode.read(find_covering, episode_id=episode.episode_id)
        transcript = replace(episode, credit=filters.select_credit(covering, episode.credit))
        return {
            "bar": _build_path(episode) + _build_list_links(episode, packed, partial(change_address, parameters)),
            "head": head.render_head(transcript),
            "credit": transcript.credit_name,
            "lines": view_model.describe_lines(transcript, ListWindow(view_model.MAX_LINES), None),
        }

    return component.answer_about_episode(request, describe)


def _build_path(episode: EpisodeTranscript) -> str:
    """Return the path of an episode as HTML: run, task, group, rollout, status and outcome."""
    facts, link = episode.facts, episode.link
    run, task = facts["run_id"], facts["task_id"]
    steps = [
        (str(run), link(Page.RUNS, run=run)),
        (str(task), link(Page.EPISODES, run=run, task=task)),
        ("group", link(Page.GROUP, group=ids.to_text(facts["group_id"]))),
    ]
    # A link with a title gives way (`style.css`); a short name stands whole.
    path = [anchor(one_line(name), target, title=one_line(name, 300) * (len(name) > 6)) for name, target in steps]
    rollout = navigation.name_sibling(facts)
    if facts["collection_round"] is not None:
        rollout += f", round {facts['collection_round']}"
    score, value = episode.outcome
    separator = " \N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK} "
    full_path = escape(one_line(separator.join([*(name for name, _ in steps), rollout]), 600))
    links = separator.join([*path, f"<span>{escape(rollout)}</span>"])
    return (
        f'<h1 class="path" title="{full_path}">Episode {links}</h1>'
        f"<span>{escape(one_line(facts['status']))}</span><span>{escape(one_line(score, 40))} {number(value)}</span>"
    )


def _build_list_links(episode: EpisodeTranscript, packed: str | None, change: Callable[..., str]) -> str:
    """Return the links to the reader's list and to the previous and next episode in it, as HTML.

    Args:
        episode: the episode.
        packed: the list (`filters.pack_filter`).
        change: function from parameters to the page's address with these changed (`navigation.change_address`).
    """
    read, link, episode_id = episode.read, episode.link, episode.episode_id
    episode_filter, order = filters.unpack_filter(packed)
    try:
        position = read(episodes.find_position, episode_filter, order, episode_id)
    except TrajlakeError:
        # The address holds a search or SQL with a fault; the page of the list explains the fault.
        back = link(Page.EPISODES, **filters.build_parameters(episode_filter, order))
        return f'<span class="turn">{anchor("The list of this address cannot be read", back)}</span>'
    page = None if position is None or position.position <= PAGE_ROWS else (position.position - 1) // PAGE_ROWS + 1
    parameters = filters.build_parameters(episode_filter, order) | {tables.OPENED: ids.to_text(episode_id)}
    back = anchor("Back to the list", link(Page.EPISODES, page=page, **parameters))
    if episode_filter.unlabelled is not None:
        queue = read(annotation_queries.read_queue, episode_filter, order, episode_id)
        progress = f"{queue.unlabelled:,} of {queue.total:,} left to label"
        return _join_list_links(back, queue.previous, queue.next, progress, change)
    if position is None:
        return f'<span class="turn">{back} This episode is not in the filtered list.</span>'
    filtered = f" that match{'es' if position.total == 1 else ''} the filter" if episode_filter.narrows else ""
    label = f"{position.position:,} of {format_count(position.total, 'episode')}{filtered}"
    return _join_list_links(back, position.previous, position.next, label, change)


def _join_list_links(
    back: str, previous: int | None, following: int | None, progress: str, change: Callable[..., str]
) -> str:
    """Return the link back, the neighbours, and the position between them, as HTML."""
    before = _link_neighbour("\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK} Previous", previous, "p", change)
    after = _link_neighbour("Next \N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}", following, "n", change)
    return f'<span class="turn">{back} {before} {after} <span>{escape(progress)}</span></span>'


def _link_neighbour(label: str, target: int | None, key: str, change: Callable[..., str]) -> str:
    """Return a link to another episode of the list that keeps the reader's other choices."""
    if target is None:
        return f"<span>{escape(label)}</span>"
    return anchor(label, change(episode=ids.to_text(target), step=None), key=key)


def _draw_facts(facts: Row) -> None:
    """Draw what identifies the episode and the policy that played it."""
    for name in ("policy", "policy_version", "environment", "split", "stop_reason", "source_format", "source_id"):
        if facts[name] is not None:
            ui.draw_fact(name.replace("_", " "), chip(facts[name]))
    ui.draw_fact("id", chip(ids.to_text(facts["episode_id"])))
    index, rollout = facts["rollout_index"], name_rollout(facts["rollout_index"])
    ui.draw_fact("rollout", chip(index if rollout in (None, str(index)) else f"{rollout} = {index}"))


def _draw_related(facts: Row) -> None:
    """Draw links to the parent episode and to sub-agents, forks and continuations."""
    rows = read(transcripts.read_related_episodes, facts["episode_id"]).to_dicts()
    if not rows:
        return
    with st.container(horizontal=True, gap="small", vertical_alignment="center"):
        for row in rows[:_MOST_RELATED]:
            episode_id = ids.to_text(row["episode_id"])
            name = chip(episode_id if row["task_id"] is None else navigation.name_episode(row))
            kind = word(row["relation"] or "child")
            label, step = f"{kind}: {name}" + (f" (agent {chip(row['agent_id'])})" if row["agent_id"] else ""), None
            if row["is_parent"]:
                label, step = f"{kind} of episode {name}", row["parent_step_index"]
            ui.draw_link(Page.EPISODE, label, "account_tree", episode=episode_id, step=step)
        if len(rows) > _MOST_RELATED:
            st.caption(f"and {len(rows) - _MOST_RELATED:,} more")


def _draw_credit_figures(credit: Credit | None, rows: pl.DataFrame) -> None:
    """Draw whose advantages the page shows, and their figures for the episode; nothing without credit."""
    if credit is None or rows.is_empty():
        return
    st.caption(f"Advantages by {chip(credit.title, 300)}.")
    first = rows.row(0, named=True)
    split = sum(outline.terms_disagree(row) for row in rows.iter_rows(named=True))
    figures = {
        "A_E": signed(first["a_episode"]),
        "Siblings scored": number(first["group_size"]),
        "Steps in shared states": number(int((rows["anchor_episodes"] > 1).sum())),
        "Unknown advantages": number(rows["advantage"].null_count()),
        "Terms disagree": number(split),
    }
    for label, text in figures.items():
        ui.draw_fact(label, f"**{text}**")
    # What each step has is told once.
    for flag in rows["flags"][0].split(","):
        if flag in outline.FLAGS and rows["flags"].str.contains(flag, literal=True).all():
            label, colour, explanation = outline.FLAGS[flag]
            ui.draw_badge(label, colour, explanation=explanation)


def _choose_window(facts: Row) -> tuple[ListWindow, int | None]:
    """Return the steps that have a line, and the open step, which the address names."""
    selected = get_int("step")
    if selected is not None and selected >= facts["num_steps"]:
        ui.warn_of_missing(f"The episode has steps 0 to {facts['num_steps'] - 1}, no step {selected}.")
        selected = None
    lines = view_model.MAX_LINES
    number, pages = (selected or 0) // lines + 1, -(-facts["num_steps"] // lines)
    if pages > 1:
        ui.draw_page_switch(pages, number, "step", lambda page: (page - 1) * lines)
    return ListWindow.page(number, lines), selected
