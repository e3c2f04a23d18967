"""Commands `collect`, `template` and `serve`, and the options of all commands that play rollouts."""

import asyncio
import json
import shlex
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lake.cli.options import SectionedCommand, executor_options, hide_progress_bars, lake_option
from lake.errors import UsageError
from lake.formats.base.secrets import redact
from lake.read.text_table import count_noun, format_cell

if TYPE_CHECKING:
    from pipelines.collect.engines.serve import ServeOptions
    from pipelines.collect.factory import PlayerOptions
    from pipelines.collect.manager.run import CollectionReport
    from pipelines.collect.tasks import TaskSet

POSITIVE = click.FloatRange(min=0, min_open=True)
COUNT = click.IntRange(min=1)
WHICH_ENGINES = ("engines", "api", "adapter", "parallel_calls", "requests_per_second", "tokens_per_second")
HOW_SAMPLED = ("temperature", "max_tokens", "top_p", "top_k", "min_p", "stop", "schema", "tool_format")
MANY_AT_ONCE = ("parallel", "call_timeout", "step_timeout", "episode_timeout", "max_steps", "retries", "grace")
"""Sections of the help: names of options in PLAYING."""

PLAYING = (
    click.option(
        "--env",
        metavar="NAME",
        help="Environment: house, FILE.py:make, package.module:make, gymnasium:ID, textworld-express:GAME, "
        "reasoning-gym:DATASET, openenv:URL.  [default: with --prompts, the prompt alone]",
    ),
    click.option("--env-arg", "env_args", multiple=True, metavar="KEY=VALUE", help="Argument of the environment."),
    click.option(
        "--engine", "engines", multiple=True, metavar="URL", help="URL of an engine; repeat it to share the rollouts."
    ),
    click.option(
        "--api",
        type=click.Choice(["auto", "vllm", "sglang", "chat"]),
        default="auto",
        show_default=True,
        help="API of the engines; chat: any OpenAI-compatible endpoint, recorded as text.",
    ),
    click.option(
        "--model",
        help="Folder of the model and its tokenizer; without --engine it plays in this process. For agents and chat "
        "endpoints: the model's name.",
    ),
    click.option("--tokenizer", metavar="FOLDER", help="Folder of the tokenizer.  [default: --model]"),
    click.option("--adapter", metavar="NAME", help="LoRA adapter loaded by the engines."),
    click.option(
        "--tool-format",
        type=click.Choice(["auto", "hermes", "llama", "none"]),
        default="auto",
        show_default=True,
        help="Format of the model's tool calls; auto: that of its chat template.",
    ),
    click.option(
        "--policy",
        help="Policy name stored with the episodes.  [default: the model's name with a digest of its weights]",
    ),
    click.option(
        "--parallel-calls", type=COUNT, default=256, show_default=True, help="Maximum concurrent calls per engine."
    ),
    click.option("--requests-per-second", type=POSITIVE, help="Limit for all calls to engines.  [default: none]"),
    click.option("--tokens-per-second", type=POSITIVE, help="Limit for prompt and answer tokens.  [default: none]"),
    click.option("--temperature", type=click.FloatRange(min=0), help="Sampling temperature.  [default: 1]"),
    click.option("--max-tokens", type=COUNT, help="Maximum tokens per action.  [default: 512]"),
    click.option(
        "--top-p",
        type=click.FloatRange(0, 1, min_open=True),
        help="top-p threshold. Biases importance ratios.  [default: off]",
    ),
    click.option(
        "--top-k", type=click.IntRange(min=0), help="top-k threshold. Biases importance ratios.  [default: off]"
    ),
    click.option(
        "--min-p", type=click.FloatRange(0, 1), help="min-p threshold. Biases importance ratios.  [default: off]"
    ),
    click.option("--stop", multiple=True, help="Stop sequence."),
    click.option(
        "--schema", type=click.Path(exists=True, dir_okay=False), help="File with a JSON schema for the answers."
    ),
    click.option("--parallel", type=COUNT, default=256, show_default=True, help="Maximum rollouts in flight."),
    click.option("--call-timeout", type=POSITIVE, help="Timeout for one policy call, in seconds.  [default: none]"),
    click.option(
        "--step-timeout", type=POSITIVE, help="Timeout for one environment step, in seconds.  [default: none]"
    ),
    click.option("--episode-timeout", type=POSITIVE, help="Time limit of a rollout, in seconds.  [default: none]"),
    click.option("--max-steps", type=COUNT, help="Maximum decisions per rollout.  [default: none]"),
    click.option(
        "--retries", type=click.IntRange(min=0), default=1, show_default=True, help="Retries after a failure."
    ),
    click.option(
        "--grace",
        type=click.FloatRange(min=0),
        default=60.0,
        show_default=True,
        help="Seconds that rollouts may continue after Ctrl-C.",
    ),
)
"""Options of environments, engines, sampling and concurrency."""


def playing_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add PLAYING to a command."""
    for option in reversed(PLAYING):
        command = option(command)
    return command


def read_player_options(options: dict[str, Any]) -> "PlayerOptions":
    """Build player options from the values of PLAYING and the command's own options, by name.

    Raises:
        UsageError: a value is invalid.
        MissingExtraError: there is a schema for a local model, and no package to enforce it.
    """
    from lake.settings import parse_pairs
    from pipelines.collect.engines import Sampling
    from pipelines.collect.factory import PlayerOptions

    names = ("temperature", "max_tokens", "top_p", "top_k", "min_p")
    sampling = {name: options[name] for name in names if options[name] is not None}
    same = PlayerOptions.model_fields.keys() & options.keys() - {"env_args"}
    return PlayerOptions(
        sampling=Sampling(**sampling, **{"stop": options["stop"]} if options["stop"] else {}),
        env_args=parse_pairs(options["env_args"]),
        step_seconds=options["step_timeout"],
        call_seconds=options["call_timeout"],
        answer_schema=_read_schema(options["schema"], is_local=not options["engines"] and options.get("agent") is None),
        **{name: options[name] for name in same},
    )


def _read_schema(file: str | None, *, is_local: bool) -> dict[str, Any] | None:
    """Read a JSON schema; if `is_local`, check that a model in this process can follow it.

    Raises:
        UsageError: the file is not a schema, or cannot be enforced in this process.
        MissingExtraError: the package for that is not installed.
    """
    if file is None:
        return None
    try:
        schema = json.loads(Path(file).read_text("utf-8"))
    except ValueError as error:
        raise UsageError(f"--schema {file} is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise UsageError(f"--schema {file} holds {type(schema).__name__}; valid: a JSON schema, which is an object")
    if is_local:
        from pipelines.collect.policies.transformers_policy import compile_grammar

        compile_grammar(schema, f"--schema {file}")
    return schema


class ProgressPrinter:
    """Prints lines on stderr; on a terminal, progress stays in one line."""

    def __init__(self) -> None:
        self._is_open = False

    def say(self, line: str) -> None:
        """Print a line that stays."""
        if self._is_open:
            click.echo(err=True)
            self._is_open = False
        click.echo(format_cell(redact(line)), err=True)

    def progress(self, line: str) -> None:
        """Print a progress line."""
        if sys.stderr.isatty():
            click.echo(f"\r\x1b[K{format_cell(line)}", err=True, nl=False)
            self._is_open = True
        else:
            click.echo(format_cell(line), err=True)


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
    help="File with a system prompt for the environment's conversations.  [default: none]",
)
@click.option(
    "--agent",
    metavar="FILE:FUNCTION",
    help="Agent instead of an environment: agent(task, client), or verifiers:TASKSET with its tasks.",
)
@click.option("--agent-python", metavar="FILE", help="Python with verifiers installed.  [default: this one]")
@click.option("--run", default="collect", show_default=True, help="Name of the run; an existing run resumes.")
@click.option("--rounds", type=COUNT, default=1, show_default=True, help="Total rounds of the run.")
@click.option("--groups", type=COUNT, default=32, show_default=True, help="Tasks per round.")
@click.option("--group-size", type=COUNT, default=8, show_default=True, help="Siblings per task.")
@click.option(
    "--prompts",
    type=click.Path(dir_okay=False),
    help="Task file, JSONL or Parquet: prompt or messages, name, ground_truth, seed, and columns that the "
    "environment reads.  [default: seeds]",
)
@click.option("--tasks", "count", type=COUNT, default=10_000, show_default=True, help="Number of seeds used as tasks.")
@click.option(
    "--first-seed", "first", type=click.IntRange(min=0), default=0, show_default=True, help="First of these seeds."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the task order and the samples.")
@click.option("--oversample", type=click.IntRange(min=0), default=0, show_default=True, help="Extra siblings to play.")
@click.option(
    "--keep",
    type=click.Choice(["all", "first", "best"]),
    default="all",
    show_default=True,
    help="Siblings to keep: all, the first to finish (others are aborted), or the best by a selection.",
)
@click.option("--carry-over", is_flag=True, help="With --keep first: surplus rollouts continue in the next round.")
@click.option("--record-only", metavar="FILE:FUNCTION", help="Record only episodes for which function(record) is true.")
@executor_options("parts of a round", valid=("local", "ray"))
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
    **flags: Any,
) -> None:
    """Collect rollouts: groups of siblings per task, round after round, into the lake.

    Everything is recorded, including failed attempts. Runs resume: after a crash or Ctrl-C, rerun the same command to
    collect only the missing rollouts. --rounds is the total number of rounds of the run. Environments and agents are
    your own code and run in this process, not in a sandbox.
    """
    import lake
    from lake.execution.on_ray import RayExecutor
    from pipelines.collect.agents.loading import load_agent_tasks
    from pipelines.collect.environments.loading import read_system_prompt
    from pipelines.collect.factory import PROMPTS, build_player, describe_options, load_record_filter
    from pipelines.collect.manager.run import collect as collect_here
    from pipelines.collect.manager.run import collect_with_ray
    from pipelines.collect.tasks import build_task_set, list_seed_tasks, read_tasks

    if flags["carry_over"] and (flags["keep"] != "first" or executor == "ray"):
        raise UsageError("--carry-over needs --keep first and --executor local")
    if flags["keep"] != "all" and not flags["oversample"]:
        raise UsageError(f"--keep {flags['keep']} needs --oversample: extra siblings to leave out")
    if prompts is not None and flags["env"] is None and flags["agent"] is None:
        flags["env"] = PROMPTS
    if prompts is not None:
        tasks = read_tasks(prompts, are_shown=flags["env"] == PROMPTS)
    else:
        agent_set = (
            load_agent_tasks(flags["agent"], python=flags["agent_python"]) if flags["agent"] is not None else None
        )
        tasks = list_seed_tasks(first, count) if agent_set is None else build_task_set(agent_set)
    if flags["agent"] is not None:
        tasks = _select_addressable(tasks)
    _print_rejected(tasks)
    hide_progress_bars()
    options = read_player_options({**flags, "system_prompt": system_prompt and read_system_prompt(system_prompt)})
    collection = _build_collection(flags, describe_options(options))
    is_recorded = load_record_filter(record_only)
    tell = ProgressPrinter()
    # Open the lake last, so that a refused command creates none. Ray's tasks build their own players; this one only
    # reports faults of the options early.
    player = build_player(options, lake_uri, flags["run"])
    if executor == "ray":
        asyncio.run(player.close())
        cluster = RayExecutor(workers)
        lk = lake.open(lake_uri, create=True)
        done = collect_with_ray(lk, options, tasks, collection, record_only, cluster, say=tell.say)
    else:
        lk = lake.open(lake_uri, create=True)
        done = collect_here(
            lk, player, tasks, collection, say=tell.say, progress=tell.progress, record_only=is_recorded
        )
    _print_summary(done, flags["run"], flags["rounds"])


def _select_addressable(tasks: "TaskSet") -> "TaskSet":
    """Return the tasks that an agent can play. Raises UsageError: none."""
    from pipelines.collect.agents.play_agent import describe_unaddressable
    from pipelines.collect.tasks import build_task_set

    why = {task.seed: problem for task in tasks.tasks if (problem := describe_unaddressable(task)) is not None}
    if not why:
        return tasks
    playable = [task for task in tasks.tasks if task.seed not in why]
    if not playable:
        raise UsageError(next(iter(why.values())))
    return build_task_set(playable, [*tasks.rejected, *why.values()])


def _build_collection(flags: dict[str, Any], settings: dict[str, Any]) -> Any:
    from pipelines.collect.manager.rounds import RunSettings
    from pipelines.collect.manager.run import Collection
    from pipelines.collect.manager.scheduler import RolloutLimits

    return Collection(
        run_settings=RunSettings(
            **{name: flags[name] for name in ("run", "groups", "group_size", "oversample", "seed")}
        ),
        limits=RolloutLimits(
            episode_seconds=flags["episode_timeout"],
            **{name: flags[name] for name in ("keep", "carry_over", "parallel", "retries", "grace")},
        ),
        rounds=flags["rounds"],
        settings=settings,
    )


def _print_rejected(tasks: "TaskSet") -> None:
    """Print the rows that are invalid tasks."""
    for line in tasks.rejected[:5]:
        click.echo(f"{format_cell(line)}; skipped", err=True)
    if further := len(tasks.rejected) - 5:
        message = f"{further} more rows are not tasks and were skipped" if further > 0 else ""
        click.echo(message, err=True, nl=further > 0)


def _print_summary(done: "CollectionReport", run: str, rounds: int) -> None:
    """Print the summary; exit with 1 if no rollout was played to its end."""
    figures, delivered = done.figures, done.delivered
    if not done.rounds:
        click.echo(f"run {format_cell(run)} has its {count_noun(rounds, 'round')} already; raise --rounds to continue")
        return
    click.echo(f"run {format_cell(run)}: {count_noun(done.rounds, 'round')}, {figures.summary()}")
    if done.dropped:
        click.echo(f"{count_noun(done.dropped, 'episode')} not recorded because of --record-only", err=True)
    if delivered.rejected:
        click.echo(f"{count_noun(delivered.rejected, 'episode')} in the table `rejects`, with the reason", err=True)
    if figures.first_error is not None:
        click.echo(f"the first error: {format_cell(redact(figures.first_error))}", err=True)
    if figures.failed and not figures.finished + figures.present:
        sys.exit(1)


_PLAYED_BY = {"environment": "--env {file}:make", "agent": "--agent {file}:agent"}
"""Kind of template -> option of `trajlake collect` that plays it."""


@click.command()
@click.argument("kind", type=click.Choice(tuple(_PLAYED_BY)))
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def template(kind: str, file: Path) -> None:
    """Write an example FILE: an environment or an agent that runs unchanged.

    An existing file is not overwritten.
    """
    from lake.errors import UsageError

    if file.suffix != ".py":
        raise UsageError(f"{file} must be a Python file; name it {file}.py")
    source = Path(__file__).with_name("templates") / f"{kind}.py"
    try:
        with file.open("x", encoding="utf-8") as written:
            written.write(source.read_text("utf-8").replace("THIS_FILE.py", str(file)))
    except FileExistsError:
        raise UsageError(f"{file} already exists; choose another name, or move it away") from None
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from error
    click.echo(f"wrote {file}; play it: trajlake collect {_PLAYED_BY[kind].format(file=file)} ...")


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("further", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="Port on 127.0.0.1 (0 picks a free port).",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Device; auto: the one that the installed vLLM was built for.",
)
@click.option(
    "--python",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Python with vLLM installed.  [default: TRAJLAKE_ENGINE_PYTHON, this one, .engine]",
)
@click.option(
    "--max-len",
    type=click.IntRange(min=2),
    help="Longest sequence, prompt and answer.  [default: the model's; on a CPU at most 4096]",
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    show_default=True,
    help="Number type of the computation; auto: that of the weights.",
)
@click.option("--lora", is_flag=True, help="Allow LoRA adapters.")
def serve(*, model: Path, **options: Any) -> None:
    """Serve the model folder MODEL with vLLM, so that `trajlake collect` can play it.

    The engine returns exact token ids, log-probabilities of its sampling distribution and the version of its weights.
    It can load new weights while it runs. It listens only on this machine and ends with this command. Options after --
    are passed to vLLM.
    """
    from pipelines.collect.engines.serve import ServeOptions

    asyncio.run(_serve(model, ServeOptions(**options)))  # same names as the flags


async def _serve(model: Path, options: "ServeOptions") -> None:
    from pipelines.collect.engines.serve import run_engine

    folder = shlex.quote(format_cell(str(model)))
    loop, main = asyncio.get_running_loop(), asyncio.current_task()
    assert main is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, main.cancel)
    with suppress(asyncio.CancelledError):
        async with run_engine(model, options, say=lambda text: click.echo(text, err=True)) as engine:
            click.echo(f"serving {folder} at {engine.url}; Ctrl-C ends it")
            click.echo(f"trajlake collect --engine {engine.url} --model {folder} --env ... --lake L")
            raise await engine.death()
