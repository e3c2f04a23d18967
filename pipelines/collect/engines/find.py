"""What answers at a URL, asked before anything is collected: its kind, its models.

Keys come from the environment variable TRAJLAKE_ENGINE_KEY, so that they stand in no command line and no table.
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
from pipelines.collect.engines.http import reached, shown
from pipelines.collect.engines.sglang import SglangEngine
from pipelines.collect.engines.vllm import VllmEngine

Api = Literal["vllm", "sglang", "chat"]
KEY = "TRAJLAKE_ENGINE_KEY"
_ASKING_SECONDS = 30.0
_MOST_NAMES = 20
"""Of models, in a message."""
_http = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def api_of(url: str) -> Api:
    """What an engine is, by the pages that only its kind has; chat: neither vLLM nor SGLang.

    Raises:
        UsageError: nothing answers.
    """
    if "version" in _page(url, "/version"):
        return "vllm"
    if _page(url, "/server_info") or _page(url, "/get_server_info"):
        return "sglang"
    return "chat"


def engine_at(url: str, api: Api | None = None) -> Engine:
    """The engine at a URL; None asks what it is.

    Raises:
        UsageError: nothing answers, or what takes no token ids.
    """
    found = api_of(url) if api is None else api
    if found == "chat":
        raise UsageError(f"{reached(url)[0]} is neither vLLM nor SGLang, and only these take token ids and weights")
    kind = VllmEngine if found == "vllm" else SglangEngine
    return kind(url, key=os.environ.get(KEY))


def folders_of(url: str) -> list[str]:
    """Where an engine says that its models were loaded from, adapters left out. Raises UsageError: nothing answers."""
    return [str(model["root"]) for model in _models(url) if model.get("root") and model.get("parent") is None]


def refuse_unserved(url: str, name: str) -> None:
    """Raise UsageError: nothing answers, or an endpoint that lists its models serves none by this name."""
    names = [str(model["id"]) for model in _models(url) if model.get("id")]
    if not names or name in names:
        return
    if _page(url, f"/v1/models/{quote(name)}").get("id"):  # of vendors, names that stand for one of those listed
        return
    listed = ", ".join(map(shown, names[:_MOST_NAMES])) + (", ..." if len(names) > _MOST_NAMES else "")
    raise UsageError(f"{reached(url)[0]} serves no model {name!r}; valid for --model: {listed}")


def _models(url: str) -> list[dict[str, Any]]:
    listed = _page(url, "/v1/models").get("data")
    return [model for model in listed if isinstance(model, dict)] if isinstance(listed, list) else []


def _page(url: str, path: str) -> dict[str, Any]:
    """A page of JSON; empty if there is none. Raises UsageError: nothing answers, or the URL is none."""
    base, headers = reached(url, os.environ.get(KEY))
    try:
        request = urllib.request.Request(base + path, headers=headers)
        with _http.open(request, timeout=_ASKING_SECONDS) as answer:
            found = json.load(answer)
    except (urllib.error.HTTPError, json.JSONDecodeError, UnicodeDecodeError):
        return {}
    except (OSError, HTTPException) as error:
        raise UsageError(f"nothing answers at {base} ({error}); `trajlake serve -h` starts an engine") from error
    return found if isinstance(found, dict) else {}
