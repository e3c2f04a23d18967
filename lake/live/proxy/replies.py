"""What the proxy itself answers: refusals, in the form that clients of these APIs show as the reason.

An answer that has begun cannot be refused any more: it is broken off, so that the client sees that it is not whole.
"""

from typing import Any

from aiohttp import web


class ClientLeftError(Exception):
    """The client closed its connection while an answer was on the way."""


class RefusedError(Exception):
    """A request that does not go on; the client is told why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    def response(self) -> web.Response:
        """As the client gets it; what is left of the request is not read."""
        response = refusal(self.status, str(self))
        response.force_close()
        return response


def error_body(status: int, message: str) -> dict[str, Any]:
    """An error in the form of OpenAI's and Anthropic's APIs."""
    return {"type": "error", "error": {"type": "trajlake_proxy", "message": message, "code": status, "param": None}}


def refusal(status: int, message: str) -> web.Response:
    """An error as a response."""
    # The client libraries of both APIs would send what is in conflict twice more.
    headers = {"x-should-retry": "false"} if status == 409 else None
    return web.json_response(error_body(status, message), status=status, headers=headers)


def broken(request: web.Request, begun: web.StreamResponse | None, status: int, message: str) -> web.StreamResponse:
    """The upstream gave nothing, or not all: say so, or break off the answer that has begun."""
    if begun is None:
        return refusal(status, message)
    if request.transport is not None:
        request.transport.close()
    return begun


async def send(response: web.StreamResponse, data: bytes) -> None:
    """Pass a piece of an answer on. Raises ClientLeftError."""
    try:
        await response.write(data)
    except ConnectionError as error:
        raise ClientLeftError from error
