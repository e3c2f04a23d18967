"""Playing: a candidate's rollouts, and the reflecting model's answers, by the manager of `pipelines.collect`.

Either is a run of the lake, so a kill loses nothing of it, and nothing is asked or played twice. Every candidate gets
the same tasks and the same seeds; its name is that of the policy with its id behind it.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import polars as pl
from pydantic import BaseModel, Field

from lake import ids
from lake.judgements.scores import ENV_RETURN
from lake.lake import Lake
from lake.read.parquet import collected
from lake.read.snapshot import Snapshot
from pipelines.collect.engines import Sampling
from pipelines.collect.engines.chat import ChatEndpoint, ChatOptions, ChatPolicy
from pipelines.collect.engines.sharing import Shared
from pipelines.collect.environments import Task
from pipelines.collect.environments.prompts import Prompt
from pipelines.collect.manager.rounds import Wanted
from pipelines.collect.manager.run import Collection, collect
from pipelines.collect.manager.scheduler import Limits
from pipelines.collect.model_folder import policy_name
from pipelines.collect.play_environment import EnvironmentPlayer
from pipelines.collect.players import Player
from pipelines.collect.tasks import TaskSet, listed
from pipelines.collect.wiring import LoadModel, PlayerOptions, load_model, player_of, told_options
from pipelines.prompts.candidates import Candidate
from pipelines.score.scoring import ScoringConfig, score_rollouts

REFLECT_KEY = "TRAJLAKE_REFLECT_KEY"
"""Environment variable of the reflecting endpoint's key."""
Say = Callable[[str], None]


class Reflection(BaseModel, frozen=True, extra="forbid"):
    """Who reflects, and on what."""

    url: str
    """Endpoint of the OpenAI form."""
    model: str
    """The name that it knows the model by."""
    temperature: float = Field(default=1.0, ge=0)
    """Of its answers."""
    max_tokens: int = Field(default=2048, ge=1)
    """Of an answer."""
    contrasts: int = Field(default=2, ge=1)
    """Pairs of a better and a worse attempt that a request shows."""
    budget: int = Field(default=16_000, ge=1000)
    """Characters of all transcripts of a request."""
    longest: int = Field(default=4000, ge=1)
    """Characters of a proposed prompt."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the reflecting model said to one request."""

    seed: int
    """Of the request."""
    episode: str
    """Its id."""
    text: str
    is_cut: bool
    """A limit of tokens ended it."""
    error: str | None
    """The endpoint failed; there is no text."""


@dataclass(frozen=True, kw_only=True)
class Arena:
    """Where candidates play.

    Args:
        lake: where rollouts are recorded.
        options: who plays, and what; without a system prompt. A model in this process is loaded once.
        scoring: what scores the rollouts of candidates.
        rank_by: env_return, or the name of a scorer: what candidates are ranked by.
        limits: how many at once, and how long.
        group_size: siblings of a start.
        seed: of the samples.
        say: called with lines that stay.
        progress: called with how far it is.
    """

    lake: Lake
    options: PlayerOptions
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    rank_by: str = ENV_RETURN
    limits: Limits
    group_size: int
    seed: int
    say: Say
    progress: Say
    load: LoadModel = field(default_factory=lambda: cache(load_model))

    def play(self, run: str, candidate: Candidate, tasks: TaskSet, environment: dict[str, object]) -> None:
        """Play what is missing of a candidate's rollouts, and score them.

        Args:
            run: that they make up.
            candidate: whose prompt is told.
            tasks: where they begin.
            environment: arguments of the environment, beside those of the options.

        Raises:
            UsageError, StartError, StoppedError: as `collect`.
            UsageError, DataRefusedError, SandboxUnavailableError, ConflictError: as `score_rollouts`.
        """
        name = self.options.policy or policy_name(self.options.model or self.options.tokenizer or "policy")
        options = self.options.model_copy(
            update={
                "system_prompt": candidate.text or None,
                "policy": f"{name}+{candidate.id}",
                "env_args": {**self.options.env_args, **environment},
            }
        )
        player = player_of(options, self.lake.uri, run, load=self.load)
        self._collect(run, player, tasks, self.group_size, told_options(options))
        quoted = run.replace("'", "''")
        score_rollouts(self.lake, self.scoring, f"run_id = '{quoted}'")

    def reflect(self, run: str, reflection: Reflection, tasks: Sequence[Task]) -> list[Answer]:
        """Ask what is missing of some requests, and give all answers, by the seeds of their tasks."""
        endpoints = Shared([ChatEndpoint(reflection.url, key=os.environ.get(REFLECT_KEY))])
        sampling = Sampling(temperature=reflection.temperature, max_tokens=reflection.max_tokens)
        speaker = ChatPolicy(endpoints, ChatOptions(model=reflection.model, sampling=sampling))
        player = EnvironmentPlayer(Prompt, speaker, engines=endpoints)
        self._collect(run, player, listed(tasks), 1, {"reflection": reflection.model_dump(exclude={"url"})})
        return read_answers(self.lake.snapshot(), run)

    def _collect(self, run: str, player: Player, tasks: TaskSet, group_size: int, settings: dict[str, object]) -> None:
        wanted = Wanted(run=run, groups=len(tasks.tasks), group_size=group_size, seed=self.seed)
        what = Collection(wanted=wanted, limits=self.limits, rounds=1, settings=settings)
        collect(self.lake, player, tasks, what, say=lambda line: self.say(f"{run}: {line}"), progress=self.progress)


def read_answers(snapshot: Snapshot, run: str) -> list[Answer]:
    """The reflecting model's answers in a run, by the seeds of their tasks."""
    mine = pl.col("run_id") == run
    heads = snapshot.scan("episodes").filter(mine).select("episode_id", "seed", "status", "error")
    steps = snapshot.scan("steps").filter(mine, pl.col("step_index") == 0)
    rows = heads.join(steps.select("episode_id", "action", "finish_reason"), on="episode_id", how="left")
    return [
        Answer(
            seed=row["seed"],
            episode=ids.to_text(row["episode_id"]),
            text=row["action"] or "",
            is_cut=row["finish_reason"] == "length",
            error=None if row["status"] == "completed" else row["error"] or row["status"],
        )
        for row in collected(rows.sort("seed")).iter_rows(named=True)
    ]
