"""The batch of an update: whose it is, its metrics, its groups, its episodes and their advantages.

Part of the page on training.
"""

import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

from lake import ids
from lake.judgements.credit import Credit
from lake.read.text_table import counted
from viewer import choices, figures, tables, taking
from viewer import components as ui
from viewer.links import Page, given
from viewer.navigation import changed, chip_link, href, into_view
from viewer.pinned import read
from viewer.plain import chip, number, one_line
from viewer.queries import Row, staleness, training
from viewer.queries.episodes import EpisodeFilter

# Other jobs that are offered where the address names none.
_OTHERS = 8
_FIRST, _LAST = "grad_norm", "logprob"
# Metrics that are told between these.
_OTHER_FIGURES = 6


def show(job_id: int, update: int, credit: Credit | None, labels: dict[str, str]) -> None:
    """Its groups and its episodes; `labels` are what the jobs are called, by their ids."""
    into_view(f"update-{update}")
    with st.container(horizontal=True, vertical_alignment="center"):
        st.subheader(f"Update {update}", anchor=False, width="content")
        first, last = read(training.update_range, job_id) or (update, update)
        previous, following = (changed(update=number, page=None) for number in (update - 1, update + 1))
        ui.turn("\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK} Previous", previous if update > first else None, "k")
        ui.turn("Next \N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}", following if update < last else None, "j")
        taking.as_list(job=ids.to_text(job_id), update=update)
    if given("job") is None:
        _instead(job_id, update, labels)
    _figures(job_id, update)
    dead = _groups(job_id, update, credit)
    total = read(training.batch_total, job_id, update, credit)
    order = tables.ordered_by()
    window = ui.pager(total, "episodes, largest mean |A| first" if order is None else "episodes")
    frame = read(training.batch, job_id, update, credit, window, order)
    columns = {
        "run_id": tables.text("Run"),
        "task_id": tables.text("Task"),
        "rollout_index": tables.value("Rollout"),
        "policy_version": tables.value("Policy version"),
        "status": tables.text("Status"),
        "outcome": tables.value("Outcome", "A dash means not scored, which is not 0."),
        "a_episode": tables.advantage("A_E"),
        "mean_advantage": tables.advantage("Mean A"),
        "lowest": tables.advantage("Lowest A"),
        "highest": tables.advantage("Highest A"),
        "undefined": tables.value("Unknown A", "Steps whose advantage is not known."),
        "dead": tables.mark("Dead group"),
        "action_tokens": tables.value("Tokens", "Tokens that carried loss."),
        "episode_id": tables.ident("Episode"),
        "group_id": tables.ident("Group"),
    }
    here = choices.packed(EpisodeFilter(update=(job_id, update)))

    def episode(row: Row) -> str:
        credit_id = None if row["credit_job"] is None else ids.to_text(row["credit_job"])
        return href(Page.EPISODE, episode=row["episode_id"], step=row["first_step"], credit=credit_id, list=here)

    if not dead:
        columns.pop("dead")
    columns = tables.known(frame, columns, order)
    tables.table(frame, columns, label="Batch", href=episode, key="episode_id", sortable=training.BATCH_ORDERS)


def _instead(job_id: int, update: int, labels: dict[str, str]) -> None:
    """Whose update this is, where the address names no job, and the others that have one."""
    st.caption(f"Of the newest job that has an update {update}: {chip(labels[ids.to_text(job_id)], 200)}.")
    having = set(map(ids.to_text, read(training.with_update, update)))
    others = [option for option in labels if option in having and option != ids.to_text(job_id)]
    if others:
        links = [chip_link(labels[option], changed(job=option, page=None)) for option in others[:_OTHERS]]
        st.html(f'<div class="trajlake-chips"><span>Others:</span>{"".join(links)}</div>')


def _groups(job_id: int, update: int, credit: Credit | None) -> int:
    """What the batch is made of: its groups, and which of them can teach nothing. Returns how many these are."""
    frame = read(training.batch_groups, job_id, update, credit)
    if frame.is_empty():
        return 0
    total, dead = frame.select("total", "dead_total").row(0)
    said = f"The batch is of {counted(total, 'group')}"
    if credit is not None:
        said += f", {number(dead)} of them dead (their A_E is 0)" if dead else ", none of them dead"
    more = f", the first {frame.height} below" if total > frame.height else ""
    st.caption(f"{said}{more}.{_versions(job_id, update)}")
    columns = {
        "run_id": tables.text("Run"),
        "task_id": tables.text("Task"),
        "collection_round": tables.value("Round", "In which they were played."),
        "policy_version": tables.value("Policy version", "The oldest that played them."),
        "episodes": tables.value("Episodes"),
        "mean_return": tables.value("Mean outcome"),
        "mean_size": tables.value("Mean |A|"),
        "dead": tables.mark("Dead group", "All scored siblings scored the same."),
        "action_tokens": tables.value("Tokens", "Tokens that carried loss."),
        "group_id": tables.ident("Group"),
    }
    credit_id = None if credit is None else credit.text
    tables.table(
        frame,
        tables.known(frame, columns),
        label="Groups of the batch",
        href=lambda row: href(Page.GROUP, group=row["group_id"], credit=credit_id),
    )
    return int(dead)


def _figures(job_id: int, update: int) -> None:
    """The metrics of the update: how far it went first, then how old its batch is; what says least comes last."""
    values = read(training.metrics_at, job_id, update)
    others = [name for name in figures.by_interest(values) if name not in (_FIRST, _LAST)]
    told = [(one_line(name), number(values[name], 4)) for name in others[:_OTHER_FIGURES]]
    played = read(staleness.around, job_id, update).get(update)
    if played is not None:
        told.insert(0, ("versions behind", _span(played.behind)))
    if _FIRST in values:
        told.insert(0, (_FIRST, number(values[_FIRST], 4)))
    if _LAST in values:
        told.append((_LAST, number(values[_LAST], 4)))
    ui.facts(*told)


def _versions(job_id: int, update: int) -> str:
    """Which versions of the policy played the batch, beside those of its neighbours: old ones are clipped more."""
    found = read(staleness.around, job_id, update)
    played = found.pop(update, None)
    if played is None:
        return ""
    version = "version" if played.versions[0] == played.versions[1] else "versions"
    behind = "version" if played.behind == (1, 1) else "versions"
    said = f"This batch was played by policy {version} {_span(played.versions)}, {_span(played.behind)} {behind} behind"
    beside = " and ".join(_span(other.versions) for other in found.values())
    whose = "neighbours'" if len(found) > 1 else "neighbour's"
    return f" {said}{f'; its {whose} by {beside}' if beside else ''}."


def _span(ends: tuple[int, int]) -> str:
    return str(ends[0]) if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"
