"""What an online run is, as one frozen document: the file that `trajlake loop` reads.

    [loop]             rounds, ahead, mode, and what ends it early
    [loop.collect]     who plays and how many: the options of `trajlake collect`
    [loop.evaluation]  held-out starts, and what they decide
    [loop.score]       scorers of every round, before credit, and rewards made of them: [reward.NAME]
    [loop.credit]      the estimator; its options in [credit.NAME], as for `trajlake credit`
    [loop.sync]        how weights reach engines
    [loop.engine]      an engine of the loop's own
    [loop.sft]         the stage before (modes sft and sft+rl), with fields of [trainer], whose machine settings it has
    [trainer]          the update of a round, as for `trajlake train`

The run's job holds the whole document, so a resumed run is compared with what it was started with.
"""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from lake.errors import UsageError
from lake.judgements.scores import ENV_RETURN
from lake.settings import from_file, merged, validated
from pipelines.collect.engines.serve import Dtype
from pipelines.collect.engines.serve_checks import Device
from pipelines.collect.manager.rounds import Wanted
from pipelines.collect.manager.scheduler import Limits
from pipelines.collect.manager.siblings import Keep
from pipelines.collect.tasks import TaskSet, read_tasks, seeds
from pipelines.collect.wiring import PROMPTS, PlayerOptions
from pipelines.credit.estimators import estimator_class, for_lone_episodes, needs_siblings
from pipelines.credit.estimators.protocol import Estimator
from pipelines.score.reward_definition import load_reward
from pipelines.score.scoring import ScoringConfig
from pipelines.select.filters import FILTERS, AnyFilter
from pipelines.spelling import spelled
from trainer.config import MACHINE, TrainConfig
from trainer.frozen import FrozenModel
from trainer.train_settings import configured, layered

NEEDS_ENGINE = (
    "an endpoint that only gives text takes no weights and gives no token ids: a loop needs vLLM or SGLang, or the "
    "model in this process"
)
"""Why an endpoint of the OpenAI form will not do."""


class TaskConfig(FrozenModel):
    """Where rollouts begin."""

    prompts: str | None = None
    """File of tasks, JSONL or Parquet; None: seeds."""
    first_seed: int = Field(0, ge=0)
    """First of them."""
    tasks: int = Field(10_000, ge=1)
    """How many."""

    def task_set(self, *, are_shown: bool) -> TaskSet:
        """The tasks; `are_shown`: nobody else shows what they ask. Raises FormatError: the file holds none."""
        if self.prompts is None:
            return seeds(self.first_seed, self.tasks)
        return read_tasks(self.prompts, are_shown=are_shown)


class CollectConfig(TaskConfig):
    """The rollouts of a round."""

    player: PlayerOptions = PlayerOptions()
    """Environment or agent, engines, sampling; without engines the model plays in this process. `model` is left open:
    it is the one that is trained."""
    groups: int = Field(32, ge=1)
    """Tasks of a round."""
    group_size: int = Field(8, ge=1)
    """Siblings of a task."""
    oversample: int = Field(0, ge=0)
    """Siblings more than are kept."""
    keep: Keep = "all"
    """Of an oversampled group: all, the first that finish, or the best by `loop.credit.score`."""
    carry_over: bool = False
    """With `keep = "first"`: the others go on in the next round, under its weights."""
    parallel: int = Field(256, ge=1)
    """Rollouts in flight."""
    retries: int = Field(1, ge=0)
    """Attempts after a failure."""
    episode_seconds: float | None = Field(None, gt=0)
    """Of a rollout; longer is cut off."""
    filters: tuple[AnyFilter, ...] = ()
    """Which rollouts of a round are trained on, in order, as `trajlake select --filter` has them: `["dead_groups",
    "length:max_steps=30"]`. Those that are left out still count as siblings."""

    @field_validator("filters", mode="before")
    @classmethod
    def _spelled(cls, given: Any) -> Any:
        """Read filters that are written in a line; what is no list is left to its check."""
        if not isinstance(given, list | tuple):
            return given
        try:
            return [spelled(one, FILTERS, "filter") if isinstance(one, str) else one for one in given]
        except UsageError as error:
            raise ValueError(str(error).removeprefix("--")) from error

    @model_validator(mode="after")
    def _checked(self) -> Self:
        if self.player.model is not None and self.player.agent is None:
            raise ValueError("`player.model` is the model that is trained; set `model` in [trainer]")
        if self.keep != "all" and not self.oversample:
            raise ValueError(f'`keep = "{self.keep}"` needs `oversample`: siblings that may be left out')
        if self.carry_over and self.keep != "first":
            raise ValueError('`carry_over` needs `keep = "first"`')
        return self

    @property
    def limits(self) -> Limits:
        """As the manager of rollouts has them."""
        return Limits(
            keep=self.keep,
            carry_over=self.carry_over,
            parallel=self.parallel,
            retries=self.retries,
            episode_seconds=self.episode_seconds,
        )


class EvaluationConfig(TaskConfig):
    """Held-out starts, played by the weights of some rounds."""

    first_seed: int = Field(1_000_000_000, ge=0)
    """First of them: far from those that are trained on."""
    tasks: int = Field(200, ge=1)
    """How many; all are played each time."""
    env_args: dict[str, Any] | None = None
    """Arguments of the environment, where held-out starts have others than those of training."""
    attempts: int = Field(1, ge=1)
    """Rollouts of each start."""
    every: int = Field(5, ge=1)
    """Rounds between evaluations; the first weights and the last ones are always evaluated."""
    score: str = ENV_RETURN
    """env_return, or a scorer of [loop.score]."""
    threshold: float = 1.0
    """Score from which on an attempt succeeds."""
    patience: int | None = Field(None, ge=1)
    """End after so many evaluations in a row without improvement of the mean score. None: never."""
    min_improvement: float = Field(0.0, ge=0)
    """What counts as an improvement."""


class CreditConfig(FrozenModel):
    """The advantages of a round."""

    estimator: str = "gigpo"
    """Its options stand in [credit.NAME]."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Of the estimator: what [credit.NAME] says is put here."""
    score: str = ENV_RETURN
    """Episode score: env_return, or a scorer."""
    rewards: str = "env_reward"
    """Step rewards: env_reward, or a scorer."""

    def build(self) -> Estimator:
        """The estimator. Raises UsageError: there is none of that name, or its options are wrong."""
        return validated(estimator_class(self.estimator), self.options, f"credit.{self.estimator}: ")


class SyncConfig(FrozenModel):
    """Weights to engines, by way of a folder that they read."""

    probe: bool = True
    """Compare their log-probabilities with the trainer's after every push."""
    limit: float | None = Field(None, gt=0)
    """Largest difference allowed, in nats; None: 1e-4 where engine and trainer compute in float32, else on
    average 0.1 for each that does not."""
    patience: float = Field(900.0, gt=0)
    """Seconds that a push waits while no engine answers: as long as restarting one may take."""
    sleep: bool = False
    """Let engines free their device while the trainer computes (vLLM with --enable-sleep-mode, on a GPU)."""


class EngineConfig(FrozenModel):
    """A vLLM that the loop starts, starts again when it dies, and ends with itself; as `trajlake serve` does."""

    serve: bool = False
    """Whether it does; else `player.engines` names engines that run, or the model plays in this process."""
    python: str | None = None
    """Of the environment that has vLLM. None: TRAJLAKE_ENGINE_PYTHON, this one, or .engine."""
    port: int = Field(0, ge=0, le=65535)
    """On 127.0.0.1; 0: any that is free."""
    device: Device = "auto"
    """auto: what the installed vLLM was built for."""
    dtype: Dtype = "auto"
    """Number type that it computes in; auto: the one that the weights are written in."""
    max_len: int | None = Field(None, ge=2)
    """Longest sequence, prompt and answer. None: the model's on a GPU, at most 4096 on a CPU."""
    options: tuple[str, ...] = ()
    """Further options of vLLM, as it takes them."""


class LoopConfig(FrozenModel):
    """When a run goes on, and when it ends."""

    rounds: int = Field(30, ge=1)
    """Rounds of collect, score, credit, train, sync."""
    mode: Literal["rl", "sft", "sft+rl"] = "rl"
    """sft: the stage [loop.sft] alone; sft+rl: the rounds start from its model."""
    ahead: Literal[0, 1] = 0
    """1: a round is collected while the one before is trained on, with the weights before that: one version stale."""
    sync_every: int = Field(1, ge=1)
    """Rounds that a version of the weights plays; with 4, rollouts are up to 3 versions stale."""
    tokens: int | None = Field(None, ge=1)
    """Budget: no round begins after so many tokens, prompts and answers, were collected. None: none."""
    hours: float | None = Field(None, gt=0)
    """Budget: no round begins after the rounds took so long together. None: none."""
    collect: CollectConfig = CollectConfig()
    evaluation: EvaluationConfig | None = None
    score: ScoringConfig = ScoringConfig()
    credit: CreditConfig = CreditConfig()
    sync: SyncConfig = SyncConfig()
    engine: EngineConfig = EngineConfig()
    sft: TrainConfig | None = None
    """None without that stage."""

    @model_validator(mode="after")
    def _checked(self) -> Self:
        if self.engine.serve and self.collect.player.engines:
            raise ValueError("[loop.engine] starts an engine, and `player.engines` names others; leave one of them out")
        if self.collect.player.engines and self.collect.player.api == "chat":
            raise ValueError(f"`player.api` is chat, and {NEEDS_ENGINE}")
        if self.sync.sleep and not self.has_engines:
            raise ValueError("`sync.sleep` is for engines; give `player.engines`, or `serve = true` in [loop.engine]")
        if self.sync.sleep and self.ahead:
            raise ValueError("`sync.sleep` needs `ahead = 0`: engines that sleep collect nothing meanwhile")
        if self.evaluation is not None and self.evaluation.every % self.sync_every:
            raise ValueError(
                f"`evaluation.every` is {self.evaluation.every}; valid: a multiple of `sync_every`, which is "
                f"{self.sync_every}: only versions that are delivered are played"
            )
        return self

    @property
    def has_engines(self) -> bool:
        """Whether engines play, and not the model in this process."""
        return self.engine.serve or bool(self.collect.player.engines)

    @property
    def trained_rounds(self) -> int:
        """Rounds that are trained on: none where the stage before is all."""
        return 0 if self.mode == "sft" else self.rounds


class OnlineConfig(FrozenModel):
    """The whole document."""

    loop: LoopConfig
    trainer: TrainConfig
    """The update of a round. `where` takes episodes of the round away; `schedule` is over the rounds."""

    @model_validator(mode="after")
    def _checked(self) -> Self:
        if (self.loop.mode != "rl") != (self.loop.sft is not None):
            raise ValueError(f"mode {self.loop.mode}: [loop.sft] is for the modes sft and sft+rl, and they need it")
        if self.trainer.validation is not None or self.trainer.mixture:
            raise ValueError("`validation` and `mixture` are for `trajlake train`; a loop has [loop.evaluation]")
        self._check_siblings()
        return self

    def _check_siblings(self) -> None:
        """Refuse (ValueError) rounds of lone episodes where what is learned from compares siblings."""
        needs = self.trainer.loss.needs
        if self.loop.collect.group_size > 1 or not self.loop.trained_rounds or not needs.credit:
            return
        if needs.pairs is not None:
            raise ValueError(
                f"`loop.collect.group_size` is 1, and the loss {self.trainer.loss.name} compares siblings: no round "
                f"would train anything. Valid: 2 or more"
            )
        estimator = self.loop.credit.build()
        if needs_siblings(estimator):
            raise ValueError(
                f"`loop.collect.group_size` is 1, and {estimator.name} compares siblings: every advantage would be 0, "
                f"and no round would train anything. Valid: 2 or more, {for_lone_episodes(estimator)}"
            )

    def wanted(self, run: str) -> Wanted:
        """What a run's rollouts are, for the manager."""
        collect = self.loop.collect
        return Wanted(
            run=run,
            groups=collect.groups,
            group_size=collect.group_size,
            oversample=collect.oversample,
            seed=self.trainer.seed,
        )

    @property
    def shows_prompts(self) -> bool:
        """Whether tasks are prompts that no environment knows."""
        return self.loop.collect.player.env == PROMPTS


def read_config(file: str, given: Mapping[str, Any]) -> OnlineConfig:
    """The document of a run.

    Args:
        file: TOML.
        given: what the command line sets, nested; it goes before the file.

    Raises:
        UsageError: no such file, or something wrong in it.
    """
    if foreign := [name for name in given if name not in OnlineConfig.model_fields]:
        raise UsageError(
            f"--set: there is no section {', '.join(foreign)}; valid: loop, trainer; options of the estimator: "
            f"loop.credit.options"
        )
    loop, trainer = from_file(file, ["loop"]), from_file(file, ["trainer"])
    loop, trainer = merged(loop, given.get("loop", {})), layered(trainer, given.get("trainer", {}))
    collect, player = _section(loop, "collect"), _section(_section(loop, "collect"), "player")
    if collect.get("prompts") is not None and not {"env", "agent"} & player.keys():
        loop = merged(loop, {"collect": {"player": {"env": PROMPTS}}})
    name = _section(loop, "credit").get("estimator", CreditConfig().estimator)
    if options := from_file(file, ["credit", str(name)]):
        loop = merged({"credit": {"options": options}}, loop)
    if isinstance(names := _section(loop, "score").get("rewards"), list):
        loop = merged(loop, {"score": {"rewards": [load_reward(file, str(name)) for name in names]}})
    if isinstance(loop.get("sft"), Mapping):
        machine = {name: trainer[name] for name in (*MACHINE, "loggers") if name in trainer}
        loop["sft"] = layered({"model": trainer.get("model"), "loss": "sft"} | machine, loop["sft"])
    update = configured(trainer, ("[trainer] model", "[trainer] loss"))
    config = validated(OnlineConfig, {"loop": loop, "trainer": update.model_dump(exclude_unset=True)})
    config.loop.credit.build()
    _check_effect(config.trainer)
    if not config.loop.collect.player.env and not config.loop.collect.player.agent:
        raise UsageError(f"{file}: [loop.collect.player] names no `env` and no `agent`; give one of them")
    return config


def _check_effect(trainer: TrainConfig) -> None:
    """Refuse (UsageError) options of [trainer] that rounds do not read."""
    idle = {
        "selection": "rounds train on rollouts that no selection has seen; `loop.collect.filters` chooses among them",
        "advantages": "a round computes its own; `[loop.credit] estimator` says how",
        "checkpoint_every": "a loop writes a checkpoint after each round; `loop.collect.groups` sets its size",
    }
    for name, why in idle.items():
        if getattr(trainer, name) != TrainConfig.model_fields[name].default:
            raise UsageError(f"`trainer.{name}` has no effect in a loop: {why}")


def _section(loop: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A part of [loop]; nothing where it is of another type, which the document's check tells."""
    found = loop.get(name)
    return found if isinstance(found, Mapping) else {}
