"""What an engine sampled, checked before anybody trains on it.

There are as many log-probabilities as ids, they are numbers, and the versions of the weights cover the tokens.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from lake.live.proxy.upstream import policy_version
from pipelines.collect.engines import EngineAnswerError, Generation, Request
from pipelines.collect.engines.http import shown

Answer = TypeVar("Answer")
Item = TypeVar("Item")
_ROUNDING = 1e-3
"""How far above 0 a log-probability may be."""


class Span(msgspec.Struct):
    """A stretch of tokens and the weights that made them, as both vLLM and SGLang write it."""

    version: str
    start: int
    end: int
    """Index behind the last."""


def read(answer: Any, form: type[Answer], source: str) -> Answer:
    """An answer in a form. Raises EngineAnswerError: it is of another; `source` is the call, for the message."""
    try:
        return msgspec.convert(answer, form)
    except msgspec.ValidationError as error:
        raise EngineAnswerError(
            f"{source} answers something else than its API says ({error}): {shown(answer)}; is its version supported?"
        ) from error


def generation(
    request: Request,
    *,
    ids: Sequence[int],
    logprobs: Sequence[float | None],
    finish_reason: str,
    spans: Sequence[Span],
    source: str,
) -> Generation:
    """One sample of a request.

    Args:
        request: what was asked for.
        ids: of the answer.
        logprobs: of `ids`, nats.
        finish_reason: as the engine has it.
        spans: versions of the weights; empty if it does not say.
        source: the call, for messages.

    Raises:
        EngineAnswerError: these do not fit together.
    """
    if len(logprobs) != len(ids):
        raise EngineAnswerError(f"{source} gives {len(logprobs)} log-probabilities for {len(ids)} tokens")
    if len(ids) > request.sampling.max_tokens:
        raise EngineAnswerError(f"{source} gives {len(ids)} tokens where {request.sampling.max_tokens} were asked for")
    if not ids and finish_reason != "abort":
        raise EngineAnswerError(f"{source} gives no tokens, and says that it ended with {shown(finish_reason)}")
    return Generation(
        ids=list(ids),
        logprobs=finite(logprobs, source),
        finish_reason=finish_reason,
        versions=_versions(spans, len(ids), source),
        # Engines renormalise over what a grammar allows, and do not say at which tokens it ruled anything out.
        constrained=None if request.schema is None else [True] * len(ids),
    )


def finite(logprobs: Sequence[float | None], source: str) -> list[float]:
    """Log-probabilities that are such. Raises EngineAnswerError: one of them is not."""
    wrong = [value for value in logprobs if value is None or not math.isfinite(value) or value > _ROUNDING]
    if wrong:
        raise EngineAnswerError(f"{source} gives a log-probability of {wrong[0]}; valid: finite, and at most 0")
    return [value for value in logprobs if value is not None]


def counted(items: Sequence[Item], wanted: int, noun: str, source: str) -> Sequence[Item]:
    """As many items as were asked for. Raises EngineAnswerError: there are more or less."""
    if len(items) != wanted:
        raise EngineAnswerError(f"{source} gives {len(items)} {noun} where {wanted} were asked for")
    return items


def _versions(spans: Sequence[Span], length: int, source: str) -> list[tuple[int | None, int, int]]:
    if not spans:
        return [(None, 0, length - 1)] if length else []
    filled = [span for span in spans if span.end > span.start]
    starts = [span.start for span in filled]
    if starts != [0, *(span.end for span in filled)][: len(filled)] or (filled and filled[-1].end != length):
        raise EngineAnswerError(f"{source} gives versions of weights that do not cover its {length} tokens: {spans}")
    return [(policy_version(span.version), span.start, span.end - 1) for span in filled]
