"""From a configuration to a plan: render what is only text, pin a snapshot, select, look for refusals, order.

The same steps make the plan again when a run is resumed, then on the pinned snapshot.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from lake import ids
from lake.errors import DataRefusedError
from lake.judgements.credit import Credit, find_credit
from lake.judgements.selections import Kept, read_kept
from lake.lake import Lake
from lake.snapshot import Snapshot
from trainer.config import TrainConfig
from trainer.data.pairs import uses_credit
from trainer.data.plan import Plan
from trainer.data.refusals import Refusal, doubts, find_refusals, refuse_text
from trainer.data.render import Renderer, engine_encoding, render_missing, rendered_encoding
from trainer.data.selection import Selection, provenance_of, select, select_episodes
from trainer.data.unrendered import refuse_unrendered
from trainer.losses import Needs, find_loss

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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


def prepare(lk: Lake, config: TrainConfig, tokenizer: "PreTrainedTokenizerBase") -> Prepared:
    """Everything up to the first update, on the newest snapshot.

    Text-only episodes are rendered first if the loss can use them; the rows stay in the lake and are used again.

    Raises:
        DataRefusedError: nothing to train on, text only under a ratio loss, or text that the template cannot render.
        UsageError: an unknown credit job or selection.
    """
    loss = find_loss(config)
    snapshot = lk.snapshot()
    episodes, held_out, _ = _split(snapshot, config)
    notes = []
    if provenance_of(snapshot, episodes["episode_id"], config.tokens) == "rendered":
        if loss.needs.behaviour_logprobs:
            raise DataRefusedError(refuse_text(episodes, loss).message)
        everything = pl.concat([episodes, held_out])["episode_id"]
        counts = render_missing(lk, snapshot, Renderer(tokenizer), everything, {"model": config.model})
        refuse_unrendered(counts)
        notes.append("rendered: " + ", ".join(f"{number} {name}" for name, number in counts.items()))
        snapshot = lk.snapshot()
    source = None
    if _uses_credit(config):
        source = find_credit(snapshot, config.advantages, place="--advantages")
        notes.append(f"advantages: {source.title}")
    return prepare_at(snapshot, config, tokenizer, source, notes)


def prepare_pinned(snapshot: Snapshot, config: TrainConfig, tokenizer: "PreTrainedTokenizerBase") -> Prepared:
    """Everything up to the first update on a snapshot on which a run was prepared before: its texts are rendered.

    Raises:
        DataRefusedError, UsageError: as for `prepare`.
    """
    source = find_credit(snapshot, config.advantages, place="--advantages") if _uses_credit(config) else None
    return prepare_at(snapshot, config, tokenizer, source)


def prepare_at(
    snapshot: Snapshot,
    config: TrainConfig,
    tokenizer: "PreTrainedTokenizerBase",
    source: Credit | None,
    notes: list[str] | None = None,
) -> Prepared:
    """Selection and plan on a pinned snapshot with a resolved source of advantages.

    Raises:
        DataRefusedError: nothing to train on, or tokens of another tokenizer.
    """
    loss = find_loss(config)
    notes = list(notes or ())
    episodes, held_out, kept = _split(snapshot, config)
    if kept is not None:
        notes.append(f"selection: {kept.describe()}")
    provenance = provenance_of(snapshot, episodes["episode_id"], config.tokens)
    own = engine_encoding(tokenizer) if provenance == "engine" else rendered_encoding(tokenizer)
    selection = select(snapshot, config, loss.needs, source=source, own_encoding=own, episodes=episodes, kept=kept)
    if selection.encoding_id not in (own, None):
        _check_foreign(selection, config, notes)
    if loss.needs.normalised_advantages and selection.advantage_ties:
        notes.append(f"all advantages are equal, so {loss.name} weighs every token alike")
    plan = Plan(selection, config)
    refusals = find_refusals(snapshot, selection.members, loss)
    notes += doubts(selection.members, loss)
    validation = None if held_out.is_empty() else _validation_plan(snapshot, config, own, held_out)
    return Prepared(snapshot, selection, plan, refusals, notes, validation)


def _uses_credit(config: TrainConfig) -> bool:
    """Whether a run reads a credit job."""
    needs = find_loss(config).needs
    return bool(needs.advantages or config.live_only or uses_credit(config.pairs, needs))


def _split(snapshot: Snapshot, config: TrainConfig) -> tuple[pl.DataFrame, pl.DataFrame, Kept | None]:
    """Episodes to train on, episodes held out (empty without validation), and the selection that is honoured.

    Raises:
        DataRefusedError: validation holds out every episode.
    """
    kept = None if config.selection is None else read_kept(snapshot, config.selection)
    episodes = select_episodes(snapshot, config.where, kept)
    if config.validation is None:
        return episodes, episodes.clear(), kept
    held_out = select_episodes(snapshot, config.validation.where, place="validation.where")
    left = episodes.join(held_out, on="episode_id", how="anti", maintain_order="left")
    if left.is_empty():
        msg = f"validation holds out all {episodes.height} selected episodes: narrow validation.where"
        raise DataRefusedError(msg)
    return left, held_out, kept


def _validation_plan(snapshot: Snapshot, config: TrainConfig, own: int | None, held_out: pl.DataFrame) -> Plan:
    """One pass over the held-out episodes, every action of which counts."""
    alone = config.model_copy(
        update={
            "loss": "sft",
            "aggregation": None,
            "unit": None,
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
    """Rows of an encoding that is not known to be the model's.

    Raises:
        DataRefusedError: they are known to be another's.
    """
    assert selection.encoding_id is not None
    if selection.provenance == "rendered":
        # Only in the snapshot of an earlier run: what is missing is rendered before a new one.
        msg = (
            f"the texts were tokenised (encoding {ids.to_text(selection.encoding_id)}) with another template, or by "
            f"another version of trajlake; start a run of its own, which tokenises them again"
        )
        raise DataRefusedError(msg)
    known = selection.encoding_id != _NO_TOKENIZER
    if known and config.tokens != "engine":
        msg = (
            f"the engine's tokens (encoding {ids.to_text(selection.encoding_id)}) were made with another tokenizer or "
            f"chat template than the model's; use that model, tokenise the text again with --tokens rendered, "
            f"or insist with --tokens engine"
        )
        raise DataRefusedError(msg)
    notes.append("the engine's tokens are taken to be of this model's tokenizer; the lake cannot tell")
