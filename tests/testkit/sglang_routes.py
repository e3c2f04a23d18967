"""SGLang's routes over a `TokenEngine`, in the form that the source of 0.5.23 answers in. No real one was asked."""

import math
from typing import TYPE_CHECKING, Any

from aiohttp import web

from testkit.token_engine import WRONG, Sample, logprob

if TYPE_CHECKING:
    from testkit.token_engine import TokenEngine

NAME = "policy"


def add_routes(engine: "TokenEngine", app: web.Application) -> None:
    """Add them to an application."""
    routes = _Routes(engine)
    for path in ("health", "server_info", "model_info"):
        app.router.add_get(f"/{path}", getattr(routes, path))
    app.router.add_get("/v1/models", routes.models)
    posted = ("generate", "pause_generation", "continue_generation", "update_weights_from_disk")
    for path in (*posted, "load_lora_adapter", "unload_lora_adapter"):
        app.router.add_post(f"/{path}", getattr(routes, path))


class _Routes:
    def __init__(self, engine: "TokenEngine") -> None:
        self.engine = engine

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self.engine.is_sick else 200)

    async def server_info(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.5.23", "model_path": self.engine.folder, "dtype": "auto"})

    async def model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"model_path": self.engine.folder, "weight_version": self.engine.version})

    async def models(self, _: web.Request) -> web.Response:
        about = {"id": NAME, "object": "model", "owned_by": "sglang", "root": NAME, "parent": None}
        return web.json_response({"object": "list", "data": [about | {"max_model_len": self.engine.max_model_len}]})

    # ------------------------------------------------------------ weights

    async def pause_generation(self, request: web.Request) -> web.Response:
        self.engine.pause(abort=(await request.json()).get("mode", "abort") == "abort")
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, _: web.Request) -> web.Response:
        self.engine.go_on()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def update_weights_from_disk(self, request: web.Request) -> web.Response:
        body = await request.json()
        if "nowhere" in body["model_path"]:
            answer = {"success": False, "message": "Failed to get weights iterator", "num_paused_requests": 0}
            return web.json_response(answer, status=400)
        self.engine.weights, self.engine.version = body["model_path"], body["weight_version"]
        return web.json_response({"success": True, "message": "Succeeded to update", "num_paused_requests": 0})

    async def load_lora_adapter(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["lora_name"] in self.engine.adapters:
            text = f"LoRA adapter with name {body['lora_name']} is already loaded"
            return web.json_response({"success": False, "error_message": text}, status=400)
        self.engine.adapters[body["lora_name"]] = body["lora_path"]
        return web.json_response({"success": True, "error_message": ""})

    async def unload_lora_adapter(self, request: web.Request) -> web.Response:
        del self.engine.adapters[(await request.json())["lora_name"]]
        return web.json_response({"success": True, "error_message": ""})

    # ------------------------------------------------------------ tokens

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        adapter = body.get("lora_path")
        if adapter is not None and adapter not in self.engine.adapters:
            return _refused(f"The following requested LoRA adapters are not loaded: {adapter}")
        answers = []
        for prompt_ids, sampling in zip(body["input_ids"], body["sampling_params"], strict=True):
            if len(prompt_ids) >= self.engine.max_model_len:
                most = self.engine.max_model_len
                text = (
                    f"The input ({len(prompt_ids)} tokens) is longer than the model's context length ({most} tokens)."
                )
                return _refused(text)
            call = await self.engine.sample(
                request.path,
                body,
                prompt_ids,
                sampling.get("sampling_seed"),
                1,
                max_tokens=sampling["max_new_tokens"],
                temperature=sampling["temperature"],
            )
            answers.append(self._answer(body, prompt_ids, call.samples[0], request[WRONG]))
        if request[WRONG] == "shape":
            return web.json_response({"answers": answers})
        return web.json_response(answers[:-1] if request[WRONG] == "samples" else answers)

    def _answer(self, body: dict[str, Any], prompt_ids: list[int], sample: Sample, wrong: str | None) -> dict[str, Any]:
        listed = [[value, token, None] for value, token in zip(sample.logprobs, sample.ids, strict=True)]
        meta: dict[str, Any] = {
            "id": "1",
            "finish_reason": {"type": sample.finish_reason},
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": len(sample.ids),
            "output_token_logprobs": listed,
            "weight_version": self.engine.version,
            "weight_versions": [{"version": v, "start": a, "end": b} for v, a, b in sample.spans()],
        }
        if body.get("logprob_start_len") == 0:
            values = [None, *(logprob(prompt_ids, at, self.engine.weights) for at in range(1, len(prompt_ids)))]
            meta["input_token_logprobs"] = [
                [value, ident, None] for value, ident in zip(values, prompt_ids, strict=True)
            ]
        answer = {"text": "?", "output_ids": list(sample.ids), "meta_info": meta}
        if wrong == "ids":
            answer["output_ids"] = sample.ids[:-1]
        if wrong == "logprobs":
            listed.append(listed[-1])
        if wrong == "number":
            listed[0][0] = math.inf
        if wrong == "spans":
            meta["weight_versions"] = [{"version": "1", "start": 1, "end": len(sample.ids)}]
        return answer


def _refused(message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=400)
