"""Exact tokens in rows of eval-protocol.

They stand, as lists of ids, in `execution_metadata.extra`: under `assistant_turn_payloads` for each turn, or for the
last turn alone; of a rollout of one turn also as `prompt_ids` and `completion_ids`, or in `raw_output`. Payloads of the
tracing gateway, {logprobs: {data}, prompt_token_ids: {data}}, are base64 of zstd. Inside is a header of 24 bytes,
little endian (magic, version, flags, 2 reserved, number of tokens, bytes of the body, 8 reserved), and the body: `LP01`
has an int32 id (-1 if it is missing) and a float32 log-probability for each token of the completion, `PTI1` an int32 id
for each token of the prompt. Newer prompts are a JSON list instead.

How tokens were sampled is said by the turn's payload or its `step_info`, else by the `extra` of `execution_metadata`,
by that, or by the row: `temperature`, `top_p`, ... themselves, or in an object of one of the names `_SETTINGS`. Where
none says it, `completion_params` do, as for every format (`lake.records.tell_sampling`). It stays where it stood, too.
"""

import base64
import math
import struct
from collections.abc import Sequence
from typing import Any, TypeGuard

import msgspec

from lake.formats.base.fields import as_object, number, whole
from lake.formats.base.rows import rest
from lake.formats.chat.tokens import Lineage
from lake.records import StepRecord, TokensRecord, sampling_of

_HEADER = struct.Struct("<4sBBHIIQ")
_LARGEST = 1 << 28
"""Bytes of a payload; more is taken for an attack."""
_ROUNDING = 1e-3
_IDS = ("prompt_token_ids", "completion_token_ids", "completion_logprobs")
_OF_ONE = ("prompt_ids", "completion_ids", "completion_logprobs")
_ABOUT = ("logprobs_metadata", "prompt_token_ids_metadata", "assistant_turn_index")
"""Repeats what the lists show."""
_KINDS = ("prompt_token_ids", "logprobs")
_SETTINGS = ("completion_params", "sampling_params", "sampling")
"""Names of objects that hold the settings of a request."""


def add_tokens(steps: Sequence[StepRecord], row: dict[str, Any], execution: dict[str, Any]) -> None:
    """Give steps their tokens. `row` and `execution` are copies at their first level: what was used is taken out."""
    extra = execution["extra"] = _copy(execution.get("extra"))
    raw = execution["raw_output"] = _copy(execution.get("raw_output"))
    by_turn, others = _turns(extra.pop("assistant_turn_payloads", None), len(steps))
    if others:
        extra["assistant_turn_payloads"] = others
    lineage = Lineage()
    for index, step in enumerate(steps):
        said, turn = step.extra or {}, by_turn.get(index, {})
        holders = [(turn, _IDS), (decoded(said.get("payloads")), _IDS)]
        if index == len(steps) - 1:
            holders += [(extra, _IDS), (decoded(row.get("payloads")), _IDS), (decoded(extra.get("payloads")), _IDS)]
        if len(steps) == 1:
            holders += [(extra, _OF_ONE), (raw, _IDS)]
        for holder, keys in holders:
            _use(holder, keys, step, index, lineage)
        if step.tokens is not None:
            _tell_sampling(step.tokens, turn, as_object(turn.get("step_info")), extra, execution, row)
        for holder in (said, *((row, extra) if index == len(steps) - 1 else ())):
            _forget(holder, step.tokens)
        if left := rest(turn, "assistant_turn_index"):
            said["payload"] = left
        step.extra = said or None


def _copy(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else {}


def _turns(given: Any, count: int) -> tuple[dict[int, dict[str, Any]], list[Any]]:
    """What is said of each turn, and what is said of none that there is."""
    by_turn: dict[int, dict[str, Any]] = {}
    others = []
    for turn in given if isinstance(given, list) else ():
        index = whole(turn.get("assistant_turn_index")) if isinstance(turn, dict) else None
        if index is None or index >= count or index in by_turn:
            others.append(turn)
        else:
            by_turn[index] = dict(turn)
    return by_turn, others


def _use(holder: dict[str, Any], keys: Sequence[str], step: StepRecord, index: int, lineage: Lineage) -> None:
    """Make the tokens of a step of what a holder says, and take out of it what they say then."""
    prompt, completion, logprobs = (holder.get(key) for key in keys)
    if not (_are_ids(prompt) and _are_ids(completion)):
        return
    if step.tokens is None and _fit(logprobs, len(completion)):
        step.tokens = lineage.add(index, prompt, completion, logprobs)
    if (tokens := step.tokens) is None or completion != tokens.action_ids:
        return
    if logprobs in (None, tokens.action_logprobs):
        for key in (*keys, *_ABOUT):
            holder.pop(key, None)


def _tell_sampling(tokens: TokensRecord, *holders: dict[str, Any]) -> None:
    """Write to tokens how they were sampled, as the first of the holders says that says it."""
    for holder in holders:
        for settings in (holder, *(as_object(holder.get(name)) for name in _SETTINGS)):
            for name, value in sampling_of(settings).items():
                if value is not None and getattr(tokens, name) is None:
                    setattr(tokens, name, value)


def _forget(holder: dict[str, Any], tokens: TokensRecord | None) -> None:
    """Take out payloads and `logprobs` that say what the tokens say."""
    if tokens is None:
        return
    payloads = as_object(holder.get("payloads"))
    if payloads and decoded(payloads).get("completion_token_ids", tokens.action_ids) == tokens.action_ids:
        holder["payloads"] = rest(payloads, *(kind for kind in _KINDS if decoded({kind: payloads.get(kind)})))
    if _repeats(holder.get("logprobs"), tokens):
        del holder["logprobs"]


def decoded(payloads: Any) -> dict[str, Any]:
    """The ids and log-probabilities of a gateway's payloads; nothing of those that are damaged or of other versions."""
    found: dict[str, Any] = {}
    if not isinstance(payloads, dict):
        return found
    for kind in _KINDS:
        entry = payloads.get(kind)
        data = entry.get("data") if isinstance(entry, dict) else None
        if isinstance(data, str):
            try:
                found |= _parsed(_unpacked(data))
            except (ValueError, OSError, struct.error, msgspec.MsgspecError):
                continue
    return found


def _unpacked(data: str) -> bytes:
    import pyarrow as pa

    packed = base64.b64decode(data, validate=True)
    with pa.CompressedInputStream(pa.BufferReader(packed), "zstd") as stream:
        raw: bytes = stream.read(_LARGEST + 1)
    if len(raw) > _LARGEST:
        raise ValueError("too long")
    return raw


def _parsed(raw: bytes) -> dict[str, Any]:
    if raw.lstrip().startswith(b"["):
        return {"prompt_token_ids": msgspec.json.decode(raw)}
    magic, version, _, _, count, length, _ = _HEADER.unpack_from(raw)
    body = raw[_HEADER.size :]
    size = {b"LP01": 8, b"PTI1": 4}.get(magic, 0)
    if version != 1 or not size or length != count * size or len(body) != length:
        raise ValueError("not of a known version")
    if magic == b"PTI1":
        return {"prompt_token_ids": [token for (token,) in struct.iter_unpack("<i", body)]}
    pairs = list(struct.iter_unpack("<if", body))
    ids = [token for token, _ in pairs]
    logprobs = [logprob for _, logprob in pairs]
    return {"completion_logprobs": logprobs} | ({"completion_token_ids": ids} if min(ids, default=-1) >= 0 else {})


def _are_ids(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and bool(value) and all(whole(token) is not None for token in value)


def _fit(logprobs: Any, count: int) -> bool:
    """Whether there are none, or one that is possible for each token."""
    if logprobs is None:
        return True
    values = [number(value) for value in logprobs] if isinstance(logprobs, list) else []
    return len(values) == count and all(value is not None and -3e38 < value <= _ROUNDING for value in values)


def _repeats(said: Any, tokens: TokensRecord) -> bool:
    """Whether a message's `logprobs` say no more than its tokens."""
    content = said.get("content") if isinstance(said, dict) and said.keys() == {"content"} else None
    logprobs = tokens.action_logprobs or []
    if not isinstance(content, list) or not content or len(content) != len(logprobs):
        return False
    return all(
        isinstance(entry, dict)
        and entry.keys() <= {"logprob", "token_id"}
        and isinstance(entry.get("logprob"), int | float)
        and math.isclose(entry["logprob"], logprob, abs_tol=1e-6)
        for entry, logprob in zip(content, logprobs, strict=True)
    )
