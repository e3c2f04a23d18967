"""Which engine answers at a URL: whoever is given one needs not say what it is.

Keys come from the environment variable TRAJLAKE_ENGINE_KEY, so that they stand in no command line and no table.
"""

import json
import os
import urllib.error
import urllib.request
from typing import Any, Literal

from lake.errors import UsageError
from pipelines.collect.engines import Engine
from pipelines.collect.engines.sglang import SglangEngine
from pipelines.collect.engines.vllm import VllmEngine

Api = Literal["vllm", "sglang", "chat"]
KEY = "TRAJLAKE_ENGINE_KEY"
_ASKING_SECONDS = 30.0
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
        raise UsageError(f"{url} is neither vLLM nor SGLang, and only these take token ids and weights")
    kind = VllmEngine if found == "vllm" else SglangEngine
    return kind(url, key=os.environ.get(KEY))


def folders_of(url: str) -> list[str]:
    """Where an engine says that its models were loaded from, adapters left out. Raises UsageError: nothing answers."""
    listed = _page(url, "/v1/models").get("data")
    models = [model for model in listed if isinstance(model, dict)] if isinstance(listed, list) else []
    return [str(model["root"]) for model in models if model.get("root") and model.get("parent") is None]


def _page(url: str, path: str) -> dict[str, Any]:
    """A page of JSON; empty if there is none. Raises UsageError: nothing answers."""
    headers = {"Authorization": f"Bearer {os.environ[KEY]}"} if KEY in os.environ else {}
    try:
        request = urllib.request.Request(url.rstrip("/").removesuffix("/v1") + path, headers=headers)
        with _http.open(request, timeout=_ASKING_SECONDS) as answer:
            found = json.load(answer)
    except (urllib.error.HTTPError, json.JSONDecodeError, UnicodeDecodeError):
        return {}
    except ValueError as error:
        raise UsageError(f"{url} is no URL ({error}); write http://HOST:PORT") from error
    except OSError as error:
        raise UsageError(f"nothing answers at {url} ({error}); `trajlake serve -h` starts an engine") from error
    return found if isinstance(found, dict) else {}
