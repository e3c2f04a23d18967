"""What an engine says of how it samples, so that tokens are recorded with what the request leaves to it.

vLLM says it at `/server_info` when it runs with `VLLM_SERVER_DEV_MODE=1`. Where its defaults come from a model's
generation_config.json it does not say which they are; with `--generation-config vllm` they are neutral. SGLang is known
by who owns its models.
"""

from typing import Any

import msgspec

_MODES = {"processed_logprobs": "processed", "raw_logprobs": "raw"}
_NEUTRAL: dict[str, float | int] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """An engine, by what it says; nothing of it is guessed."""

    logprobs_mode: str | None = None
    """processed or raw: whether log-probabilities are taken after the temperature."""
    sampling: dict[str, float | int] = {}
    """Fields of `TokensRecord` -> how it samples where a request does not say."""
    dtype: str | None = None
    """Number type that it computes in."""


class _Model(msgspec.Struct):
    logprobs_mode: str | None = None
    generation_config: str | None = None
    override_generation_config: dict[str, Any] = {}
    dtype: str | None = None


class _Config(msgspec.Struct):
    model_config: _Model


class _Info(msgspec.Struct):
    vllm_config: _Config


def engine_of(info: Any) -> Engine:
    """The engine that answered `GET /server_info?config_format=json`; an empty one if that says nothing."""
    try:
        model = msgspec.convert(info, _Info).vllm_config.model_config
    except msgspec.ValidationError:
        return Engine()
    given = {key: value for key, value in model.override_generation_config.items() if isinstance(value, int | float)}
    defaults = _NEUTRAL if model.generation_config == "vllm" else {}
    sampling = defaults | {key: given[key] for key in _NEUTRAL if key in given}
    dtype = model.dtype.removeprefix("torch.") if model.dtype else None
    return Engine(logprobs_mode=_MODES.get(model.logprobs_mode or ""), sampling=sampling, dtype=dtype)


def owner_of(models: Any) -> str | None:
    """The engine that owns the models of `GET /v1/models`, where it is one that tells token ids."""
    listed = models.get("data") if isinstance(models, dict) else None
    owners = {model.get("owned_by") for model in listed or () if isinstance(model, dict)}
    return "sglang" if owners == {"sglang"} else None


def told_version(answer: Any) -> str | None:
    """The version of the weights that an answer says it was sampled with (SGLang: `metadata.weight_version`)."""
    said = answer.get("metadata") if isinstance(answer, dict) else None
    version = said.get("weight_version") if isinstance(said, dict) else None
    return version if isinstance(version, str) else None
