"""An S3 server on this machine (moto), and endpoints that fail as real ones do.

The fixture `s3_server` is the one server of a test process, and `s3` a new bucket on it for each test.
"""

import itertools
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec

import pytest

from testkit.processes import environment

SECRET = "tl+SECRET/do-not-print-9f3a"
"""The secret key of every test: no byte of it may be found in a lake or in what a process prints."""

_NUMBERS = itertools.count(1)


@dataclass(frozen=True)
class Store:
    """A bucket on a server, and how to reach it.

    Attributes:
        endpoint: http://127.0.0.1:PORT.
        bucket: its name.
        root: a URI for a lake in it.
        options: storage options that reach it.
    """

    endpoint: str
    bucket: str

    @property
    def root(self) -> str:
        return f"s3://{self.bucket}/some/lake"

    @property
    def options(self) -> dict[str, str]:
        return options(self.endpoint)

    @property
    def environment(self) -> dict[str, str]:
        """The same options, as a process finds them in its environment."""
        return {name.upper(): value for name, value in self.options.items()}


def options(endpoint: str) -> dict[str, str]:
    """Storage options for an endpoint; no one is asked for credentials, the instance's metadata server included."""
    return {
        "aws_endpoint_url": endpoint,
        "aws_allow_http": "true",
        "aws_region": "us-east-1",
        "aws_access_key_id": "AKIATESTTESTTEST",
        "aws_secret_access_key": SECRET,
        "aws_metadata_endpoint": "http://127.0.0.1:9",
    }


_SERVER = """
import functools, logging, sys, threading
from botocore import utils
from moto import backends
from moto.moto_server.werkzeug_app import DomainDispatcherApplication
from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer
from testkit import moto_reads
# S3 decides If-None-Match and puts in one; moto looks first and puts later, so two writers could both be told yes.
put, one_at_a_time = S3Response.put_object, threading.Lock()
def put_object(self):
    with one_at_a_time:
        return put(self)
S3Response.put_object = put_object
# Half of what a request costs moto is that it lists its own folders and parses times that it wrote itself.
folders = tuple(backends.list_of_moto_modules())
backends.list_of_moto_modules = lambda: folders
utils._parse_timestamp_with_tzinfo = functools.lru_cache(1 << 16)(utils._parse_timestamp_with_tzinfo)
DomainDispatcherApplication.__call__ = moto_reads.before(DomainDispatcherApplication.__call__)
logging.getLogger("werkzeug").setLevel(logging.ERROR)  # not a line for every request
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print("http://%s:%d" % server.get_host_and_port(), flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The endpoint of a fresh S3 server.

    A separate process, which ends when the test's end of the pipe does: `DeltaTable.is_deltatable` keeps the GIL
    while it waits for an answer, so a server in a thread of the test would never give one.
    """
    if find_spec("moto") is None:
        pytest.skip("moto is not installed: pip install 'trajlake[dev]'")
    command = [sys.executable, "-W", "ignore", "-c", _SERVER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        endpoint = server.stdout.readline().strip()
        assert endpoint.startswith("http://127.0.0.1:"), "the server did not start"
        yield endpoint
        server.stdin.close()


@pytest.fixture
def s3(s3_server: str) -> Store:
    """A new bucket."""
    return new_bucket(s3_server)


def new_bucket(endpoint: str) -> Store:
    """A bucket that no one has used."""
    store = Store(endpoint, f"bucket-{next(_NUMBERS)}")
    with urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{store.bucket}", method="PUT")) as answer:
        assert answer.status == 200
    return store


@contextmanager
def answering(reply: Callable[[BaseHTTPRequestHandler, bytes], None]) -> Iterator[str]:
    """An HTTP endpoint that lets a function answer, given the request and its body."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            reply(self, self.rfile.read(int(self.headers.get("Content-Length") or 0)))

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def send(request: BaseHTTPRequestHandler, status: int, body: bytes = b"", **headers: str) -> None:
    """Answer a request."""
    request.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **headers}.items():
        request.send_header(name, value)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body)


def refusal(status: int, code: str) -> Callable[[BaseHTTPRequestHandler, bytes], None]:
    """An answer that refuses everything, as S3 words it."""
    body = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>{SECRET}</Message></Error>'
    return lambda request, _: send(request, status, body.encode())


def passed_on(endpoint: str, request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, bytes, dict[str, str]]:
    """What a server answers to a request."""
    connection = HTTPConnection(endpoint.removeprefix("http://"))
    try:
        connection.request(request.command, request.path, body, dict(request.headers))
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.headers)
    finally:
        connection.close()


def unused_endpoint() -> str:
    """An address at which no one listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"
