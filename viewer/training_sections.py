"""Sections of the page on training: the batch of an update, what a job trained on, and an online run.

An update has its metrics, groups and episodes with their advantages. A job has a funnel of its data, its repeats and
staleness, its mixture, and the drift of its policy from the data; these are read when the reader opens them. An online
run (`trajlake loop`) has its state, curves and rounds.
"""

from datetime import timedelta
from functools import partial

import polars as pl
import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

from lake import ids
from lake.judgements.credit import Credit
from lake.judgements.scores import ENV_RETURN
from lake.read.text_table import count_noun, format_count
from lake.read.training import name_evaluation_run
from viewer import components as ui
from viewer import download, figures, filters, run_details, session, tables
from viewer.navigation import Page, change_address, chip_link, get_int, get_parameter, href, scroll_into_view
from viewer.plain import chip, number, one_line, percent, seconds, slug, visible
from viewer.queries import Row, training, training_data
from viewer.queries.episodes import EpisodeFilter
from viewer.queries.training import Loop
from viewer.session import read
from viewer.transcript.tokens import describe_weights

_MAX_OTHER_JOBS = 8
"""Maximum links to other jobs, where the address names no job."""
_FIRST_METRIC, _LAST_METRIC = "grad_norm", "logprob"
_MAX_OTHER_METRICS = 6
"""Maximum metrics between the first and the last."""


def draw_update(job_id: int, update: int, credit: Credit | None, labels: dict[str, str]) -> None:
    """Draw the metrics, groups and episodes of an update; `labels` are names of jobs by id."""
    scroll_into_view(f"update-{update}")
    with st.container(horizontal=True, vertical_alignment="center"):
        st.subheader(f"Update {update}", anchor=False, width="content")
        first, last = read(training.find_update_range, job_id) or (update, update)
        previous, following = (change_address(update=number, page=None) for number in (update - 1, update + 1))
        ui.draw_turn(
            "\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK} Previous", previous if update > first else None, "k"
        )
        ui.draw_turn("Next \N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}", following if update < last else None, "j")
        download.draw_list_link(job=ids.to_text(job_id), update=update)
    if get_parameter("job") is None:
        st.caption(f"Of the newest job that has an update {update}: {chip(labels[ids.to_text(job_id)], 200)}.")
        job_ids = set(map(ids.to_text, read(training.list_jobs_with_update, update)))
        jobs = [option for option in labels if option in job_ids and option != ids.to_text(job_id)]
        if jobs:
            links = [
                chip_link(labels[option], change_address(job=option, page=None)) for option in jobs[:_MAX_OTHER_JOBS]
            ]
            st.html(f'<div class="trajlake-chips"><span>Others:</span>{"".join(links)}</div>')
    _draw_update_figures(job_id, update)
    dead = _draw_batch_groups(job_id, update, credit)
    total = read(training.count_batch, job_id, update, credit)
    order = tables.read_order()
    window = ui.draw_pager(total, "episodes, largest mean |A| first" if order is None else "episodes")
    frame = read(training.read_batch, job_id, update, credit, window, order)
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
    packed_filter = filters.pack_filter(EpisodeFilter(update=(job_id, update)))

    def episode(row: Row) -> str:
        credit_id = None if row["credit_job"] is None else ids.to_text(row["credit_job"])
        return href(
            Page.EPISODE, episode=row["episode_id"], step=row["first_step"], credit=credit_id, list=packed_filter
        )

    if not dead:
        columns.pop("dead")
    columns = tables.select_filled(frame, columns, order)
    tables.draw_table(frame, columns, label="Batch", href=episode, key="episode_id", sortable=training.BATCH_ORDERS)


def _draw_batch_groups(job_id: int, update: int, credit: Credit | None) -> int:
    """Draw the groups of the batch; return the number of dead groups."""
    frame = read(training.read_batch_groups, job_id, update, credit)
    if frame.is_empty():
        return 0
    total, dead = frame.select("total", "dead_total").row(0)
    text = f"The batch is of {count_noun(total, 'group')}"
    if credit is not None:
        text += f", {number(dead)} of them dead (their A_E is 0)" if dead else ", none of them dead"
    limit_note = f", the first {frame.height} below" if total > frame.height else ""
    st.caption(f"{text}{limit_note}.{_describe_versions(job_id, update)}")
    columns = {
        "run_id": tables.text("Run"),
        "task_id": tables.text("Task"),
        "collection_round": tables.value("Round", "The round in which its episodes were played."),
        "policy_version": tables.value("Policy version", "The oldest version that played its episodes."),
        "episodes": tables.value("Episodes"),
        "mean_return": tables.value("Mean outcome"),
        "mean_size": tables.value("Mean |A|"),
        "dead": tables.mark("Dead group", "All scored siblings scored the same."),
        "action_tokens": tables.value("Tokens", "Tokens that carried loss."),
        "group_id": tables.ident("Group"),
    }
    credit_id = None if credit is None else credit.text
    tables.draw_table(
        frame,
        tables.select_filled(frame, columns),
        label="Groups of the batch",
        href=lambda row: href(Page.GROUP, group=row["group_id"], credit=credit_id),
    )
    return int(dead)


def _draw_update_figures(job_id: int, update: int) -> None:
    """Draw metrics of the update, the gradient norm first, the age of its batch last."""
    metric_values = read(training.read_metrics_at, job_id, update)
    names = [name for name in figures.sort_by_interest(metric_values) if name not in (_FIRST_METRIC, _LAST_METRIC)]
    metrics = [(one_line(name), number(metric_values[name], 4)) for name in names[:_MAX_OTHER_METRICS]]
    played = read(training_data.read_versions_around, job_id, update).get(update)
    if played is not None:
        metrics.insert(0, ("versions behind", _format_span(played.behind)))
    if _FIRST_METRIC in metric_values:
        metrics.insert(0, (_FIRST_METRIC, number(metric_values[_FIRST_METRIC], 4)))
    if _LAST_METRIC in metric_values:
        metrics.append((_LAST_METRIC, number(metric_values[_LAST_METRIC], 4)))
    ui.draw_facts(*metrics)


def _describe_versions(job_id: int, update: int) -> str:
    """Return which policy versions played the batch and those of its neighbours: old ones are clipped more."""
    versions_by_update = read(training_data.read_versions_around, job_id, update)
    played = versions_by_update.pop(update, None)
    if played is None:
        return ""
    version = "version" if played.versions[0] == played.versions[1] else "versions"
    behind = "version" if played.behind == (1, 1) else "versions"
    span, lag = _format_span(played.versions), _format_span(played.behind)
    text = f"This batch was played by policy {version} {span}, {lag} {behind} behind"
    neighbours = " and ".join(_format_span(neighbour.versions) for neighbour in versions_by_update.values())
    owner = "neighbours'" if len(versions_by_update) > 1 else "neighbour's"
    return f" {text}{f'; its {owner} by {neighbours}' if neighbours else ''}."


def _format_span(ends: tuple[int, int]) -> str:
    return str(ends[0]) if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


_MIXTURE_COLUMNS: dict[str, training_data.MixtureColumn] = {
    "run": "run_id",
    "task": "task_id",
    "round": "collection_round",
    "policy version": "policy_version",
    "format": "source_format",
}


def draw_intake(job_id: int) -> None:
    """Draw what the job trained on, and the drift of its policy from the data; both fold out."""
    saw = st.expander("What training saw", icon=":material/filter_alt:", key="saw", on_change="rerun")
    if saw.open:
        with saw:
            _draw_funnel(job_id)
            _draw_repeats(job_id)
            _draw_mixture(job_id)
    moved = st.expander("Drift from the data", icon=":material/trending_flat:", key="drift", on_change="rerun")
    if moved.open:
        with moved:
            _draw_drift(job_id)


def _draw_funnel(job_id: int) -> None:
    stages = read(training_data.read_funnel, job_id)
    frame = pl.DataFrame(
        {
            "stage": [f"{'left out: ' if stage.is_drop else ''}{one_line(stage.name, 120)}" for stage in stages],
            "episodes": [stage.episodes for stage in stages],
            "steps": [stage.steps for stage in stages],
            "position": range(len(stages)),
        },
        schema_overrides={"episodes": pl.Int64, "steps": pl.Int64},
    )
    columns = {
        "stage": tables.wide("From the lake to the loss", "A link lists the episodes, as they are in the lake now."),
        "episodes": tables.value("Episodes"),
        "steps": tables.value("Steps"),
    }

    def listed(row: Row) -> str:
        sql = stages[row["position"]].sql
        return "" if sql is None else href(Page.EPISODES, sql=sql, about=row["stage"])

    tables.draw_table(frame, columns, label="Funnel", href=listed)
    if len(stages) == 1:
        st.caption("Dropped episodes are listed when `trajlake train` finishes. `trajlake loop` does not record them.")


def _draw_repeats(job_id: int) -> None:
    times, stale = read(training_data.count_repeats, job_id), read(training_data.count_by_staleness, job_id)
    if times.is_empty():
        return
    left_column, right_column = st.columns(2)
    bars = times.with_columns(pl.col("times").cast(pl.String))
    often = figures.build_histogram(bars, "times", "episodes", title="Times an episode was trained on", x_title="Times")
    ui.draw_chart(left_column, often, "times")
    links = (
        chip_link(
            f"{count_noun(row['times'], 'time')}: {count_noun(row['episodes'], 'episode')}",
            href(
                Page.EPISODES,
                sql=training_data.build_repeats_sql(job_id, row["times"]),
                about=f"trained on {count_noun(row['times'], 'time')}",
            ),
        )
        for row in times.head(8).iter_rows(named=True)
    )
    left_column.html(f'<div class="trajlake-chips">{" ".join(links)}</div>')
    ages = stale.with_columns(pl.col("staleness").cast(pl.String).fill_null("unknown"))
    title, x_title = "Trained tokens by staleness", "Policy versions behind"
    ui.draw_chart(
        right_column, figures.build_histogram(ages, "staleness", "action_tokens", title=title, x_title=x_title), "stale"
    )
    right_column.caption(
        "The update's first version minus the episode's version. For episodes of another run: the newest version of "
        "that run in the job, minus theirs."
    )


def _draw_mixture(job_id: int) -> None:
    by = st.segmented_control("Mixture by", list(_MIXTURE_COLUMNS), default="run", key="mixture-by", required=True)
    frame = read(training_data.read_mixture, job_id, _MIXTURE_COLUMNS[by])
    has_weights = read(training_data.has_weights, job_id)
    columns = {
        "value": tables.text(str(by).capitalize()),
        "episodes": tables.value("Episodes"),
        "rows": tables.value("Times consumed"),
        "action_tokens": tables.value("Trained tokens"),
        "share": tables.share("Share of the loss weight" if has_weights else "Share of the trained tokens"),
    }
    tables.draw_table(frame, columns, label="Mixture")
    if not has_weights:
        st.caption("The job did not record all token weights, so the shares are of trained tokens.")
    if frame.height == training_data.MOST_ROWS:
        st.caption(f"The {training_data.MOST_ROWS} largest shares.")


def _draw_drift(job_id: int) -> None:
    policies = read(training_data.list_rescored_policies, job_id)
    if not policies:
        st.info(
            "None of this job's policies was rescored. `trajlake rescore RUN@UPDATES` scores its training data with a "
            "checkpoint; this part then shows the drift from the policies that sampled.",
            icon=":material/info:",
        )
        return
    labels = {series: f"{one_line(name)}: {describe_weights(done)}" for series, (name, done) in policies.items()}
    newest, key = len(labels) - 1, f"drift-{job_id}"
    series_id = st.selectbox("Policy", list(labels), index=newest, format_func=labels.__getitem__, key=key)
    frame = read(training_data.read_drift, job_id, series_id)
    if frame.is_empty():
        st.info("This policy was rescored on none of the job's steps, or has no ratios there.")
        return
    columns = {
        "staleness": tables.value("Versions behind", "A dash: the version that sampled is unknown."),
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
    tables.draw_table(frame, columns, label="Drift")
    why = read(training_data.explain_missing_clip, job_id)
    notes = [
        "Log ratio of a token: its log-probability under this policy minus that under the policy that sampled it.",
        f"At most {training_data.DRIFT_STEPS:,} of the steps, drawn by a hash of their ids.",
    ]
    if why is not None:
        notes.append(f"Clip shares unknown: {chip(why, 300)}.")
    st.caption(" ".join(notes))


_AXES = {"Rounds": "round", "Tokens": "tokens_so_far"}
_FOLLOW = "follow"
"""Query parameter, and key of the switch: whether the page follows the run."""
_MIN_REFRESH_SECONDS = 4.0
"""Minimum number of seconds between two checks for newer data by a page that follows a run."""
_REST_FACTOR = 4.0
"""Factor on the time that a page took to draw, for the pause after it."""
_QUIET_SECONDS = 120.0
"""Seconds without a row after which a run may have been killed; runs with long rounds get three of the longest."""


def draw_loop(loop: Loop) -> None:
    """Draw the online run that a training job belongs to."""
    sums = read(training.sum_rounds, loop)
    evaluations = read(training.read_evaluations, loop)
    _draw_loop_state(loop, sums)
    _draw_loop_figures(loop, sums, evaluations)
    _draw_loop_curves(loop, evaluations)
    if sums["rounds"]:
        _draw_rounds(loop, int(sums["rounds"]), evaluations)


def _draw_loop_state(loop: Loop, sums: Row) -> None:
    """Draw whether the run is active, its present activity, and its progress."""
    done, planned = int(sums["rounds"]), loop.planned
    with st.container(horizontal=True, vertical_alignment="center"):
        if loop.status == "succeeded":
            ui.draw_badge("finished", "green")
            ui.draw_fact("ended by", slug(str(loop.counts.get("stopped_by", "?"))))
        elif loop.status == "failed":
            ui.draw_badge("failed", "red")
        else:
            silent = max(
                0.0, (session.get_session().pinned_at - read(training.find_last_write, loop)) / timedelta(seconds=1)
            )
            if silent > max(_QUIET_SECONDS, 3 * sums["longest"]):
                ui.draw_badge("silent", "orange", explanation="The run was killed, or is in a long operation.")
                ui.draw_fact("no row for", f"{seconds(silent)}; if it was killed, rerun its command with `--resume`")
            else:
                ui.draw_badge("running", "blue")
            st.toggle("Follow", value=True, key=_FOLLOW, bind="query-params", help="Show new data automatically.")
            for part in read(training.list_activities, loop):
                episodes = (
                    "" if part.planned is None else f"{number(part.done)} of {format_count(part.planned, 'episode')}"
                )
                if part.phase == "evaluating":
                    ui.draw_fact("evaluating on held-out starts", episodes)
                    continue
                label = f"{part.phase}{',' if ' ' in part.phase else ''} round"
                ui.draw_fact(label, f"{part.number:,}{': ' if episodes else ''}{episodes}")
        ui.draw_link(Page.JOB, "Settings of the loop", "tune", job=ids.to_text(loop.job_id))
        ui.draw_link(Page.JOB, "Its training job", "account_tree", job=ids.to_text(loop.train_job))
    if loop.error:
        st.code(visible(loop.error), language=None, wrap_lines=True)
    if planned:
        st.progress(min(1.0, done / planned), text=f"{done:,} of {format_count(planned, 'round')}")


def follow_loop(loop: Loop, draw_seconds: float) -> None:
    """Draw the page again when the active run has newer data and the reader follows it; a slow page less often."""

    @st.fragment(run_every=max(_MIN_REFRESH_SECONDS, _REST_FACTOR * draw_seconds))
    def look() -> None:
        if session.get_session().is_outdated():
            session.refresh()
            st.rerun()

    if loop.status == "started" and st.session_state.get(_FOLLOW):
        look()


def _draw_loop_figures(loop: Loop, sums: Row, evaluations: pl.DataFrame) -> None:
    """Draw the totals and the best evaluations so far in a line."""
    facts: list[ui.Figure] = []
    evaluated = evaluations.drop_nulls("success")
    if evaluated.height:
        first, last = evaluated.row(0, named=True), evaluated.row(-1, named=True)
        if first["version"] != last["version"]:
            facts.append(
                (
                    f"Held-out success of version {first['version']:,}",
                    percent(first["success"]),
                    _format_interval(first),
                )
            )
        facts.append(
            (f"Held-out success of version {last['version']:,}", percent(last["success"]), _format_interval(last))
        )
        best = evaluated.sort("score", descending=True, maintain_order=True).row(0, named=True)
        facts.append(
            ("Best version", f"{best['version']:,}", "Version with the highest mean score, in the folder `best`.")
        )
    budget, hours = loop.settings.get("tokens"), loop.settings.get("hours")
    tokens = number(int(sums["tokens"])) + (f" of {number(budget)}" if isinstance(budget, int) else "")
    spent = seconds(sums["seconds"]) + (f" of {number(hours)} h" if isinstance(hours, int | float) else "")
    facts += [
        ("Episodes", number(int(sums["episodes"])), "Episodes of the rounds that were trained on."),
        ("Tokens", tokens, "Tokens of prompts and answers in those rounds, and the budget if there is one."),
        ("Time", spent, "Duration of those rounds, and the budget if there is one."),
    ]
    ui.draw_facts(*facts)


def _format_interval(row: Row) -> str:
    interval = "" if row["low"] is None else f"95 % interval {percent(row['low'])} to {percent(row['high'])}, "
    return f"{interval}{row['episodes']:,} scored attempts, {row['unscored']:,} without a score."


def _draw_loop_curves(loop: Loop, evaluations: pl.DataFrame) -> None:
    frame = read(training.read_round_curves, loop)
    if frame.is_empty() and evaluations.is_empty():
        st.info("No round is complete yet.", icon=":material/hourglass_empty:")
        return
    axis = str(
        st.segmented_control("Over", list(_AXES), default="Rounds", key="axis", bind="query-params", required=True)
    )
    x_title = "Rounds trained on" if axis == "Rounds" else "Tokens collected"
    charts: list[run_details.OpenableChart] = []
    if evaluations.height:
        points = evaluations.with_columns(x=pl.col("version" if axis == "Rounds" else "tokens"))
        title = "Held-out success, 95 % interval over tasks"
        chart = figures.build_curve(
            points, "success", title=title, x_title=x_title, band=True, share=True, picks=("version",)
        )
        run = name_evaluation_run(loop.run)
        charts.append((chart, "loop-success", lambda point: href(Page.EPISODES, run=run, version=point["version"])))
    frame = frame.with_columns(x=pl.col(_AXES[axis]))
    across = "Round" if axis == "Rounds" else x_title
    for name, title, share, address in (
        ("mean_score", f"Mean {slug(loop.score)} of the rollouts", False, build_episodes_address),
        ("mean_return", _return_title(loop), False, build_episodes_address),
        ("live_share", "Groups with signal", True, build_groups_address),
        ("failed_share", "Failed rollouts", True, build_episodes_address),
        ("entropy", "Entropy of the policy, nats", False, build_update_address),
        ("kl", "KL of a round's updates, nats", False, build_update_address),
        ("seconds", "Seconds of a round", False, build_round_address),
        ("tokens", "Tokens of a round", False, build_episodes_address),
        ("parity", "Largest log-probability difference to an engine", False, build_round_address),
        ("stale", "Trained tokens of older versions", True, build_update_address),
    ):
        if frame[name].drop_nulls().len() and (name not in ("stale", "failed_share") or frame[name].max()):
            points = frame.drop_nulls(name)
            chart = figures.build_curve(points, name, title=title, x_title=across, share=share, picks=_POINT_FIELDS)
            charts.append((chart, f"loop-{name}", partial(address, loop)))
    if axis == "Rounds":
        charts += run_details.build_unscored_chart(loop.run, "collection_round")
    run_details.draw_chart_grid(charts)
    st.caption("A point opens its held-out episodes, its round, or the episodes, groups or updates of the round.")


def _return_title(loop: Loop) -> str:
    """Return the name of the mean return: the outcome, unless the advantages come from another score."""
    return "Mean outcome" if loop.score == ENV_RETURN else f"Mean {slug(ENV_RETURN)}"


_POINT_FIELDS = ("round", "last", "first_update")
"""Fields of a clicked point, which stands for the rounds up to `last`; see `training.read_round_curves`."""


def build_episodes_address(loop: Loop, point: Row) -> str:
    """Return the address of the episodes of a point's rounds."""
    return href(Page.EPISODES, run=loop.run, **run_details.build_span("round", point["round"], point["last"]))


def build_groups_address(loop: Loop, point: Row) -> str:
    """Return the address of the groups of a round; of several rounds, that of their episodes."""
    if point["last"] > point["round"]:
        return build_episodes_address(loop, point)
    return href(Page.GROUPS, run=loop.run, round=point["round"])


def build_update_address(loop: Loop, point: Row) -> str:
    """Return the address of the first update of a round."""
    job = ids.to_text(loop.train_job)
    return href(Page.TRAINING, job=job, round=point["round"], update=point["first_update"])


def build_round_address(loop: Loop, point: Row) -> str:
    """Return the address of a round on this page."""
    return href(Page.TRAINING, job=ids.to_text(loop.train_job), round=point["round"])


def _draw_rounds(loop: Loop, total: int, evaluations: pl.DataFrame) -> None:
    st.subheader("Rounds", anchor=False)
    st.caption("Round k is played by version k of the weights, and evaluated before it is trained on.")
    frame = read(training.read_rounds, loop, ui.draw_pager(total, "rounds, the newest first", name="rounds"))
    frame = frame.join(evaluations.select("version", "success"), left_on="round", right_on="version", how="left")
    frame = frame.sort("round", descending=True)
    columns = {
        "round": tables.value("Round"),
        "success": tables.share(
            "Held-out success", "Success of the version that played the round, if it was evaluated."
        ),
        "mean_score": tables.value(
            f"Mean {slug(loop.score)}",
            "The score behind the advantages. A dash means not scored, which is not 0.",
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
        "push_seconds": tables.value("Push, s", "Seconds to push the weights to the slowest engine.", digits=1),
        "tokens": tables.value("Tokens"),
        "seconds": tables.value("Seconds", digits=1),
    }
    optional = ("success", "mean_score", "entropy", "kl", "stale", "parity", "push_seconds")
    empty = [name for name in optional if frame[name].is_null().all()]
    empty += [name for name in ("carried",) if not frame[name].sum()]
    if "mean_score" not in empty and frame["mean_return"].is_null().all():
        empty.append("mean_return")
    selected = get_int("round")
    tables.draw_table(
        frame,
        {name: column for name, column in columns.items() if name not in empty},
        label="Rounds",
        href=lambda row: change_address(round=row["round"], update=None),
        key="round",
        selected=None if selected is None else str(selected),
    )
    if selected is not None:
        _draw_round(loop, selected, is_evaluated=selected in evaluations["version"])


def _draw_round(loop: Loop, round_number: int, *, is_evaluated: bool) -> None:
    """Draw links to a round's episodes, groups and updates, and to the evaluation before it."""
    frame = read(training.read_round, loop, round_number)
    if frame.is_empty():
        ui.warn_of_missing(f"This run has not trained on a round {round_number:,}.")
        return
    row = frame.row(0, named=True)
    with st.container(horizontal=True, vertical_alignment="center"):
        st.subheader(f"Round {round_number:,}", anchor=False, width="content")
        ui.draw_link(Page.EPISODES, "Its episodes", "format_list_bulleted", run=loop.run, round=round_number)
        ui.draw_link(Page.GROUPS, "Its groups", "workspaces", run=loop.run, round=round_number)
        if is_evaluated:
            run = name_evaluation_run(loop.run)
            ui.draw_link(
                Page.EPISODES,
                f"Held-out episodes of version {round_number:,}",
                "science",
                run=run,
                version=round_number,
            )
        if row["updates"]:
            job = ids.to_text(loop.train_job)
            label = f"Its {format_count(row['updates'], 'update')}, from {row['first_update']:,}"
            ui.draw_link(
                Page.TRAINING, label, "model_training", job=job, round=round_number, update=row["first_update"]
            )
        else:
            st.caption("Nothing was trained: no group had signal.")
