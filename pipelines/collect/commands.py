"""Command `collect`."""

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import click

from lake.cli.executor_options import executor_options
from lake.cli.options import SectionedCommand, lake_option, quiet
from lake.errors import UsageError
from lake.formats.base.secrets import redacted
from lake.read.text_table import cell, counted
from pipelines.collect.options import (
    COUNT,
    HOW_SAMPLED,
    MANY_AT_ONCE,
    WHICH_ENGINES,
    Teller,
    player_options,
    playing_options,
)

if TYPE_CHECKING:
    from pipelines.collect.manager.run import Outcome
    from pipelines.collect.tasks import TaskSet

_SECTIONS = {
    "Who plays": ("env", "env_args", "system_prompt", "agent", "agent_python", "model", "tokenizer", "policy"),
    "Which engines": WHICH_ENGINES,
    "What is played": ("lake_uri", "run", "rounds", "groups", "group_size", "prompts", "count", "first", "seed"),
    "How actions are sampled": HOW_SAMPLED,
    "Many at once": MANY_AT_ONCE,
    "Which are kept": ("oversample", "keep", "carry_over", "record_only"),
    "Several machines": ("executor", "workers"),
}


@click.command(cls=SectionedCommand, sections=_SECTIONS)
@lake_option
@playing_options
@click.option(
    "--system-prompt",
    type=click.Path(exists=True, dir_okay=False),
    help="File of a text that every conversation of an environment opens with.  [default: none]",
)
@click.option(
    "--agent",
    metavar="FILE:FUNCTION",
    help="An agent instead of an environment: agent(task, client); or verifiers:TASKSET, with the tasks of that.",
)
@click.option("--agent-python", metavar="FILE", help="Python that has verifiers installed.  [default: this one]")
@click.option("--run", default="collect", show_default=True, help="Name of the run; the same goes on where it was.")
@click.option("--rounds", type=COUNT, default=1, show_default=True, help="Rounds that the run has in the end.")
@click.option("--groups", type=COUNT, default=32, show_default=True, help="Tasks of a round.")
@click.option("--group-size", type=COUNT, default=8, show_default=True, help="Siblings of a task.")
@click.option(
    "--prompts",
    type=click.Path(dir_okay=False),
    help="Tasks from a file, JSONL or Parquet: prompt or messages, name, ground_truth, seed, and what else the "
    "environment reads.  [default: seeds]",
)
@click.option("--tasks", "count", type=COUNT, default=10_000, show_default=True, help="Seeds that are tasks.")
@click.option("--first-seed", "first", type=click.IntRange(min=0), default=0, show_default=True, help="First of them.")
@click.option("--seed", type=int, default=0, show_default=True, help="Decides the order of tasks, and the samples.")
@click.option("--oversample", type=click.IntRange(min=0), default=0, show_default=True, help="Siblings more than kept.")
@click.option(
    "--keep",
    type=click.Choice(["all", "first", "best"]),
    default="all",
    show_default=True,
    help="Of an oversampled group: all; the first that finish, the others are aborted; or the best, by a selection.",
)
@click.option("--carry-over", is_flag=True, help="With --keep first: the others go on in the next round.")
@click.option("--record-only", metavar="FILE:FUNCTION", help="Record what function(record) is true of, and no more.")
@executor_options("Shares of a round", valid=("local", "ray"))
def collect(
    *,
    lake_uri: str,
    prompts: str | None,
    system_prompt: str | None,
    count: int,
    first: int,
    record_only: str | None,
    executor: str,
    workers: int | None,
    **given: Any,
) -> None:
    """Collect rollouts: groups of siblings per task, round after round, into the lake.

    Everything is recorded, failed attempts too. A run goes on where it was: killed or stopped with Ctrl-C, the same
    command plays what is missing and nothing else; --rounds is how many it has in the end. Environments and agents are
    your own code and run in this process, not in a sandbox.
    """
    import lake
    from lake.execution.on_ray import RayExecutor
    from pipelines.collect.agents.loading import agent_tasks
    from pipelines.collect.environments.system_prompt import prompt_text
    from pipelines.collect.manager.run import collect as collect_here
    from pipelines.collect.manager.shares import collect_with_ray
    from pipelines.collect.tasks import listed, read_tasks, seeds
    from pipelines.collect.wiring import PROMPTS, player_of, recorded_only, told_options

    if given["carry_over"] and (given["keep"] != "first" or executor == "ray"):
        raise UsageError("--carry-over needs --keep first, and --executor local")
    if given["keep"] != "all" and not given["oversample"]:
        raise UsageError(f"--keep {given['keep']} needs --oversample: siblings that may be left out")
    if prompts is not None and given["env"] is None and given["agent"] is None:
        given["env"] = PROMPTS
    if prompts is not None:
        tasks = read_tasks(prompts, are_shown=given["env"] == PROMPTS)
    else:
        own = agent_tasks(given["agent"], python=given["agent_python"]) if given["agent"] is not None else None
        tasks = seeds(first, count) if own is None else listed(own)
    if given["agent"] is not None:
        tasks = _addressable(tasks)
    _tell_rejected(tasks)
    quiet()
    options = player_options({**given, "system_prompt": system_prompt and prompt_text(system_prompt)})
    what = _collection(given, told_options(options))
    wanted = recorded_only(record_only)
    tell = Teller()
    # The lake comes last: a command that is refused leaves none behind. Ray's tasks make players of their own, and what
    # they would refuse is refused here.
    player = player_of(options, lake_uri, given["run"])
    if executor == "ray":
        asyncio.run(player.close())
        cluster = RayExecutor(workers)
        lk = lake.open(lake_uri, create=True)
        done = collect_with_ray(lk, options, tasks, what, record_only, cluster, say=tell.say)
    else:
        lk = lake.open(lake_uri, create=True)
        done = collect_here(lk, player, tasks, what, say=tell.say, progress=tell.progress, record_only=wanted)
    _tell(done, given["run"], given["rounds"])


def _addressable(tasks: "TaskSet") -> "TaskSet":
    """The tasks that an agent can play. Raises UsageError: there are none."""
    from pipelines.collect.agents.play_agent import unaddressable
    from pipelines.collect.tasks import listed

    why = {task.seed: problem for task in tasks.tasks if (problem := unaddressable(task)) is not None}
    if not why:
        return tasks
    kept = [task for task in tasks.tasks if task.seed not in why]
    if not kept:
        raise UsageError(next(iter(why.values())))
    return listed(kept, [*tasks.rejected, *why.values()])


def _collection(given: dict[str, Any], settings: dict[str, Any]) -> Any:
    from pipelines.collect.manager.rounds import Wanted
    from pipelines.collect.manager.run import Collection
    from pipelines.collect.manager.scheduler import Limits

    return Collection(
        wanted=Wanted(**{name: given[name] for name in ("run", "groups", "group_size", "oversample", "seed")}),
        limits=Limits(
            episode_seconds=given["episode_timeout"],
            **{name: given[name] for name in ("keep", "carry_over", "parallel", "retries", "grace")},
        ),
        rounds=given["rounds"],
        settings=settings,
    )


def _tell_rejected(tasks: "TaskSet") -> None:
    """Say which rows are no tasks."""
    for line in tasks.rejected[:5]:
        click.echo(f"{cell(line)}; it is left out", err=True)
    if more := len(tasks.rejected) - 5:
        click.echo(f"{more} rows more are no tasks and left out" if more > 0 else "", err=True, nl=more > 0)


def _tell(done: "Outcome", run: str, rounds: int) -> None:
    """The summary; exits with 1 if nothing was played to its end."""
    figures, delivered = done.figures, done.delivered
    if not done.rounds:
        click.echo(f"run {cell(run)} has its {counted(rounds, 'round')} already; give more --rounds to go on")
        return
    click.echo(f"run {cell(run)}: {counted(done.rounds, 'round')}, {figures.summary()}")
    if done.dropped:
        click.echo(f"{counted(done.dropped, 'episode')} not recorded, as --record-only says", err=True)
    if delivered.rejected:
        click.echo(f"{counted(delivered.rejected, 'episode')} in the table `rejects`, with the reason", err=True)
    if figures.first_error is not None:
        click.echo(f"the first error: {cell(redacted(figures.first_error))}", err=True)
    if figures.failed and not figures.finished + figures.present:
        sys.exit(1)
