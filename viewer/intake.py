"""What a training job saw: its funnel, how stale and how often, of what, and how far its policy drifted from the data.

Part of the page on training; read when it is opened.
"""

import polars as pl
import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

from lake.read.text_table import counted
from viewer import components as ui
from viewer import figures, tables
from viewer.links import Page
from viewer.navigation import chip_link, href
from viewer.pinned import read
from viewer.plain import chip, one_line
from viewer.queries import Row, drift, intake, staleness, updates
from viewer.transcript.fates import after

_BY: dict[str, intake.By] = {
    "run": "run_id",
    "task": "task_id",
    "round": "collection_round",
    "policy version": "policy_version",
    "format": "source_format",
}


def show(job_id: int) -> None:
    """What the job took in, and how far its policy has moved from it; both fold out."""
    saw = st.expander("What training saw", icon=":material/filter_alt:", key="saw", on_change="rerun")
    if saw.open:
        with saw:
            _funnel(job_id)
            _often(job_id)
            _mixture(job_id)
    moved = st.expander("Drift from the data", icon=":material/trending_flat:", key="drift", on_change="rerun")
    if moved.open:
        with moved:
            _drift(job_id)


def _funnel(job_id: int) -> None:
    stages = read(intake.funnel, job_id)
    frame = pl.DataFrame(
        {
            "stage": [f"{'left out: ' if stage.is_drop else ''}{one_line(stage.name, 120)}" for stage in stages],
            "episodes": [stage.episodes for stage in stages],
            "steps": [stage.steps for stage in stages],
            "place": range(len(stages)),
        },
        schema_overrides={"episodes": pl.Int64, "steps": pl.Int64},
    )
    columns = {
        "stage": tables.wide("From the lake to the loss", "A link lists the episodes, as they are in the lake now."),
        "episodes": tables.value("Episodes"),
        "steps": tables.value("Steps"),
    }

    def listed(row: Row) -> str:
        sql = stages[row["place"]].sql
        return "" if sql is None else href(Page.EPISODES, sql=sql, about=row["stage"])

    tables.table(frame, columns, label="Funnel", href=listed)
    if len(stages) == 1:
        st.caption(
            "What was left out is on record once a run of `trajlake train` has ended; a loop keeps no such record."
        )


def _often(job_id: int) -> None:
    times, stale = read(intake.times, job_id), read(staleness.by_age, job_id)
    if times.is_empty():
        return
    left, right = st.columns(2)
    bars = times.with_columns(pl.col("times").cast(pl.String))
    often = figures.histogram(bars, "times", "episodes", title="Times an episode was trained on", x_title="Times")
    ui.chart(left, often, "times")
    links = (
        chip_link(
            f"{counted(row['times'], 'time')}: {counted(row['episodes'], 'episode')}",
            _trained(job_id, row["times"]),
        )
        for row in times.head(8).iter_rows(named=True)
    )
    left.html(f'<div class="trajlake-chips">{" ".join(links)}</div>')
    ages = stale.with_columns(pl.col("staleness").cast(pl.String).fill_null("unknown"))
    title, x_title = "Trained tokens by staleness", "Policy versions behind"
    ui.chart(right, figures.histogram(ages, "staleness", "action_tokens", title=title, x_title=x_title), "stale")
    right.caption(
        "The version that the update began with, minus the one that played the episode. Of another run's episodes: the "
        "newest version of that run that the job consumed, minus theirs."
    )


def _trained(job_id: int, times: int) -> str:
    """The address of the episodes that a job trained on so many times."""
    about = f"trained on {counted(times, 'time')}"
    return href(Page.EPISODES, sql=intake.trained_so_often(job_id, times), about=about)


def _mixture(job_id: int) -> None:
    by = st.segmented_control("Mixture by", list(_BY), default="run", key="mixture-by", required=True)
    frame = read(intake.mixture, job_id, _BY[by])
    weighed = read(intake.is_weighed, job_id)
    columns = {
        "value": tables.text(str(by).capitalize()),
        "episodes": tables.value("Episodes"),
        "rows": tables.value("Times consumed"),
        "action_tokens": tables.value("Trained tokens"),
        "share": tables.share("Share of the loss weight" if weighed else "Share of the trained tokens"),
    }
    tables.table(frame, columns, label="Mixture")
    if not weighed:
        st.caption("What tokens weighed in the loss is not on record for all of it, so shares are of trained tokens.")
    if frame.height == intake.MOST:
        st.caption(f"The {intake.MOST} largest shares.")


def _drift(job_id: int) -> None:
    policies = read(updates.policies, job_id)
    if not policies:
        st.info(
            "None of this job's policies was rescored: `trajlake rescore RUN@UPDATES` reads what it trained on with a "
            "checkpoint, and the lake then knows how far it is from the policies that sampled.",
            icon=":material/info:",
        )
        return
    labels = {series: f"{one_line(name)}: {after(done)}" for series, (name, done) in policies.items()}
    newest, key = len(labels) - 1, f"drift-{job_id}"
    chosen = st.selectbox("Policy", list(labels), index=newest, format_func=labels.__getitem__, key=key)
    frame = read(drift.by_staleness, job_id, chosen)
    if frame.is_empty():
        st.info("It was rescored on none of the steps that the job trained on, or has no ratios there.")
        return
    columns = {
        "staleness": tables.value("Versions behind", "A dash: the version that sampled is not known."),
        "steps": tables.value("Steps"),
        "tokens": tables.value("Tokens"),
        "mean": tables.advantage("Mean log ratio"),
        "q05": tables.advantage("5 %"),
        "q50": tables.advantage("Median"),
        "q95": tables.advantage("95 %"),
        "ess": tables.share("ESS", "Effective sample size of the ratios, as a share of the tokens."),
        "stopped": tables.share("Clipped", "Tokens whose gradient the loss's clip or mask would stop at this policy."),
        "limited": tables.share("Limited", "Tokens whose weight would be at the loss's limit at this policy."),
    }
    tables.table(frame, columns, label="Drift")
    why = read(drift.clip, job_id)
    said = [
        "Log ratio of a token: its log-probability under this policy minus that under the policy that sampled it.",
        f"At most {drift.STEPS:,} of the steps, drawn by a hash of their ids.",
    ]
    if why is not None:
        said.append(f"No shares are told of the clip: {chip(why, 300)}.")
    st.caption(" ".join(said))
