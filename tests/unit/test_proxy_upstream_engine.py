"""What is taken from what an engine says of itself; the shape is vLLM 0.32.0's."""

from typing import Any

import pytest

from lake.live.proxy.upstream import EngineDefaults, parse_engine

NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


def info(**model: Any) -> Any:
    return {"vllm_config": {"model_config": {"model": "tiny", **model}, "cache_config": {}}, "vllm_env": {}}


@pytest.mark.parametrize(
    ("fields", "engine"),
    [
        (
            info(logprobs_mode="processed_logprobs", generation_config="vllm", override_generation_config={}),
            EngineDefaults(logprobs_mode="processed", sampling=NEUTRAL),
        ),
        (info(logprobs_mode="raw_logprobs", generation_config="auto"), EngineDefaults(logprobs_mode="raw")),
        (
            info(generation_config="vllm", override_generation_config={"temperature": 0.6, "eos_token_id": [1]}),
            EngineDefaults(sampling=NEUTRAL | {"temperature": 0.6}),
        ),
        (
            info(generation_config="auto", override_generation_config={"top_k": 20}),
            EngineDefaults(sampling={"top_k": 20}),
        ),
        (info(logprobs_mode="processed_logits"), EngineDefaults()),
        (info(logprobs_mode=3), EngineDefaults()),
        ({"vllm_config": "model='tiny', dtype=torch.float32"}, EngineDefaults()),
        (None, EngineDefaults()),
        ([], EngineDefaults()),
    ],
)
def test_only_what_is_said_counts(fields: Any, engine: EngineDefaults) -> None:
    assert parse_engine(fields) == engine
