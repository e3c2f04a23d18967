"""Groups of siblings: the list, one group with its shared anchor states, and the anchor states of a whole credit."""

import shlex
from collections.abc import Callable

import polars as pl
import streamlit as st  # noqa: TID253 - loaded by the viewer's process only
from streamlit.delta_generator import DeltaGenerator  # noqa: TID253

from lake import ids
from lake.cli.options import format_lake_flags
from lake.judgements import outcomes
from lake.judgements.credit import Credit, find_covering
from lake.judgements.scores import ENV_RETURN
from lake.read.text_table import count_noun, format_count
from viewer import changed_data, download, filters, navigation, side_by_side, tables
from viewer import components as ui
from viewer.navigation import Page, change_address, get_parameter, href
from viewer.plain import chip, number, percent, visible
from viewer.queries import Row, Sort, anchors, episodes, groups, runs, training, transcripts
from viewer.queries.episodes import EpisodeFilter
from viewer.queries.groups import GroupFilter, Signal
from viewer.reader import MAX_LOCKED_ROWS
from viewer.session import get_viewed_lake, read

_COLUMNS = {
    "run_id": tables.text("Run"),
    "task_id": tables.text("Task", under="run_id"),
    "collection_round": tables.value("Round", under="run_id"),
    "signal": tables.text("Signal", "live: outcomes differ. dead: all scored the same. unjudged: fewer than 2 scored."),
    "size": tables.value("Siblings"),
    "scored": tables.value("Scored", under="size"),
    "mean_return": tables.value("Mean outcome"),
    "sd_return": tables.value("Std", "Sample standard deviation.", under="mean_return"),
    "lowest": tables.value("Lowest", under="mean_return"),
    "highest": tables.value("Highest", under="mean_return"),
    "mean_steps": tables.value("Mean steps", digits=1),
    "shared_share": tables.share("Shared steps", "Steps from a state that siblings share, by the current credit."),
    "error_share": tables.share(
        "In error texts", "Share of the shared steps; one error text stands for several situations."
    ),
    "empty_share": tables.share(
        "In empty states", "Share of the shared steps; any situation may lead to an empty state. A dash: not counted."
    ),
    "ways_in": tables.value("Ways in", "Mean number of distinct actions that led to a shared state.", digits=1),
}
_ID_COLUMNS = {"group_id": tables.ident("Group")}


def show_groups() -> None:
    """Draw the filtered list of groups, with their signals."""
    ui.draw_header("Groups")
    if not read(runs.count_runs):
        ui.draw_empty("This lake holds no groups yet.", "trajlake ingest FILE --lake LAKE      # or: trajlake demo")
        return
    line, order = filters.draw_filter_line(), tables.read_order()
    signal = line.aside.segmented_control(
        "Signal", list(map(str, Signal)), key="signal", label_visibility="collapsed", **ui.FILTER
    )
    group_filter = GroupFilter(line.episode_filter, Signal(signal) if signal else None, _choose_grouping(line.popover))
    group_parameters = {"signal": group_filter.signal, "grouping": group_filter.grouping}
    filters.draw_filter_chips(
        filters.build_parameters(group_filter.having)
        | {name: value for name, value in group_parameters.items() if value}
    )
    filters.run_searches(group_filter.having)
    filters.draw_facets(
        group_filter.having, lambda facet, limit: read(groups.count_group_facet_values, facet, group_filter, limit)
    )
    total = read(groups.count_groups, group_filter, order)
    if not total:
        st.info("No group matches these filters.", icon=":material/filter_alt_off:")
        return
    frame = read(groups.read_page, group_filter, ui.draw_pager(total, "groups"), order)
    scores = read(groups.read_mean_scores, group_filter, tuple(frame["group_id"]))
    frame, scored = tables.add_score_columns(frame, scores, group_filter.having.score, means=True)
    tables.draw_table(
        frame,
        tables.select_filled(frame, _COLUMNS | scored | _ID_COLUMNS, order),
        label="Groups",
        href=lambda row: href(Page.GROUP, group=row["group_id"], score=group_filter.having.score),
        key="group_id",
        sortable=groups.ORDERS,
    )
    download.draw_csv_link("groups", order, list=filters.pack_filter(group_filter.having), **group_parameters)


def _choose_grouping(container: DeltaGenerator) -> str | None:
    names, grouping = read(groups.list_groupings), get_parameter("grouping")
    if grouping is not None and grouping not in names:
        ui.warn_of_missing(f"This lake has no grouping {chip(grouping)}; showing groups as collected.")
    if not names:
        return None
    meaning = "Groups that `trajlake group` formed, by name."
    choice = container.selectbox(
        "Grouping", names, index=None, key="grouping", placeholder="as collected", help=meaning, **ui.FILTER
    )
    return None if choice is None else str(choice)


_SIGNALS = {
    Signal.LIVE: ("live group", "green", "Outcomes differ: there is something to learn from."),
    Signal.DEAD: ("dead group", "orange", "All scored siblings scored the same: episode advantages are 0."),
    Signal.UNJUDGED: ("unjudged group", "gray", "Fewer than two scored siblings: nothing to compare."),
}


def show_group() -> None:
    """Draw one group: the siblings' outcomes and the anchor states that they share."""
    group_id = ui.read_required_id("group", Page.GROUPS, "All groups")
    facts = read(groups.read_group, group_id, ENV_RETURN)
    if facts is None:
        ui.end_with_not_found(changed_data.describe_deleted_group(group_id), Page.GROUPS, "All groups")
    ui.draw_header(f"Group {chip(navigation.name_group(facts), navigation.MAX_NAME)}")
    with st.container(horizontal=True, vertical_alignment="bottom"):
        scorer = filters.choose_outcome(st.container(width=260), facts["run_id"])
        score = read(outcomes.choose_score_of_run, facts["run_id"], scorer)
        with st.container():
            covering = read(find_covering, group_id=group_id)
            credit = filters.choose_credit(covering, "group")
    facts = read(groups.read_group, group_id, score) or facts
    _draw_facts(facts, credit)
    filters.explain_credit(credit, group_id=group_id)
    _draw_siblings(facts, credit, score)
    with st.container(horizontal=True, vertical_alignment="bottom"):
        # At first the best and the worst of the siblings.
        episode_ids = side_by_side.choose_siblings(group_id, score, read(transcripts.choose_contrast, group_id, score))
        if len(episode_ids) > 1:
            texts = [ids.to_text(episode_id) for episode_id in episode_ids]
            target = href(Page.COMPARE, episode=texts, score=score, credit=None if credit is None else credit.text)
            st.markdown(f":material/view_column: [Compare step by step]({target})", width="content")
        else:
            st.caption("Choose two or more.", width="content")
    if credit is None:
        message = (
            "Choose a credit above to see the anchor states that siblings share."
            if covering
            else "No credit job has covered this group, so there are no anchor states to show."
        )
        st.info(message, icon=":material/info:")
    else:
        _draw_anchors(group_id, credit, score)


def _draw_facts(facts: Row, credit: Credit | None) -> None:
    with st.container(horizontal=True, gap="small", vertical_alignment="center"):
        label, colour, explanation = _SIGNALS[Signal(facts["signal"])]
        ui.draw_badge(label, colour, explanation=explanation)
        if facts["first_version"] != facts["last_version"]:
            ui.draw_badge("mixes policy versions", "red", explanation="Different weights played its siblings.")
        expected = facts["expected_size"]
        if expected is not None and facts["size"] < expected:
            ui.draw_badge(
                f"{facts['size']} of {count_noun(expected, 'sibling')}",
                "orange",
                explanation="The collector planned more siblings.",
            )
        ui.draw_fact("id", chip(ids.to_text(facts["group_id"])))
        ui.draw_link(Page.GROUPS, "Groups of the run", "arrow_back", run=facts["run_id"], score=get_parameter("score"))
        download.draw_html_link(credit, group=ids.to_text(facts["group_id"]))
    ui.draw_facts(
        ("Siblings", number(facts["size"])),
        ("Scored", number(facts["scored"])),
        ("Mean outcome", number(facts["mean_return"])),
        ("Std", number(facts["sd_return"]), "Sample standard deviation of the outcomes."),
        *((name.capitalize(), number(facts[name])) for name in ("lowest", "highest")),
    )


def _draw_siblings(facts: Row, credit: Credit | None, score: str) -> None:
    order = tables.read_order()
    build_address = _build_sibling_address(facts["group_id"], credit, score, order)
    if facts["scored"]:
        marks = read(groups.read_outcomes, facts["group_id"], score)
        st.html(side_by_side.render_outcomes(marks, facts["mean_return"], facts["sd_return"], build_address))
    window = ui.draw_pager(facts["size"], "siblings", name="siblings")
    frame = read(groups.read_siblings, facts["group_id"], credit, window, score, order)
    answers = read(episodes.read_answers, tuple(frame.select("episode_id", "num_steps").iter_rows()))
    frame = frame.join(answers, on="episode_id", how="left", maintain_order="left")
    frame, scores = tables.add_score_columns(frame, read(episodes.read_scores, tuple(frame["episode_id"])), score)
    columns = {
        "rollout_index": tables.value("Rollout"),
        "status": tables.text("Status"),
        "answer": tables.excerpt("Answer", "The last action."),
        "outcome": tables.value("Outcome", "A dash means not scored, which is not 0."),
        **scores,
        "num_steps": tables.value("Steps"),
        "a_episode": tables.advantage("A_E"),
        "mean_advantage": tables.advantage("Mean A"),
        "policy_version": tables.value("Policy version"),
        "episode_id": tables.ident("Episode"),
    }
    tables.draw_table(
        frame,
        tables.select_filled(frame, columns, order),
        label="Siblings",
        href=build_address,
        key="episode_id",
        sortable=groups.SIBLING_ORDERS,
        page="siblings",
    )
    credit_text = None if credit is None else credit.text
    with st.container(horizontal=True, vertical_alignment="center"):
        group = ids.to_text(facts["group_id"])
        download.draw_csv_link("siblings", order, group=group, credit=credit_text, score=score)
        download.draw_list_link(group=group, score=get_parameter("score"))


def _draw_anchors(group_id: int, credit: Credit, score: str) -> None:
    st.subheader("Anchor states shared by siblings", anchor=False)
    shares = read(anchors.compute_shares, group_id, credit)
    total = read(anchors.count_anchors, group_id, credit)
    total_steps = max(shares["steps"], 1)
    st.caption(
        f"{format_count(total, 'state')} shared by two siblings or more; {percent(shares['shared'] / total_steps)} of "
        f"{format_count(shares['steps'], 'step')} start from them, {percent(shares['alone'] / total_steps)} from a "
        "state that no other step has (A_S 0, or unknown if unscored)."
    )
    if shares["doubted"]:
        weight = shares["doubted_weight"]  # None where every A_S is 0
        of_sum = "" if weight is None else f": {percent(weight)} of the sum of |A_S|"
        st.warning(
            f"{number(shares['doubted'])} of {format_count(shares['shared'], 'shared step')} are from error texts or "
            f"empty states, which any situation may lead to{of_sum}.",
            icon=":material/report:",
        )
    if not total:
        st.info("No two siblings passed the same state.", icon=":material/info:")
        return
    order = tables.read_order("anchors")
    frame = read(anchors.read_page, group_id, credit, ui.draw_pager(total, "shared states"), order)
    columns = {
        "state": tables.wide("State"),
        "size": tables.value("Steps"),
        "episodes": tables.value("Siblings", "Distinct episodes that passed the state."),
        "actions": tables.value("Actions", "Distinct actions taken there."),
        "spread": tables.value("Return spread", "Largest minus smallest return-to-go; 0: all steps have the same."),
        "lowest": tables.value("Lowest"),
        "highest": tables.value("Highest"),
        "mean_step": tables.value("Mean step", digits=1),
        "ways_in": tables.value("Ways in", "Distinct actions that led to the state; many suggest several situations."),
        "doubt": tables.text(
            "Doubt", "Error texts and empty states make false anchors: any situation may lead to them."
        ),
        "states": tables.value("Texts", "Distinct texts; several if the definition ignores a part of the state."),
        "share": tables.share("Share of |A_S|", "Share of the sum over the group's steps."),
        "anchor_key": tables.ident("Anchor"),
    }
    tables.draw_table(
        frame,
        tables.select_filled(frame, columns, order),
        label="Shared states",
        href=lambda row: change_address(anchor=row["anchor_key"], steps=None),
        key="anchor_key",
        selected=get_parameter("anchor"),
        sortable=anchors.ORDERS,
        parameter="anchors",
    )
    download.draw_csv_link("shared-states", order, group=ids.to_text(group_id), credit=credit.text)
    _draw_visits(group_id, credit, score)


def _draw_visits(group_id: int, credit: Credit, score: str) -> None:
    """Draw the steps from the anchor state that the address names."""
    if (text := _read_anchor("Choose a state to see every step from it.")) is None:
        return
    anchor_key = ids.from_text(text)
    total = read(anchors.count_visits, group_id, anchor_key, credit)
    if not total:
        ui.warn_of_missing(f"No step of this group starts from anchor {chip(text)}.")
        return
    st.subheader("Steps from this state", anchor=False)
    window = ui.draw_pager(total, "steps", name="steps")
    frame = read(anchors.read_visits, group_id, anchor_key, credit, window, score)
    state = read(transcripts.read_text, frame["episode_id"][0], frame["step_index"][0], "state", transcripts.TEXT)
    st.code(visible(state), language=None, wrap_lines=True)
    actions = pl.coalesce(pl.col("action").replace("", None), "tool_calls").fill_null("")
    columns = {
        "rollout_index": tables.value("Rollout"),
        "step_index": tables.value("Step"),
        "action": tables.wide("Action"),
        "reward": tables.value("Reward"),
        "return_to_go": tables.value("Return-to-go"),
        "a_step": tables.advantage("A_S"),
        "advantage": tables.advantage("A"),
        "outcome": tables.value("Outcome"),
        "episode_id": tables.ident("Episode"),
    }
    frame = frame.with_columns(action=actions)
    tables.draw_table(
        frame, tables.select_filled(frame, columns), label="Steps", href=_build_sibling_address(group_id, credit, score)
    )
    download.draw_list_link(sql=anchors.build_visitors_sql(credit, anchor_key, group_id), about=f"passed state {text}")


def _build_sibling_address(
    group_id: int, credit: Credit | None, score: str, order: Sort | None = None
) -> Callable[[Row], str]:
    """Return a function from a row to the address of its episode, where previous and next stay in the group."""
    credit_text = None if credit is None else credit.text
    packed_filter = filters.pack_filter(EpisodeFilter(group=group_id, score=score), order)
    return lambda row: href(
        Page.EPISODE, episode=row["episode_id"], step=row.get("step_index"), credit=credit_text, list=packed_filter
    )


_MEANING = (
    "**A_S** compares the steps of siblings from the same state. It misleads where one text stands for several "
    "situations. **Ways in** counts the distinct actions that led to the state; many suggest several situations. "
    "**Doubt** marks error texts and empty states: any situation may lead to them. **Share of \\|A_S\\|** is the "
    "state's share of all step advantages."
)


def show_anchors() -> None:
    """Draw the anchor states of a whole credit: their share of the step advantages, and reasons for doubt."""
    ui.draw_header("Anchors")
    credit = filters.read_credit_input("credit") or read(training.look_up_credit)
    if credit is None:
        ui.draw_empty("This lake holds no advantages yet.", "trajlake credit gigpo --lake LAKE")
        return
    filters.explain_credit(credit)
    total = read(anchors.count_states, credit)
    if not total["anchors"]:
        st.info("No two siblings passed the same state.", icon=":material/info:")
    else:
        _draw_states(credit, total["anchors"], total["shared"], total["steps"])
        _draw_groups(credit)
    _draw_definitions(credit)


def _draw_states(credit: Credit, count: int, shared: int, steps: int) -> None:
    st.caption(
        f"{number(shared)} of {format_count(steps, 'step')} ({percent(shared / steps)}) start from one of "
        f"{format_count(count, 'state')} that siblings of a group share.",
        help=_MEANING,
    )
    columns = {
        "state": tables.wide("State"),
        "share": tables.TableColumn(
            "Share of |A_S|", kind=tables.Kind.SHARE, explanation="Share of the sum over all steps.", digits=3
        ),
        "size": tables.value("Steps"),
        "episodes": tables.value("Episodes"),
        "groups": tables.value("Groups", "Groups whose siblings share the state."),
        "spread": tables.value("Return spread", "Largest minus smallest return-to-go of a group; mean over groups."),
        "actions": tables.value("Actions", f"Distinct actions from the state, in at most {anchors.SAMPLE} steps."),
        "ways_in": tables.value(
            "Ways in", f"Distinct actions that led to the state, in at most {anchors.SAMPLE} steps."
        ),
        "states": tables.value("Texts", "Distinct texts; several if the definition ignores a part of the state."),
        "doubt": tables.text(
            "Doubt", "Error texts and empty states make false anchors: any situation may lead to them."
        ),
        "anchor_key": tables.ident("Anchor"),
    }
    order = tables.read_order()
    tables.draw_table(
        read(anchors.read_states, credit, ui.draw_pager(count, "states"), order),
        columns,
        label="States",
        href=lambda row: change_address(anchor=row["anchor_key"], groups=None),
        key="anchor_key",
        selected=get_parameter("anchor"),
        sortable=(*anchors.STATE_ORDERS, *(anchors.TEXT_ORDERS if count <= anchors.MOST_STATES_BY_TEXT else ())),
    )
    download.draw_csv_link("anchors", order, credit=credit.text)


def _read_anchor(advice: str) -> str | None:
    """Return the id of the anchor that the address names; without one, draw the advice, or the fault of the id."""
    text = get_parameter("anchor")
    if text is None:
        st.caption(advice)
    elif not ids.is_text(text):
        ui.warn_of_missing(f"{chip(text)} is not the id of an anchor.")
    else:
        return text
    return None


def _draw_groups(credit: Credit) -> None:
    """Draw the groups of the state that the address names."""
    if (text := _read_anchor("Choose a state to see the groups whose siblings share it.")) is None:
        return
    anchor_key = ids.from_text(text)
    total = read(anchors.count_siblings, credit, anchor_key)
    if not total["groups"]:
        ui.warn_of_missing(f"No siblings share a state with anchor {chip(text)}.")
        return
    st.subheader("Groups that share this state", anchor=False)
    window = ui.draw_pager(total["groups"], "groups", name="groups")
    frame = read(anchors.read_groups, credit, anchor_key, window, tables.read_order("by"))
    columns = {
        "run_id": tables.text("Run"),
        "task_id": tables.text("Task"),
        "collection_round": tables.value("Round"),
        "size": tables.value("Steps"),
        "episodes": tables.value("Siblings"),
        "spread": tables.value("Return spread"),
        "weight": tables.value("Sum of |A_S|"),
        "group_id": tables.ident("Group"),
    }
    tables.draw_table(
        frame,
        tables.select_filled(frame, columns),
        label="Groups of the state",
        href=lambda row: href(Page.GROUP, group=row["group_id"], anchor=text, credit=credit.text),
        key="group_id",
        sortable=anchors.GROUP_ORDERS,
        parameter="by",
        page="groups",
    )
    with st.container(horizontal=True, vertical_alignment="center"):
        st.caption("A row opens the steps of its siblings from the state.", width="content")
        if total["episodes"] <= MAX_LOCKED_ROWS:
            download.draw_list_link(sql=anchors.build_visitors_sql(credit, anchor_key), about=f"passed state {text}")


def _draw_definitions(credit: Credit) -> None:
    """Draw the figures of other definitions of a state, and the commands that measure and use them."""
    st.subheader("Under another definition", anchor=False)
    lake = format_lake_flags(get_viewed_lake().lakes)
    measurement = read(anchors.read_measurement)
    if measurement is None:
        st.caption(
            "This command compares other definitions of a state on a sample of groups: without counters, without error "
            "texts, with the last states together. `--keep` stores the figures for this page."
        )
        st.code(f"trajlake anchors --keep {lake}", language=None)
        return
    steps = int(measurement.figures["steps"].max() or 0)  # type: ignore[arg-type]
    later = " Episodes were recorded since." if measurement.is_outdated else ""
    st.caption(
        f"Measured at {measurement.ended_at:%Y-%m-%d %H:%M} UTC on {format_count(steps, 'step')}.{later} "
        "To measure again:"
    )
    st.code(" ".join(filter(None, (f"trajlake anchors --keep {lake}", measurement.options))), language=None)
    columns = {
        "anchors": tables.text("Definition"),
        "shared": tables.share("Shared steps", "Steps whose state a sibling visited too; they have an A_S."),
        "singleton": tables.share("Alone", "Steps whose state no other step of the group has; their A_S is 0."),
        "known": tables.share("Compared", "Steps with a state under the definition."),
        "errors": tables.share("In error texts", "Share of the shared steps."),
        "ways_in": tables.value("Ways in", "Mean number of distinct actions that led to a shared state.", digits=1),
        "states": tables.value("States"),
        "definition": tables.wide("As JSON"),
    }
    tables.draw_table(
        measurement.figures,
        columns,
        label="Definitions",
        href=lambda row: change_address(definition=row["anchors"]),
        key="anchors",
        selected=get_parameter("definition"),
    )
    definition = measurement.figures.filter(anchors=get_parameter("definition") or "")
    if definition.is_empty():
        st.caption("Choose a definition to see the command that computes with it.")
        return
    estimator = str(credit.parameters.get("estimator") or "gigpo")
    setting = shlex.quote(f"anchors={definition['definition'][0]}")
    st.code(visible(f"trajlake credit {shlex.quote(estimator)} {lake} --set {setting}"), language=None)
