"""The demo: a tiny transformer learns a text game from nothing, every number through the lake.

1. A script that errs seven times in ten leaves traces; they are recorded, tokenised and learned from (sft).
2. The loop improves the policy: rollouts, GiGPO advantages, clipped policy gradient.
3. Before and after, the policy plays the same 500 starts, whose worlds no training start shares.

The demo's policy from nothing: a word-level tokenizer and a tiny randomly initialised Llama.

The vocabulary holds the environment's words and three markers and nothing else: an entry that no text uses would be
sampled now and then, and masking it would make the behaviour distribution differ from the one the trainer recomputes.
The chat template is append-only: rendering a longer conversation extends the rendering of a shorter one token by
token. The shape is one that vLLM serves on a CPU too (head_dim 32). It is Llama's and not Qwen2's because for the
latter transformers ignores the saved tokenizer and builds a byte-level one. The initializer range is 0.1: at this
width the usual 0.02 starts so close to zero that the warm start fails.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from lake.errors import UsageError
from lake.lake import Lake
from pipelines.collect import GroupConfig, collect_groups, distinct_seeds
from pipelines.collect.environments.house import House, HouseConfig, HouseScript, Split, vocabulary
from trainer.backends.base import SingleDevice
from trainer.config import OptimizerConfig, TrainConfig
from trainer.losses.sft import SFT
from trainer.online.loop import LoopConfig, MakeEnvironment, Player, Round, play, record_episodes, run_rounds
from trainer.policy.model import load_policy
from trainer.runs.offline import make_deterministic, train

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

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
    """A word-level tokenizer of exactly these words and the three markers; any other word is an error.

    Padding, where a caller needs it, is the end marker: masks come from lengths, never from ids.
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
    """A randomly initialised Llama in float32; the same seed gives the same weights."""
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
    """Write a fresh policy as an ordinary Hugging Face folder."""
    tokenizer = build_tokenizer(words)
    build_model(tokenizer, config, seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


RUN, TRACES, BEFORE, AFTER = "demo", "demo-traces", "demo-before", "demo-after"
"""The demo's runs: the loop, the script's traces, and the two evaluations."""
_TRACE_SEEDS = 500_000
"""Start seeds of the traces lie this far above the loop's."""

Say = Callable[[str], None]


class DemoConfig(BaseModel):
    """The demo. The defaults were chosen for seeds 0 to 3 (docs/lab-log.md)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int = Field(default=0, ge=0)
    """Decides weights, starts and samples."""
    iterations: int = Field(default=30, ge=1, le=500)
    """Rounds of the loop."""
    shuffle_advantages: bool = False
    """A control: shuffle the advantages among the steps of each round."""
    traces: int = Field(default=800, ge=1, le=2000)
    """Episodes of the script."""
    noise: float = Field(default=0.7, ge=0, le=1)
    """Probability that the script takes a random admissible action."""
    held_out: int = Field(default=500, ge=1, le=500)
    """Starts that are played before and after."""

    def loop(self) -> LoopConfig:
        """The loop's configuration."""
        return LoopConfig(
            run_id=RUN, rounds=self.iterations, shuffle_advantages=self.shuffle_advantages, seed=self.seed
        )


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What the demo came to."""

    before: float
    """Success on the held-out starts after the warm start."""
    after: float
    """The same at the end."""
    iterations: int
    episodes: int
    """Rollouts the loop collected."""


def house(split: Split) -> MakeEnvironment:
    """Makes houses of a split."""
    config = HouseConfig(split=split)
    return lambda: House(config)


def run_demo(lake: Lake, config: DemoConfig, say: Say) -> DemoResult:
    """Run the demo on a lake; models go to the folder `models` beside its tables.

    Raises:
        UsageError: the lake holds the demo already.
    """
    refuse_second(lake)
    models = Path(lake.uri, "models")
    warm = warm_start(lake, config, models, say)
    loop = config.loop()
    # One thread: a model this small gains nothing from two, and the result is the same on every number of cores.
    backend = SingleDevice(load_policy(warm), OptimizerConfig())
    player = Player(warm)
    before = evaluate(lake, player, config, BEFORE)
    say(f"before: success {before:.2f} on {config.held_out} held-out starts")
    episodes = 0
    for done in run_rounds(lake, backend, player, house(Split.TRAIN), loop):
        episodes += done.episodes
        say(_line(done, config.iterations))
    player.load(backend.policy.model)
    after = evaluate(lake, player, config, AFTER)
    player.model.save_pretrained(models / "final")
    player.tokenizer.save_pretrained(models / "final")
    return DemoResult(before, after, config.iterations, episodes)


def refuse_second(lake: Lake) -> None:
    """Raise UsageError: the lake holds a demo already, to its end or not."""
    if not lake.sql("SELECT run_id FROM job_runs WHERE run_id = ?", [RUN]).is_empty():
        raise UsageError(f"{lake.uri} holds a demo already; name another --lake, or remove that folder")


def warm_start(lake: Lake, config: DemoConfig, models: Path, say: Say) -> Path:
    """Learn from the script's traces; the folder of the trained model."""
    make_deterministic(TrainConfig(model="", loss=SFT(), threads=1))
    save_policy(models / "fresh", vocabulary(), TinyPolicyConfig(), config.seed)
    first = config.seed * 1_000_000 + _TRACE_SEEDS
    groups = collect_groups(
        house(Split.TRAIN),
        HouseScript(config.noise),
        distinct_seeds(house(Split.TRAIN), first, config.traces),
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


def evaluate(lake: Lake, player: Player, config: DemoConfig, run_id: str) -> float:
    """Success on the held-out starts, sampled at temperature 1; the rollouts are recorded as a run."""
    held_out = LoopConfig(
        run_id=run_id, starts=config.held_out, groups=GroupConfig(group_size=1), seed=config.seed, rounds=1
    )
    records = play(player, house(Split.HELD_OUT), held_out, 0)
    record_episodes(lake, records, run_id=run_id, parameters=held_out.model_dump(mode="json"))
    return sum(record.env_return or 0.0 for record in records) / len(records)


def _line(done: Round, rounds: int) -> str:
    entropy = "nothing to train on" if done.entropy is None else f"entropy {done.entropy:.2f}"
    return (
        f"round {done.number + 1}/{rounds}: success {done.success:.2f}, {done.credit.live_groups} live and "
        f"{done.credit.dead_groups} dead groups, {entropy}"
    )


def free_lake_folder(wanted: Path) -> Path:
    """The folder itself if nothing is there, else the first of `-2`, `-3`, ... that is free."""
    numbered = (wanted.with_name(f"{wanted.name}-{number}") for number in count(2))
    return next(path for path in chain([wanted], numbered) if not path.exists())
