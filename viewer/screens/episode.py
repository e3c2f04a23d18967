"""One episode: where it belongs, what it took, its scores, and its transcript with the ledger of its credit."""

from html import escape

import polars as pl
import streamlit as st  # noqa: TID253 - this is a Streamlit page

from lake import ids
from lake.errors import TrajlakeError
from lake.judgements.credit import Credit, covering
from viewer import annotations, choices, gone, links, plain, tables, taking
from viewer import components as ui
from viewer.links import Page, given_int
from viewer.navigation import anchor, changed, href, look_at
from viewer.pinned import read
from viewer.plain import chip, number, one_line, signed, visible, word
from viewer.queries import PAGE_ROWS, Row, Window, episodes, search, training
from viewer.queries import annotations as said
from viewer.transcript import component, drawn, ledger
from viewer.transcript.told import Told, outcome

# Related episodes with a link. (A string here would be printed: Streamlit shows stray expressions of its scripts.)
RELATED = 20
# Longer words of a scorer are folded.
LONG_REASON = 300


def show() -> None:
    """The page."""
    episode_id = ui.wanted_id("episode", Page.EPISODES, "All episodes")
    facts = read(episodes.episode, episode_id)
    if facts is None:
        ui.not_found(gone.episodes([episode_id]), Page.EPISODES, "All episodes")
    look_at(facts["run_id"])
    ui.bar(f"{_path(facts)}{_place(episode_id)}")
    _facts(facts)
    _related(facts)
    chosen, rows, hidden = _credit(facts)
    _figures(facts, rows)
    _scores(episode_id)
    _ground_truth(episode_id)
    tells = annotations.show(episode_id, given_int("step"))
    window, selected = _steps_window(facts)
    searched = choices.carried()[0].text
    find = search.longest(searched) if searched else ""
    component.show(Told(read, href, facts, chosen), window, selected, hidden, tells=tells, find=find)


def _path(facts: Row) -> str:
    """Where the episode belongs, as HTML: run, task, group, rollout; how it ended, and its outcome."""
    run, task = facts["run_id"], facts["task_id"]
    steps = [
        (run, href(Page.RUNS, run=run)),
        (task, href(Page.EPISODES, run=run, task=task)),
        ("group", href(Page.GROUP, group=ids.to_text(facts["group_id"]))),
    ]
    path = [anchor(one_line(str(name), links.NAME // 2), target) for name, target in steps]
    rollout = f"rollout {facts['rollout_index']}" + (f", attempt {facts['attempt']}" if facts["attempt"] else "")
    if facts["collection_round"] is not None:
        rollout += f", round {facts['collection_round']}"
    judged, value = outcome(read, facts)
    separator = " \N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK} "
    return (
        f'<h1 class="path">Episode {separator.join([*path, escape(rollout)])}</h1>'
        f"<span>{escape(one_line(facts['status']))}</span><span>{escape(one_line(judged, 40))} {number(value)}</span>"
    )


def _place(episode_id: int) -> str:
    """The way back to the filtered list that the reader came from, and to the episodes beside this one, as HTML."""
    wanted, order = choices.carried()
    try:
        place = read(episodes.place, wanted, order, episode_id)
    except TrajlakeError:
        # The address holds a text to search or SQL; the page of its list says what is wrong with it.
        back = href(Page.EPISODES, **choices.parameters(wanted, order))
        return f'<span class="turn">{anchor("The list of this address cannot be read", back)}</span>'
    page = None if place is None or place.position <= PAGE_ROWS else (place.position - 1) // PAGE_ROWS + 1
    here = choices.parameters(wanted, order) | {tables.OPENED: ids.to_text(episode_id)}
    back = anchor("Back to the list", href(Page.EPISODES, page=page, **here))
    if wanted.unlabelled is not None:
        queue = read(said.queue, wanted, order, episode_id)
        told = f"{queue.left:,} of {queue.total:,} left to label"
        return _turns(back, queue.previous, queue.next, told)
    if place is None:
        return f'<span class="turn">{back} This episode is not in the filtered list.</span>'
    filtered = " that match the filter" if wanted.narrows else ""
    return _turns(back, place.previous, place.next, f"{place.position:,} of {place.total:,} episodes{filtered}")


def _turns(back: str, previous: int | None, following: int | None, told: str) -> str:
    """The way back, the neighbours, and where between them the reader is."""
    before = _neighbour("\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK} Previous", previous, "p")
    after = _neighbour("Next \N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}", following, "n")
    return f'<span class="turn">{back} {before} {after} <span>{escape(told)}</span></span>'


def _neighbour(label: str, target: int | None, key: str) -> str:
    """A link to another episode of the list, with everything else as the reader has set it."""
    if target is None:
        return f"<span>{escape(label)}</span>"
    return anchor(label, changed(episode=ids.to_text(target), step=None), key=key)


def _facts(facts: Row) -> None:
    with st.container(horizontal=True, gap="small", vertical_alignment="center"):
        for name in ("policy", "environment"):
            if facts[name] is not None:
                ui.fact(name, chip(facts[name]))
        if facts["policy_version"] is not None:
            ui.fact("policy version", facts["policy_version"])
        if facts["stop_reason"]:
            ui.fact("stopped by", chip(facts["stop_reason"]))
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


def _credit(facts: Row) -> tuple[Credit | None, pl.DataFrame, list[str]]:
    """Whose advantages are shown; those advantages by step; and which kinds of text are hidden."""
    episode_id = facts["episode_id"]
    with st.container(horizontal=True, vertical_alignment="bottom"):
        chosen = choices.credit(read(covering, episode_id=episode_id), "episode")
        kinds = {"reasoning": "Reasoning", "tools": "Tool calls"}
        hidden = [kind for kind, label in kinds.items() if not _shown(kind, label)]
        taking.one_file(chosen, episode=ids.to_text(episode_id))
    choices.explain(chosen, episode_id=episode_id)
    rows = read(training.advantages, episode_id, chosen) if chosen else pl.DataFrame()
    return chosen, rows, hidden


def _shown(kind: str, label: str) -> bool:
    return st.toggle(label, value=True, key=kind, bind="query-params")


def _figures(facts: Row, rows: pl.DataFrame) -> None:
    """The episode in figures, in one line."""
    with st.container(horizontal=True, gap="medium", vertical_alignment="center"):
        parts = [("Steps", number(facts["num_steps"])), *_spent(facts)]
        if rows.height:
            first = rows.row(0, named=True)
            split = sum(ledger.disagree(row) for row in rows.iter_rows(named=True))
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
    """What scorers say of the whole episode, with their reasons; what they say of steps is beside the steps."""
    whole = read(episodes.scores, episode_id).filter(pl.col("step_index").is_null())
    if whole.is_empty():
        return
    with st.container(horizontal=True, gap="medium"):
        for row in whole.iter_rows(named=True):
            ui.fact(chip(row["scorer"]), f"**{number(row['value'])}**")
    texts = [
        (f"{kind} of {chip(row['scorer'])}", row[kind])
        for row in whole.iter_rows(named=True)
        for kind in ("reason", "error")
        if row[kind]
    ]
    if len(texts) == 1 and len(texts[0][1]) <= LONG_REASON:
        ui.fact(texts[0][0], chip(texts[0][1], LONG_REASON))
    elif texts:
        # One fold for all: the transcript begins on the first screen, however many scorers say why.
        with st.expander(_folded(texts), type="compact"):
            for label, text in texts:
                st.markdown(label)
                st.code(visible(text), language=None, wrap_lines=True)


def _folded(texts: list[tuple[str, str]]) -> str:
    """What a fold of texts of scorers is called."""
    size = sum(len(text) for _, text in texts)
    return f"{texts[0][0] if len(texts) == 1 else f'What {len(texts)} scorers say'} ({size:,} characters)"


def _ground_truth(episode_id: int) -> None:
    text, _ = read(episodes.document, episode_id, "ground_truth")
    if text is not None:
        with st.expander("Ground truth", icon=":material/flag:", type="compact"):
            st.code(visible(plain.pretty(text)), language="json", wrap_lines=True)


def _steps_window(facts: Row) -> tuple[Window, int | None]:
    """The steps that have a line, and the step that is opened: the one that the address names."""
    selected = given_int("step")
    if selected is not None and selected >= facts["num_steps"]:
        ui.missing(f"The episode has steps 0 to {facts['num_steps'] - 1}, no step {selected}.")
        selected = None
    lines = drawn.LINES
    number, pages = (selected or 0) // lines + 1, -(-facts["num_steps"] // lines)
    if pages > 1:
        ui.page_switch(pages, number, "step", lambda chosen: (chosen - 1) * lines)
    return Window.page(number, lines), selected


show()
