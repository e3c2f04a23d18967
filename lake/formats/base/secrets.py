"""Keys and passwords, which no table keeps: those under a name in settings, and those that stand in a text.

Harnesses write down what they were called with; exceptions of HTTP clients quote headers and addresses.
"""

import re
from typing import Any

REDACTED = "[redacted]"
QUOTING = ("url.", "http.", "exception.")
"""How names of attributes of OpenTelemetry begin that quote addresses and headers, and not what was said."""
_NAMES = frozenset(
    (
        "api_key",
        "apikey",
        "x-api-key",
        "authorization",
        "proxy-authorization",
        "cookie",
        "set-cookie",
        "access_token",
        "password",
        "secret",
        "client_secret",
        "credentials",
        "vertex_credentials",
        "azure_ad_token",
        "aws_access_key_id",
        "aws_secret_access_key",
        "aws_session_token",
    )
)
_NAME = (
    r"(?:api[-_]?key|authorization|access[-_]?token|refresh[-_]?token|auth[-_]?token|session[-_]?token|ad[-_]?token"
    r"|access[-_]?key(?:[-_]?id)?|secret(?:[-_]?key)?|passw(?:or)?d|credentials)"
)
_IN_QUERIES = r"(?:key|token|auth|code|sig|signature|x-amz-(?:signature|credential|security-token))"
_ISSUED = (
    r"sk-[\w-]{6,}|[sr]k_(?:live|test)_\w{6,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|hf_[A-Za-z]{16,}"
    r"|gsk_\w{16,}|nvapi-[\w-]{16,}|tvly-[\w-]{12,}|xox[a-z]-[\w-]{8,}|A[KS]IA[0-9A-Z]{12,}|AIza[\w-]{20,}"
    r"|eyJ[\w-]{6,}\.[\w-]{6,}(?:\.[\w-]*)?"
)
_RULES = tuple(
    (re.compile(pattern, re.IGNORECASE), replacement)
    for pattern, replacement in (
        (r"(\bcookie[\"']?\s*[:=,]\s*b?[\"']?)[^\r\n\"']+", rf"\1{REDACTED}"),
        (rf"({_NAME}[\"']\s*[:=,]\s*b?([\"']))(?:(?!\2)[^\\\r\n]|\\.)*", rf"\1{REDACTED}"),
        (rf"({_NAME}\s*[:=]\s*)(?:(?:bearer|basic|token|digest)\s+)?[^\s,;&\"'<>(){{}}\[\]]+", rf"\1{REDACTED}"),
        (rf"({_NAME}\s*[:=]\s*([\"']))(?:(?!\2)[^\\\r\n]|\\.)*", rf"\1{REDACTED}"),
        # A word that is no secret may follow: `Basic understanding`.
        (r"(\b(?:bearer|basic)\s+)(?:(?=[^\s\"',;]*[0-9=])[^\s\"',;]{6,}|[^\s\"',;]{24,})", rf"\1{REDACTED}"),
        (rf"([?&;]{_IN_QUERIES}=)[^\s&#;\"'<>\[]+", rf"\1{REDACTED}"),
        (r"(?<=://)[^\s/?#@\"'<>\[]+@", f"{REDACTED}@"),
        (rf"(?<![A-Za-z0-9])(?:{_ISSUED})", REDACTED),
    )
)


def without_secrets(settings: Any) -> Any:
    """Settings without keys and passwords, at any depth."""
    if isinstance(settings, dict):
        return {key: _kept(key, value) for key, value in settings.items() if not is_secret(key)}
    if isinstance(settings, list):
        return [without_secrets(value) for value in settings]
    return settings


def _kept(key: str, value: Any) -> Any:
    return redacted(value) if isinstance(value, str) and key.startswith(QUOTING) else without_secrets(value)


def redacted(text: str) -> str:
    """A text without the keys and passwords that can be told as such.

    They are told by the name before them (`Authorization: ...`, `api_key=...`, `Cookie: ...`), by their place in an
    address (user and password, the key of a query), or by how their issuers spell them (`sk-...`, `Bearer ...`).
    """
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text


def is_secret(key: str) -> bool:
    """Whether a key or a password stands under a name; of `http.request.header.authorization` the last part counts."""
    name = key.lower().rpartition(".")[2]
    return name in _NAMES or name.endswith("_api_key")
