"""What commands that play rollouts have in common: options, who plays by them, and lines on stderr."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lake.errors import UsageError
from lake.formats.base.secrets import redacted
from lake.read.text_table import cell

if TYPE_CHECKING:
    from pipelines.collect.wiring import PlayerOptions

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
    click.option("--engine", "engines", multiple=True, metavar="URL", help="An engine; several share the rollouts."),
    click.option(
        "--api",
        type=click.Choice(["auto", "vllm", "sglang", "chat"]),
        default="auto",
        show_default=True,
        help="What the engines are; chat: any endpoint of the OpenAI form, recorded as text.",
    ),
    click.option(
        "--model",
        help="Folder of the model: its tokenizer is the engine's; without --engine it plays in this process. Of an "
        "agent or a chat endpoint: the name to ask for.",
    ),
    click.option("--tokenizer", metavar="FOLDER", help="The tokenizer's folder.  [default: --model]"),
    click.option("--adapter", metavar="NAME", help="LoRA adapter that the engines have loaded."),
    click.option(
        "--tool-format",
        type=click.Choice(["auto", "hermes", "llama", "none"]),
        default="auto",
        show_default=True,
        help="How the model writes tool calls; auto: as its chat template does.",
    ),
    click.option(
        "--policy", help="Name that is stored with the episodes.  [default: the model's, with a digest of its weights]"
    ),
    click.option("--parallel-calls", type=COUNT, default=256, show_default=True, help="Calls an engine gets at once."),
    click.option("--requests-per-second", type=POSITIVE, help="Limit of all calls to engines.  [default: none]"),
    click.option(
        "--tokens-per-second", type=POSITIVE, help="Limit of their tokens, prompts and answers.  [default: none]"
    ),
    click.option("--temperature", type=click.FloatRange(min=0), help="Divides the logits.  [default: 1]"),
    click.option("--max-tokens", type=COUNT, help="Tokens of an action.  [default: 512]"),
    click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), help="Nucleus; biases ratios.  [default: off]"),
    click.option("--top-k", type=click.IntRange(min=0), help="Likeliest tokens; biases ratios.  [default: off]"),
    click.option("--min-p", type=click.FloatRange(0, 1), help="Least share; biases ratios.  [default: off]"),
    click.option("--stop", multiple=True, help="A text that ends an action."),
    click.option(
        "--schema", type=click.Path(exists=True, dir_okay=False), help="File of a JSON schema that answers are held to."
    ),
    click.option("--parallel", type=COUNT, default=256, show_default=True, help="Rollouts in flight."),
    click.option("--call-timeout", type=POSITIVE, help="Seconds of a decision; longer is a failure.  [default: none]"),
    click.option("--step-timeout", type=POSITIVE, help="Seconds of an environment's step; the same.  [default: none]"),
    click.option("--episode-timeout", type=POSITIVE, help="Seconds of a rollout; longer is cut off.  [default: none]"),
    click.option("--max-steps", type=COUNT, help="Decisions after which a rollout is cut off.  [default: none]"),
    click.option(
        "--retries", type=click.IntRange(min=0), default=1, show_default=True, help="Attempts after a failure."
    ),
    click.option(
        "--grace",
        type=click.FloatRange(min=0),
        default=60.0,
        show_default=True,
        help="Seconds that rollouts may go on after Ctrl-C.",
    ),
)
"""Which environment and engines, how actions are sampled, and how many rollouts run at once."""


def playing_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add PLAYING to a command."""
    for option in reversed(PLAYING):
        command = option(command)
    return command


def player_options(given: dict[str, Any]) -> "PlayerOptions":
    """Who plays, by the values of PLAYING and of what the command adds to them, by name. Raises UsageError."""
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


class Teller:
    """Lines on stderr; how far it is stays in one line where there is a terminal."""

    def __init__(self) -> None:
        self._is_open = False

    def say(self, line: str) -> None:
        """Print a line that stays."""
        if self._is_open:
            click.echo(err=True)
            self._is_open = False
        click.echo(cell(redacted(line)), err=True)

    def progress(self, line: str) -> None:
        """Print how far it is."""
        if sys.stderr.isatty():
            click.echo(f"\r\x1b[K{cell(line)}", err=True, nl=False)
            self._is_open = True
        else:
            click.echo(cell(line), err=True)
