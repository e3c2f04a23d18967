"""From a configuration to a plan: render what is only text, pin a snapshot, select, look for refusals, order.

The same steps make the plan again when a run is resumed, then on the pinned snapshot.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from lake import ids
from lake.errors import DataRefusedError
from lake.judgements.credit import Credit, find_credit, outdated
from lake.judgements.selections import Kept, read_kept
from lake.lake import Lake
from lake.read.parquet import collected
from lake.read.snapshot import Snapshot
from trainer.config import TrainConfig
from trainer.data.plan.plan import Plan
from trainer.data.render.chat import refuse_unrendered
from trainer.data.render.render import Renderer, engine_encoding, render_missing, render_to_scratch, rendered_encoding
from trainer.data.select.refusals import Refusal, assumptions, find_refusals, refuse_text
from trainer.data.select.selection import Selection, provenance_of, select, select_episodes
from trainer.losses import Needs
from trainer.losses.sft import SFT
from trainer.policy.model_folder import context_length

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Tokenize = Callable[[], "PreTrainedTokenizerBase"]
_NO_TOKENIZER = ids.key_hash("engine", None, None)
"""encoding_id of engine rows that do not name their tokenizer."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that could start."""

    snapshot: Snapshot
    """The pinned data."""
    selection: Selection
    """What is trained on, and what is not."""
    plan: Plan
    """In which order."""
    refusals: list[Refusal]
    """What speaks against it; not empty means that it must not be trained."""
    notes: list[str]
    """What a user should know."""
    validation: Plan | None = None
    """The held-out episodes, if the run is validated."""


def prepare(
    lk: Lake, config: TrainConfig, tokenizer: "PreTrainedTokenizerBase | None" = None, *, scratch: Lake | None = None
) -> Prepared:
    """Everything up to the first update, on the newest snapshot.

    Text-only episodes are rendered first if the loss can use them; the rows stay in the lake and are used again. What
    the data refuse without a tokenizer is refused before one is loaded.

    Args:
        tokenizer: of the model; None loads it when it is needed.
        scratch: an empty lake that takes the rendered rows in place of `lk`, in which nothing is then written.

    Raises:
        DataRefusedError: nothing to train on, text only under a ratio loss, or text that the template cannot render.
        UsageError: an unknown credit job or selection, or no tokenizer.
    """
    loss = config.loss
    snapshot = lk.snapshot()
    episodes, held_out, _ = _split(snapshot, config)
    notes = []
    is_text = provenance_of(snapshot, episodes["episode_id"], config.tokens) == "rendered"
    if is_text and loss.needs.behaviour_logprobs:
        raise DataRefusedError(refuse_text(episodes, loss).message)
    source = find_source(snapshot, config)
    tokenize = _tokenizer_of(config, tokenizer)
    if is_text:
        renderer, everything = Renderer(tokenize()), _with_decisions(snapshot, pl.concat([episodes, held_out]))
        if scratch is None:
            done = render_missing(lk, snapshot, renderer, everything, {"model": config.model})
            snapshot = lk.snapshot()
            # What is current in the snapshot that the run pins, whatever ended meanwhile.
            source = find_source(snapshot, config)
        else:
            snapshot, done = render_to_scratch(scratch, snapshot, renderer, everything)
        refuse_unrendered(done)
        notes.append(done.describe())
    if source is not None:
        notes.append(f"advantages: {source.title}")
        notes += [stale] if (stale := outdated(snapshot, source)) else []
    del episodes, held_out  # they are looked for again, and many take much memory
    return prepare_at(snapshot, config, source, tokenize, notes)


def _with_decisions(snapshot: Snapshot, episodes: pl.DataFrame) -> pl.Series:
    """Those episodes (int64 [E]) that have a step to train on: of some only the outcome is known."""
    steps = snapshot.scan("steps").filter("trainable").select(pl.col("episode_id").unique())
    return episodes["episode_id"].filter(episodes["episode_id"].is_in(collected(steps)["episode_id"].implode()))


def _tokenizer_of(config: TrainConfig, tokenizer: "PreTrainedTokenizerBase | None" = None) -> _Tokenize:
    """Gives the tokenizer of a run's model, which is loaded once, and only if it is asked for."""

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
) -> Prepared:
    """Selection and plan on a pinned snapshot, in which texts are rendered, with a resolved source of advantages.

    Args:
        tokenize: gives the tokenizer; None loads the model's, if it is needed.
        notes: what is known already.

    Raises:
        DataRefusedError: nothing to train on, or tokens of another tokenizer.
    """
    tokenize, notes = tokenize or _tokenizer_of(config), list(notes)
    loss = config.loss
    episodes, held_out, kept = _split(snapshot, config)
    if kept is not None:
        notes.append(f"selection: {kept.describe()}")
    provenance = provenance_of(snapshot, episodes["episode_id"], config.tokens)
    encoding = engine_encoding if provenance == "engine" else rendered_encoding

    @cache
    def own() -> int:
        return encoding(tokenize())

    selection = select(
        snapshot,
        config,
        loss.needs,
        source=source,
        own_encoding=own,
        episodes=episodes,
        kept=kept,
        longest=context_length(Path(config.model)),
    )
    refusals = find_refusals(snapshot, selection.members, loss)
    if loss.needs.normalised_advantages and not selection.advantage_ties:
        mean, scale = selection.advantage_mean, selection.advantage_scale
        centred = f"advantage {'+' if mean < 0 else '-'} {abs(mean):.4g}"
        notes.append(f"{loss.name} takes ({centred}) / {scale:.4g}: mean and deviation of what is trained on")
    if loss.needs.normalised_advantages and selection.advantage_ties:
        notes.append(f"all advantages are equal, so {loss.name} weighs every token alike")
    plan = Plan(selection, config)
    if not refusals and selection.encoding_id not in (None, own()):
        _check_foreign(selection, config, notes)
    notes += assumptions(selection.members, loss)
    validation = None if held_out.is_empty() else _validation_plan(snapshot, plan.config, own, held_out)
    return Prepared(snapshot, selection, plan, refusals, notes, validation)


def find_source(snapshot: Snapshot, config: TrainConfig) -> Credit | None:
    """The advantages that a run reads, if it reads any."""
    reads = config.loss.needs.credit or config.live_only
    return find_credit(snapshot, config.advantages, place="--advantages") if reads else None


def _split(snapshot: Snapshot, config: TrainConfig) -> tuple[pl.DataFrame, pl.DataFrame, Kept | None]:
    """Episodes to train on, episodes held out (empty without validation), and the selection that is honoured.

    A DataRefusedError where validation holds out every episode.
    """
    kept = None if config.selection is None else read_kept(snapshot, config.selection)
    episodes = select_episodes(snapshot, config.where, kept)
    if config.validation is None:
        return episodes, episodes.clear(), kept
    held_out = select_episodes(snapshot, config.validation.where, place="validation.where")
    left = episodes.join(held_out, on="episode_id", how="anti", maintain_order="left")
    if left.is_empty():
        raise DataRefusedError(f"validation holds out all {episodes.height} selected episodes: narrow validation.where")
    return left, held_out, kept


def _validation_plan(snapshot: Snapshot, config: TrainConfig, own: Callable[[], int], held_out: pl.DataFrame) -> Plan:
    """One pass over the held-out episodes, every action of which counts."""
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
    return Plan(select(snapshot, alone, Needs(), own_encoding=own, episodes=held_out), alone)


def _check_foreign(selection: Selection, config: TrainConfig, notes: list[str]) -> None:
    """Note rows of an encoding that may not be the model's; refuse them (DataRefusedError) if it is another's."""
    assert selection.encoding_id is not None
    if selection.provenance == "rendered":
        # Only in the snapshot of an earlier run: what is missing is rendered before a new one.
        raise DataRefusedError(
            f"the texts were tokenised (encoding {ids.to_text(selection.encoding_id)}) with another template, or by "
            f"another version of trajlake; start a run of its own, which tokenises them again"
        )
    known = selection.encoding_id != _NO_TOKENIZER
    if known and config.tokens != "engine":
        raise DataRefusedError(
            f"the engine's tokens (encoding {ids.to_text(selection.encoding_id)}) were made with another tokenizer or "
            f"chat template than the model's; use that model, tokenise the text again with --tokens rendered, "
            f"or insist with --tokens engine"
        )
    notes.append("the engine's tokens are taken to be of this model's tokenizer; the lake cannot tell")
