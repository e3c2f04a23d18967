"""The configuration of an online run as one frozen document: the file that `trajlake loop` reads.

    [loop]             rounds, ahead, mode, and limits that end it early
    [loop.collect]     the players and their number: the options of `trajlake collect`
    [loop.evaluation]  held-out starts, and the decisions by their scores
    [loop.score]       scorers of every round, before credit, and rewards of their scores: [reward.NAME]
    [loop.credit]      the estimator; its options in [credit.NAME], as for `trajlake credit`
    [loop.sync]        how weights reach engines
    [loop.engine]      an engine that the loop keeps
    [loop.sft]         the first stage (modes sft and sft+rl): fields of [trainer], and its machine settings
    [trainer]          the update of a round, as for `trajlake train`

The run's job stores the document, so a resumed run is compared with its start. `check_loop` looks for faults before
anything is played or recorded: a wrong name would otherwise be found only after a round has been played.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from lake.errors import UsageError
from lake.judgements.scores import ENV_RETURN
from lake.judgements.selections import bracket_predicate
from lake.settings import FrozenModel, merge, read_section, validate
from pipelines.collect.agents.loading import load_agent
from pipelines.collect.engines.http import parse_address
from pipelines.collect.engines.serve import Device, EngineDtype
from pipelines.collect.environments.loading import load_environment
from pipelines.collect.policies.transformers_policy import compile_grammar
from pipelines.collect.settings import PROMPTS, RoundConfig, RunSettings, TaskConfig
from pipelines.collect.tasks import load_tasks
from pipelines.credit.estimators import find_estimator, needs_siblings, suggest_for_lone_episodes
from pipelines.credit.estimators.protocol import Estimator
from pipelines.score.rewards import load_reward
from pipelines.score.scoring import ScoringConfig
from pipelines.select.filters import FILTERS, AnyFilter
from pipelines.spelling import parse_part
from trainer.backends.ranks import is_launched
from trainer.config import MACHINE, TrainConfig
from trainer.runs.offline import check_model
from trainer.train_settings import build_config, layer_settings

Say = Callable[[str], None]
"""Takes a line for the user."""
VALUE_SCORER = "value_head"
"""Name of the value head as a scorer: its scores are the values that gae reads."""
VALUE_OPTIONS = {"values": VALUE_SCORER, "bootstrap": False}
"""Options of gae in a loop with a value head, unless [credit.gae] sets them. With bootstrap a policy that never ends is
worth what it expects, the head learns that, and success falls: on the demo's house from 0.8 to 0 within 10 rounds."""
NEEDS_ENGINE = (
    "an endpoint that only gives text takes no weights and gives no token ids: a loop needs vLLM or SGLang, or the "
    "model in this process"
)
"""Reason that an OpenAI-compatible endpoint is refused."""


class CollectConfig(RoundConfig):
    """The rollouts of a round. `player.model` stays unset: the trained model plays."""

    filters: tuple[AnyFilter, ...] = ()
    """Filters of the rollouts to train on, in order, as for `trajlake select --filter`: `["dead_groups",
    "length:max_steps=30"]`. Rollouts that they leave out still count as siblings."""

    @field_validator("filters", mode="before")
    @classmethod
    def _parse_filters(cls, filters: Any) -> Any:
        """Parse filters that are written as text; pydantic refuses a field that is not a list."""
        if not isinstance(filters, list | tuple):
            return filters
        try:
            return [parse_part(entry, FILTERS, "filter") if isinstance(entry, str) else entry for entry in filters]
        except UsageError as error:
            raise ValueError(str(error).removeprefix("--")) from error

    @model_validator(mode="after")
    def _checked(self) -> Self:
        if self.player.model is not None and self.player.agent is None:
            raise ValueError("`player.model` is the model that is trained; set `model` in [trainer]")
        if not self.player.has_model:
            raise ValueError(
                f"`player.policy` {self.player.policy} has no weights to train; collect with it first (`trajlake "
                "collect`), and train on its episodes: `trajlake train --loss sft`"
            )
        return self


class EvaluationConfig(TaskConfig):
    """Held-out starts, which the weights of some rounds play."""

    first_seed: int = Field(1_000_000_000, ge=0)
    """First seed, far from those that are trained on."""
    tasks: int = Field(200, ge=1)
    """Number of seeds; each evaluation plays all of them."""
    env_args: dict[str, Any] | None = None
    """Arguments of the environment for held-out starts; None takes those of training."""
    attempts: int = Field(1, ge=1)
    """Number of rollouts of each start."""
    every: int = Field(5, ge=1)
    """Number of rounds between evaluations; the first and the last weights are always evaluated."""
    score: str = ENV_RETURN
    """Score of an attempt: env_return, or a scorer of [loop.score]."""
    threshold: float = 1.0
    """Lowest score that is a success."""
    patience: int | None = Field(None, ge=1)
    """Number of evaluations in a row without a better mean score that end the run. None never ends it."""
    min_improvement: float = Field(0.0, ge=0)
    """Smallest improvement of the mean score that counts."""


class CreditConfig(FrozenModel):
    """The advantages of a round."""

    estimator: str = "gigpo"
    """Name of the estimator, whose options are in [credit.NAME]."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the estimator; those of [credit.NAME] are put here."""
    score: str = ENV_RETURN
    """Episode score: env_return, or a scorer."""
    rewards: str = "env_reward"
    """Step rewards: env_reward, or a scorer."""
    control: Literal["shuffled"] | None = None
    """shuffled: train on each round's advantages shuffled among its live steps, which should teach nothing."""

    def build(self) -> Estimator:
        """Build the estimator. Raises UsageError: the name is unknown, or an option is wrong."""
        return validate(find_estimator(self.estimator), self.options, f"credit.{self.estimator}: ")


class SyncConfig(FrozenModel):
    """How engines get the weights."""

    transfer: Literal["folder", "nccl", "ipc"] = "folder"
    """Way of the weights. folder: engines read a model folder. nccl: one broadcast to vLLMs on other GPUs. ipc: vLLMs
    on the trainer's GPU read its memory. nccl and ipc need vLLM in the trainer's environment, too."""
    probe: bool = True
    """Compare the engines' log-probabilities with the trainer's after every push."""
    limit: float | None = Field(None, gt=0)
    """Largest difference allowed, in nats. None: 1e-4 where engine and trainer compute in float32, else a mean of
    0.1 for each of the two that does not."""
    patience: float = Field(900.0, gt=0)
    """Longest wait of a push while no engine answers, in seconds: the time of an engine's restart."""
    sleep: bool = False
    """Let engines free their device while the trainer computes (vLLM with --enable-sleep-mode, on a GPU)."""
    sleep_level: Literal[1, 2] = 1
    """Weights of a sleeping engine. 1: moved to the machine's memory. 2: dropped, and pushed again after waking."""


class EngineConfig(FrozenModel):
    """A vLLM that the loop starts, restarts when it dies, and ends; as `trajlake serve` does."""

    serve: bool = False
    """Whether the loop keeps an engine. Else `player.engines` names engines, or the model plays in this process."""
    python: str | None = None
    """Python of the environment that has vLLM. None: TRAJLAKE_ENGINE_PYTHON, this one, or .engine."""
    port: int = Field(0, ge=0, le=65535)
    """Port on 127.0.0.1; 0 picks a free port."""
    device: Device = "auto"
    """Device of the engine; auto: the one that the installed vLLM was built for."""
    dtype: EngineDtype = "auto"
    """Number type of the engine; auto: the type of the weights on disk."""
    max_len: int | None = Field(None, ge=2)
    """Longest sequence in tokens, prompt and answer. None: the model's on a GPU, at most 4096 on a CPU."""
    options: tuple[str, ...] = ()
    """Additional options of vLLM, as on its command line."""


class LoopConfig(FrozenModel):
    """Rounds of a run, and what ends it."""

    rounds: int = Field(30, ge=1)
    """Number of rounds of collect, score, credit, train, sync."""
    mode: Literal["rl", "sft", "sft+rl"] = "rl"
    """sft: the stage [loop.sft] alone; sft+rl: the rounds start from its model."""
    ahead: Literal[0, 1] = 0
    """1 collects a round while the previous one is trained on, with weights that are one version stale."""
    sync_every: int = Field(1, ge=1)
    """Number of rounds that a version of the weights plays; with 4, rollouts are up to 3 versions stale."""
    tokens: int | None = Field(None, ge=1)
    """Budget of collected tokens, prompts and answers; no round begins after it is used up. None: no budget."""
    hours: float | None = Field(None, gt=0)
    """Budget of the rounds' time together, in hours; no round begins after it is used up. None: no budget."""
    collect: CollectConfig = CollectConfig()
    evaluation: EvaluationConfig | None = None
    score: ScoringConfig = ScoringConfig()
    credit: CreditConfig = CreditConfig()
    sync: SyncConfig = SyncConfig()
    engine: EngineConfig = EngineConfig()
    sft: TrainConfig | None = None
    """Configuration of the first stage; None without it."""

    @model_validator(mode="after")
    def _checked(self) -> Self:
        if self.engine.serve and self.collect.player.engines:
            raise ValueError("[loop.engine] starts an engine, and `player.engines` names others; leave one of them out")
        if self.collect.player.engines and self.collect.player.api == "chat":
            raise ValueError(f"`player.api` is chat, and {NEEDS_ENGINE}")
        for name, is_set in (("sleep", self.sync.sleep), ("transfer", self.sync.transfer != "folder")):
            if is_set and not self.has_engines:
                source = "give `player.engines`, or `serve = true` in [loop.engine]"
                raise ValueError(f"`sync.{name}` is for engines; {source}")
        if self.sync.sleep and self.ahead:
            raise ValueError(
                "`sync.sleep` needs `ahead = 0`: sleeping engines collect nothing while the trainer computes"
            )
        if self.sync.sleep_level != 1 and not self.sync.sleep:
            raise ValueError("`sync.sleep_level` has no effect: set `sync.sleep`")
        if self.sync.sleep_level != 1 and self.sync.transfer != "folder" and self.sync_every > 1:
            raise ValueError(
                f"`sync.sleep_level` 2 with `sync.transfer` {self.sync.transfer} needs `sync_every = 1`: engines that "
                "lost their weights get those of the trainer, which are newer"
            )
        if self.evaluation is not None and self.evaluation.every % self.sync_every:
            raise ValueError(
                f"`evaluation.every` is {self.evaluation.every}; valid: a multiple of `sync_every`, which is "
                f"{self.sync_every}: only versions that are delivered are played"
            )
        return self

    @property
    def has_engines(self) -> bool:
        """Whether engines play instead of the model in this process."""
        return self.engine.serve or bool(self.collect.player.engines)

    @property
    def trained_rounds(self) -> int:
        """Number of rounds that are trained on: 0 where the first stage is the whole run."""
        return 0 if self.mode == "sft" else self.rounds


class OnlineConfig(FrozenModel):
    """The whole document."""

    loop: LoopConfig
    trainer: TrainConfig
    """The update of a round. `where` leaves out episodes of the round; `schedule` is over the rounds."""

    @model_validator(mode="after")
    def _checked(self) -> Self:
        if (self.loop.mode != "rl") != (self.loop.sft is not None):
            raise ValueError(f"mode {self.loop.mode}: [loop.sft] is for the modes sft and sft+rl, and they need it")
        if self.trainer.validation is not None or self.trainer.mixture:
            raise ValueError("`validation` and `mixture` are for `trajlake train`; a loop has [loop.evaluation]")
        if self.loop.sync.transfer != "folder" and self.trainer.lora is not None:
            raise ValueError(
                "`sync.transfer` sends whole weights, and [trainer.lora] trains adapters: set it to folder"
            )
        self._check_siblings()
        self._check_values()
        return self

    def _check_values(self) -> None:
        """Refuse (ValueError) an estimator that needs a critic without one, and a critic that no estimator reads."""
        credit, player = self.loop.credit, self.loop.collect.player
        is_valued, needs_values = self.trainer.value is not None, credit.estimator == "gae"
        if not self.loop.trained_rounds or not self.trainer.loss.needs.advantages:
            return
        if is_valued and (not needs_values or credit.control is not None):
            raise ValueError(
                f"[trainer.value] is for the estimator gae without a control, and `loop.credit` names "
                f"{credit.estimator}{'' if credit.control is None else ' with a control'}: set `loop.credit.estimator` "
                f"to gae and leave `loop.credit.control` out, or leave [trainer.value] out"
            )
        if needs_values and not is_valued and "values" not in credit.options and player.agent is None:
            raise ValueError(
                "the estimator gae needs a value of each step, and nothing gives these rollouts one: add "
                "[trainer.value], which trains a value head, or name a scorer of steps in `[credit.gae] values`"
            )

    def _check_siblings(self) -> None:
        """Refuse (ValueError) rounds of lone episodes where loss or estimator compares siblings."""
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
                f"and no round would train anything. Valid: 2 or more, {suggest_for_lone_episodes(estimator)}"
            )

    def request_rollouts(self, run: str) -> RunSettings:
        """Return the request for a run's rollouts, for the manager."""
        collect = self.loop.collect
        return RunSettings(
            run=run,
            groups=collect.groups,
            group_size=collect.group_size,
            oversample=collect.oversample,
            seed=self.trainer.seed,
        )

    @property
    def shows_prompts(self) -> bool:
        """Whether tasks are prompts without an environment."""
        return self.loop.collect.player.env == PROMPTS


def read_config(file: str, overrides: Mapping[str, Any]) -> OnlineConfig:
    """Read the configuration of a run.

    Args:
        file: path of a TOML file.
        overrides: nested settings of the command line, which win over the file.

    Raises:
        UsageError: the file cannot be read, or a setting is wrong.
    """
    if foreign := [name for name in overrides if name not in OnlineConfig.model_fields]:
        raise UsageError(
            f"--set: there is no section {', '.join(foreign)}; valid: loop, trainer; options of the estimator: "
            f"loop.credit.options"
        )
    loop, trainer = read_section(file, ["loop"]), read_section(file, ["trainer"])
    loop, trainer = merge(loop, overrides.get("loop", {})), layer_settings(trainer, overrides.get("trainer", {}))
    name = _section(loop, "credit").get("estimator", CreditConfig().estimator)
    if options := read_section(file, ["credit", str(name)]):
        loop = merge({"credit": {"options": options}}, loop)
    if isinstance(rewards := _section(loop, "score").get("rewards"), list):
        loop = merge(loop, {"score": {"rewards": [load_reward(file, str(name)) for name in rewards]}})
    if isinstance(loop.get("sft"), Mapping):
        machine = {name: trainer[name] for name in (*MACHINE, "loggers") if name in trainer}
        loop["sft"] = layer_settings({"model": trainer.get("model"), "loss": "sft"} | machine, loop["sft"])
    update = build_config(trainer, ("[trainer] model", "[trainer] loss"))
    config = validate(OnlineConfig, {"loop": loop, "trainer": update.model_dump(exclude_unset=True)})
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
    """Return a section of [loop]; empty where it has another type, which validation refuses."""
    section = loop.get(name)
    return section if isinstance(section, Mapping) else {}


WHERE = "trainer.where"
"""Name of the predicate in messages."""
_ENV_REWARD = "env_reward"
SEVERAL_DEVICES = (
    "a loop trains in one process, on one device. For several, train each round with separate commands: collect, "
    "score, credit, `trajlake train --ranks 2`, push (docs/guides/loop.md, Several devices)"
)
"""Reason that a loop has no ranks, and the alternative."""


def check_loop(config: OnlineConfig, *, ranks: int = 1) -> None:
    """Check a configuration as far as that is possible without the lake and without engines; `ranks` processes.

    Raises:
        UsageError: a model, environment, agent, scorer or score is unknown, or a predicate or URL is invalid.
        FormatError: the file of tasks is missing or empty.
        MissingExtraError: the package of an environment, a schema of answers or a logger is not installed.
    """
    loop = config.loop
    if ranks > 1 or (is_launched() and os.environ["WORLD_SIZE"] != "1"):
        # Several processes, also those of torchrun, would each play and train a run.
        raise UsageError(SEVERAL_DEVICES)
    check_model(config.trainer)
    bracket_predicate(config.trainer.where, WHERE)
    for url in loop.collect.player.engines:
        parse_address(url)
    _check_scores(loop)
    load_tasks(loop.collect, are_shown=config.shows_prompts)
    if loop.evaluation is not None:
        load_tasks(loop.evaluation, are_shown=config.shows_prompts)
    _check_played(loop)


def _check_played(loop: LoopConfig) -> None:
    """Make the environments of rounds and evaluations, or load the agent; compile the schema of answers."""
    player, evaluation = loop.collect.player, loop.evaluation
    if player.agent is not None:
        load_agent(player.agent, python=player.agent_python)
    elif player.answer_schema is not None and not player.engines and not loop.engine.serve:
        compile_grammar(player.answer_schema, "loop.collect.player.answer_schema")
    if player.env is None or player.env == PROMPTS:
        return
    load_environment(player.env, player.env_args)
    if evaluation is not None and evaluation.env_args is not None:
        load_environment(player.env, evaluation.env_args)


def _check_scores(loop: LoopConfig) -> None:
    """Refuse (UsageError) scores that neither the environment nor [loop.score] gives."""
    scorers = [scorer.make_scorer().name for scorer in loop.score.scorers()]
    scorers += [reward.name for reward in loop.score.rewards]
    uses = [
        ("loop.credit.score", loop.credit.score, ENV_RETURN),
        ("loop.credit.rewards", loop.credit.rewards, _ENV_REWARD),
    ]
    if loop.evaluation is not None:
        uses.append(("loop.evaluation.score", loop.evaluation.score, ENV_RETURN))
    for setting, name, recorded in uses:
        if name not in (recorded, *scorers):
            raise UsageError(
                f"`{setting}` is {name!r}; valid: {', '.join((recorded, *scorers))}: what the environment records, and "
                f"the scorers and rewards of [loop.score]"
            )
