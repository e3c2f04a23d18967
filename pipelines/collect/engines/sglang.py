"""SGLang: tokens in and out over `/generate`, versions of weights, loading weights from a folder, LoRA adapters.

Facts are from the source of SGLang 0.5.23 (`http_server.py`, `io_struct.py`, `sampling_params.py`,
`weight_versions.py`); its wheels want CUDA, so no real one was run here. The tests run against a small server that
answers in the same form.

Log-probabilities are those after the temperature and before anything is truncated (top-p, top-k, min-p), unless the
server runs with SGLANG_RETURN_ORIGINAL_LOGPROB, which it does not say: `logprobs_mode` is what you say it is. Seeds
count under `--enable-deterministic-inference` only.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from lake.live.proxy.upstream import policy_version
from pipelines.collect.engines import (
    ContextFullError,
    EngineAnswerError,
    EngineCard,
    EngineError,
    EngineGoneError,
    EngineRefusedError,
    Generation,
    Request,
)
from pipelines.collect.engines.answers import Span, counted, finite, generation, read
from pipelines.collect.engines.http import Http
from pipelines.collect.engines.models import Models, room_of, served
from pipelines.collect.engines.once import Once

GENERATE = "/generate"
_TOO_LONG = ("longer than the model's context length", "maximum allowed length")


class SglangEngine:
    """An SGLang server; see `Engine`.

    Args:
        url: base URL, with or without /v1 at the end.
        model: the name that it serves the model by; None: the only one that is no adapter.
        timeout: seconds that an answer may take.
        key: of `--api-key`, or of `--admin-api-key` if there is one.
        logprobs_mode: processed or raw; see above. None: not known.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        timeout: float = 600.0,
        key: str | None = None,
        logprobs_mode: str | None = None,
    ) -> None:
        self._http = Http(url, timeout=timeout, key=key)
        self.url = self._http.base
        self._model = model
        self._logprobs_mode = logprobs_mode
        self._known = Once(self._asked_what_it_is)

    async def describe(self) -> EngineCard:
        """See `Engine.describe`; asked once, and again after it was gone."""
        return await self._known()

    async def generate(self, request: Request) -> list[Generation]:
        """See `Engine.generate`. Raises ContextFullError where the prompt leaves no room."""
        try:
            card = await self.describe()
            sampling = _sampling(request, card, self.url)
            body: dict[str, Any] = {
                # One prompt each: samples of one prompt would share the seed, and be the same.
                "input_ids": [list(request.prompt_ids)] * request.samples,
                "sampling_params": [sampling | _seed(request.seed, index) for index in range(request.samples)],
                "return_logprob": True,
            }
            if request.adapter is not None:
                body["lora_path"] = request.adapter
            answer = await self._asked(body)
        except EngineGoneError:
            self._known.forget()  # another may answer at this address next time
            raise
        source = f"{self.url}{GENERATE}"
        samples = counted(read(answer, list[_Sample], source), request.samples, "samples", source)
        return [_generation(request, each, source) for each in samples]

    async def logprobs(self, ids: Sequence[int], *, adapter: str | None = None) -> list[float]:
        """See `Engine.logprobs`."""
        body = {
            "input_ids": [list(ids)],
            "sampling_params": [{"max_new_tokens": 0, "temperature": 1.0}],
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        source = f"{self.url}{GENERATE}"
        answer = await self._asked(body | ({"lora_path": adapter} if adapter is not None else {}))
        (sample,) = counted(read(answer, list[_Sample], source), 1, "samples", source)
        listed = counted(sample.meta_info.input_token_logprobs or [], len(ids), "prompt log-probabilities", source)
        if [each[1] for each in listed] != list(ids):
            raise EngineAnswerError(f"{source} gives log-probabilities of other tokens than it was sent")
        return finite([each[0] for each in listed[1:]], source)

    async def version(self) -> int | None:
        """See `Engine.version`."""
        said = read(await self._renamed("/model_info", "/get_model_info"), _ModelInfo, f"{self.url}/model_info")
        return policy_version(said.weight_version)

    async def newest_version(self) -> int | None:
        """See `Engine.newest_version`; it keeps the weights and the version that it has if it cannot load others."""
        return await self.version()

    async def load_weights(self, folder: Path, version: int) -> None:
        """See `Engine.load_weights`. Calls in flight are computed again under the new weights."""
        try:
            await self._control("/pause_generation", {"mode": "retract"})
            body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
            await self._control("/update_weights_from_disk", body)
        finally:
            await asyncio.shield(self._http.post("/continue_generation"))

    async def load_adapter(self, name: str, folder: Path) -> None:
        """See `Engine.load_adapter`; one that is loaded is unloaded first."""
        try:
            await self._control("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        except EngineRefusedError as error:
            if "already" not in str(error):
                raise
            await self._control("/unload_lora_adapter", {"lora_name": name})
            await self._control("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    async def is_healthy(self) -> bool:
        """See `Engine.is_healthy`."""
        return await self._http.is_healthy()

    async def close(self) -> None:
        """See `Engine.close`."""
        await self._http.close()

    async def _asked_what_it_is(self) -> EngineCard:
        model = served(read(await self._http.get("/v1/models"), Models, f"{self.url}/v1/models"), self._model)
        said = read(await self._renamed("/server_info", "/get_server_info"), _Info, f"{self.url}/server_info")
        return EngineCard(
            engine=f"sglang {said.version}",
            model=model.id,
            folder=model.root if model.root != model.id else said.model_path,
            max_tokens=model.max_model_len,
            logprobs_mode=self._logprobs_mode,
            dtype=said.dtype if said.dtype != "auto" else None,
        )

    async def _asked(self, body: dict[str, Any]) -> Any:
        try:
            return await self._http.post(GENERATE, body)
        except EngineRefusedError as error:
            if any(sign in str(error) for sign in _TOO_LONG):
                raise ContextFullError(str(error)) from error
            raise

    async def _control(self, path: str, body: dict[str, Any]) -> None:
        """Do something with the engine. Raises EngineError: it says that it did not succeed."""
        said = await self._http.post(path, body)
        if isinstance(said, dict) and said.get("success") is False:
            raise EngineError(f"POST {path} at {self.url} did not succeed: {said.get('message')}")

    async def _renamed(self, path: str, earlier: str) -> Any:
        """What stands at a path that had another name in earlier versions."""
        try:
            return await self._http.get(path)
        except EngineRefusedError as error:
            if error.status != 404:
                raise
            return await self._http.get(earlier)


class _Info(msgspec.Struct):
    version: str
    model_path: str | None = None
    dtype: str | None = None


class _ModelInfo(msgspec.Struct):
    weight_version: str | None = None


class _Finish(msgspec.Struct):
    type: str


class _Meta(msgspec.Struct):
    finish_reason: _Finish
    output_token_logprobs: list[tuple[float | None, int, str | None]] = []
    input_token_logprobs: list[tuple[float | None, int, str | None]] | None = None
    weight_version: str | None = None
    weight_versions: list[Span] | None = None


class _Sample(msgspec.Struct):
    meta_info: _Meta
    output_ids: list[int] | None = None


def _generation(request: Request, sample: _Sample, source: str) -> Generation:
    meta = sample.meta_info
    ids = [each[1] for each in meta.output_token_logprobs]
    if sample.output_ids is not None and sample.output_ids != ids:
        raise EngineAnswerError(f"{source} gives log-probabilities of other tokens than it sampled")
    spans = meta.weight_versions or []
    if not spans and meta.weight_version is not None:
        # Earlier versions tell the last version only, and had no pause that keeps calls.
        spans = [Span(version=meta.weight_version, start=0, end=len(ids))]
    return generation(
        request,
        ids=ids,
        logprobs=[each[0] for each in meta.output_token_logprobs],
        finish_reason=meta.finish_reason.type,
        spans=spans,
        source=source,
    )


def _sampling(request: Request, card: EngineCard, url: str) -> dict[str, Any]:
    """Sampling parameters, all of them, so that none is left to the engine's defaults."""
    given = request.sampling
    more: dict[str, Any] = {"stop": list(given.stop)} if given.stop else {}
    more |= {"stop_token_ids": list(request.stop_ids)} if request.stop_ids else {}
    if request.schema is not None:
        more["json_schema"] = msgspec.json.encode(request.schema).decode()
    return more | {
        "max_new_tokens": room_of(request, card, url),
        "temperature": given.temperature,
        "top_p": given.top_p,
        "top_k": given.top_k or -1,
        "min_p": given.min_p,
    }


def _seed(seed: int | None, index: int) -> dict[str, int]:
    return {} if seed is None else {"sampling_seed": seed + index}
