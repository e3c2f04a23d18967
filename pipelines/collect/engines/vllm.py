"""vLLM: tokens in and out, versions of weights, loading weights from a folder, LoRA adapters.

Facts are from running 0.32.0. Two routes take token ids. `/inference/v1/generate` is there with `--enable-scale-out`
and tells the version of every token. `/v1/completions` is always there and tells none: the version is asked for before
and after, and unknown where it changed meanwhile.

How it is to be started: `--logprobs-mode processed_logprobs`, so that log-probabilities are those of the distribution
that was sampled from; `--generation-config vllm`, so that nothing of the sampling is hidden in the model's folder;
`VLLM_SERVER_DEV_MODE=1` for versions and weights; for adapters `--enable-lora` and
`VLLM_ALLOW_RUNTIME_LORA_UPDATING=True`; on a CPU `--no-enable-chunked-prefill`, because a prompt that has a seed and is
read in parts ends the engine. `trajlake serve` does that.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from lake.live.proxy.engine import engine_of
from lake.live.proxy.upstream import Upstream, policy_version
from pipelines.collect.engines import (
    ContextFullError,
    EngineAnswerError,
    EngineCard,
    EngineError,
    EngineFailedError,
    EngineGoneError,
    EngineRefusedError,
    Generation,
    Request,
)
from pipelines.collect.engines.answers import Span, counted, finite, generation, read
from pipelines.collect.engines.http import Http
from pipelines.collect.engines.models import Models, room_of, served
from pipelines.collect.engines.once import Once

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
_LOADING = "loading:"
"""Stands before the version while weights are loaded, and after that failed: no number, so no token is said to be of
one."""
_DEV_MODE = "start vLLM with VLLM_SERVER_DEV_MODE=1, or by trajlake serve"
_SLEEP = "start vLLM with --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1"
_LORA = "start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"


class VllmEngine:
    """A vLLM server; see `Engine`.

    Args:
        url: base URL, with or without /v1 at the end.
        model: the name that it serves the model by; None: the only one that is no adapter.
        timeout: seconds that an answer may take.
        key: of `--api-key`.
    """

    def __init__(self, url: str, *, model: str | None = None, timeout: float = 600.0, key: str | None = None) -> None:
        self._http = Http(url, timeout=timeout, key=key)
        self.url = self._http.base
        self._model = model
        self._known = Once(self._asked_what_it_is)
        self._told: Upstream | None = None

    async def describe(self) -> EngineCard:
        """See `Engine.describe`; asked once, and again after it was gone."""
        card, _ = await self._known()
        return card

    async def generate(self, request: Request) -> list[Generation]:
        """See `Engine.generate`. Raises ContextFullError where the prompt leaves no room."""
        try:
            card, has_generate = await self._known()
            sampling = _sampling(request, card, self.url)
            if has_generate:
                return await self._by_generate(request, card, sampling)
            return await self._by_completions(request, card, sampling)
        except EngineGoneError:
            self._known.forget()  # another may answer at this address next time
            raise

    async def logprobs(self, ids: Sequence[int], *, adapter: str | None = None) -> list[float]:
        """See `Engine.logprobs`."""
        model = adapter or (await self.describe()).model
        body = {"model": model, "prompt": list(ids), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        source = f"{self.url}{COMPLETIONS}"
        choice = read(await self._http.post(COMPLETIONS, body), _Completions, source).choices[0]
        listed = counted(choice.prompt_logprobs or [], len(ids), "prompt log-probabilities", source)
        found = [(each or {}).get(str(token)) for each, token in zip(listed[1:], ids[1:], strict=True)]
        return finite([each.logprob if each is not None else None for each in found], source)

    async def version(self) -> int | None:
        """See `Engine.version`; None too without VLLM_SERVER_DEV_MODE."""
        return policy_version(await self._weight_version())

    async def newest_version(self) -> int | None:
        """See `Engine.newest_version`."""
        return policy_version((await self._weight_version()).removeprefix(_LOADING))

    async def load_weights(self, folder: Path, version: int) -> None:
        """See `Engine.load_weights`. A failure leaves the engine without a version; it ends at its next token.

        On a CPU, vLLM 0.32 keeps its old head unless the folder holds tied weights by every name.
        """
        try:
            await self._control("/pause?mode=keep")
            await self._control("/update_weight_version", {"new_version": f"{_LOADING}{version}"})
            await self._reload(folder)
            # Calls in flight are computed again under the new weights; their prefixes would be kept otherwise.
            said = await self._control("/reset_prefix_cache?reset_running_requests=true")
            if isinstance(said, dict) and said.get("success") is False:
                raise EngineError(f"{self.url} keeps prefixes of earlier weights in its cache; restart it")
            await self._control("/update_weight_version", {"new_version": str(version)})
        finally:
            self._told = None
            await asyncio.shield(self._control("/resume"))

    async def load_adapter(self, name: str, folder: Path) -> None:
        """See `Engine.load_adapter`."""
        body = {"lora_name": name, "lora_path": str(folder), "load_inplace": True}
        await self._control("/v1/load_lora_adapter", body, hint=_LORA)

    async def sleep(self) -> None:
        """Free the device: weights go to the machine's memory, and what was computed of prompts is dropped.

        Raises EngineError: it was started without --enable-sleep-mode, or on a device that has none (a CPU).
        """
        await self._control("/sleep?level=1", hint=_SLEEP)

    async def wake_up(self) -> None:
        """Take the device again, with the weights from before; nothing happens to an engine that is awake."""
        await self._control("/wake_up", hint=_SLEEP)

    async def is_healthy(self) -> bool:
        """See `Engine.is_healthy`."""
        return await self._http.is_healthy()

    async def close(self) -> None:
        """See `Engine.close`."""
        await self._http.close()
        self._told = None

    async def _asked_what_it_is(self) -> tuple[EngineCard, bool]:
        """What it is, and whether it has the route that tells versions."""
        version = read(await self._http.get("/version"), _Version, f"{self.url}/version").version
        model = served(read(await self._http.get("/v1/models"), Models, f"{self.url}/v1/models"), self._model)
        said = engine_of(await self._optional("/server_info?config_format=json"))
        card = EngineCard(
            engine=f"vllm {version}",
            model=model.id,
            folder=model.root,
            max_tokens=model.max_model_len,
            logprobs_mode=said.logprobs_mode,
            dtype=said.dtype,
        )
        return card, await self._http.status(GENERATE) == 405  # it is there, and wants POST

    async def _by_generate(self, request: Request, card: EngineCard, sampling: dict[str, Any]) -> list[Generation]:
        if request.schema is not None:
            sampling["structured_outputs"] = {"json": request.schema}
        body = {
            "model": request.adapter or card.model,
            "token_ids": list(request.prompt_ids),
            "sampling_params": sampling | {"logprobs": 0},
        }
        source = f"{self.url}{GENERATE}"
        said = read(await self._asked(GENERATE, body), _Generated, source)
        return [
            generation(
                request,
                ids=each.token_ids,
                logprobs=_sampled(each, source),
                finish_reason=each.finish_reason,
                spans=each.weight_versions or (),
                source=source,
            )
            for each in counted(said.choices, request.samples, "samples", source)
        ]

    async def _by_completions(self, request: Request, card: EngineCard, sampling: dict[str, Any]) -> list[Generation]:
        schema = {} if request.schema is None else {"structured_outputs": {"json": request.schema}}
        body = sampling | schema | {"logprobs": 0, "return_token_ids": True, "prompt": list(request.prompt_ids)}
        before = await (await self._weights()).version_before()
        said = await self._asked(COMPLETIONS, body | {"model": request.adapter or card.model})
        after = await (await self._weights()).version_now()
        source = f"{self.url}{COMPLETIONS}"
        choices = counted(read(said, _Completions, source).choices, request.samples, "samples", source)
        found = []
        for each in choices:
            if each.prompt_token_ids != list(request.prompt_ids):
                raise EngineAnswerError(f"{source} sampled after another prompt than the one that it was sent")
            ids = each.token_ids or []
            values = each.logprobs.token_logprobs if each.logprobs is not None else []
            spans = [Span(version=before, start=0, end=len(ids))] if before is not None and before == after else []
            finish = each.finish_reason
            found.append(
                generation(request, ids=ids, logprobs=values, finish_reason=finish, spans=spans, source=source)
            )
        return found

    async def _asked(self, path: str, body: dict[str, Any]) -> Any:
        try:
            return await self._http.post(path, body)
        except EngineRefusedError as error:
            if "maximum context length" in str(error):
                raise ContextFullError(str(error)) from error
            raise

    async def _weight_version(self) -> str:
        said = await self._optional("/weight_info")
        return read(said, _WeightInfo, f"{self.url}/weight_info").weight_version if said else ""

    async def _weights(self) -> Upstream:
        """Who asks for the version of the weights around a call, once for all calls that ask together."""
        if self._told is None:
            told = Upstream(self.url, self._http.session, timeout=30)
            await told.name()
            self._told = told
        return self._told

    async def _reload(self, folder: Path) -> None:
        try:
            await self._control(
                "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            )
        except EngineFailedError as error:
            raise EngineFailedError(f"{error}; vLLM 0.32 has no whole weights then, restart it") from error

    async def _control(self, path: str, body: dict[str, Any] | None = None, *, hint: str = _DEV_MODE) -> Any:
        try:
            return await self._http.post(path, body)
        except EngineRefusedError as error:
            if error.status in (404, 405):
                raise EngineRefusedError(f"{error}; {hint}", error.status) from error
            raise

    async def _optional(self, path: str) -> Any:
        """What is there only in the developer mode; None without it."""
        try:
            return await self._http.get(path)
        except EngineRefusedError:
            return None


class _Version(msgspec.Struct):
    version: str


class _WeightInfo(msgspec.Struct):
    weight_version: str


class _LogProb(msgspec.Struct):
    logprob: float | None
    token_id: int | None = None


class _Content(msgspec.Struct):
    content: list[_LogProb]


class _Sample(msgspec.Struct):
    token_ids: list[int]
    finish_reason: str
    logprobs: _Content
    weight_versions: list[Span] | None = None


class _Generated(msgspec.Struct):
    choices: list[_Sample]


class _TokenLogProbs(msgspec.Struct):
    token_logprobs: list[float | None]


class _Completion(msgspec.Struct):
    finish_reason: str
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: _TokenLogProbs | None = None
    prompt_logprobs: list[dict[str, _LogProb] | None] | None = None


class _Completions(msgspec.Struct):
    choices: list[_Completion]


def _sampling(request: Request, card: EngineCard, url: str) -> dict[str, Any]:
    """Sampling parameters, all of them, so that none is left to the engine's defaults."""
    given = request.sampling
    named = {"temperature": given.temperature, "top_p": given.top_p, "top_k": given.top_k, "min_p": given.min_p}
    more: dict[str, Any] = {"stop": list(given.stop)} if given.stop else {}
    more |= {"stop_token_ids": list(request.stop_ids)} if request.stop_ids else {}
    return named | more | {"max_tokens": room_of(request, card, url), "n": request.samples, "seed": request.seed}


def _sampled(sample: _Sample, source: str) -> list[float | None]:
    content = sample.logprobs.content
    if len(content) == len(sample.token_ids) and [each.token_id for each in content] != sample.token_ids:
        raise EngineAnswerError(f"{source} gives log-probabilities of other tokens than it sampled")
    return [each.logprob for each in content]
