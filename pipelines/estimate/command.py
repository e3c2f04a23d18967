"""Command `estimate`: what a lake will take, before it is paid for."""

from dataclasses import asdict
from math import isfinite
from typing import TYPE_CHECKING, Any

import click

from lake.cli.options import as_json, echo_rows

if TYPE_CHECKING:
    from pipelines.estimate.model import Cluster, Estimate, JobEstimate, LimitEstimate
    from pipelines.estimate.workload import Workload

_SUFFIXES = {"k": 1e3, "m": 1e6, "b": 1e9}
_HOUR, _MINUTE = 3600.0, 60.0


class Count(click.ParamType[float]):
    """A count as people write it: 250000, 1e9, 10M, 1B."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Raises click's usage error: no number, or not above 0."""
        if isinstance(value, float):
            return value
        text = str(value).lower().replace(",", "").replace("_", "")
        scale = _SUFFIXES.get(text[-1:])
        try:
            count = float(text) if scale is None else float(text[:-1]) * scale
        except ValueError:
            count = float("nan")
        if not 0 < count < float("inf"):
            self.fail(f"{value!r} is not a count; write 250000, 1e9, 10M or 1B", param, ctx)
        return count


class Finite(click.FloatRange):
    """A number in a range; infinity and what is no number are in none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Raises click's usage error."""
        number: float = super().convert(value, param, ctx)
        if not isfinite(number):
            self.fail(f"{value!r} is not a number that can be counted with", param, ctx)
        return number


_POSITIVE, _NOT_NEGATIVE = Finite(min=0, min_open=True), Finite(min=0)


@click.command()
@click.option("--steps", type=Count(), help="Decisions in all, e.g. 1e9 or 1B.  [default: those of --like]")
@click.option(
    "--like", metavar="LAKE", help="Lake whose episodes are like those expected: length, tokens, group, bytes."
)
@click.option("--episode-steps", type=_POSITIVE, help="Decisions of an episode.  [default: as --like, else 10]")
@click.option("--step-tokens", type=_POSITIVE, help="Tokens that a step adds.  [default: as --like, else 200]")
@click.option("--group-size", type=click.IntRange(1), help="Episodes of a group.  [default: as --like, else 8]")
@click.option("--days", type=_POSITIVE, default=30.0, show_default=True, help="In which they are collected.")
@click.option("--nodes", type=click.IntRange(1), default=1, show_default=True, help="Machines that jobs run on.")
@click.option("--cores", type=click.IntRange(1), default=8, show_default=True, help="Cores of a machine.")
@click.option("--memory", type=_POSITIVE, default=32.0, show_default=True, help="GB of memory of a machine.")
@click.option("--price", type=_NOT_NEGATIVE, default=0.0, show_default=True, help="Of a machine for an hour.")
@click.option(
    "--speed", type=_POSITIVE, default=1.0, show_default=True, help="Of a core, relative to those that were measured."
)
@click.option("--commit-ms", type=_POSITIVE, default=250.0, show_default=True, help="What one commit takes the store.")
@click.option(
    "--function-ms",
    type=_NOT_NEGATIVE,
    default=0.0,
    show_default=True,
    help="Of the reward function, an episode.",
)
@click.option(
    "--format",
    "output_format",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="How it is printed; json: everything, in one object.",
)
def estimate(steps: float | None, like: str | None, output_format: str, **given: Any) -> None:
    """Say what a lake of a given size will take: bytes, files, hours and memory of each job, and its first limit.

    Nothing is measured here: the factors come from benchmarks on machines of two cores (docs/guides/scale.md says
    which, and how far they were off). Training and judges depend on your model and are not in it.
    """
    from pipelines.estimate.model import Cluster
    from pipelines.estimate.model import estimate as estimated

    work, stored = _workload(steps, like, given)
    cluster = Cluster(
        nodes=given["nodes"],
        cores=given["cores"],
        memory_gb=given["memory"],
        speed=given["speed"],
        price=given["price"],
        days=given["days"],
        commit_seconds=given["commit_ms"] / 1000,
        function_seconds=given["function_ms"] / 1000,
    )
    found = estimated(work, cluster, stored=stored)
    if output_format == "json":
        click.echo(as_json({"workload": asdict(work)} | asdict(found)))
    else:
        _print(work, cluster, found)


def _workload(steps: float | None, like: str | None, given: dict[str, Any]) -> "tuple[Workload, dict[str, float]]":
    """The workload, and the stored bytes of an episode by table where --like tells them."""
    from dataclasses import replace

    from pipelines.estimate.model import stored_of
    from pipelines.estimate.workload import Workload, workload_of

    stored: dict[str, float] = {}
    if like is None:
        if steps is None:
            raise click.UsageError("how many steps? Give --steps, e.g. --steps 1B, or --like LAKE")
        work = Workload(0, 10, 200)
    else:
        from lake.cli.options import opened

        snapshot = opened((like,))
        work, stored = workload_of(snapshot), stored_of(snapshot)
        steps = steps or work.steps
    shape = {name: given[name] for name in ("episode_steps", "step_tokens", "group_size") if given[name] is not None}
    work = replace(work, **shape)
    # Bytes of an episode are another's where its shape is.
    return replace(work, episodes=steps / work.episode_steps), {} if shape else stored


def _print(work: "Workload", cluster: "Cluster", found: "Estimate") -> None:
    from lake.read.text_table import counted

    size = f"{work.steps:,.0f} steps in {work.episodes:,.0f} episodes of {work.episode_steps:.3g} steps"
    click.echo(f"{size}, {work.step_tokens:.4g} tokens a step, groups of {work.group_size}\n")
    total = sum(table.gb for table in found.tables)
    rows = [{"table": t.table, "GB": _figure(t.gb), "files": f"{t.files:,}"} for t in found.tables]
    echo_rows(
        [*rows, {"table": "in all", "GB": _figure(total), "files": f"{sum(t.files for t in found.tables):,}"}], "table"
    )
    machines = counted(cluster.nodes, "node")
    click.echo(f"\nOnce over everything, on {machines} of {counted(cluster.cores, 'core')}:")
    echo_rows([_job_row(job, priced=cluster.price > 0) for job in found.jobs], "table")
    writing = found.writing
    groups, commits = _figure(writing.groups_per_second), _figure(writing.commits_per_second)
    most, after = _figure(writing.most_commits_per_second), _time(writing.visible_after_seconds)
    click.echo(
        f"\nCollected in {cluster.days:g} days: {groups} groups a second, in {commits} commits a second "
        f"of at most {most}; a group is visible after {after}"
    )
    click.echo("\nLimits that no further node moves, the first one first:")
    echo_rows([_limit_row(limit) for limit in found.limits], "table")
    click.echo(f"\n{_verdict(work, found.limits[0])}")


def _job_row(job: "JobEstimate", *, priced: bool) -> dict[str, str]:
    row = {
        "job": job.job,
        "runs on": job.runs_on,
        "core hours": _figure(job.core_hours),
        "takes": _time(job.hours * _HOUR),
        "peak GB of a process": _figure(job.memory_gb),
    }
    return row | {"price": _figure(job.cost)} if priced else row


def _limit_row(limit: "LimitEstimate") -> dict[str, str]:
    return {
        "limit": limit.limit,
        "needed": f"{_figure(limit.needed)} {limit.unit}",
        "there is": f"{_figure(limit.available)} {limit.unit}",
        "reached at steps": _about(limit.reached_at_steps),
        "what to do": limit.remedy,
    }


def _verdict(work: "Workload", first: "LimitEstimate") -> str:
    if work.steps < first.reached_at_steps:
        return f"first limit: {first.limit}, at {first.reached_at_steps / work.steps:.2g} times as many steps"
    return f"beyond the first limit: {first.limit}, reached at {_about(first.reached_at_steps)} steps; {first.remedy}"


def _figure(value: float) -> str:
    """Two digits that count, and no exponent."""
    if value >= 10:
        return f"{value:,.0f}"
    return f"{value:.2g}" if value >= 0.001 else "0" if value == 0 else "< 0.001"


def _about(steps: float) -> str:
    """Two digits, and zeros."""
    return f"{float(f'{steps:.2g}'):,.0f}"


def _time(seconds: float) -> str:
    if seconds < 2 * _MINUTE:
        return f"{_figure(seconds)} s"
    return f"{seconds / _MINUTE:.0f} min" if seconds < 2 * _HOUR else f"{_figure(seconds / _HOUR)} h"
