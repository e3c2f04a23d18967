"""One episode: its scores, its transcript, and beside each step why its advantage is what it is."""

from dataclasses import replace

import polars as pl
import streamlit as st  # noqa: TID253 - this is a Streamlit page

from lake import ids
from lake.judgements.credit import covering
from viewer import choices, figures, links, plain, tables, transcript
from viewer import components as ui
from viewer.links import Page, given_int
from viewer.navigation import changed, href
from viewer.pinned import read
from viewer.plain import chip, number, signed, visible, word
from viewer.queries import PAGE_ROWS, Row, Window, episodes, lineage, training
from viewer.queries.episodes import EpisodeFilter

# Steps on a page. (A string here would be printed: Streamlit shows stray expressions of its scripts.)
STEPS = 10
# Related episodes with a link.
RELATED = 20


def show() -> None:
    """The page."""
    episode_id = ui.wanted_id("episode", Page.EPISODES, "All episodes")
    facts = read(episodes.episode, episode_id)
    if facts is None:
        ui.not_found(_gone(episode_id), Page.EPISODES, "All episodes")
    ui.header(f"Episode {chip(links.episode(facts), links.NAME)}")
    _place(episode_id)
    _facts(facts)
    _related(facts)
    options, rows = _credit(facts)
    _figures(facts, rows)
    _scores(episode_id)
    _ground_truth(episode_id)
    window, selected = _steps_window(facts)
    if rows.height:
        _chart(rows, selected)
    _transcript(facts, rows, options, window, selected)


def _gone(episode_id: int) -> str:
    """That an episode is not to be seen: why and when it was taken back, or that it never was there."""
    row, name = read(lineage.taken_back, episode_id), chip(ids.to_text(episode_id))
    if row is None:
        return f"This lake holds no episode {name}."
    said = f"Episode {name} was {row['kind']} at {row['at']:%Y-%m-%d %H:%M:%S} UTC"
    if row["reason"]:
        said += f": {chip(row['reason'])}"
    if row["superseded_by"] is not None:
        newer = ids.to_text(row["superseded_by"])
        said += f"; [{newer}]({href(Page.EPISODE, episode=newer)}) took its place"
    return f"{said}. An older snapshot may still have it: `trajlake show {ids.to_text(episode_id)} --as-of NAME`."


def _place(episode_id: int) -> None:
    """Previous and next in the filtered list that the reader came from."""
    wanted, order = choices.carried()
    place = read(episodes.place, wanted, order, episode_id)
    with st.container(horizontal=True, vertical_alignment="center"):
        page = None if place is None or place.position <= PAGE_ROWS else (place.position - 1) // PAGE_ROWS + 1
        here = choices.parameters(wanted, order) | {tables.OPENED: ids.to_text(episode_id)}
        ui.link(Page.EPISODES, "Back to the list", "arrow_back", page=page, **here)
        if place is None:
            st.caption("This episode is not in the filtered list.")
            return
        _neighbour("\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK} Previous", place.previous, "k")
        _neighbour("Next \N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}", place.next, "j")
        filtered = " that match the filter" if replace(wanted, score=None) != EpisodeFilter() else ""
        st.caption(f"{place.position:,} of {place.total:,} episodes{filtered}")


def _neighbour(label: str, target: int | None, key: str) -> None:
    """A link to another episode of the list, with everything else as the reader has set it."""
    address = None if target is None else changed(episode=ids.to_text(target), step=None)
    ui.turn(label, address, key)


def _facts(facts: Row) -> None:
    with st.container(horizontal=True, gap="small", vertical_alignment="center"):
        ui.status_badge(facts["status"])
        for name in ("policy", "environment"):
            if facts[name] is not None:
                ui.fact(name, chip(facts[name]))
        if facts["policy_version"] is not None:
            ui.fact("policy version", facts["policy_version"])
        if facts["stop_reason"]:
            ui.fact("stopped by", chip(facts["stop_reason"]))
        group = ids.to_text(facts["group_id"])
        ui.link(Page.GROUP, f"Group of task {chip(facts['task_id'])}", "workspaces", group=group)
        ui.link(Page.COMPARE, "Beside its siblings", "view_column", episode=ids.to_text(facts["episode_id"]))
        ui.fact("id", chip(ids.to_text(facts["episode_id"])))
    if facts["error"]:
        st.error("The rollout ended with an error.", icon=":material/error:")
        st.code(visible(facts["error"]), language=None, wrap_lines=True)


def _related(facts: Row) -> None:
    """Links to the episode that this one came out of, and to its sub-agents, forks and continuations."""
    rows = read(episodes.related, facts["episode_id"]).to_dicts()
    if not rows:
        return
    with st.container(horizontal=True, gap="small", vertical_alignment="center"):
        for row in rows[:RELATED]:
            shown = ids.to_text(row["episode_id"])
            name = chip(shown if row["task_id"] is None else links.episode(row))
            kind = word(row["relation"] or "child")
            label, step = f"{kind}: {name}" + (f" (agent {chip(row['agent_id'])})" if row["agent_id"] else ""), None
            if row["is_parent"]:
                label, step = f"{kind} of episode {name}", row["parent_step_index"]
            ui.link(Page.EPISODE, label, "account_tree", episode=shown, step=step)
        if len(rows) > RELATED:
            st.caption(f"and {len(rows) - RELATED:,} more")


def _credit(facts: Row) -> tuple[transcript.Options, pl.DataFrame]:
    """What of the transcript is shown, with which advantages; and those advantages by step."""
    episode_id = facts["episode_id"]
    with st.container(horizontal=True, vertical_alignment="bottom"):
        chosen = choices.credit(read(covering, episode_id=episode_id), "episode")
        options = transcript.Options(
            reasoning=st.toggle("Reasoning", value=True, key="reasoning", bind="query-params"),
            tools=st.toggle("Tool calls", value=True, key="tools", bind="query-params"),
            credit=None if chosen is None else chosen.text,
            formula=None if chosen is None else chosen.formula,
        )
    choices.explain(chosen, episode_id=episode_id)
    rows = read(training.advantages, episode_id, chosen) if chosen else pl.DataFrame()
    return options, rows


def _figures(facts: Row, rows: pl.DataFrame) -> None:
    """The episode in figures, in one line."""
    with st.container(horizontal=True, gap="medium", vertical_alignment="center"):
        parts = [("Return", number(facts["env_return"])), ("Steps", number(facts["num_steps"])), *_spent(facts)]
        if rows.height:
            first = rows.row(0, named=True)
            split = sum(transcript.disagree(row) for row in rows.iter_rows(named=True))
            parts += [
                ("A_E", signed(first["a_episode"])),
                ("Siblings scored", number(first["group_size"])),
                ("Steps in shared states", number(int((rows["anchor_episodes"] > 1).sum()))),
                ("Unknown advantages", number(rows["advantage"].null_count())),
                ("Terms disagree", number(split)),
            ]
        for label, value in parts:
            ui.fact(label, f"**{value}**")
        if rows.height and "dead_group" in rows["flags"][0].split(","):
            why = "All scored siblings scored the same."
            ui.badge("dead group", "orange", icon=":material/block:", explanation=why)


def _spent(facts: Row) -> list[tuple[str, str]]:
    """What the episode took, as far as the lake knows."""
    spent = []
    if facts["seconds"] is not None:
        spent.append(("Duration", plain.seconds(facts["seconds"])))
    for label, name in (("Prompt tokens", "prompt_tokens"), ("Completion tokens", "completion_tokens")):
        if facts[name] is not None:
            spent.append((label, number(facts[name])))
    if facts["cost"] is not None:
        spent.append(("Cost", number(facts["cost"], 4)))
    return spent


def _scores(episode_id: int) -> None:
    """What scorers say of the episode, with their reasons; what they say of its steps is folded."""
    frame = read(episodes.scores, episode_id)
    if frame.is_empty():
        return
    st.subheader("Scores", anchor=False)
    whole, of_steps = frame.filter(pl.col("step_index").is_null()), frame.drop_nulls("step_index")
    with st.container(horizontal=True, gap="medium"):
        for row in whole.iter_rows(named=True):
            ui.fact(chip(row["scorer"]), f"**{number(row['value'])}**")
    for position, row in enumerate(whole.iter_rows(named=True)):
        for kind in ("reason", "error"):
            if row[kind]:
                _why(f"{kind} of {chip(row['scorer'])}", row[kind], f"{kind}-{position}")
    if of_steps.height:
        with st.expander(f"Scores of steps ({of_steps.height})", icon=":material/format_list_numbered:"):
            columns = {
                "scorer": tables.text("Scorer"),
                "step_index": tables.value("Step"),
                "value": tables.value("Value"),
                "reason": tables.wide("Reason"),
                "error": tables.wide("Error"),
            }
            tables.table(of_steps, columns, label="Scores of steps")


def _why(label: str, text: str, key: str) -> None:
    """The text of a scorer, folded if it is long."""
    if len(text) <= transcript.TOOL_OUTPUT:
        with st.container(gap="xsmall"):
            st.caption(label)
            transcript.passage(text, len(text), key, prose=True)
    else:
        with st.expander(f"{label} ({len(text):,} characters)"):
            transcript.passage(text, len(text), key)


def _ground_truth(episode_id: int) -> None:
    text, length = read(episodes.document, episode_id, "ground_truth")
    if text is not None:
        with st.expander("Ground truth", icon=":material/flag:"):
            shown = plain.pretty(text)
            transcript.passage(shown, max(length, len(shown)), "truth", language="json")


def _steps_window(facts: Row) -> tuple[Window, int | None]:
    """The page of steps to show, and the step that is marked: the one that the address names."""
    selected = given_int("step")
    if selected is not None and selected >= facts["num_steps"]:
        ui.missing(f"The episode has steps 0 to {facts['num_steps'] - 1}, no step {selected}.")
        selected = None
    return Window.page((selected or 0) // STEPS + 1, STEPS), selected


def _chart(rows: pl.DataFrame, selected: int | None) -> None:
    event = st.altair_chart(
        figures.advantages(rows, selected), key="advantages", on_select="rerun", selection_mode=figures.PICK
    )
    picked = event["selection"].get(figures.PICK)
    if picked and picked[0]["step_index"] != selected:
        st.query_params["step"] = str(picked[0]["step_index"])
        st.rerun()


def _transcript(
    facts: Row, rows: pl.DataFrame, options: transcript.Options, window: Window, selected: int | None
) -> None:
    episode_id = facts["episode_id"]
    pages = -(-facts["num_steps"] // STEPS)
    if pages > 1:
        with st.container(horizontal=True, vertical_alignment="center"):
            last = min(window.offset + STEPS, facts["num_steps"])
            st.caption(f"Steps {window.offset} to {last - 1} of {facts['num_steps']}", width="stretch")
            ui.page_switch(pages, window.offset // STEPS + 1, "step", lambda chosen: (chosen - 1) * STEPS)
    if window.offset == 0:
        document, length = read(episodes.document, episode_id, "initial_messages")
        states = read(episodes.steps, episode_id, Window(1))["state"].to_list()
        first = [m for m in plain.messages(document, length) if plain.content(m)[: episodes.TEXT] not in states]
        transcript.messages(first, "first")
    by_step = {row["step_index"]: row for row in rows.iter_rows(named=True)}
    scale = transcript.scale_of(rows, read(episodes.rewards, episode_id))
    for row in read(episodes.steps, episode_id, window).iter_rows(named=True):
        given = by_step.get(row["step_index"])
        transcript.step(episode_id, row, given, scale, options)
    if selected is not None:
        transcript.mark(selected)
    if window.offset + window.limit >= facts["num_steps"]:
        document, length = read(episodes.document, episode_id, "final_observation")
        if after := plain.messages(document, length):
            st.caption("After the last step")
            transcript.messages(after, "last")


show()
