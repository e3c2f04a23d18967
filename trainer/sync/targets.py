"""Engines at one version: load weights into all of them, reload those that restarted, and measure parity.

A failing engine is reported and does not block the others. It is not current, and it gets the weights again before it
is used: `pipelines.collect.engines.pool` calls `refresh` before it sends calls to an engine that was unreachable.

The parity probe compares an engine's log-probabilities of fixed tokens with the trainer's, under the same weights. They
differ where weights were not loaded, were loaded in part, or are computed by other kernels or in another number type.
A policy gradient would then correct for a policy that never acted. Measured with SmolLM2-135M, vLLM 0.32 on a CPU,
against float32 in transformers:

- The engine computes in float32: below 5e-5 nats at every token.
- The engine computes in bfloat16: 0.035 on average and 0.4 at most. Rounding alone moves a logit by up to 1/32.
- Both compute in bfloat16: 0.083 to 0.1 on average (a model after SFT, on openings it does not model).

So the limit applies to the largest difference where both compute in float32, and else to the mean, because single
tokens say little in 16-bit numbers. These are the limits of a policy that scores packed sequences
(`trainer.policy.model`), the second one counted once for each side that rounds. A 16-bit engine that missed one small
update looks like one that received it; only its version shows the difference.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl
from pydantic import BaseModel, ConfigDict, Field

from lake.read.parquet import collect_rows
from lake.read.snapshot import Snapshot
from pipelines.collect.engines import Engine, EngineError, EngineGoneError

if TYPE_CHECKING:
    from trainer.policy.model import PackedPolicy

EXACT = "float32"
"""Number type to which the narrow limit applies, if engine and trainer both compute in it."""
_SHORTEST = 2
"""Minimum number of tokens of a sequence: the first token has no log-probability."""
_SHAPE = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
Load = Callable[[Engine], Awaitable[None]]


class ProbeConfig(BaseModel):
    """How parity is measured, and whether an engine that misses it is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    limit: float | None = Field(default=None, gt=0)
    """Allowed difference in nats: the largest one where both compute in float32, else the mean. None: 1e-4 in float32,
    else 0.1 for each of the two that computes in 16-bit numbers."""
    refuse: bool = True
    """Refuse an engine above the limit; false uses it and reports the difference."""
    sequences: int = Field(default=8, ge=1)
    """Number of sequences scored after a push."""
    max_tokens: int = Field(default=256, ge=_SHORTEST)
    """Tokens after which a sequence is cut."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Fixed sequences with the trainer's log-probabilities."""

    ids: list[list[int]]
    """Token ids of each sequence, at least two."""
    logprobs: list[npt.NDArray[np.float32]]
    """Log-probability of every token but the first, in nats at temperature 1."""
    dtype: str = EXACT
    """Number type that the trainer computed them in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """Distance of an engine's log-probabilities from the trainer's."""

    largest: float
    """Largest absolute difference in nats."""
    mean: float
    """Mean absolute difference over tokens, in nats."""
    tokens: int
    dtype: str | None
    """Number type that the engine reports."""
    is_exact: bool
    """Engine and trainer both compute in float32."""
    limit: float
    """Allowed `largest` where `is_exact`, else allowed `mean`."""

    @property
    def is_met(self) -> bool:
        """Return whether the engine is within the limit; NaN is not."""
        return (self.largest if self.is_exact else self.mean) <= self.limit

    def __str__(self) -> str:
        difference = f"log-probabilities differ by {self.largest:.2g} nats at most, {self.mean:.2g} on average"
        measure = "at most" if self.is_exact else "on average"
        return (
            f"{difference} ({self.tokens:,} tokens, {self.dtype or 'unknown dtype'}; allowed {measure}: {self.limit:g})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """One version of a policy's weights, as engines load it."""

    version: int
    folder: Path | None = None
    """A model in Hugging Face layout, or LoRA adapters as peft writes them; None: sent to the engines directly."""
    adapter: str | None = None
    """Name by which requests select the adapters; None: the folder holds the model itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightDelivery:
    """Outcome of a push at one engine."""

    url: str
    before: int | None
    """Version before the push; None if the engine has none or did not report it."""
    after: int | None
    """Version after the push; None if the engine does not report it: it is gone, or failed while it loaded."""
    seconds: float
    """Wall time of loading, including the pause of sampling."""
    parity: Parity | None = None
    """Distance of its log-probabilities from the trainer's; None if not measured."""
    error: str | None = None
    """Why the engine must not be used; None if it has the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """Outcome of a push at all engines."""

    version: int
    deliveries: tuple[WeightDelivery, ...]
    """One per engine, in the order of the engines."""

    @property
    def failed(self) -> tuple[WeightDelivery, ...]:
        """Return the deliveries whose engine lacks the weights, or must not be used with them."""
        return tuple(delivery for delivery in self.deliveries if delivery.error is not None)

    def metrics(self) -> dict[str, float]:
        """Return rows for the table `metrics`: log-probabilities of the worst engine, time of the slowest one."""
        parities = [delivery.parity for delivery in self.deliveries if delivery.parity is not None]
        metrics = {"sync/seconds": max((delivery.seconds for delivery in self.deliveries), default=0.0)}
        metrics["sync/failed"] = float(len(self.failed))
        if parities:
            metrics["sync/logprob_diff_max"] = max(parity.largest for parity in parities)
            metrics["sync/logprob_diff_mean"] = max(parity.mean for parity in parities)
        return metrics


class ParityError(EngineError):
    """An engine's log-probabilities are too far from the trainer's.

    Attributes:
        parity: the measured distance.
    """

    def __init__(self, url: str, parity: Parity) -> None:
        super().__init__(
            f"{url}: {parity}; push again, compare its model and number type with the trainer's, or raise the limit"
        )
        self.parity = parity


class SyncTargets:
    """The engines that serve one policy.

    Args:
        engines: each can read the folders that are pushed.
        probe: how parity is measured, for a push with a reference.
    """

    def __init__(self, engines: Sequence[Engine], probe: ProbeConfig | None = None) -> None:
        self.engines = list(engines)
        self.probe = probe or ProbeConfig()
        self.current: Weights | None = None
        """Weights that every engine should have."""
        self._reference: Reference | None = None
        self._current_urls: set[str] = set()
        """URLs of engines that last loaded `current`."""
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def deliver(self, weights: Weights, reference: Reference | None = None, load: Load | None = None) -> Push:
        """Load the weights into all engines, and compare each engine with the reference if there is one.

        `load` brings them to one engine, or raises EngineError; None: the engine reads their folder.
        """
        self.current, self._reference = weights, reference
        self._current_urls.clear()
        deliveries = await asyncio.gather(*(self._deliver_to(engine, load or self._load) for engine in self.engines))
        return Push(version=weights.version, deliveries=tuple(deliveries))

    async def refresh(self, engine: Engine) -> bool:
        """Load the current weights into an engine that lacks them; return whether it did.

        Raises:
            EngineError: the engine cannot load them, so it must not be used.
        """
        async with self._locks[engine.url]:
            if self.current is None or await self._has_current(engine):
                return False
            await self._load_and_measure(engine, self._load)
            return True

    async def watch(self, say: Callable[[str], None], seconds: float = 2.0) -> None:
        """Poll every engine and reload those that were restarted; runs until cancelled."""
        while True:
            for engine in self.engines:
                try:
                    if self.current is not None and await self.refresh(engine):
                        say(f"{engine.url}: came back, version {self.current.version} again")
                except EngineGoneError:
                    continue  # the next round asks again
                except EngineError as error:
                    say(str(error))
            await asyncio.sleep(seconds)

    async def measure(self, engine: Engine, reference: Reference) -> Parity:
        """Return the distance of an engine from the reference.

        Raises:
            EngineError: the engine does not answer.
            ParityError: the distance is above the limit, and the probe refuses that.
        """
        adapter = None if self.current is None else self.current.adapter
        logprobs = [await engine.logprobs(ids, adapter=adapter) for ids in reference.ids]
        parity = compare_logprobs(reference, logprobs, (await engine.describe()).dtype, self.probe)
        if not parity.is_met and self.probe.refuse:
            raise ParityError(engine.url, parity)
        return parity

    async def _deliver_to(self, engine: Engine, load: Load) -> WeightDelivery:
        began, delivery = time.monotonic(), WeightDelivery(url=engine.url, before=None, after=None, seconds=0.0)
        try:
            async with self._locks[engine.url]:
                delivery = replace(delivery, before=await engine.version())
                began = time.monotonic()
                parity, seconds = await self._load_and_measure(engine, load)
                return replace(delivery, after=await engine.version(), seconds=seconds, parity=parity)
        except EngineError as error:
            seconds, parity = time.monotonic() - began, error.parity if isinstance(error, ParityError) else None
            with suppress(EngineError):
                delivery = replace(delivery, after=await engine.version())
            return replace(delivery, seconds=seconds, parity=parity, error=str(error))

    async def _has_current(self, engine: Engine) -> bool:
        """Return whether an engine has the current weights, or newer ones from another push.

        False for adapters, because no engine reports which adapters it has.
        """
        assert self.current is not None
        if engine.url not in self._current_urls or self.current.adapter is not None:
            return False
        version = await engine.version()
        return version is not None and version >= self.current.version

    async def _load_and_measure(self, engine: Engine, load: Load) -> tuple[Parity | None, float]:
        """Load the current weights into an engine and measure it; return its parity and the seconds of loading."""
        self._current_urls.discard(engine.url)
        began = time.monotonic()
        await load(engine)
        seconds = time.monotonic() - began
        parity = None if self._reference is None else await self.measure(engine, self._reference)
        self._current_urls.add(engine.url)
        return parity, seconds

    async def _load(self, engine: Engine) -> None:
        """Let an engine read the current weights from their folder."""
        weights = self.current
        assert weights is not None
        if weights.folder is None:
            raise EngineError(
                f"{engine.url} does not have version {weights.version}, and gets weights with the next push"
            )
        if weights.adapter is None:
            check_model_shape(engine.url, (await engine.describe()).folder, weights.folder)
            await engine.load_weights(weights.folder, weights.version)
        else:
            await engine.load_adapter(weights.adapter, weights.folder)


def check_model_shape(url: str, served: str | None, folder: Path) -> None:
    """Raise EngineError if the engine serves a model of another shape, where this machine can read both folders.

    vLLM 0.32 notices only in the middle of loading, and then has no complete weights.
    """
    theirs, ours = read_model_shape(served), read_model_shape(folder)
    if theirs is None or ours is None:
        return
    differences = [f"{name} {ours[name]} (it serves {theirs[name]})" for name in _SHAPE if ours[name] != theirs[name]]
    if differences:
        raise EngineError(
            f"{url} serves another model than that in {folder}: {', '.join(differences)}; it keeps what it has"
        )


def read_model_shape(folder: str | Path | None) -> dict[str, object] | None:
    """Return the fields `_SHAPE` of a model folder's config.json; None if it cannot be read here."""
    try:
        config = msgspec.json.decode(Path(folder or "", "config.json").read_bytes())
        return {name: config.get(name) for name in _SHAPE}
    except (OSError, msgspec.MsgspecError, AttributeError):
        return None


def compare_logprobs(
    reference: Reference, logprobs: Sequence[Sequence[float]], dtype: str | None, config: ProbeConfig
) -> Parity:
    """Compare an engine's log-probabilities with the reference; a wrong number of them is an infinite difference."""
    from trainer.policy.model import EXACT as NARROW_LIMIT
    from trainer.policy.model import NARROW as WIDE_LIMIT

    differences_N = np.concatenate(
        [
            np.abs(np.asarray(theirs, np.float64) - ours) if len(theirs) == len(ours) else np.array([np.inf])
            for ours, theirs in zip(reference.logprobs, logprobs, strict=True)
        ]
    )
    rounding_sides = sum(number_type != EXACT for number_type in (dtype, reference.dtype))
    return Parity(
        largest=float(differences_N.max()),
        mean=float(differences_N.mean()),
        tokens=len(differences_N),
        dtype=dtype,
        is_exact=not rounding_sides,
        limit=config.limit or rounding_sides * WIDE_LIMIT or NARROW_LIMIT,
    )


def score_reference(policy: "PackedPolicy", ids: Sequence[Sequence[int]]) -> Reference:
    """Return the trainer's log-probabilities of sequences, in the policy's number type."""
    import torch

    from trainer.policy.model import pack_sequences

    logprobs = []
    for sequence in ids:
        with torch.no_grad():
            logprobs_N, _ = policy.logprobs(pack_sequences([sequence]).to(policy.device))
        logprobs.append(logprobs_N.float().cpu().numpy())
    weights = str(policy.model.dtype).removeprefix("torch.")
    return Reference([list(sequence) for sequence in ids], logprobs, weights if policy.dtype == EXACT else policy.dtype)


def read_newest_sequences(snapshot: Snapshot, vocabulary: int, config: ProbeConfig) -> list[list[int]]:
    """Return openings (context and action) that engines sampled under the newest policy versions, cut where long.

    Empty if the lake holds none that the vocabulary covers.
    """
    opening = (pl.col("provenance") == "engine") & (pl.col("prefix_length") == 0)
    rows = snapshot.scan("tokens").filter(opening).select("episode_id", "policy_version", "context_ids", "action_ids")
    newest = rows.sort("policy_version", "episode_id", descending=True, nulls_last=True).head(8 * config.sequences)
    sequences = [[*row["context_ids"], *row["action_ids"]] for row in collect_rows(newest).iter_rows(named=True)]
    fitting = [ids[: config.max_tokens] for ids in sequences if len(ids) >= _SHORTEST and max(ids) < vocabulary]
    return fitting[: config.sequences]


def draw_random_sequences(vocabulary: int, config: ProbeConfig) -> list[list[int]]:
    """Draw sequences of ids from a fixed seed, for a lake without sampled ones."""
    length = min(32, config.max_tokens)
    ids_QT = np.random.default_rng(0).integers(0, vocabulary, (config.sequences, length))
    return [[int(token) for token in ids_T] for ids_T in ids_QT]
