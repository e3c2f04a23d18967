"""The parity probe: an engine's log-probabilities of fixed tokens beside the trainer's own, under the same weights.

Engines and trainers disagree where weights were not loaded, were loaded in part, or are computed in other numbers or by
other kernels; a policy gradient then corrects for a policy that never acted. Measured with SmolLM2-135M, vLLM 0.32 on
a CPU against float32 in transformers: below 5e-5 nats at every token where the engine computes in float32, 0.035 on
average and 0.4 at most where it computes in bfloat16, whose rounding alone moves a logit by up to 1/32; 0.083 to 0.1 on
average where the trainer does, too (a model after SFT, on openings it does not model). So the limit is on the largest
difference where both compute in float32, and else on the mean, as single tokens say little in 16-bit numbers: the same
two as of a policy that scores packed sequences (`trainer.policy.model`), the second one once for each side that rounds.
A 16-bit engine that missed one small update looks no different from one that got it; its version tells.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import polars as pl
from pydantic import BaseModel, ConfigDict, Field

from lake.read.parquet import collected
from lake.read.snapshot import Snapshot

if TYPE_CHECKING:
    from trainer.policy.model import Policy

EXACT = "float32"
"""The number type of engines and trainers that are held to the narrow limit."""
_SHORTEST = 2
"""Tokens of a sequence that has a log-probability."""


class ProbeConfig(BaseModel):
    """How parity is measured and what becomes of an engine that misses it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    limit: float | None = Field(default=None, gt=0)
    """Nats. Where both compute in float32 the largest difference may be so large, else the mean; None: 1e-4, and 0.1
    for each of the two that computes in 16-bit numbers."""
    refuse: bool = True
    """An engine above the limit is not used; false: it is, and the difference is told."""
    sequences: int = Field(default=8, ge=1)
    """Sequences that are scored after a push."""
    max_tokens: int = Field(default=256, ge=_SHORTEST)
    """Tokens of a sequence; longer ones are cut."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Fixed sequences and what the trainer says of them."""

    ids: list[list[int]]
    """Token ids of each sequence, at least two."""
    logprobs: list[npt.NDArray[np.float32]]
    """Of every token but the first, in nats at temperature 1."""
    dtype: str = EXACT
    """Number type that the trainer computed them in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """How far an engine's log-probabilities are from the trainer's."""

    largest: float
    """Absolute difference in nats."""
    mean: float
    """The same, averaged over tokens."""
    tokens: int
    dtype: str | None
    """Number type that the engine says it computes in."""
    is_exact: bool
    """It and the trainer compute in float32."""
    limit: float
    """What is allowed: of `largest` where that is exact, else of `mean`."""

    @property
    def is_met(self) -> bool:
        """Whether the engine is within the limit; differences that are no numbers are not."""
        return (self.largest if self.is_exact else self.mean) <= self.limit

    def __str__(self) -> str:
        said = f"log-probabilities differ by {self.largest:.2g} nats at most, {self.mean:.2g} on average"
        measured = "at most" if self.is_exact else "on average"
        return f"{said} ({self.tokens:,} tokens, {self.dtype or 'unknown dtype'}; allowed {measured}: {self.limit:g})"


def parity(reference: Reference, found: Sequence[Sequence[float]], dtype: str | None, config: ProbeConfig) -> Parity:
    """Compare what an engine says of the reference's sequences; a wrong number of values is an infinite difference."""
    from trainer.policy.model import EXACT as NARROW_LIMIT
    from trainer.policy.model import NARROW as WIDE_LIMIT

    differences = [
        np.abs(np.asarray(theirs, np.float64) - ours) if len(theirs) == len(ours) else np.array([np.inf])
        for ours, theirs in zip(reference.logprobs, found, strict=True)
    ]
    every_N = np.concatenate(differences)
    narrow = sum(one != EXACT for one in (dtype, reference.dtype))
    return Parity(
        largest=float(every_N.max()),
        mean=float(every_N.mean()),
        tokens=len(every_N),
        dtype=dtype,
        is_exact=not narrow,
        limit=config.limit or narrow * WIDE_LIMIT or NARROW_LIMIT,
    )


def score(policy: "Policy", ids: Sequence[Sequence[int]]) -> Reference:
    """The trainer's own log-probabilities of sequences, in the policy's arithmetic."""
    import torch

    from trainer.policy.model import whole_sequences

    scored = []
    for sequence in ids:
        with torch.no_grad():
            logprobs_N, _ = policy.logprobs(whole_sequences([sequence]).to(policy.device))
        scored.append(logprobs_N.float().cpu().numpy())
    weights = str(policy.model.dtype).removeprefix("torch.")
    return Reference([list(sequence) for sequence in ids], scored, weights if policy.dtype == EXACT else policy.dtype)


def newest_sequences(snapshot: Snapshot, vocabulary: int, config: ProbeConfig) -> list[list[int]]:
    """Sequences from the newest `tokens` that an engine sampled: the opening context and action, cut where long.

    Newest by the version of the policy. Empty if the lake holds none that the vocabulary covers.
    """
    opening = (pl.col("provenance") == "engine") & (pl.col("prefix_length") == 0)
    rows = snapshot.scan("tokens").filter(opening).select("episode_id", "policy_version", "context_ids", "action_ids")
    newest = rows.sort("policy_version", "episode_id", descending=True, nulls_last=True).head(8 * config.sequences)
    sequences = [[*row["context_ids"], *row["action_ids"]] for row in collected(newest).iter_rows(named=True)]
    fitting = [ids[: config.max_tokens] for ids in sequences if len(ids) >= _SHORTEST and max(ids) < vocabulary]
    return fitting[: config.sequences]


def random_sequences(vocabulary: int, config: ProbeConfig) -> list[list[int]]:
    """Sequences of ids drawn at random, the same every time; for a lake without any."""
    length = min(32, config.max_tokens)
    ids_QT = np.random.default_rng(0).integers(0, vocabulary, (config.sequences, length))
    return [[int(token) for token in ids_T] for ids_T in ids_QT]
