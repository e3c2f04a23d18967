"""The demo: a tiny random transformer learns a text game, with all data in the lake.

1. A script that takes a random action seven times in ten leaves traces. They are recorded, tokenised and trained on
(sft).
2. The loop improves the policy: rollouts, GiGPO advantages, clipped policy gradient.
3. Before and after, the policy plays the same 500 starts, whose worlds no training start shares.

The demo's policy is a word-level tokenizer and a tiny Llama. The vocabulary has only the environment's words and three
markers. An unused entry would be sampled now and then, and masking it would make the behaviour distribution differ from
the one that the trainer recomputes. The chat template is append-only: a longer conversation extends the rendering of a
shorter one token by token. vLLM serves this shape on a CPU, too (head_dim 32). It is a Llama and not a Qwen2, for which
transformers ignores the saved tokenizer and builds a byte-level one. The initializer range is 0.1: at this width the
usual 0.02 starts so close to zero that the warm start fails.

The demo's loop plays its groups in lock-step with the model in this process, so that one seed gives one result. A round
records its rollouts, computes their advantages in a credit job, and updates the policy from the tables: the optimizer
sees what `tokens` and `advantages` hold at the round's snapshot. The next round plays the new weights.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field
from transformers import PreTrainedTokenizerBase  # noqa: TID253

from lake import ids
from lake.errors import DataRefusedError, UsageError
from lake.judgements.credit import find_credit
from lake.lake import Lake
from lake.read.training import round_predicate
from lake.records import EpisodeRecord
from lake.write.jobs import Job
from pipelines.collect import GroupConfig, collect_groups, distinct_seeds
from pipelines.collect.environments.games import TextGame
from pipelines.collect.environments.house import House, HouseConfig, HouseScript, Split, list_vocabulary
from pipelines.collect.policies.transformers_policy import SamplingConfig, TransformersPolicy
from pipelines.credit import CreditSummary, GiGPO
from pipelines.credit.compare import shuffle_advantages
from pipelines.credit.job import run_credit
from trainer.backends.base import SingleDevice
from trainer.config import OptimizerConfig, TrainConfig
from trainer.data.render import compute_engine_encoding
from trainer.losses.ppo import PPO
from trainer.losses.sft import SFT
from trainer.online.learner import build_round_config
from trainer.policy.model import load_policy
from trainer.policy.model_files import load_model, load_tokenizer
from trainer.runs.loop import train_round
from trainer.runs.offline import make_deterministic, train

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


class LockStepConfig(BaseModel):
    """Rounds of collect, credit, train. The defaults are the demo's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    """Name of the run."""
    rounds: int = Field(default=30, ge=1, le=500)
    """Number of rounds."""
    starts: int = Field(default=32, ge=1, le=500)
    """Number of groups of a round, each from a different start."""
    groups: GroupConfig = GroupConfig()
    """Siblings per start, and number of rollouts at the same time."""
    max_action_tokens: int = Field(default=4, ge=1)
    """Tokens after which an action is cut off, its end token included."""
    credit: GiGPO = GiGPO()
    """Estimator of the advantages."""
    shuffle_advantages: bool = False
    """Control: train on the round's advantages shuffled among its steps."""
    epochs: int = Field(default=1, ge=1)
    """Passes over a round's episodes."""
    minibatches: int = Field(default=4, ge=1)
    """Optimizer steps of a pass."""
    token_budget: int = Field(default=8192, ge=1)
    """Tokens of one forward and backward pass."""
    ppo: PPO = PPO(entropy_coefficient=0.02)
    """The loss. Without the entropy bonus a tiny policy collapses."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Learning rate of the first round."""
    final_fraction: float = Field(default=0.2, ge=0, le=1)
    """Share of the learning rate at the end of the linear decay over the rounds."""
    seed: int = Field(default=0, ge=0)
    """Seed of starts, samples and the order of episodes."""

    def first_seed(self, number: int) -> int:
        """Return the first start seed of a round, so far from others that rounds and runs share none."""
        return self.seed * 1_000_000 + number * 1_000

    def rollouts(self, number: int) -> str:
        """Return a predicate over `episodes` of the rollouts of a round."""
        return round_predicate(self.run_id, number)

    def trainer(self, model: str) -> TrainConfig:
        """Return the configuration that the update phases of all rounds share."""
        return TrainConfig(
            model=model,
            loss=self.ppo,
            tokens="engine",
            epochs=self.epochs,
            minibatches=self.minibatches,
            token_budget=self.token_budget,
            seed=self.seed,
        )

    def update_config(self, model: str, number: int) -> TrainConfig:
        """Return the configuration of the update phase of a round."""
        return build_round_config(self.trainer(model), self.rollouts(number), number)


class LockStepPlayer:
    """A second instance of the policy that generates, as packed attention cannot, with its tokenizer."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = load_model(folder).eval()
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(folder)

    def load(self, model: Any) -> None:
        """Copy the weights of the trained instance."""
        self.model.load_state_dict(model.state_dict())


MakeEnvironment = Callable[[], TextGame]


@dataclass(frozen=True, slots=True)
class LockStepRound:
    """Figures of a round."""

    number: int
    """0, 1, ..."""
    episodes: int
    """Number of rollouts."""
    success: float
    """Mean return of its rollouts, played by the weights before its update."""
    credit: CreditSummary
    """Summary of its credit job."""
    entropy: float | None
    """Mean entropy at the trained tokens in nats; None if there was nothing to train on."""


def run_rounds(
    lake: Lake,
    backend: SingleDevice,
    player: LockStepPlayer,
    make_environment: MakeEnvironment,
    config: LockStepConfig,
) -> Iterator[LockStepRound]:
    """Run the loop as one training job that updates the backend's weights in place; yield a report after each round.

    `make_environment` makes a new environment of the training split.
    """
    parameters = config.model_dump(mode="json")
    with lake.job(kind="train", run_id=config.run_id, parameters=parameters) as job:
        updates = 0
        for number in range(config.rounds):
            player.load(backend.policy.model)
            records = play(player, make_environment, config, number)
            record_episodes(lake, records, run_id=config.run_id, parameters={"round": number} | parameters)
            report = run_credit(lake, config.credit, only=config.rollouts(number))
            credit_job = report.job_id
            if config.shuffle_advantages:
                credit_job, _ = shuffle_advantages(lake, report.job_id, config.seed * 1_000_000 + number)
            done, entropy = _update(lake, job, backend, player.tokenizer, credit_job, config, number, updates)
            updates += done
            returns = [record.env_return or 0.0 for record in records]
            yield LockStepRound(number, len(records), sum(returns) / len(returns), report.summary, entropy)
        job.counts |= {"rounds": config.rounds, "optimizer_steps": updates}


def play(
    player: LockStepPlayer, make_environment: MakeEnvironment, config: LockStepConfig, number: int
) -> list[EpisodeRecord]:
    """Play the rollouts of a round."""
    policy = TransformersPolicy(
        player.model,
        player.tokenizer,
        name=config.run_id,
        version=number,
        sampling=SamplingConfig(max_action_tokens=config.max_action_tokens),
    )
    groups = collect_groups(
        make_environment,
        policy,
        distinct_seeds(make_environment, config.first_seed(number), config.starts),
        config=config.groups,
        run_seed=config.seed,
        collection_round=number,
    )
    return [record for group in groups for record in group]


def record_episodes(lake: Lake, records: list[EpisodeRecord], *, run_id: str, parameters: dict[str, object]) -> None:
    """Record rollouts in a `collect` job."""
    with lake.job(kind="collect", run_id=run_id, parameters=parameters) as job:
        counts = job.record(records)
        job.counts |= {
            "rows_in": len(records),
            "rows_out": counts.new,
            "rows_dropped": counts.rejected,
            "already_present": counts.present,
        }


def _update(
    lake: Lake,
    job: Job,
    backend: SingleDevice,
    tokenizer: PreTrainedTokenizerBase,
    credit_job: int,
    config: LockStepConfig,
    number: int,
    first_step: int,
) -> tuple[int, float | None]:
    """Train on a round's advantages and write its rows; return the number of updates and the mean entropy."""
    snapshot = lake.snapshot()
    try:
        done = train_round(
            backend,
            snapshot,
            find_credit(snapshot, ids.to_text(credit_job)),
            config.update_config(config.run_id, number),
            learning_rate=config.learning_rate * (1 - (1 - config.final_fraction) * number / config.rounds),
            first_step=first_step,
            own_encoding=compute_engine_encoding(tokenizer),
        )
    except DataRefusedError:
        # Every group of the round is dead. The starts of the next round may be better.
        return 0, None
    job.write("batches", done.batches)
    job.write("metrics", done.metrics)
    entropies = [report.metrics["entropy"] for report in done.reports]
    return len(done.reports), sum(entropies) / len(entropies)


USER, ASSISTANT, END = "<|user|>", "<|assistant|>", "<|end|>"
MARKERS = (USER, ASSISTANT, END)
CHAT_TEMPLATE = f"""
{{%- for message in messages -%}}
{{%- if message['role'] == 'assistant' -%}}{ASSISTANT}{{{{ message['content'] }}}}{END}
{{%- else -%}}{USER}{{{{ message['content'] }}}}
{{%- endif -%}}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}{ASSISTANT}{{%- endif -%}}
""".strip()


class TinyPolicyConfig(BaseModel):
    """Shape of the demo's model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_layers: int = Field(default=2, ge=1)
    """Transformer blocks."""
    num_heads: int = Field(default=2, ge=1)
    """Query heads; the model is num_heads * head_dim wide."""
    num_kv_heads: int = Field(default=1, ge=1)
    """Key and value heads."""
    head_dim: int = Field(default=32, ge=1)
    """Width of a head: one that inference engines know (32, 64, ...)."""
    intermediate_size: int = Field(default=128, ge=1)
    """Width of the feed-forward layer."""
    initializer_range: float = Field(default=0.1, gt=0)
    """Standard deviation of the initial weights."""
    rope_theta: float = Field(default=1000.0, gt=0)
    """Base of the rotary position encoding."""
    max_positions: int = Field(default=1024, ge=1)
    """Longest sequence in tokens."""


def build_tokenizer(words: Sequence[str]) -> "PreTrainedTokenizerFast":
    """Build a word-level tokenizer of these words and the three markers; any other word is an error.

    The padding token is the end marker: masks come from lengths and never from ids.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    entries = [*MARKERS, *sorted(set(words) - set(MARKERS))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(entries)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(MARKERS))
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, additional_special_tokens=[USER, ASSISTANT]
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(tokenizer: "PreTrainedTokenizerFast", config: TinyPolicyConfig, seed: int) -> "LlamaForCausalLM":
    """Build a randomly initialised Llama in float32; the same seed gives the same weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.num_heads * config.head_dim,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        max_position_embeddings=config.max_positions,
        initializer_range=config.initializer_range,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # Parameters are float32 unless torch's default says otherwise.
        return LlamaForCausalLM(shape)  # type: ignore[no-untyped-call]


def save_policy(folder: Path, words: Sequence[str], config: TinyPolicyConfig, seed: int) -> None:
    """Write a new policy as an ordinary Hugging Face folder."""
    tokenizer = build_tokenizer(words)
    build_model(tokenizer, config, seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


RUN, TRACES, BEFORE, AFTER = "demo", "demo-traces", "demo-before", "demo-after"
"""The demo's runs: the loop, the script's traces, and the two evaluations."""
_TRACE_SEEDS = 500_000
"""Start seeds of the traces lie this far above the loop's."""

Say = Callable[[str], None]


class DemoConfig(BaseModel):
    """Settings of the demo. The defaults were chosen for seeds 0 to 3 (docs/lab-log.md)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int = Field(default=0, ge=0)
    """Seed of weights, starts and samples."""
    iterations: int = Field(default=30, ge=1, le=500)
    """Number of rounds."""
    shuffle_advantages: bool = False
    """Control: shuffle the advantages among the steps of each round."""
    traces: int = Field(default=800, ge=1, le=2000)
    """Number of episodes of the script."""
    noise: float = Field(default=0.7, ge=0, le=1)
    """Probability that the script takes a random admissible action."""
    held_out: int = Field(default=500, ge=1, le=500)
    """Number of starts that are played before and after."""

    def loop(self) -> LockStepConfig:
        """Return the configuration of the loop."""
        return LockStepConfig(
            run_id=RUN, rounds=self.iterations, shuffle_advantages=self.shuffle_advantages, seed=self.seed
        )


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Success of the demo's policy."""

    before: float
    """Success on the held-out starts after the warm start."""
    after: float
    """Success on the held-out starts at the end."""
    iterations: int
    episodes: int
    """Number of rollouts of the loop."""


def make_house(split: Split) -> MakeEnvironment:
    """Return a function that makes houses of a split."""
    config = HouseConfig(split=split)
    return lambda: House(config)


def run_demo(lake: Lake, config: DemoConfig, say: Say) -> DemoResult:
    """Run the demo on a lake, with its models in the folder `models` of the lake.

    Raises:
        UsageError: the lake holds the demo already.
    """
    refuse_second(lake)
    models = Path(lake.uri, "models")
    warm = train_warm_start(lake, config, models, say)
    loop = config.loop()
    # One thread: a model this small gains nothing from two, and the result is the same on every number of cores.
    backend = SingleDevice(load_policy(warm), OptimizerConfig())
    player = LockStepPlayer(warm)
    before = evaluate(lake, player, config, BEFORE)
    say(f"before: success {before:.2f} on {config.held_out} held-out starts")
    episodes = 0
    for report in run_rounds(lake, backend, player, make_house(Split.TRAIN), loop):
        episodes += report.episodes
        entropy = "nothing to train on" if report.entropy is None else f"entropy {report.entropy:.2f}"
        say(
            f"round {report.number + 1}/{config.iterations}: success {report.success:.2f}, "
            f"{report.credit.live_groups} live and {report.credit.dead_groups} dead groups, {entropy}"
        )
    player.load(backend.policy.model)
    after = evaluate(lake, player, config, AFTER)
    player.model.save_pretrained(models / "final")
    player.tokenizer.save_pretrained(models / "final")
    return DemoResult(before, after, config.iterations, episodes)


def refuse_second(lake: Lake) -> None:
    """Raise UsageError where the lake holds a demo already, finished or not."""
    if not lake.sql("SELECT run_id FROM job_runs WHERE run_id = ?", [RUN]).is_empty():
        raise UsageError(f"{lake.uri} holds a demo already; name another --lake, or remove that folder")


def train_warm_start(lake: Lake, config: DemoConfig, models: Path, say: Say) -> Path:
    """Train on the script's traces; return the folder of the trained model."""
    make_deterministic(TrainConfig(model="", loss=SFT(), threads=1))
    save_policy(models / "fresh", list_vocabulary(), TinyPolicyConfig(), config.seed)
    first = config.seed * 1_000_000 + _TRACE_SEEDS
    groups = collect_groups(
        make_house(Split.TRAIN),
        HouseScript(config.noise),
        distinct_seeds(make_house(Split.TRAIN), first, config.traces),
        config=GroupConfig(group_size=1),
        run_seed=config.seed,
        collection_round=0,
    )
    traces = [record for group in groups for record in group]
    record_episodes(lake, traces, run_id=TRACES, parameters={"noise": config.noise, "seed": config.seed})
    success = sum(record.env_return or 0.0 for record in traces) / len(traces)
    say(f"traces: {len(traces)} episodes of the script, success {success:.2f}")
    sft = TrainConfig(
        model=str(models / "fresh"),
        loss=SFT(),
        where=f"run_id = '{TRACES}'",
        epochs=2,
        learning_rate=4e-3,
        seed=config.seed,
        checkpoint_every=1_000_000,
        threads=1,
    )
    return train(lake, sft, models / "warm-start", run_id="demo-warm-start").model


def evaluate(lake: Lake, player: LockStepPlayer, config: DemoConfig, run_id: str) -> float:
    """Return success on the held-out starts, sampled at temperature 1; record the rollouts as a run."""
    held_out = LockStepConfig(
        run_id=run_id, starts=config.held_out, groups=GroupConfig(group_size=1), seed=config.seed, rounds=1
    )
    records = play(player, make_house(Split.HELD_OUT), held_out, 0)
    record_episodes(lake, records, run_id=run_id, parameters=held_out.model_dump(mode="json"))
    return sum(record.env_return or 0.0 for record in records) / len(records)


def find_free_folder(folder: Path) -> Path:
    """Return the folder if it does not exist, else the first of `-2`, `-3`, ... that does not."""
    numbered = (folder.with_name(f"{folder.name}-{number}") for number in count(2))
    return next(path for path in chain([folder], numbered) if not path.exists())
