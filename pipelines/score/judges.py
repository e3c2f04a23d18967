"""Judges: models that a reward function asks over the network, through any server that speaks OpenAI's chat API.

    judge = Judge("gpt-4o-mini")

    @reward_function(requires_network=True)
    async def helpful(messages, **kwargs):
        answer = await judge.ask(f"... 0 to 10 ... {messages[-1].content}", temperature=0)
        return float(answer) / 10

Inside `trajlake score`, an answer that the lake holds for this very request is read, not asked again, and new ones are
stored in `responses`. Keys come from environment variables and stay in the worker process that asks: no table, no log
and no error holds one, and redirects are refused, as one would carry the key to wherever it is sent.
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
from pipelines.score.reward_function import current_run

STATUSES_TO_REPEAT = frozenset((408, 409, 425, 429))
"""Beside all of 500 and above."""
_LARGEST = 8 << 20
_SHOWN = 300


class JudgeError(RuntimeError):
    """A judge gave no answer; asking again at once would not help."""


class BusyError(JudgeError):
    """A judge gave no answer this time; `after`: seconds the server asks to wait."""

    def __init__(self, reason: str, after: float | None = None) -> None:
        super().__init__(reason)
        self.after = after


def post(url: str, body: bytes, key: str | None, timeout: float) -> bytes:
    """Body of the answer to a POST of JSON, with the key as a bearer token; `timeout` seconds without a sign at most.

    BusyError for a timeout, a lost connection, or a status that may pass; JudgeError for any other status.
    """
    # urllib takes 40 ms to import, and most workers never ask.
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError
    from urllib.request import Request

    headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "trajlake"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    request = Request(url, data=body, headers=headers, method="POST")
    try:
        with _opener().open(request, timeout=timeout) as response:
            data: bytes = response.read(_LARGEST + 1)
    except HTTPError as error:
        with error:
            raise _refused(error.code, error.read(4096), error.headers, key) from None
    except (TimeoutError, URLError, HTTPException, OSError) as error:
        reason = getattr(error, "reason", error)
        text = "no answer in time" if isinstance(reason, TimeoutError) else f"{type(error).__name__}: {reason}"
        raise BusyError(redacted(text, key)) from None
    if len(data) > _LARGEST:
        msg = f"{url} answered with more than {_LARGEST >> 20} MB"
        raise JudgeError(msg)
    return data


def redacted(text: str, key: str | None) -> str:
    """A text without the key: servers like to quote it."""
    return text.replace(key, "***") if key else text


def _refused(status: int, body: bytes, headers: Any, key: str | None) -> JudgeError:
    quoted = redacted(" ".join(body.decode("utf-8", "replace").split()), key)[:_SHOWN]
    text = f"HTTP {status}" + (f": {quoted}" if quoted else "")
    if status in STATUSES_TO_REPEAT or status >= 500:
        return BusyError(text, _seconds(headers.get("Retry-After")))
    if 300 <= status < 400:
        return JudgeError(f"{text} (redirects are not followed: give the judge its final address)")
    return JudgeError(text)


def _seconds(text: str | None) -> float | None:
    """Retry-After as seconds; a date is not worth parsing."""
    try:
        return max(float(text), 0.0) if text else None
    except ValueError:
        return None


def _opener() -> Any:
    from urllib.request import HTTPRedirectHandler, build_opener

    class _Stays(HTTPRedirectHandler):
        def redirect_request(self, *_: Any, **__: Any) -> None:
            """No redirect: the answer's status stands."""

    return build_opener(_Stays)


__all__ = ["Judge", "JudgeError"]

_LONGEST_WAIT = 60.0
"""Seconds between two tries, whatever the server asks for."""
Question = str | Sequence[dict[str, Any]]


class _Spoken(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Spoken


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


class Judge:
    """A model behind an OpenAI-compatible server. ValueError for an address or numbers that make no sense.

    Args:
        model: its name.
        base_url: the server's address up to `/v1`; http or https. Unless given, that of the environment variable
            OPENAI_BASE_URL, else OpenAI's.
        api_key_env: environment variable that holds the key; None for a server that wants none.
        timeout: seconds to wait for the server at each try.
        tries: how often a request is made before it counts as failed. Repeated are timeouts, lost connections, answers
            that are no JSON, and the statuses 408, 409, 425, 429 and 5xx.
        backoff: seconds before the second try; doubled from then on, with up to half of it in random addition. A
            server's Retry-After is honoured up to a minute.
        concurrency: requests in flight at once, in one worker.
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
        """Ask, without holding up other coroutines; see `ask_now`."""
        # to_thread runs it in a copy of this context, where the run is.
        return await asyncio.to_thread(self.ask_now, question, about=about, sample=sample, **options)

    def ask_now(
        self, question: Question, *, about: Sequence[int] | None = None, sample: int = 0, **options: Any
    ) -> str:
        """Ask and wait for the answer's text.

        Args:
            question: a text, or chat messages.
            about: positions of the rollouts that the question tells something of, in a batch- or group-wise function;
                all unless given. Erasing one of these episodes erases the answer.
            sample: number of the answer, where several to one question are wanted: each is asked and stored apart.
            **options: of the request, for example temperature=0, max_tokens=20, response_format={...}.

        JudgeError if there is no answer after all tries, one that makes no sense, or no key in the environment.
        """
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else list(question)
        body = {"model": self.model, "messages": messages, **options}
        request_id = self.request_id(body, sample)
        run = current_run()
        if run is not None and request_id in run.known:
            return run.known[request_id]
        key = self._key()
        with self._slots:
            completion = self._asked(body, key)
        answer = completion.choices[0].message.content
        if answer is None:
            msg = f"{self.model} answered without text"
            raise JudgeError(msg)
        answer = redacted(answer, key)
        if run is not None:
            usage = completion.usage or _Usage()
            run.known[request_id] = answer
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
        """Key of a request: what is asked, of whom, with which options; never the key that pays for it."""
        asked = msgspec.json.encode(body, order="deterministic").decode()
        return ids.to_text(ids.key_hash("request", self.base_url, asked, sample))

    def _asked(self, body: dict[str, Any], key: str | None) -> _Completion:
        wait, reason = self.backoff, ""
        for number in range(self.tries):
            if number:
                time.sleep(min(wait, _LONGEST_WAIT) * (1 + random.random() / 2))
                wait *= 2
            try:
                data = post(f"{self.base_url}/chat/completions", msgspec.json.encode(body), key, self.timeout)
                return self._completion(data, key)
            except BusyError as busy:
                reason = str(busy)
                wait = max(wait, min(busy.after or 0.0, _LONGEST_WAIT))
        msg = f"{self.model} at {self.base_url} did not answer in {self.tries} tries: {reason}"
        raise JudgeError(msg)

    def _completion(self, data: bytes, key: str | None) -> _Completion:
        try:
            found = msgspec.json.decode(data, type=_Completion)
        except msgspec.ValidationError as error:
            msg = (
                f"{self.model} at {self.base_url} answered JSON that is no chat completion: {redacted(str(error), key)}"
            )
            raise JudgeError(msg) from None
        except msgspec.DecodeError:
            msg = f"an answer that is no JSON: {redacted(data.decode('utf-8', 'replace'), key)[:100]!r}"
            raise BusyError(msg) from None
        if not found.choices:
            msg = f"{self.model} at {self.base_url} answered without a choice"
            raise JudgeError(msg)
        return found

    def _key(self) -> str | None:
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env, "").strip()
        if not key:
            msg = (
                f"the environment variable {self.api_key_env} is not set for the judge {self.model}; set it, and name "
                "it in `environment` of [score]"
            )
            raise JudgeError(msg)
        return key
