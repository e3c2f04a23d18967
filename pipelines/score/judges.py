"""Judges: models that a reward function asks over the network, on any server with OpenAI's chat API.

    judge = Judge("gpt-4o-mini")

    @reward_function(requires_network=True)
    async def helpful(messages, **kwargs):
        answer = await judge.ask(f"... 0 to 10 ... {messages[-1].content}", temperature=0)
        return float(answer) / 10

Inside `trajlake score`, the judge reuses an answer that the lake holds for the same request, and stores new answers in
`responses`. Keys come from environment variables and stay in the worker process that asks: no table, log or error
contains one. Redirects are refused, because a redirect would send the key to another address.
"""

import asyncio
import os
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from lake import ids
from lake.retries import compute_pause
from pipelines.score.reward_function import get_judge_run

STATUSES_TO_REPEAT = frozenset((408, 409, 425, 429))
"""HTTP statuses to retry, in addition to 500 and above."""
_MAX_BYTES = 8 << 20
_MAX_QUOTE = 300


class JudgeError(RuntimeError):
    """A judge gave no answer, and an immediate retry would not help."""


class BusyError(JudgeError):
    """A judge gave no answer this time; `after`: seconds that the server asks to wait."""

    def __init__(self, reason: str, after: float | None = None) -> None:
        super().__init__(reason)
        self.after = after


def post_json(url: str, body: bytes, key: str | None, timeout: float) -> bytes:
    """POST JSON with the key as a bearer token, and return the answer's body; `timeout`: longest silence in seconds.

    BusyError for a timeout, a lost connection, or a temporary status; JudgeError for any other status.
    """
    # urllib takes 40 ms to import, and most workers never ask a judge.
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError
    from urllib.request import HTTPRedirectHandler, Request, build_opener

    class _NoRedirect(HTTPRedirectHandler):
        def redirect_request(self, *_: Any, **__: Any) -> None:
            """Follow no redirect, so that the answer's status is reported."""

    headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "trajlake"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    request = Request(url, data=body, headers=headers, method="POST")
    try:
        with build_opener(_NoRedirect).open(request, timeout=timeout) as response:
            answer: bytes = response.read(_MAX_BYTES + 1)
    except HTTPError as error:
        with error:
            raise _make_status_error(error.code, error.read(4096), error.headers, key) from None
    except (TimeoutError, URLError, HTTPException, OSError) as error:
        reason = getattr(error, "reason", error)
        text = "no answer in time" if isinstance(reason, TimeoutError) else f"{type(error).__name__}: {reason}"
        raise BusyError(redact_key(text, key)) from None
    if len(answer) > _MAX_BYTES:
        msg = f"{url} answered with more than {_MAX_BYTES >> 20} MB"
        raise JudgeError(msg)
    return answer


def redact_key(text: str, key: str | None) -> str:
    """Return a text without the key, which servers may quote."""
    return text.replace(key, "***") if key else text


def _make_status_error(status: int, body: bytes, headers: Any, key: str | None) -> JudgeError:
    quoted = redact_key(" ".join(body.decode("utf-8", "replace").split()), key)[:_MAX_QUOTE]
    text = f"HTTP {status}" + (f": {quoted}" if quoted else "")
    if status in STATUSES_TO_REPEAT or status >= 500:
        # Retry-After may also be a date; it is ignored then.
        seconds = headers.get("Retry-After")
        try:
            return BusyError(text, max(float(seconds), 0.0) if seconds else None)
        except ValueError:
            return BusyError(text)
    if 300 <= status < 400:
        return JudgeError(f"{text} (redirects are not followed: give the judge its final address)")
    return JudgeError(text)


__all__ = ["Judge", "JudgeError"]

_LONGEST_WAIT = 60.0
"""Maximum seconds between two tries, even if the server asks for more."""
Question = str | Sequence[dict[str, Any]]


class _AnswerMessage(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _AnswerMessage


class _TokenUsage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _ChatCompletion(msgspec.Struct):
    choices: list[_Choice]
    usage: _TokenUsage | None = None


class Judge:
    """A model on an OpenAI-compatible server. ValueError for an invalid address or number.

    Args:
        model: name of the model.
        base_url: the server's address up to `/v1`; http or https. Default: the environment variable OPENAI_BASE_URL,
            else OpenAI's address.
        api_key_env: environment variable with the key; None for a server without keys.
        timeout: seconds to wait for the server in each try.
        tries: maximum number of tries. Timeouts, lost connections, answers that are not JSON, and the statuses 408,
            409, 425, 429 and 5xx are retried.
        backoff: seconds before the second try. Each further wait is twice as long, plus up to half of it at random. A
            server's Retry-After is honoured up to a minute.
        concurrency: concurrent requests of one worker.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key_env: str | None = "OPENAI_API_KEY",
        timeout: float = 60.0,
        tries: int = 5,
        backoff: float = 1.0,
        concurrency: int = 8,
    ) -> None:
        base_url = base_url or os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com/v1"
        if not base_url.startswith(("http://", "https://")):
            msg = f"a judge's base_url is {base_url!r}; valid: an address that begins with http:// or https://"
            raise ValueError(msg)
        if tries < 1 or concurrency < 1 or timeout <= 0 or backoff < 0:
            msg = "a judge needs tries >= 1, concurrency >= 1, timeout > 0 and backoff >= 0"
            raise ValueError(msg)
        self.model = model
        self.base_url = base_url.rstrip("/")
        self.api_key_env = api_key_env
        self.timeout = timeout
        self.tries = tries
        self.backoff = backoff
        self._slots = threading.BoundedSemaphore(concurrency)

    def __repr__(self) -> str:
        return f"Judge({self.model!r}, base_url={self.base_url!r})"

    async def ask(
        self, question: Question, *, about: Sequence[int] | None = None, sample: int = 0, **options: Any
    ) -> str:
        """Ask without blocking other coroutines; see `ask_now`."""
        # to_thread runs it in a copy of this context, which holds the run.
        return await asyncio.to_thread(self.ask_now, question, about=about, sample=sample, **options)

    def ask_now(
        self, question: Question, *, about: Sequence[int] | None = None, sample: int = 0, **options: Any
    ) -> str:
        """Ask, and return the answer's text.

        Args:
            question: a text, or chat messages.
            about: positions of the rollouts that the question concerns, in a batch- or group-wise function; all by
                default. The erasure of one of these episodes erases the answer.
            sample: number of the answer, for several answers to one question; each is a separate request.
            **options: options of the request, for example temperature=0, max_tokens=20, response_format={...}.

        JudgeError if there is no answer after all tries, an invalid one, or no key in the environment.
        """
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else list(question)
        body = {"model": self.model, "messages": messages, **options}
        request_id = self.request_id(body, sample)
        run = get_judge_run()
        if run is not None and request_id in run.answers:
            return run.answers[request_id]
        key = self._read_key()
        with self._slots:
            completion = self._request(body, key)
        answer = completion.choices[0].message.content
        if answer is None:
            msg = f"{self.model} answered without text"
            raise JudgeError(msg)
        answer = redact_key(answer, key)
        if run is not None:
            usage = completion.usage or _TokenUsage()
            run.answers[request_id] = answer
            run.fresh.append(
                {
                    "request_id": request_id,
                    "model": self.model,
                    "answer": answer,
                    "about": None if about is None else list(about),
                    "prompt_tokens": usage.prompt_tokens,
                    "completion_tokens": usage.completion_tokens,
                }
            )
        return answer

    def request_id(self, body: dict[str, Any], sample: int = 0) -> str:
        """Return the id of a request: a hash of address, model, messages and options, without the API key."""
        request = msgspec.json.encode(body, order="deterministic").decode()
        return ids.to_text(ids.key_hash("request", self.base_url, request, sample))

    def _request(self, body: dict[str, Any], key: str | None) -> _ChatCompletion:
        asked_for, reason = 0.0, ""
        for failures in range(self.tries):
            if failures:
                pause = max(compute_pause(failures, first=self.backoff, longest=_LONGEST_WAIT), asked_for)
                time.sleep(pause * (1 + random.random() / 2))  # never shorter than the server asked for
            try:
                answer = post_json(f"{self.base_url}/chat/completions", msgspec.json.encode(body), key, self.timeout)
                completion = msgspec.json.decode(answer, type=_ChatCompletion)
            except msgspec.ValidationError as error:
                fault = redact_key(str(error), key)
                msg = f"{self.model} at {self.base_url} answered JSON that is not a chat completion: {fault}"
                raise JudgeError(msg) from None
            except msgspec.DecodeError:
                reason = f"an answer that is not JSON: {redact_key(answer.decode('utf-8', 'replace'), key)[:100]!r}"
            except BusyError as busy:
                reason = str(busy)
                asked_for = max(asked_for, min(busy.after or 0.0, _LONGEST_WAIT))
            else:
                if completion.choices:
                    return completion
                msg = f"{self.model} at {self.base_url} answered without a choice"
                raise JudgeError(msg)
        msg = f"{self.model} at {self.base_url} did not answer in {self.tries} tries: {reason}"
        raise JudgeError(msg)

    def _read_key(self) -> str | None:
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env, "").strip()
        if not key:
            msg = (
                f"the environment variable {self.api_key_env} of the judge {self.model} is not set; set it, and add "
                "it to `environment` in [score]"
            )
            raise JudgeError(msg)
        return key
