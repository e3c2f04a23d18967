"""From a configuration to a plan: render text, pin a snapshot, select steps, check refusals, order episodes.

A resumed run repeats the same steps on the pinned snapshot.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from lake import ids
from lake.errors import DataRefusedError
from lake.judgements.credit import Credit, describe_outdated, find_credit
from lake.judgements.selections import SelectedEpisodes, read_selection
from lake.lake import Lake
from lake.read.parquet import collect_rows
from lake.read.snapshot import Snapshot
from trainer.config import TrainConfig
from trainer.data.plan import Plan
from trainer.data.refusals import Refusal, build_text_refusal, find_refusals, list_assumptions
from trainer.data.render import (
    Renderer,
    compute_engine_encoding,
    compute_rendered_encoding,
    refuse_unrendered,
    render_missing,
    render_to_scratch,
)
from trainer.data.selection import TrainingSelection, resolve_provenance, select, select_episodes
from trainer.losses import Needs
from trainer.losses.sft import SFT
from trainer.policy.model_files import read_context_length

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Tokenize = Callable[[], "PreTrainedTokenizerBase"]
_NO_TOKENIZER = ids.hash_engine_encoding(None, None)
"""encoding_id of engine rows that do not name their tokenizer."""


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run that is ready to start."""

    snapshot: Snapshot
    selection: TrainingSelection
    """Steps that are trained, and steps that are not."""
    plan: Plan
    """Order in which they are trained."""
    refusals: list[Refusal]
    """Reasons not to train; the run must not start unless this is empty."""
    notes: list[str]
    validation: Plan | None = None
    """Plan of the held-out episodes, if the run is validated."""


def fit_token_budget(config: TrainConfig) -> TrainConfig:
    """Return the configuration with the token budget that `auto` means: 8,192 on a CPU, on a GPU what its memory holds.

    Raises:
        UsageError: the GPU's memory holds no update of the model.
    """
    if config.token_budget != "auto":
        return config
    budget = 8192
    if config.device != "cpu":
        import torch

        from trainer.policy.memory import choose_token_budget

        budget = choose_token_budget(config, torch.cuda.get_device_properties(config.device).total_memory)
    return config.model_copy(update={"token_budget": budget})


def prepare(
    lk: Lake, config: TrainConfig, tokenizer: "PreTrainedTokenizerBase | None" = None, *, scratch: Lake | None = None
) -> PreparedRun:
    """Prepare a run on the newest snapshot, up to its first update.

    Text-only episodes are rendered first if the loss can use them. The rendered rows stay in the lake for later runs.
    Refusals that need no tokenizer are raised before the tokenizer is loaded.

    Args:
        tokenizer: tokenizer of the model; None loads it when it is needed.
        scratch: an empty lake that takes the rendered rows in place of `lk`, which then stays unchanged.

    Raises:
        DataRefusedError: nothing to train on, text only under a ratio loss, or text that the template cannot render.
        UsageError: an unknown credit job or selection, or no tokenizer.
    """
    loss = config.loss
    snapshot = lk.snapshot()
    episodes, held_out, _ = _split_episodes(snapshot, config)
    notes = []
    is_text = resolve_provenance(snapshot, episodes["episode_id"], config.tokens) == "rendered"
    if is_text and loss.needs.behaviour_logprobs:
        raise DataRefusedError(build_text_refusal(episodes, loss).message)
    source = find_source(snapshot, config)
    tokenize = _make_tokenizer_loader(config, tokenizer)
    if is_text:
        # Only episodes with a step to train on are rendered; some have only an outcome.
        trainable = collect_rows(snapshot.scan("steps").filter("trainable").select(pl.col("episode_id").unique()))
        episode_ids = pl.concat([episodes, held_out])["episode_id"]
        episode_ids = episode_ids.filter(episode_ids.is_in(trainable["episode_id"].implode()))
        renderer = Renderer(tokenize())
        if scratch is None:
            done = render_missing(lk, snapshot, renderer, episode_ids, {"model": config.model})
            snapshot = lk.snapshot()
            # Resolve again in the snapshot that the run pins: other credit jobs may have ended since.
            source = find_source(snapshot, config)
        else:
            snapshot, done = render_to_scratch(scratch, snapshot, renderer, episode_ids)
        refuse_unrendered(done)
        notes.append(done.describe())
    if source is not None:
        notes.append(f"advantages: {source.title}")
        notes += [stale] if (stale := describe_outdated(snapshot, source)) else []
    del episodes, held_out  # `prepare_at` selects them again; large frames take much memory
    return prepare_at(snapshot, config, source, tokenize, notes)


def _make_tokenizer_loader(config: TrainConfig, tokenizer: "PreTrainedTokenizerBase | None" = None) -> _Tokenize:
    """Return a function that loads the tokenizer of a run's model on its first call."""

    @cache
    def tokenize() -> "PreTrainedTokenizerBase":
        from trainer.policy.model_files import load_tokenizer

        return load_tokenizer(config.model) if tokenizer is None else tokenizer

    return tokenize


def prepare_at(
    snapshot: Snapshot,
    config: TrainConfig,
    source: Credit | None,
    tokenize: _Tokenize | None = None,
    notes: Sequence[str] = (),
) -> PreparedRun:
    """Select and plan on a pinned snapshot in which texts are rendered, with a resolved source of advantages.

    Args:
        tokenize: returns the tokenizer; None loads the model's, if it is needed.
        notes: notes of earlier stages.

    Raises:
        DataRefusedError: nothing to train on, or tokens of another tokenizer.
    """
    tokenize, notes = tokenize or _make_tokenizer_loader(config), list(notes)
    loss = config.loss
    episodes, held_out, selected = _split_episodes(snapshot, config)
    if selected is not None:
        notes.append(f"selection: {selected.describe()}")
    provenance = resolve_provenance(snapshot, episodes["episode_id"], config.tokens)
    encoding = compute_engine_encoding if provenance == "engine" else compute_rendered_encoding

    @cache
    def compute_encoding() -> int:
        return encoding(tokenize())

    selection = select(
        snapshot,
        config,
        loss.needs,
        source=source,
        own_encoding=compute_encoding,
        episodes=episodes,
        selected=selected,
        longest=read_context_length(Path(config.model)),
    )
    refusals = find_refusals(snapshot, selection.members, loss)
    if loss.needs.normalised_advantages and not selection.advantage_ties:
        mean, scale = selection.advantage_mean, selection.advantage_scale
        centred = f"advantage {'+' if mean < 0 else '-'} {abs(mean):.4g}"
        notes.append(f"{loss.name} takes ({centred}) / {scale:.4g}: mean and deviation over the trained steps")
    if loss.needs.normalised_advantages and selection.advantage_ties:
        notes.append(f"all advantages are equal, so {loss.name} weighs every token equally")
    plan = Plan(selection, config)
    if not refusals and selection.encoding_id not in (None, compute_encoding()):
        _check_encoding(selection, config, notes)
    notes += list_assumptions(selection.members, loss)
    validation = None
    if not held_out.is_empty():
        validation = _build_validation_plan(snapshot, plan.config, compute_encoding, held_out)
    return PreparedRun(snapshot, selection, plan, refusals, notes, validation)


def find_source(snapshot: Snapshot, config: TrainConfig) -> Credit | None:
    """Return the credit job whose advantages a run reads, if it reads any."""
    reads = config.loss.needs.credit or config.live_only
    return find_credit(snapshot, config.advantages, option="advantages") if reads else None


def _split_episodes(
    snapshot: Snapshot, config: TrainConfig
) -> tuple[pl.DataFrame, pl.DataFrame, SelectedEpisodes | None]:
    """Return the training episodes, the held-out episodes (empty without validation), and the selection that applies.

    Raises:
        DataRefusedError: validation holds out every episode.
    """
    selected = None if config.selection is None else read_selection(snapshot, config.selection)
    episodes = select_episodes(snapshot, config.where, selected)
    if config.validation is None:
        return episodes, episodes.clear(), selected
    held_out = select_episodes(snapshot, config.validation.where, option="validation.where")
    training = episodes.join(held_out, on="episode_id", how="anti", maintain_order="left")
    if training.is_empty():
        raise DataRefusedError(f"validation holds out all {episodes.height} selected episodes: narrow validation.where")
    return training, held_out, selected


def _build_validation_plan(
    snapshot: Snapshot, config: TrainConfig, compute_encoding: Callable[[], int], held_out: pl.DataFrame
) -> Plan:
    """Build a plan of one pass over the held-out episodes, in which every action counts."""
    alone = config.model_copy(
        update={
            "loss": SFT(),
            "selection": None,
            "mixture": (),
            "max_staleness": None,
            "live_only": False,
            "epochs": 1,
            "minibatches": None,
            "validation": None,
        }
    )
    return Plan(select(snapshot, alone, Needs(), own_encoding=compute_encoding, episodes=held_out), alone)


def _check_encoding(selection: TrainingSelection, config: TrainConfig, notes: list[str]) -> None:
    """Add a note where rows may not use the model's encoding.

    Raises:
        DataRefusedError: the rows use another encoding.
    """
    assert selection.encoding_id is not None
    if selection.provenance == "rendered":
        # This happens only in the snapshot of an earlier run: a new run renders missing texts first.
        raise DataRefusedError(
            f"the texts were tokenised (encoding {ids.to_text(selection.encoding_id)}) with another template, or by "
            f"another version of trajlake; start a new run, which tokenises them again"
        )
    names_tokenizer = selection.encoding_id != _NO_TOKENIZER
    if names_tokenizer and config.tokens != "engine":
        raise DataRefusedError(
            f"the engine's tokens (encoding {ids.to_text(selection.encoding_id)}) were made with another tokenizer or "
            f"chat template than the model's; use that model, tokenise the text again with tokens=rendered, "
            f"or insist with tokens=engine"
        )
    notes.append("the run assumes that this model's tokenizer made the engine's tokens; the lake has no record of it")
