"""Command `collect`."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lake.cli.options import SectionedCommand, lake_option, quiet
from lake.errors import UsageError
from lake.formats.base.secrets import redacted
from lake.read.text_table import cell, counted

if TYPE_CHECKING:
    from pipelines.collect.manager.run import Outcome
    from pipelines.collect.tasks import TaskSet

_SECTIONS = {
    "Who plays": ("env", "env_args", "agent", "agent_python", "model", "tokenizer", "policy"),
    "Which engines": ("engines", "api", "adapter", "parallel_calls", "requests_per_second", "tokens_per_second"),
    "What is played": ("lake_uri", "run", "rounds", "groups", "group_size", "prompts", "count", "first", "seed"),
    "How actions are sampled": (
        "temperature",
        "max_tokens",
        "top_p",
        "top_k",
        "min_p",
        "stop",
        "schema",
        "tool_format",
    ),
    "Many at once": ("parallel", "call_timeout", "step_timeout", "episode_timeout", "max_steps", "retries", "grace"),
    "Which are kept": ("oversample", "keep", "carry_over", "record_only"),
    "Several machines": ("executor", "workers"),
}
_POSITIVE = click.FloatRange(min=0, min_open=True)
_COUNT = click.IntRange(min=1)


@click.command(cls=SectionedCommand, sections=_SECTIONS)
@lake_option
@click.option(
    "--env",
    metavar="NAME",
    help="Environment: house, FILE.py:make, package.module:make, gymnasium:ID, textworld-express:GAME, "
    "reasoning-gym:DATASET, openenv:URL.  [default: with --prompts, the prompt alone]",
)
@click.option("--env-arg", "env_args", multiple=True, metavar="KEY=VALUE", help="Argument of the environment.")
@click.option(
    "--agent",
    metavar="FILE:FUNCTION",
    help="An agent instead of an environment: agent(task, client); or verifiers:TASKSET, with the tasks of that.",
)
@click.option("--agent-python", metavar="FILE", help="Python that has verifiers installed.  [default: this one]")
@click.option("--engine", "engines", multiple=True, metavar="URL", help="An engine; several share the rollouts.")
@click.option(
    "--api",
    type=click.Choice(["auto", "vllm", "sglang", "chat"]),
    default="auto",
    show_default=True,
    help="What the engines are; chat: any endpoint of the OpenAI form, recorded as text.",
)
@click.option(
    "--model",
    help="Folder of the model: its tokenizer is the engine's; without --engine it plays in this process. Of an agent "
    "or a chat endpoint: the name to ask for.",
)
@click.option("--tokenizer", metavar="FOLDER", help="The tokenizer's folder.  [default: --model]")
@click.option("--adapter", metavar="NAME", help="LoRA adapter that the engines have loaded.")
@click.option(
    "--tool-format",
    type=click.Choice(["auto", "hermes", "llama", "none"]),
    default="auto",
    show_default=True,
    help="How the model writes tool calls; auto: as its chat template does.",
)
@click.option("--policy", help="Name that is stored with the episodes.  [default: the model's]")
@click.option("--parallel-calls", type=_COUNT, default=256, show_default=True, help="Calls an engine gets at once.")
@click.option("--requests-per-second", type=_POSITIVE, help="Limit of all calls to engines.  [default: none]")
@click.option(
    "--tokens-per-second", type=_POSITIVE, help="Limit of their tokens, prompts and answers.  [default: none]"
)
@click.option("--run", default="collect", show_default=True, help="Name of the run; the same goes on where it was.")
@click.option("--rounds", type=_COUNT, default=1, show_default=True, help="Rounds that the run has in the end.")
@click.option("--groups", type=_COUNT, default=32, show_default=True, help="Tasks of a round.")
@click.option("--group-size", type=_COUNT, default=8, show_default=True, help="Siblings of a task.")
@click.option(
    "--prompts",
    type=click.Path(dir_okay=False),
    help="Tasks from a file, JSONL or Parquet: prompt or messages, name, ground_truth, seed, and what else the "
    "environment reads.  [default: seeds]",
)
@click.option("--tasks", "count", type=_COUNT, default=10_000, show_default=True, help="Seeds that are tasks.")
@click.option("--first-seed", "first", type=click.IntRange(min=0), default=0, show_default=True, help="First of them.")
@click.option("--seed", type=int, default=0, show_default=True, help="Decides the order of tasks, and the samples.")
@click.option("--temperature", type=click.FloatRange(min=0), help="Divides the logits.  [default: 1]")
@click.option("--max-tokens", type=_COUNT, help="Tokens of an action.  [default: 512]")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), help="Nucleus; biases ratios.  [default: off]")
@click.option("--top-k", type=click.IntRange(min=0), help="Likeliest tokens; biases ratios.  [default: off]")
@click.option("--min-p", type=click.FloatRange(0, 1), help="Least share; biases ratios.  [default: off]")
@click.option("--stop", multiple=True, help="A text that ends an action.")
@click.option(
    "--schema", type=click.Path(exists=True, dir_okay=False), help="File of a JSON schema that answers are held to."
)
@click.option("--parallel", type=_COUNT, default=256, show_default=True, help="Rollouts in flight.")
@click.option("--call-timeout", type=_POSITIVE, help="Seconds of a decision; longer is a failure.  [default: none]")
@click.option("--step-timeout", type=_POSITIVE, help="Seconds of an environment's step; the same.  [default: none]")
@click.option("--episode-timeout", type=_POSITIVE, help="Seconds of a rollout; longer is cut off.  [default: none]")
@click.option("--max-steps", type=_COUNT, help="Decisions after which a rollout is cut off.  [default: none]")
@click.option("--retries", type=click.IntRange(min=0), default=1, show_default=True, help="Attempts after a failure.")
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    help="Seconds that rollouts may go on after Ctrl-C.",
)
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
@click.option(
    "--executor", type=click.Choice(["local", "ray"]), default="local", show_default=True, help="Where rollouts run."
)
@click.option("--workers", type=_COUNT, help="Ray tasks that share a round.  [default: one per CPU]")
def collect(
    *,
    lake_uri: str,
    prompts: str | None,
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
    from pipelines.collect.agents.loading import agent_tasks
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
    options = _player_options(given)
    what = _collection(given, told_options(options))
    wanted = recorded_only(record_only)
    tell = _Teller()
    # The lake comes last: a command that is refused leaves none behind.
    if executor == "ray":
        lk = lake.open(lake_uri, create=True)
        done = collect_with_ray(lk, options, tasks, what, record_only, workers, say=tell.say)
    else:
        player = player_of(options, lake_uri, given["run"])
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


def _player_options(given: dict[str, Any]) -> Any:
    from lake.settings import from_pairs
    from pipelines.collect.engines import Sampling
    from pipelines.collect.wiring import PlayerOptions

    names = ("temperature", "max_tokens", "top_p", "top_k", "min_p")
    sampling = {name: given[name] for name in names if given[name] is not None}
    same = PlayerOptions.model_fields.keys() & given.keys() - {"env_args"}
    return PlayerOptions(
        sampling=Sampling(**sampling, **{"stop": given["stop"]} if given["stop"] else {}),
        env_args=from_pairs(given["env_args"]),
        step_seconds=given["step_timeout"],
        call_seconds=given["call_timeout"],
        answer_schema=_schema(given["schema"]),
        **{name: given[name] for name in same},
    )


def _schema(file: str | None) -> dict[str, Any] | None:
    """What a file of a JSON schema holds. Raises UsageError: it is none."""
    if file is None:
        return None
    try:
        found = json.loads(Path(file).read_text("utf-8"))
    except ValueError as error:
        raise UsageError(f"--schema {file} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"--schema {file} holds {type(found).__name__}; valid: an object, as JSON schemas are")
    return found


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
        progress_seconds=1.0 if sys.stderr.isatty() else 10.0,
    )


class _Teller:
    """Lines on stderr; how far it is stays in one line where there is a terminal."""

    def __init__(self) -> None:
        self._is_open = False

    def say(self, line: str) -> None:
        if self._is_open:
            click.echo(err=True)
            self._is_open = False
        click.echo(cell(redacted(line)), err=True)

    def progress(self, line: str) -> None:
        if sys.stderr.isatty():
            click.echo(f"\r\x1b[K{cell(line)}", err=True, nl=False)
            self._is_open = True
        else:
            click.echo(cell(line), err=True)


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
