"""A user's function as a scorer: what it declares, its version, its consent, and the calls that score episodes.

Nothing of it runs here. What it declares is read in the sandbox; a function that requires the network is refused unless
the user allows it, and runs in a worker process without walls then. Such a function has the key of its model in its
environment and may return it, raise it or print it, mostly by accident: `***` is kept in its place.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import polars as pl
from pydantic import BaseModel, Field

from lake import ids
from lake.errors import UsageError
from lake.execution.held import held
from lake.read.episodes import parts
from lake.read.snapshot import Snapshot
from lake.settings import NAME
from pipelines.score.reward_function import (
    KNOWN_ANSWERS,
    NEW_ANSWERS,
    STEP_INDICES,
    TRUTHS,
    Mode,
    StepIndex,
)
from pipelines.score.rollouts import (
    ARGUMENTS,
    RENAMED,
    Rollout,
    check_arguments,
    joint_call,
    one_call,
    read_rollouts,
)
from pipelines.score.rows import Reading, Scored, add_result, known_answers, response_rows
from pipelines.score.sandbox.contract import FunctionSource, Outcome, SandboxLimits
from pipelines.score.sandbox.levels import weaker
from pipelines.score.sandbox.pool import Sandbox, inspect_function
from pipelines.score.scorers import SCORERS
from pipelines.score.source import Source, find_source
from pipelines.score.work import Share

NETWORK_SECONDS = 300.0
"""Wall-clock seconds of one call of a function that asks over the network, unless it declares a `timeout`."""


class ScoreConfig(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """Options of a score run."""

    name: str | None = Field(None, pattern=NAME, max_length=200)
    """Name under which the scores are kept; the function's own unless given."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the function beside those that the lake gives, or options of a built-in scorer."""
    step_index: StepIndex | None = None
    """What step outputs count: `step` numbers, `message` indices, or `auto`, whichever fits; unless given, what the
    function declares."""
    default_step_reward: float | None = None
    """Reward of steps that the function gave none; without it they have no row."""
    batch_size: int = Field(64, ge=1)
    """Rollouts in one call of a batch-wise function. Siblings stay together where they fit."""
    allow_network: bool = False
    """Consent: functions that require the network may run without a sandbox. Read them first."""
    concurrency: int = Field(8, ge=1, le=256)
    """Calls in flight at once, of functions that require the network; one that declares its own counts instead."""
    environment: tuple[str, ...] = ("OPENAI_API_KEY", "OPENAI_BASE_URL")
    """Names of environment variables that functions which require the network are given, if they are set."""
    commit_seconds: float = Field(15.0, gt=0)
    """Scores are committed at least so often; a kill loses what came after the last commit, and nothing else."""
    commit_episodes: int = Field(4096, ge=1)
    """Scores are committed at the latest after so many episodes."""
    limits: SandboxLimits = Field(default_factory=SandboxLimits)
    """What the sandbox allows."""


_NAMED = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_SHORTEST = 8
"""Characters of a key. What is shorter is a stand-in such as `none`, and may be part of any word."""
_MASK = "***"


def keys_in(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The values that are keys, by the names of their variables; longest first."""
    values = {value.strip() for name, value in environment.items() if _NAMED.search(name)}
    return tuple(sorted((value for value in values if len(value) >= _SHORTEST), key=lambda key: (-len(key), key)))


def masked(data: Any, keys: tuple[str, ...]) -> Any:
    """JSON data of any depth, or a text, without keys; one that is cut off at either end of a text is masked too."""
    if not keys:
        return data
    if isinstance(data, str):
        return _masked_text(data, keys)
    if isinstance(data, list):
        return [masked(each, keys) for each in data]
    if isinstance(data, dict):
        return {masked(name, keys): masked(value, keys) for name, value in data.items()}
    return data


def _masked_text(text: str, keys: tuple[str, ...]) -> str:
    for key in keys:
        text = text.replace(key, _MASK)
        for length in range(len(key) - 1, _SHORTEST - 1, -1):
            if text.startswith(key[-length:]):
                text = _MASK + text[length:]
            if text.endswith(key[:length]):
                text = text[:-length] + _MASK
    return text


_PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE")
"""Variables that whoever may use the network needs to reach it."""
_ADAPTER = "pipelines.score.reward_function:as_reward_function"
"""What makes a reward function of whatever the module holds; it is called in the worker."""
Unit = list[Rollout]
"""The rollouts of one call."""


class UserFunction:
    """A reward function from a user's file.

    Raises:
        UsageError: it bears a built-in's name, requires the network and that is not allowed, cannot be imported, or
            its arguments do not fit; see `check_arguments`.
        SandboxUnavailableError: this machine cannot isolate it as asked.
    """

    def __init__(self, source: Source, config: ScoreConfig) -> None:
        self.name = config.name or source.name
        if self.name in SCORERS:
            msg = (
                f"{self.name!r} is the name of a built-in scorer: one would be taken for the other; give another --name"
            )
            raise UsageError(msg)
        facts = inspect_function(str(source.path), source.name, config.limits, _ADAPTER)
        declared = facts.get("declared") or {}
        self.source = source
        self.config = config
        self.mode: Mode = facts["mode"]
        self.is_grouped = self.mode == "group"
        self.is_batched = self.mode == "batch"
        self.needs_network = bool(facts.get("requires_network"))
        if self.needs_network and not config.allow_network:
            msg = (
                f"{source.path.name}:{source.name} requires the network, so it cannot run in the sandbox: it would run "
                "as an ordinary process of yours. Read it, then allow it: --allow-network, or allow_network = true in "
                "[score]"
            )
            raise UsageError(msg)
        self.notes: Sequence[str] = check_arguments(
            source.name,
            self.mode,
            config.arguments,
            parameters=_texts(declared.get("parameters")),
            required=_texts(declared.get("required")),
            takes_all=bool(facts.get("accepts_any")),
            fixed=_texts(declared.get("fixed")),
        ) + [f"{name} has no effect: {why}" for name, why in self._idle().items()]
        taken = set(facts.get("parameters") or ())
        self._wanted = frozenset(ARGUMENTS) if facts.get("accepts_any") else _wanted(taken)
        step_index = config.step_index or declared.get("step_index")
        self._reading = Reading(
            step_index=step_index if step_index in STEP_INDICES else "auto",
            default_step_reward=config.default_step_reward,
        )
        self._declared = declared
        self.printed = ""

    @property
    def parameters(self) -> dict[str, Any]:
        """What decides the scores beside the source, and what is worth keeping with the job."""
        return {
            "mode": self.mode,
            "arguments": self.config.arguments,
            "step_index": self._reading.step_index,
            "default_step_reward": self.config.default_step_reward,
            "batch_size": self.config.batch_size if self.mode == "batch" else None,
        }

    @property
    def version(self) -> str:
        """Hash of the source and the parameters, as 13 characters."""
        decisive = msgspec.json.encode(self.parameters, order="deterministic").decode()
        return ids.to_text(ids.key_hash("function", self.source.hash, decisive))

    def is_current(self) -> bool:
        """Whether the source is still what the version stands for; fresh workers read what is there."""
        try:
            return find_source(f"{self.source.path}:{self.source.name}").hash == self.source.hash
        except UsageError:
            return False

    def check(self, snapshot: Snapshot) -> None:
        """Its options name nothing of a lake."""

    @property
    def asked(self) -> SandboxLimits:
        """The levels that it may be held at."""
        limits = self._limits()
        return SandboxLimits(min_level=limits.min_level, max_level=limits.max_level)

    def score(self, snapshot: Snapshot, episodes: pl.DataFrame, share: Share | None = None) -> Iterator[Scored]:
        """Score episodes (run_id, group_id, episode_id, num_steps), and give what there is every half second at least.

        LakeAccessError if a file of the lake is missing or damaged.
        """
        limits = self._limits()
        keys = keys_in(limits.environment)

        def calls() -> Iterator[list[tuple[Unit, bytes]]]:
            for units, known in self._batches(snapshot, episodes, limits.rows_per_batch):
                yield [(unit, self._call(unit, known)) for unit in units]
                # Rollouts of a part are put into the same batches wherever it runs: those of one are not cut off.
                if share is not None and not self.is_batched and share.stop():
                    return

        with self._sandbox(limits, is_kept=share is not None) as sandbox:
            level = weaker(sandbox.level, share.level if share else None)
            reading = Reading(self._reading.step_index, self._reading.default_step_reward, level)
            for answered in sandbox.stream(calls()):
                scored = Scored()
                for unit, outcome in answered:
                    clean = replace(outcome, value=masked(outcome.value, keys), error=masked(outcome.error, keys))
                    self._add(scored, unit, clean, reading)
                self.printed = masked(sandbox.printed, keys)
                yield scored

    @contextmanager
    def _sandbox(self, limits: SandboxLimits, *, is_kept: bool) -> Iterator[Sandbox]:
        """Workers of the function; kept, with its source, for the next part that this process is given."""
        if is_kept:
            key = (str(self.source.path), self.source.hash, self.mode, limits.model_dump_json())
            yield held("sandbox", key, lambda: _Kept(self, limits)).sandbox
            return
        with self.sandbox(self.source, limits) as sandbox:
            yield sandbox

    def sandbox(self, source: Source, limits: SandboxLimits) -> Sandbox:
        """Workers of the function, whose source may lie elsewhere than where it was found."""
        return Sandbox(FunctionSource(str(source.path), source.name, self.mode, _ADAPTER), limits)

    def _idle(self) -> dict[str, str]:
        """Options that were given and change nothing, and why."""
        given, idle = self.config.model_fields_set, {}
        if self.mode != "batch" and "batch_size" in given:
            idle["batch_size"] = f"a {self.mode} function is not called with batches"
        if not self.needs_network:
            why = "the function does not declare requires_network, and runs in the sandbox"
            idle |= {name: why for name in ("allow_network", "concurrency", "environment") if name in given}
        elif "workers" in self.config.limits.model_fields_set:
            idle["limits.workers"] = "a function that requires the network has as many as `concurrency` says"
        return idle

    def _limits(self) -> SandboxLimits:
        limits = self.config.limits
        if not self.needs_network:
            return limits
        names = {*self.config.environment, *_PROXIES} & os.environ.keys()
        concurrency, timeout = self._declared.get("concurrency"), self._declared.get("timeout")
        return limits.model_copy(
            update={
                "min_level": "none",
                "max_level": "none",
                "environment": {name: os.environ[name] for name in names} | limits.environment,
                "workers": concurrency if isinstance(concurrency, int) and concurrency > 0 else self.config.concurrency,
                # An answer is waited for: the next call should not wait behind it.
                "rows_per_batch": 1,
                "seconds_per_row": float(timeout)
                if isinstance(timeout, int | float) and timeout > 0
                else max(limits.seconds_per_row, NETWORK_SECONDS),
            }
        )

    def _batches(
        self, snapshot: Snapshot, episodes: pl.DataFrame, calls: int
    ) -> Iterator[tuple[list[Unit], dict[int, dict[str, str]]]]:
        """Calls by the batch, with the stored answers of their episodes."""
        for part in parts(episodes):
            known = known_answers(snapshot, part["episode_id"]) if self.needs_network else {}
            units = self._units(read_rollouts(snapshot, part, self._wanted))
            for low in range(0, len(units), calls):
                yield units[low : low + calls], known

    def _units(self, rollouts: list[Rollout]) -> list[Unit]:
        if self.mode == "pointwise":
            return [[rollout] for rollout in rollouts]
        groups: list[Unit] = []
        for rollout in rollouts:
            if groups and groups[-1][0].group_id == rollout.group_id:
                groups[-1].append(rollout)
            else:
                groups.append([rollout])
        return groups if self.mode == "group" else _filled(groups, self.config.batch_size)

    def _call(self, unit: Unit, known: dict[int, dict[str, str]]) -> bytes:
        arguments = dict(self.config.arguments)
        if self.needs_network:
            arguments[KNOWN_ANSWERS] = {
                request: answer for rollout in unit for request, answer in known.get(rollout.episode_id, {}).items()
            }
        call = one_call(unit[0], arguments) if self.mode == "pointwise" else joint_call(unit, arguments)
        return msgspec.json.encode(call)

    def _add(self, scored: Scored, unit: Unit, outcome: Outcome, reading: Reading) -> None:
        value, error = outcome.value, outcome.error
        if self.needs_network and error is None:
            value, answers = _answers_apart(value)
            episode_ids = [rollout.episode_id for rollout in unit]
            if answers:
                scored.answers += len(answers)
                scored.responses.append(response_rows(answers, episode_ids, datetime.now(UTC)))
        if error is not None and outcome.kind not in ("exception", "invalid"):
            error = f"{outcome.kind}: {error}"
        if self.mode == "pointwise":
            add_result(scored, unit[0], value, error, reading)
            return
        values: list[Any] = value if isinstance(value, list) else []
        if error is None and len(values) != len(unit):
            got = f"{len(values)} results" if isinstance(value, list) else "no list"
            error = f"the function returned {got} for {len(unit)} rollouts; valid: a list with one for each, in order"
        if error is not None:
            values = [None] * len(unit)
        siblings = len(unit) if self.mode == "group" else None
        for rollout, one in zip(unit, values, strict=True):
            add_result(scored, rollout, one, error, reading, siblings)


class _Kept:
    """A sandbox of a worker process, and a folder for the source if the function's file is not on this machine."""

    def __init__(self, function: UserFunction, limits: SandboxLimits) -> None:
        self._stack = ExitStack()
        source = function.source
        if not function.is_current():
            folder = self._stack.enter_context(TemporaryDirectory(prefix="trajlake-source-"))
            source = source.placed(Path(folder))
        self.sandbox = self._stack.enter_context(function.sandbox(source, limits))

    def close(self) -> None:
        """End the sandbox, then delete the source."""
        self._stack.close()


def _texts(value: Any) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def _wanted(parameters: set[str]) -> frozenset[str]:
    """The arguments behind a function's parameters; batch-wise ones have other names for two of them."""
    renamed = {joint: name for name, joint in RENAMED.items()} | dict.fromkeys(TRUTHS, "ground_truth")
    return frozenset({"messages"} | {renamed.get(name, name) for name in parameters})


def _filled(groups: Sequence[Unit], size: int) -> list[Unit]:
    """Groups put together to batches; only one that is larger than a batch is split."""
    batches: list[Unit] = []
    for group in groups:
        if batches and len(batches[-1]) + len(group) <= size:
            batches[-1] = [*batches[-1], *group]
        else:
            batches += [list(group[low : low + size]) for low in range(0, len(group), size)]
    return batches


def _answers_apart(value: Any) -> tuple[Any, list[dict[str, Any]]]:
    """A result and the judges' new answers that came with it; a worker may say anything."""
    found: Any = []
    if isinstance(value, dict):
        value = dict(value)
        found = value.pop(NEW_ANSWERS, [])
    elif isinstance(value, list) and value and isinstance(value[-1], dict) and NEW_ANSWERS in value[-1]:
        found = value[-1][NEW_ANSWERS]
        value = value[:-1]
    return value, [answer for answer in found if isinstance(answer, dict)] if isinstance(found, list) else []
