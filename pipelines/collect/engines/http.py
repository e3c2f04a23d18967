"""Call an engine over HTTP: JSON in, JSON out, every failure as an engine error; and check its answers.

Each call is one try; `pool.py` owns retries. A cancelled call closes its connection, which makes engines abort the
sampling.

The checks run before any training: log-probabilities are finite numbers, one per token, and the versions of the weights
cover the tokens.
"""

import math
import os
from base64 import b64decode
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import msgspec

from lake.errors import MissingExtraError, UsageError
from lake.live.proxy.upstream import explain_unreachable, parse_base_url, policy_version
from lake.read.text_table import format_cell
from lake.secrets import REDACTED, redact
from pipelines.collect.engines import (
    ContextFullError,
    EngineAnswerError,
    EngineBusyError,
    EngineCard,
    EngineError,
    EngineFailedError,
    EngineGoneError,
    EngineRefusedError,
    Generation,
    Request,
)

try:
    import aiohttp
except ImportError as _error:
    raise MissingExtraError('engines need the package aiohttp: pip install "trajlake[record]"') from _error


OPTION = "--engine"
"""Option that names an engine's address in messages."""
_MOST_BYTES = 1 << 28
_MOST_SHOWN = 300
_MESSAGES = ("message", "error_message", "detail")
_CONNECT_SECONDS = 30.0


class EngineClient:
    """An HTTP client of one engine. It belongs to the event loop that first uses it.

    Args:
        url: base URL, with or without /v1 at the end.
        timeout: timeout of an answer in seconds.
        key: bearer token; no message contains it.

    Raises:
        UsageError: the URL is invalid.
    """

    def __init__(self, url: str, *, timeout: float, key: str | None = None) -> None:
        self.base, self._headers = parse_address(url, key)
        self._secrets = _secrets_of(self._headers)
        self._timeout = timeout
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """The session, created at first use. It does not limit connections; a pool does."""
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=self._timeout, connect=_CONNECT_SECONDS)
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers, timeout=timeout)
        return self._session

    async def get(self, path: str) -> Any:
        """Return the answer at a path. Raises EngineError; see `post`."""
        return await self._request("GET", path, None)

    async def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Post a body and return the answer: None if empty, a string if not JSON.

        Raises:
            EngineGoneError: it was unreachable, broke off, or timed out.
            EngineBusyError: status 429 or 503.
            EngineFailedError: another status of 500 or more.
            EngineRefusedError: another status of 300 or more.
            EngineAnswerError: the answer is too long.
        """
        return await self._request("POST", path, body or {})

    async def status(self, path: str) -> int:
        """Return the HTTP status of GET. Raises EngineGoneError."""
        status, _, _ = await self._send("GET", path, None)
        return status

    async def is_healthy(self) -> bool:
        """Return whether /health answers 200, as engines do."""
        try:
            return await self.status("/health") == 200
        except EngineGoneError:
            return False

    async def close(self) -> None:
        """Close connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _request(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        status, headers, data = await self._send(method, path, body)
        if status >= 300:
            raise self._refusal(status, headers, f"{method} {path}", data)
        try:
            return msgspec.json.decode(data) if data else None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return data.decode(errors="replace")

    async def _send(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, Any, bytes]:
        data = None if body is None else msgspec.json.encode(body)
        try:
            try:
                return await self._once(method, path, data)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                # The server may have closed a kept connection: vLLM closes idle ones after 5 s, and every one after
                # an error. Without this retry a /resume after a failed load would be lost.
                if self._session is None or isinstance(error, aiohttp.ClientConnectorError):
                    raise  # closed on this side, or never connected
                return await self._once(method, path, data)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineGoneError(self._explain(error, path)) from error

    async def _once(self, method: str, path: str, data: bytes | None) -> tuple[int, Any, bytes]:
        headers = {"Content-Type": "application/json"} if data is not None else {}
        async with self.session.request(
            method, self.base + path, data=data, headers=headers, allow_redirects=False
        ) as response:
            gathered = bytearray()
            async for piece in response.content.iter_any():
                gathered += piece
                if len(gathered) > _MOST_BYTES:
                    raise EngineAnswerError(
                        f"{self.base}{path} answers more than {_MOST_BYTES >> 20} MB; is {OPTION} an engine?"
                    )
            return response.status, response.headers, bytes(gathered)

    def _explain(self, error: Exception, path: str) -> str:
        if (problem := explain_unreachable(error, self.base, OPTION)) is not None:
            return problem
        if isinstance(error, TimeoutError):
            return f"{self.base}{path} did not answer within {self._timeout:g} s; does the engine hang?"
        return f"{self.base}{path} broke off in the middle of its answer; see the log of the engine"

    def _refusal(self, status: int, headers: Any, call: str, data: bytes) -> EngineError:
        reason = _error_text(data)
        for secret in self._secrets:
            reason = reason.replace(secret, REDACTED)  # some endpoints quote a refused key
        message = f"{call} at {self.base} answers {status}: {reason}"
        if status in (429, 503):
            return EngineBusyError(message, parse_retry_after(headers.get("Retry-After")))
        if status >= 500:
            return EngineFailedError(message)
        return EngineRefusedError(message, status)


def parse_address(url: str, key: str | None = None) -> tuple[str, dict[str, str]]:
    """Split an engine's URL into a base URL for requests and messages, and an Authorization header.

    A user and password in the URL appear only in the header, so no message, log or table can show them.

    Args:
        url: URL, with or without /v1 at the end.
        key: bearer token, sent instead of user and password.

    Raises:
        UsageError: the URL is invalid.
    """
    base, headers = parse_base_url(url, OPTION)
    return base, headers if key is None else {"Authorization": f"Bearer {key}"}


def _secrets_of(headers: Mapping[str, str]) -> list[str]:
    """Return the secrets in an Authorization header: the key, or the password, plain and encoded."""
    kind, _, value = headers.get("Authorization", "").partition(" ")
    plain = b64decode(value).decode(errors="replace").partition(":")[2] if kind == "Basic" else ""
    return [secret for secret in (value, plain) if secret]


def parse_retry_after(retry_after: str | None) -> float | None:
    """Return the seconds that the header Retry-After asks for (seconds or a date), or None."""
    if retry_after is None:
        return None
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            moment = parsedate_to_datetime(retry_after)
        except ValueError:
            return None
        moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
        seconds = (moment - datetime.now(UTC)).total_seconds()
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def read_key(variable: str | None) -> str | None:
    """Return the key in an environment variable; None if no variable is named. Raises UsageError: it is not set."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UsageError(f"the environment variable {variable} is not set; it holds the key of the endpoint")
    return key


def excerpt(value: Any) -> str:
    """Return a value for a message: on one line, shortened, without keys."""
    text = format_cell(redact(value if isinstance(value, str) else repr(value)))
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _error_text(data: bytes) -> str:
    """Return the message of an error answer, from any of the usual fields."""
    text = data.decode(errors="replace")
    try:
        body = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return excerpt(text) or "nothing"
    if isinstance(body, dict):
        inner = body.get("error")
        detail = inner.get("message") if isinstance(inner, dict) else inner
        text = detail or next((body[name] for name in _MESSAGES if body.get(name)), text)
    return excerpt(text) or "nothing"


Answer = TypeVar("Answer")
Item = TypeVar("Item")
_ROUNDING = 1e-3
"""Tolerance by which a log-probability may exceed 0."""


class WeightsSpan(msgspec.Struct):
    """A range of tokens and the version of their weights, in the format of vLLM and SGLang."""

    version: str
    start: int
    end: int
    """Index after the last token."""


def convert_answer(answer: Any, form: type[Answer], source: str) -> Answer:
    """Convert an answer to a type. Raises EngineAnswerError: it does not match; `source` names the call."""
    try:
        return msgspec.convert(answer, form)
    except msgspec.ValidationError as error:
        raise EngineAnswerError(
            f"{source} does not answer in the format of its API ({error}): {excerpt(answer)}; is its version supported?"
        ) from error


def build_generation(
    request: Request,
    *,
    ids: Sequence[int],
    logprobs: Sequence[float | None],
    finish_reason: str,
    spans: Sequence[WeightsSpan],
    source: str,
) -> Generation:
    """Check one sample of a request and build a generation.

    Args:
        request: the request.
        ids: token ids of the answer.
        logprobs: log-probabilities of `ids`, in nats.
        finish_reason: the engine's finish reason.
        spans: versions of the weights; empty if not reported.
        source: name of the call, for messages.

    Raises:
        EngineAnswerError: the values do not match each other.
    """
    if len(logprobs) != len(ids):
        raise EngineAnswerError(f"{source} gives {len(logprobs)} log-probabilities for {len(ids)} tokens")
    if len(ids) > request.sampling.max_tokens:
        raise EngineAnswerError(f"{source} gives {len(ids)} tokens where {request.sampling.max_tokens} were asked for")
    if not ids and finish_reason != "abort":
        raise EngineAnswerError(f"{source} returned no tokens with finish reason {excerpt(finish_reason)}")
    return Generation(
        ids=list(ids),
        logprobs=check_logprobs(logprobs, source),
        finish_reason=finish_reason,
        versions=_versions(spans, len(ids), source),
        # Engines renormalise over the allowed tokens, and do not report where the grammar excluded any.
        constrained=None if request.schema is None else [True] * len(ids),
    )


def check_logprobs(logprobs: Sequence[float | None], source: str) -> list[float]:
    """Return log-probabilities that are finite and at most 0. Raises EngineAnswerError."""
    wrong = [value for value in logprobs if value is None or not math.isfinite(value) or value > _ROUNDING]
    if wrong:
        raise EngineAnswerError(f"{source} gives a log-probability of {wrong[0]}; valid: finite, and at most 0")
    return [value for value in logprobs if value is not None]


def check_count(items: Sequence[Item], count: int, noun: str, source: str) -> Sequence[Item]:
    """Return the samples if there are `count` of them. Raises EngineAnswerError."""
    if len(items) != count:
        raise EngineAnswerError(f"{source} gives {len(items)} {noun} where {count} were asked for")
    return items


def _versions(spans: Sequence[WeightsSpan], length: int, source: str) -> list[tuple[int | None, int, int]]:
    if not spans:
        return [(None, 0, length - 1)] if length else []
    filled = [span for span in spans if span.end > span.start]
    starts = [span.start for span in filled]
    if starts != [0, *(span.end for span in filled)][: len(filled)] or (filled and filled[-1].end != length):
        raise EngineAnswerError(f"{source} gives versions of weights that do not cover its {length} tokens: {spans}")
    return [(policy_version(span.version), span.start, span.end - 1) for span in filled]


class ListedModel(msgspec.Struct):
    """A model or an adapter in `/v1/models`."""

    id: str
    root: str | None = None
    """Folder it was loaded from."""
    parent: str | None = None
    """Model that the adapter belongs to."""
    max_model_len: int | None = None


class ModelList(msgspec.Struct):
    """The answer of `/v1/models`."""

    data: list[ListedModel]


def find_model(models: ModelList, name: str | None) -> ListedModel:
    """Return the model with a name, or the only one that is not an adapter. Raises EngineError: not found.

    Several names of one model have one folder; the first of them is returned.
    """
    candidates = [model for model in models.data if (model.id == name if name is not None else model.parent is None)]
    if not candidates or any(model.root is None or model.root != candidates[0].root for model in candidates[1:]):
        names = ", ".join(excerpt(model.id) for model in models.data) or "none"
        request = "one model that is not an adapter" if name is None else f"the model {name!r}"
        raise EngineError(f"the request is for {request}, and the engine serves {names}. Name one of them as the model")
    return candidates[0]


def compute_room(request: Request, card: EngineCard, url: str) -> int:
    """Return the maximum tokens of the answer. Raises ContextFullError: the prompt fills the context."""
    most, length = request.sampling.max_tokens, len(request.prompt_ids)
    room = most if card.max_tokens is None else min(most, card.max_tokens - length)
    if room < 1:
        raise ContextFullError(f"the prompt has {length} tokens, and {url} takes {card.max_tokens} with the answer")
    return room
