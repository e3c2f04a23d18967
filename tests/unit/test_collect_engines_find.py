"""What is asked at an engine's address before anything is collected: the names of its models."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from lake.errors import UsageError
from pipelines.collect.engines.find import require_model

LISTED = {"/v1/models": {"data": [{"id": f"m{number}"} for number in range(30)]}}


@contextmanager
def endpoint(pages: dict[str, Any]) -> Iterator[str]:
    """The URL of a server that has these pages, and 404 for all others."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = pages.get(self.path)
            self.send_response(404 if page is None else 200)
            self.end_headers()
            self.wfile.write(json.dumps(page).encode())

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    "pages",
    [
        LISTED | {"/v1/models/a%20name": {"id": "m7"}},
        {"/v1/models": {"data": [{"id": "a name"}]}},
        {"/v1/models": {"data": []}},
        {"/v1/models": {"data": "none"}},
        {"/v1/models": ["a name"]},
        {},
    ],
    ids=["another name of one", "listed", "lists none", "lists no models", "no list", "no such page"],
)
def test_a_name_that_is_served_or_cannot_be_looked_up_is_used(pages: dict[str, Any]) -> None:
    with endpoint(pages) as url:
        require_model(f"{url}/v1", "a name")


def test_another_name_is_refused_with_the_first_of_those_that_are_served() -> None:
    with endpoint(LISTED) as url, pytest.raises(UsageError) as refused:
        require_model(url, "m30")
    names = ", ".join(f"m{number}" for number in range(20))
    assert str(refused.value) == f"{url} serves no model 'm30'; valid for --model: {names}, ..."
