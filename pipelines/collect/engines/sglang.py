"""SGLang: tokens in and out over `/generate`, versions of weights, loading weights from a folder, LoRA adapters.

Facts come from the source of SGLang 0.5.23 (`http_server.py`, `io_struct.py`, `sampling_params.py`,
`weight_versions.py`). Its wheels need CUDA, so no real server was run here. The tests use a small server that answers
in the same format.

Log-probabilities are computed after the temperature and before truncation (top-p, top-k, min-p), unless the server runs
with SGLANG_RETURN_ORIGINAL_LOGPROB. The server does not report that, so the caller sets `logprobs_mode`. Seeds only
work with `--enable-deterministic-inference`.
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
    SharedAnswer,
)
from pipelines.collect.engines.http import (
    EngineClient,
    ModelList,
    WeightsSpan,
    build_generation,
    check_count,
    check_logprobs,
    compute_room,
    convert_answer,
    find_model,
)

GENERATE = "/generate"
_TOO_LONG = ("longer than the model's context length", "maximum allowed length")


class SglangEngine:
    """An SGLang server; see `Engine`.

    Args:
        url: base URL, with or without /v1 at the end.
        model: name of the served model. None: the only one that is not an adapter.
        timeout: timeout of an answer in seconds.
        key: of `--api-key`, or of `--admin-api-key` if the server has one.
        logprobs_mode: processed or raw; see above. None: unknown.
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
        self._http = EngineClient(url, timeout=timeout, key=key)
        self.url = self._http.base
        self._model = model
        self._logprobs_mode = logprobs_mode
        self._card = SharedAnswer(self._ask_card)

    async def describe(self) -> EngineCard:
        """See `Engine.describe`; asked once, and again after the engine was gone."""
        return await self._card()

    async def generate(self, request: Request) -> list[Generation]:
        """See `Engine.generate`. Raises ContextFullError where the prompt leaves no room."""
        try:
            card = await self.describe()
            sampling = _sampling(request, card, self.url)
            body: dict[str, Any] = {
                # One prompt per sample: samples of one prompt would share the seed and be equal.
                "input_ids": [list(request.prompt_ids)] * request.samples,
                "sampling_params": [
                    sampling if request.seed is None else sampling | {"sampling_seed": request.seed + index}
                    for index in range(request.samples)
                ],
                "return_logprob": True,
            }
            if request.adapter is not None:
                body["lora_path"] = request.adapter
            answer = await self._post_generate(body)
        except EngineGoneError:
            self._card.forget()  # another engine may answer at this address later
            raise
        source = f"{self.url}{GENERATE}"
        samples = check_count(convert_answer(answer, list[_SglangSample], source), request.samples, "samples", source)
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
        answer = await self._post_generate(body | ({"lora_path": adapter} if adapter is not None else {}))
        (sample,) = check_count(convert_answer(answer, list[_SglangSample], source), 1, "samples", source)
        listed = check_count(sample.meta_info.input_token_logprobs or [], len(ids), "prompt log-probabilities", source)
        if [each[1] for each in listed] != list(ids):
            raise EngineAnswerError(f"{source} returned log-probabilities of other tokens than it received")
        return check_logprobs([each[0] for each in listed[1:]], source)

    async def version(self) -> int | None:
        """See `Engine.version`."""
        model_info = convert_answer(
            await self._get_renamed("/model_info", "/get_model_info"), _SglangModelInfo, f"{self.url}/model_info"
        )
        return policy_version(model_info.weight_version)

    async def newest_version(self) -> int | None:
        """See `Engine.newest_version`; a failed load leaves the old weights and version."""
        return await self.version()

    async def load_weights(self, folder: Path, version: int) -> None:
        """See `Engine.load_weights`. Calls in flight are recomputed under the new weights."""
        try:
            await self._control("/pause_generation", {"mode": "retract"})
            body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
            await self._control("/update_weights_from_disk", body)
        finally:
            await asyncio.shield(self._http.post("/continue_generation"))

    async def load_adapter(self, name: str, folder: Path) -> None:
        """See `Engine.load_adapter`; a loaded adapter is unloaded first."""
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

    async def _ask_card(self) -> EngineCard:
        model = find_model(
            convert_answer(await self._http.get("/v1/models"), ModelList, f"{self.url}/v1/models"), self._model
        )
        server_info = convert_answer(
            await self._get_renamed("/server_info", "/get_server_info"), _SglangServerInfo, f"{self.url}/server_info"
        )
        return EngineCard(
            engine=f"sglang {server_info.version}",
            model=model.id,
            folder=model.root if model.root != model.id else server_info.model_path,
            max_tokens=model.max_model_len,
            logprobs_mode=self._logprobs_mode,
            dtype=server_info.dtype if server_info.dtype != "auto" else None,
        )

    async def _post_generate(self, body: dict[str, Any]) -> Any:
        try:
            return await self._http.post(GENERATE, body)
        except EngineRefusedError as error:
            if any(sign in str(error) for sign in _TOO_LONG):
                raise ContextFullError(str(error)) from error
            raise

    async def _control(self, path: str, body: dict[str, Any]) -> None:
        """Post a control request. Raises EngineError: it did not succeed."""
        answer = await self._http.post(path, body)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineError(f"POST {path} at {self.url} did not succeed: {answer.get('message')}")

    async def _get_renamed(self, path: str, earlier: str) -> Any:
        """Get a path that had another name in earlier versions."""
        try:
            return await self._http.get(path)
        except EngineRefusedError as error:
            if error.status != 404:
                raise
            return await self._http.get(earlier)


class _SglangServerInfo(msgspec.Struct):
    version: str
    model_path: str | None = None
    dtype: str | None = None


class _SglangModelInfo(msgspec.Struct):
    weight_version: str | None = None


class _SglangFinish(msgspec.Struct):
    type: str


class _SglangMeta(msgspec.Struct):
    finish_reason: _SglangFinish
    output_token_logprobs: list[tuple[float | None, int, str | None]] = []
    input_token_logprobs: list[tuple[float | None, int, str | None]] | None = None
    weight_version: str | None = None
    weight_versions: list[WeightsSpan] | None = None


class _SglangSample(msgspec.Struct):
    meta_info: _SglangMeta
    output_ids: list[int] | None = None


def _generation(request: Request, sample: _SglangSample, source: str) -> Generation:
    meta = sample.meta_info
    ids = [each[1] for each in meta.output_token_logprobs]
    if sample.output_ids is not None and sample.output_ids != ids:
        raise EngineAnswerError(f"{source} gives log-probabilities of other tokens than it sampled")
    spans = meta.weight_versions or []
    if not spans and meta.weight_version is not None:
        # Earlier versions report only the last version, and cannot keep calls during a pause.
        spans = [WeightsSpan(version=meta.weight_version, start=0, end=len(ids))]
    return build_generation(
        request,
        ids=ids,
        logprobs=[each[0] for each in meta.output_token_logprobs],
        finish_reason=meta.finish_reason.type,
        spans=spans,
        source=source,
    )


def _sampling(request: Request, card: EngineCard, url: str) -> dict[str, Any]:
    """Build all sampling parameters, so that no default of the engine applies."""
    sampling = request.sampling
    stops: dict[str, Any] = {"stop": list(sampling.stop)} if sampling.stop else {}
    stops |= {"stop_token_ids": list(request.stop_ids)} if request.stop_ids else {}
    if request.schema is not None:
        stops["json_schema"] = msgspec.json.encode(request.schema).decode()
    return stops | {
        "max_new_tokens": compute_room(request, card, url),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
    }
