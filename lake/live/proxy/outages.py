"""Why an upstream gave no answer, in words that say which address it is and what to do.

Agents get them as the error of their call, and the log has them once an outage, and once when it is over.
"""

import logging
import os

import aiohttp

_PLAIN = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNKNOWN_PROTOCOL", "PACKET_LENGTH_TOO_LONG")
"""What TLS makes of an answer in plain text."""
_log = logging.getLogger("trajlake")


class AnswerTooLongError(aiohttp.ClientError):
    """An answer that is longer than it may be."""


class Outages:
    """Whether an upstream can be reached, told when that changes.

    Args:
        base: its address, without a user and password.
    """

    def __init__(self, base: str) -> None:
        self._base = base
        self.problem: str | None = None
        """Why it cannot be reached; None as long as nothing is known of that."""

    def answered(self) -> None:
        """It answered something."""
        if self.problem is not None:
            self.problem = None
            _log.warning("upstream: %s answers again", self._base)

    def failed(self, error: Exception) -> str:
        """A call was not answered, or not wholly; why. Of one that reached nobody the log tells, once an outage."""
        if (problem := unreached(error, self._base)) is None:
            return _broken_off(error)
        if self.problem is None:
            _log.warning("upstream: %s", problem)
        self.problem = problem
        return problem


def unreached(error: Exception, base: str, option: str = "--upstream") -> str | None:
    """Why nobody was reached; None if somebody was. `option` is where the address was given."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        reason = getattr(error.certificate_error, "verify_message", "it says nothing")
        return f"the certificate of {base} is not trusted ({reason}); is {option} right?"
    if isinstance(error, aiohttp.ClientConnectorSSLError):
        return _without_tls(getattr(error.os_error, "reason", None) or "no reason was given", base, option)
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return f"the host of {base} is unknown; is {option} right?"
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        why = _reason(error.os_error) if isinstance(error, aiohttp.ClientConnectorError) else "no connection in time"
        return f"nothing answers at {base} ({why}); is the engine running, and is {option} right?"
    return None


def _without_tls(reason: str, base: str, option: str) -> str:
    if reason in _PLAIN:
        return f"{base} speaks no TLS; use http:// in {option}"
    return f"TLS with {base} failed ({reason.replace('_', ' ').lower()}); is {option} right?"


def _broken_off(error: Exception) -> str:
    if isinstance(error, AnswerTooLongError):
        return f"the upstream failed: {error}"
    if isinstance(error, TimeoutError):
        return "the upstream was silent for too long; a larger --timeout waits longer"
    if isinstance(error, aiohttp.ClientResponseError):
        return "the upstream failed: what it answers is no HTTP; if it speaks TLS, use https:// in --upstream"
    return "the upstream failed: it closed the connection before the answer was whole"


def _reason(error: OSError) -> str:
    """`connection refused`, without the addresses that asyncio adds."""
    return (os.strerror(error.errno) if error.errno else error.strerror or "no connection").lower()
