"""Probe a URL before a collection starts: which API it serves, and which models.

Keys come from the environment variable TRAJLAKE_ENGINE_KEY, so that no command line and no table holds them.
"""

import json
import os
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any, Literal
from urllib.parse import quote

from lake.errors import UsageError
from pipelines.collect.engines import Engine
from pipelines.collect.engines.http import excerpt, parse_address
from pipelines.collect.engines.sglang import SglangEngine
from pipelines.collect.engines.vllm import VllmEngine

Api = Literal["vllm", "sglang", "chat"]
KEY = "TRAJLAKE_ENGINE_KEY"
_ASKING_SECONDS = 30.0
_MOST_NAMES = 20
"""Maximum models that a message lists."""
_http = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def detect_api(url: str) -> Api:
    """Return which API a URL serves, by pages that only one kind has; chat if neither vLLM nor SGLang.

    Raises:
        UsageError: nothing answers.
    """
    if "version" in _page(url, "/version"):
        return "vllm"
    if _page(url, "/server_info") or _page(url, "/get_server_info"):
        return "sglang"
    return "chat"


def connect_engine(url: str, api: Api | None = None) -> Engine:
    """Return the engine at a URL; without `api`, detect its kind.

    Raises:
        UsageError: nothing answers, or the endpoint takes no token ids.
    """
    detected = detect_api(url) if api is None else api
    if detected == "chat":
        raise UsageError(f"{parse_address(url)[0]} is neither vLLM nor SGLang; only these take token ids and weights")
    kind = VllmEngine if detected == "vllm" else SglangEngine
    return kind(url, key=os.environ.get(KEY))


def list_folders(url: str) -> list[str]:
    """Return the folders an engine loaded its models from, without adapters. Raises UsageError: nothing answers."""
    return [str(model["root"]) for model in _models(url) if model.get("root") and model.get("parent") is None]


def require_model(url: str, name: str) -> None:
    """Raise UsageError if nothing answers, or if the endpoint lists its models and `name` is not among them."""
    names = [str(model["id"]) for model in _models(url) if model.get("id")]
    if not names or name in names:
        return
    if _page(url, f"/v1/models/{quote(name)}").get("id"):  # vendors accept aliases that they do not list
        return
    listed = ", ".join(map(excerpt, names[:_MOST_NAMES])) + (", ..." if len(names) > _MOST_NAMES else "")
    raise UsageError(f"{parse_address(url)[0]} serves no model {name!r}; valid for --model: {listed}")


def _models(url: str) -> list[dict[str, Any]]:
    listed = _page(url, "/v1/models").get("data")
    return [model for model in listed if isinstance(model, dict)] if isinstance(listed, list) else []


def _page(url: str, path: str) -> dict[str, Any]:
    """Return a JSON page, or {} if it does not exist. Raises UsageError: nothing answers, or the URL is invalid."""
    base, headers = parse_address(url, os.environ.get(KEY))
    try:
        request = urllib.request.Request(base + path, headers=headers)
        with _http.open(request, timeout=_ASKING_SECONDS) as answer:
            page = json.load(answer)
    except (urllib.error.HTTPError, json.JSONDecodeError, UnicodeDecodeError):
        return {}
    except (OSError, HTTPException) as error:
        raise UsageError(f"nothing answers at {base} ({error}); `trajlake serve -h` starts an engine") from error
    return page if isinstance(page, dict) else {}
