"""What the proxy itself answers: refusals, in the form that clients of these APIs show as the reason."""

from typing import Any

from aiohttp import web


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
    return web.json_response(error_body(status, message), status=status)
