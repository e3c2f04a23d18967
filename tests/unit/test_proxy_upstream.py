"""What is said of an upstream: what it is, why it gave nothing, and which addresses are refused."""

import asyncio
import socket
from collections.abc import Callable

import aiohttp
import pytest
from click.testing import CliRunner

from lake.cli import trajlake
from lake.errors import UsageError
from lake.live.proxy.upstream import AnswerTooLongError, Outages, explain_unreachable, parse_base_url
from testkit.wording import Wording


def error_of(url: str) -> Exception:
    """What asking an address raises."""

    async def ask() -> Exception:
        async with aiohttp.ClientSession() as session:
            with pytest.raises((aiohttp.ClientError, TimeoutError)) as error:
                async with session.get(url, timeout=aiohttp.ClientTimeout(sock_connect=5, sock_read=0.2)):
                    pass
            return error.value

    return asyncio.run(ask())


def answering(say: Callable[[asyncio.StreamWriter], None], scheme: str = "http") -> Exception:
    """What asking a server raises that answers as told."""

    async def serve() -> Exception:
        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(100)
            say(writer)
            writer.close()

        async with await asyncio.start_server(talk, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await asyncio.to_thread(error_of, f"{scheme}://127.0.0.1:{port}/")

    return asyncio.run(serve())


def test_why_nobody_was_reached_is_told_with_the_address_and_what_to_do(wording: Wording) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        base = f"http://127.0.0.1:{closed.getsockname()[1]}"
        message = explain_unreachable(error_of(base), base)
    text = wording(message)
    assert f"at {base} (connection refused)" in text
    assert "is --upstream right?" in text
    plain = answering(lambda writer: writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "https")
    text = wording(explain_unreachable(plain, "https://a:1"))
    assert text.startswith("https://a:1 speaks no TLS")
    assert "use http:// in --upstream" in text


def test_what_broke_off_is_told_in_plain_words_and_is_no_outage() -> None:
    outages = Outages("http://a:1")
    closed = "the upstream failed: it closed the connection before the answer was whole"
    assert outages.failed(answering(lambda _: None)) == closed
    assert outages.failed(aiohttp.ClientPayloadError("<TransferEncodingError: 400>")) == closed
    assert outages.failed(AnswerTooLongError("it is long")) == "the upstream failed: it is long"
    assert "use https://" in outages.failed(
        answering(lambda writer: writer.write(b"\x15\x03\x01\x00\x02\x02\x46\r\n\r\n"))
    )
    assert "--set timeout=SECONDS" in outages.failed(aiohttp.SocketTimeoutError())
    assert outages.problem is None


def test_an_outage_is_told_once_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    outages = Outages("http://a:1")
    for _ in range(2):
        for _ in range(3):
            outages.failed(aiohttp.ConnectionTimeoutError())
        for _ in range(3):
            outages.answered()
    assert [message.partition(" (")[0] for message in caplog.messages] == [
        "upstream: nothing answers at http://a:1",
        "upstream: http://a:1 answers again",
    ] * 2


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/completions/", "/api/v1/responses", "/v1/messages"])
def test_an_endpoint_is_no_base_url(endpoint: str) -> None:
    base = f"http://127.0.0.1:8000{'/api' * endpoint.startswith('/api')}/v1"
    with pytest.raises(UsageError, match=f"an endpoint and .*; valid: {base}$"):
        parse_base_url(f"http://user:word@127.0.0.1:8000{endpoint}")


@pytest.mark.parametrize("url", ["http://a", "http://a/v1/", "https://a/openai/v1", "http://a/router"])
def test_what_may_be_a_base_url_is_taken(url: str) -> None:
    assert parse_base_url(url)[0] == url.rstrip("/").removesuffix("/v1")


def test_a_lake_that_cannot_be_is_refused_at_once(tmp_path: object) -> None:
    command = CliRunner().invoke(trajlake, ["record", "--upstream", "http://127.0.0.1:9", "--lake", __file__])
    assert command.exit_code != 0
    assert "recording" not in command.output
    assert "is a file, and" in str(command.exception or command.output)
