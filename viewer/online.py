"""The part of the training page that is about an online run (`trajlake loop`): where it is, its curves, its rounds."""

from datetime import timedelta
from functools import partial

import polars as pl
import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

from lake import ids
from lake.judgements.scores import ENV_RETURN
from lake.read.online_runs import evaluation_run
from viewer import components as ui
from viewer import figures, over_rounds, pinned, tables
from viewer.links import Page, given_int
from viewer.navigation import changed, href
from viewer.pinned import read
from viewer.plain import number, percent, seconds, slug, visible
from viewer.queries import Row, loops
from viewer.queries.loops import Doing, Loop

_AXES = {"Rounds": "round", "Tokens": "tokens_so_far"}
_FOLLOW = "follow"
"""Query parameter, and key of the switch: whether the page follows the run."""
_LOOK_SECONDS = 4.0
"""How often a page that follows a run looks for newer data, at most."""
_REST = 4.0
"""Times as long as a page took to draw that it then rests."""
_QUIET_SECONDS = 120.0
"""Silence after which a run may have been killed; a run of long rounds may be silent for three of its longest."""


def show(loop: Loop) -> None:
    """The run that a training job belongs to."""
    sums = read(loops.sums, loop)
    evaluations = read(loops.evaluations, loop)
    _state(loop, sums)
    _figures(loop, sums, evaluations)
    _curves(loop, evaluations)
    if sums["rounds"]:
        _rounds(loop, int(sums["rounds"]), evaluations)


def _state(loop: Loop, sums: Row) -> None:
    """Whether it runs, what it does, and how far it is."""
    done, planned = int(sums["rounds"]), loop.planned
    with st.container(horizontal=True, vertical_alignment="center"):
        if loop.status == "succeeded":
            ui.badge("finished", "green")
            ui.fact("ended by", slug(str(loop.counts.get("stopped_by", "?"))))
        elif loop.status == "failed":
            ui.badge("failed", "red")
        else:
            _liveness(loop, sums["longest"])
            for part in read(loops.doing, loop):
                ui.fact(*_told(part))
        ui.link(Page.JOB, "Settings of the loop", "tune", job=ids.to_text(loop.job_id))
        ui.link(Page.JOB, "Its training job", "account_tree", job=ids.to_text(loop.train_job))
    if loop.error:
        st.code(visible(loop.error), language=None, wrap_lines=True)
    if planned:
        st.progress(min(1.0, done / planned), text=f"{done:,} of {planned:,} rounds")


def _liveness(loop: Loop, longest: float) -> None:
    """A run that has not ended: it runs, as far as its rows tell, or it was killed; the page follows it."""
    silent = max(0.0, (pinned.pinned_at() - read(loops.last_sign, loop)) / timedelta(seconds=1))
    if silent > max(_QUIET_SECONDS, 3 * longest):
        ui.badge("silent", "orange", explanation="Killed, or busy with something that takes long.")
        ui.fact("no row for", f"{seconds(silent)}; if it was killed, the same command with `--resume` goes on")
    else:
        ui.badge("running", "blue")
    st.toggle("Follow", value=True, key=_FOLLOW, bind="query-params", help="Show new data as it comes.")


def follow(loop: Loop, drawn_in: float) -> None:
    """Draw the page anew once there is newer data, for as long as the run goes on and the reader wants it.

    Args:
        drawn_in: seconds that the page took: a page that takes long is drawn less often.
    """

    @st.fragment(run_every=max(_LOOK_SECONDS, _REST * drawn_in))
    def look() -> None:
        if pinned.is_outdated():
            pinned.refresh()
            st.rerun()

    if loop.status == "started" and st.session_state.get(_FOLLOW):
        look()


def _told(part: Doing) -> tuple[str, str]:
    if part.what == "evaluating":
        label = "evaluating on held-out starts"
    else:
        label = f"{part.what}{',' if ' ' in part.what else ''} round"
    episodes = "" if part.planned is None else f"{number(part.done)} of {number(part.planned)} episodes"
    if part.what == "evaluating":
        return label, episodes
    return label, f"{part.number:,}{': ' if episodes else ''}{episodes}"


def _figures(loop: Loop, sums: Row, evaluations: pl.DataFrame) -> None:
    """What it came to until now, in a line."""
    told: list[ui.Figure] = []
    known = evaluations.drop_nulls("success")
    if known.height:
        first, last = known.row(0, named=True), known.row(-1, named=True)
        if first["version"] != last["version"]:
            told.append(
                (f"Held-out success of version {first['version']:,}", percent(first["success"]), _interval(first))
            )
        told.append((f"Held-out success of version {last['version']:,}", percent(last["success"]), _interval(last)))
        best = known.sort("score", descending=True, maintain_order=True).row(0, named=True)
        told.append(
            ("Best version", f"{best['version']:,}", "Of the highest mean score; it lies in the folder `best`.")
        )
    budget, hours = loop.settings.get("tokens"), loop.settings.get("hours")
    tokens = number(int(sums["tokens"])) + (f" of {number(budget)}" if isinstance(budget, int) else "")
    spent = seconds(sums["seconds"]) + (f" of {number(hours)} h" if isinstance(hours, int | float) else "")
    told += [
        ("Episodes", number(int(sums["episodes"])), "Of the rounds that were trained on."),
        ("Tokens", tokens, "Prompts and answers of those, and the budget if there is one."),
        ("Time", spent, "Of those rounds, and the budget if there is one."),
    ]
    ui.facts(*told)


def _interval(row: Row) -> str:
    interval = "" if row["low"] is None else f"95 % interval {percent(row['low'])} to {percent(row['high'])}, "
    return f"{interval}{row['episodes']:,} scored attempts, {row['unscored']:,} without a score."


def _curves(loop: Loop, evaluations: pl.DataFrame) -> None:
    frame = read(loops.curves, loop)
    if frame.is_empty() and evaluations.is_empty():
        st.info("No round is complete yet.", icon=":material/hourglass_empty:")
        return
    chosen = str(
        st.segmented_control("Over", list(_AXES), default="Rounds", key="axis", bind="query-params", required=True)
    )
    x_title = "Rounds trained on" if chosen == "Rounds" else "Tokens collected"
    charts = []
    if evaluations.height:
        points = evaluations.with_columns(x=pl.col("version" if chosen == "Rounds" else "tokens"))
        title = "Held-out success, 95 % interval over tasks"
        drawn = figures.curve(
            points, "success", title=title, x_title=x_title, band=True, share=True, picks=("version",)
        )
        charts.append((drawn, "loop-success", partial(held_out_of, loop)))
    frame = frame.with_columns(x=pl.col(_AXES[chosen]))
    across = "Round" if chosen == "Rounds" else x_title
    for name, title, share, opens in (
        ("mean_score", f"Mean {slug(loop.score)} of the rollouts", False, episodes_of),
        ("mean_return", _return_title(loop), False, episodes_of),
        ("live_share", "Groups with signal", True, groups_of),
        ("entropy", "Entropy of the policy, nats", False, updates_of),
        ("kl", "KL of a round's updates, nats", False, updates_of),
        ("seconds", "Seconds of a round", False, round_of),
        ("tokens", "Tokens of a round", False, episodes_of),
        ("parity", "Largest log-probability difference to an engine", False, round_of),
        ("stale", "Trained tokens of older versions", True, updates_of),
    ):
        if frame[name].drop_nulls().len() and (name != "stale" or frame[name].max()):
            points = frame.drop_nulls(name)
            drawn = figures.curve(points, name, title=title, x_title=across, share=share, picks=_PICKED)
            charts.append((drawn, f"loop-{name}", partial(opens, loop)))
    over_rounds.grid(charts)
    st.caption("A point opens what it is of: held-out episodes, the round's episodes, groups or updates, or the round.")


def _return_title(loop: Loop) -> str:
    """How the mean return is called: the outcome, or one beside the score that advantages come from."""
    return "Mean outcome" if loop.score == ENV_RETURN else f"Mean {slug(ENV_RETURN)}"


_PICKED = ("round", "last", "first_update")
"""What is known of a clicked point, which stands for the rounds up to `last`; see `loops.curves`."""


def held_out_of(loop: Loop, point: Row) -> str:
    """The address of the episodes that a version was evaluated by."""
    return href(Page.EPISODES, run=evaluation_run(loop.run), version=point["version"])


def episodes_of(loop: Loop, point: Row) -> str:
    """The address of the episodes of a point's rounds."""
    return href(Page.EPISODES, run=loop.run, **over_rounds.within("round", point["round"], point["last"]))


def groups_of(loop: Loop, point: Row) -> str:
    """The address of the groups of a round; of several rounds, which no list of groups is of, their episodes."""
    if point["last"] > point["round"]:
        return episodes_of(loop, point)
    return href(Page.GROUPS, run=loop.run, round=point["round"])


def updates_of(loop: Loop, point: Row) -> str:
    """The address of the first update of a round."""
    job = ids.to_text(loop.train_job)
    return href(Page.TRAINING, job=job, round=point["round"], update=point["first_update"])


def round_of(loop: Loop, point: Row) -> str:
    """The address of a round on this page, with the links to all that it is made of."""
    return href(Page.TRAINING, job=ids.to_text(loop.train_job), round=point["round"])


def _rounds(loop: Loop, total: int, evaluations: pl.DataFrame) -> None:
    st.subheader("Rounds", anchor=False)
    st.caption("Round k is played by version k of the weights, and evaluated before it is trained on.")
    frame = read(loops.rounds, loop, ui.pager(total, "rounds, the newest first", name="rounds"))
    frame = frame.join(evaluations.select("version", "success"), left_on="round", right_on="version", how="left")
    frame = frame.sort("round", descending=True)
    columns = {
        "round": tables.value("Round"),
        "success": tables.share("Held-out success", "Of the version that played it, where that was evaluated."),
        "mean_score": tables.value(
            f"Mean {slug(loop.score)}",
            "Of the score that advantages come from. A dash means not scored, which is not 0.",
        ),
        "mean_return": tables.value(_return_title(loop), "A dash means not scored, which is not 0."),
        "carried": tables.value("Carried over", "Rollouts that an earlier round began."),
        "live_groups": tables.value("Live groups"),
        "dead_groups": tables.value("Dead groups", "All siblings scored the same: no signal."),
        "updates": tables.value("Updates"),
        "entropy": tables.value("Entropy", "Mean over its updates, in nats."),
        "kl": tables.value("KL", "Mean of kl_k3 over its updates.", digits=4),
        "stale": tables.value("Stale", "Share of its trained tokens that an older version sampled."),
        "parity": tables.value(
            "Parity", "Largest difference of log-probabilities between engine and trainer, in nats."
        ),
        "push_seconds": tables.value("Push, s", "Of the weights to the slowest engine.", digits=1),
        "tokens": tables.value("Tokens"),
        "seconds": tables.value("Seconds", digits=1),
    }
    optional = ("success", "mean_score", "entropy", "kl", "stale", "parity", "push_seconds")
    empty = [name for name in optional if frame[name].is_null().all()]
    empty += [name for name in ("carried",) if not frame[name].sum()]
    if "mean_score" not in empty and frame["mean_return"].is_null().all():
        empty.append("mean_return")
    asked = given_int("round")
    tables.table(
        frame,
        {name: what for name, what in columns.items() if name not in empty},
        label="Rounds",
        href=lambda row: changed(round=row["round"], update=None),
        key="round",
        chosen=None if asked is None else str(asked),
    )
    if asked is not None:
        _round(loop, asked, is_evaluated=asked in evaluations["version"])


def _round(loop: Loop, asked: int, *, is_evaluated: bool) -> None:
    """What a round is made of: links to its episodes, its groups, its updates, and the evaluation before it."""
    found = read(loops.one_round, loop, asked)
    if found.is_empty():
        ui.missing(f"This run has not trained on a round {asked:,}.")
        return
    row = found.row(0, named=True)
    with st.container(horizontal=True, vertical_alignment="center"):
        st.subheader(f"Round {asked:,}", anchor=False, width="content")
        ui.link(Page.EPISODES, "Its episodes", "format_list_bulleted", run=loop.run, round=asked)
        ui.link(Page.GROUPS, "Its groups", "workspaces", run=loop.run, round=asked)
        if is_evaluated:
            run = evaluation_run(loop.run)
            ui.link(Page.EPISODES, f"Held-out episodes of version {asked:,}", "science", run=run, version=asked)
        if row["updates"]:
            job = ids.to_text(loop.train_job)
            label = f"Its {row['updates']:,} updates, from {row['first_update']:,}"
            ui.link(Page.TRAINING, label, "model_training", job=job, round=asked, update=row["first_update"])
        else:
            st.caption("Nothing was trained: no group had signal.")
