"""An engine on 127.0.0.1 that samples from a model folder, with the ids and log-probabilities that vLLM gives.

For what needs a real policy behind a recording and runs in seconds: chat completions, not streamed, one at a time.
`tests/integration/test_proxy_vllm.py` has the real vLLM.
"""

import asyncio
from pathlib import Path
from typing import Any

from aiohttp import web

from testkit.engine_server import Engine


class ModelEngine(Engine):
    """An engine whose answers are sampled.

    Args:
        folder: a model in Hugging Face layout, with a chat template.
        most: tokens of an answer.
    """

    def __init__(self, folder: Path, *, most: int = 12, seed: int = 0) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        super().__init__()
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._turn, self._most = asyncio.Lock(), most
        torch.manual_seed(seed)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        async with self._turn:
            return web.json_response(await asyncio.to_thread(self._answer, body))

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        text = self._tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, tokenize=False)
        prompt_ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        ids, logprobs = self._sampled(prompt_ids, body)
        content = [{"token": "", "logprob": value, "bytes": None, "top_logprobs": []} for value in logprobs]
        is_ended = ids[-1] == self._tokenizer.eos_token_id
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": self._tokenizer.decode(ids, skip_special_tokens=True)},
            "logprobs": {"content": content} if body.get("logprobs") else None,
            "finish_reason": "stop" if is_ended else "length",
            "token_ids": ids if body.get("return_token_ids") else None,
        }
        usage = {"prompt_tokens": len(prompt_ids), "completion_tokens": len(ids)}
        return {
            "id": f"chatcmpl-{id(ids):x}",
            "object": "chat.completion",
            "created": 1_790_000_000,
            "model": "policy",
            "choices": [choice],
            "usage": usage | {"total_tokens": sum(usage.values())},
            "prompt_token_ids": prompt_ids if body.get("return_token_ids") else None,
        }

    def _sampled(self, prompt_ids: list[int], body: dict[str, Any]) -> tuple[list[int], list[float]]:
        """Ids of an answer, its end included, and their log-probabilities as they were sampled."""
        import torch

        prompt_1T = torch.tensor([prompt_ids])
        with torch.inference_mode():
            out = self._model.generate(
                prompt_1T,
                attention_mask=torch.ones_like(prompt_1T),
                max_new_tokens=min(self._most, body.get("max_tokens") or self._most),
                do_sample=True,
                temperature=float(body.get("temperature", 1.0)),
                top_k=0,
                top_p=1.0,
                eos_token_id=self._tokenizer.eos_token_id,
                pad_token_id=self._tokenizer.eos_token_id,
                output_scores=True,
                return_dict_in_generate=True,
            )
        ids_T = out.sequences[0, len(prompt_ids) :]
        logprobs_TV = torch.stack(out.scores)[:, 0].log_softmax(-1)
        return ids_T.tolist(), logprobs_TV.gather(1, ids_T[:, None])[:, 0].tolist()
