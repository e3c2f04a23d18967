"""How keys and passwords are told: by their issuers' spelling, by the names of fields and headers, by looks.

`SHAPES` hold wherever they stand, also in what people and models say. So they take whole keys alone: words, variables
and examples of documentation stay. The rules of `QUOTED` are for settings, errors and addresses, where a name before a
value counts.
"""

import re
from functools import lru_cache

REDACTED = "[redacted]"
_DIGIT = r"(?=[\w-]{0,200}\d)"
_PLACEHOLDER = r"(?!(?i:passw(?:or)?d|pass|pwd|pw|secret|token|redacted|x+|\.+|\*+|your[\w-]*|my[\w-]*)@)"


def _issued(beginning: str, rest: str) -> tuple[str, re.Pattern[str], str]:
    """A key that begins so, with no letter before it but the `n` of a line end in JSON."""
    start = re.escape(beginning)
    return beginning, re.compile(rf"{start}(?:(?<![A-Za-z0-9_]{start})|(?<=\\[nrt]{start})){rest}"), REDACTED


def _rule(sign: str, pattern: str) -> tuple[str, re.Pattern[str], str]:
    """A rule that keeps its first group."""
    return sign, re.compile(pattern), rf"\1{REDACTED}"


_CONNECTED = (
    r"((?i:server|data source|host|hostaddr|user id|uid|endpoint|username|user)=[^;,()\s\"'{}]{1,200}(?:;\s*|[ ])"
    r"(?:\w{1,30}(?: \w{1,30})?=[^;,()\s\"'{}]{0,200}(?:;\s*|[ ])){0,9}(?i:password|pwd)=)(?![{$<*])[^;\s\"'\\]{3,}"
)
SHAPES = (
    _issued("sk-", rf"(?!ecdsa-|ssh-){_DIGIT}[\w-]{{16,}}"),
    *(_issued(f"{kind}k_{stage}_", r"\w{16,}") for kind in "srp" for stage in ("live", "test")),
    *(_issued(f"gh{kind}_", r"[A-Za-z0-9]{16,}") for kind in "pousr"),
    _issued("github_pat_", r"\w{16,}"),
    _issued("hf_", r"[A-Za-z0-9]{16,}"),
    _issued("gsk_", rf"{_DIGIT}\w{{16,}}"),
    *(_issued(name, rf"{_DIGIT}[\w-]{{16,}}") for name in ("glpat-", "nvapi-", "tvly-", "xai-", "pplx-")),
    *(_issued(f"xox{kind}-", rf"{_DIGIT}[\w-]{{10,}}") for kind in "abceoprsx"),
    *(_issued(f"lsv2_{kind}_", r"\w{16,}") for kind in ("pt", "sk")),
    _issued("npm_", r"[A-Za-z0-9]{36}"),
    _issued("dapi", r"[0-9a-f]{32}"),
    *(_issued(name, r"(?!\w{0,9}EXAMPLE)[0-9A-Z]{16}(?![0-9A-Za-z])") for name in ("AKIA", "ASIA")),
    _issued("AIza", rf"{_DIGIT}[\w-]{{30,}}"),
    _issued("ya29.", r"[\w-]{20,}"),
    _issued("eyJ", r"[\w-]{8,}\.eyJ[\w-]{8,}(?:\.[\w-]*)?"),
    # The end may be cut off; line ends may be spelled as in JSON.
    _rule(
        "PRIVATE KEY",
        r"()-----BEGIN [A-Z ]*PRIVATE KEY-----(?:\s|\\+[rn])*(?:[\w-]+: [^\r\n\\]{0,80}(?:\s|\\+[rn])+){0,3}"
        r"[A-Za-z0-9+/=]{16,}(?:(?:\s|\\+[rn])+[A-Za-z0-9+/=]+(?=[\s\\\"'-]|\Z))*"
        r"(?:(?:\s|\\+[rn])*-----END [A-Z ]*PRIVATE KEY-----)?",
    ),
    _rule("AccountKey=", r"(AccountKey=)[A-Za-z0-9+/=]{16,}"),
    _rule("AccessKey=", r"(AccessKey=)[A-Za-z0-9+/=]{16,}"),
    *(_rule(f"{b}earer ", rf"({b}earer )(?=[\w.~+/=-]{{0,200}}\d)[\w.~+/=-]{{16,}}") for b in "Bb"),
    _rule("uthorization", r"(uthorization\\?[\"']?\s*[:=]\s*\\?[\"']?(?:Basic|Token)\s+)[\w.~+/=-]{12,}"),
    _rule(
        "://",
        rf"(://)(?P<user>[^\s/?#@\"'<>{{}}$\[\]:\\]*):{_PLACEHOLDER}(?!(?P=user)@)[^\s/?#@\"'<>{{}}$\[\]\\]+(?=@)",
    ),
    *(_rule(sign, _CONNECTED) for sign in ("assword=", "wd=", "ASSWORD=", "WD=")),
)
"""Keys as their issuers spell them, and passwords in addresses and connection strings: what stands in every such text,
the rule, and what is put there instead."""
_W = "[0-9A-Za-z_]"
SIGNS = (
    rf"sk-[0-9A-Za-z_-]{{16}}|hf_{_W}{{16}}|gsk_{_W}{{16}}|gh[pousr]_{_W}{{16}}",
    rf"xox[a-z]-{_W}|xai-{_W}|pplx-{_W}|lsv2_|npm_{_W}{{30}}|ya29\.{_W}|nvapi-{_W}|tvly-{_W}|glpat-{_W}|github_pat_{_W}"
    rf"|k_live_{_W}|k_test_{_W}",
    r"AKIA[0-9A-Z]{16}|ASIA[0-9A-Z]{16}|AIza[0-9A-Za-z_-]{30}|eyJ[0-9A-Za-z_-]{8,}\.eyJ|-----BEGIN [A-Z ]*PRIVATE KEY"
    r"|://[^\s/?#@\"'<>{}$\[\]:\\]*:[^\s/?#@\"'<>{}$\[\]\\]+@|earer [0-9A-Za-z_.~+/=-]{16}|assword=[^{$<*]|wd=[^{$<*]"
    r"|countKey=[A-Za-z0-9+/=]{16}|ccessKey=[A-Za-z0-9+/=]{16}|uthorization.{0,8}(?:Basic|Token) |ASSWORD=|WD="
    r"|dapi[0-9a-f]{32}",
)
"""One of them stands in every text that `SHAPES` change. The engine of Polars finds few literals at a time, and classes
of ASCII, several times as fast as others."""

_NAME = (
    r"(?:api[-_]?key|authorization|access[-_]?token|refresh[-_]?token|auth[-_]?token|session[-_]?token|ad[-_]?token"
    r"|access[-_]?key(?:[-_]?id)?|private[-_]?key|account[-_]?key|secret(?:[-_]?key)?|passw(?:or)?d|credentials"
    r"|connection[-_]?string)"
)
_IN_QUERIES = (
    r"(?:(?:api[-_]?|access[-_]?)?key|(?:\w{1,40}[-_])?token|auth|code|sig|signature"
    r"|x-amz-(?:signature|credential|security-token))"
)
_ISSUED = (
    r"sk-[\w-]{6,}|[sr]k_(?:live|test)_\w{6,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|hf_[A-Za-z]{16,}"
    r"|gsk_\w{16,}|nvapi-[\w-]{16,}|tvly-[\w-]{12,}|xox[a-z]-[\w-]{8,}|A[KS]IA[0-9A-Z]{12,}|AIza[\w-]{20,}"
    r"|eyJ[\w-]{6,}\.[\w-]{6,}(?:\.[\w-]*)?"
)
QUOTED = tuple(
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
        (
            r"((?:^|[\s\"'])--?[\w-]{0,30}(?:api-?key|token|secret|passw(?:or)?d|credentials?)[= ])"
            r"[^\s\"'\[-][^\s\"']*",
            rf"\1{REDACTED}",
        ),
        (rf"(?<![A-Za-z0-9])(?:{_ISSUED})", REDACTED),
    )
)
"""Rules for texts that quote headers, addresses, settings and commands: errors, above all."""

# ---------------------------------------------------------------- names

_STRONG = (
    r"api[-_]?keys?|x[-_]api[-_]key|(?:proxy[-_])?authorization|(?:client|app|consumer)[-_]secret|(?:set[-_])?cookies?"
    r"|secret[-_](?:access[-_])?key|access[-_]key(?:[-_]id)?|(?:private|signing|encryption|account|subscription|master)[-_]key"
    r"|shared[-_]access[-_](?:key|signature)|passw(?:or)?d|passphrase|credentials?|connection[-_]string"
    r"|(?:personal[-_])?access[-_]token|(?:auth|authorization|bearer|ad|hf|id|refresh|security|session|jwt|github|gitlab)"
    r"[-_]token|bearer"
)
_WEAK = r"token|secrets?|pwd|pat|jwt|dsn|(?:auth|admin|azure|anthropic|google|openai|server|service|user|vendor)[-_]key"
STRONG = re.compile(rf"(?:^|.*[-_.])(?:{_STRONG})$", re.IGNORECASE)
"""Names of fields under which a key stands, whatever it looks like."""
WEAK = re.compile(rf"(?:^|.*[-_.])(?:{_WEAK})$|^(?:key|auth|sig|signature|account)$", re.IGNORECASE)
"""Names of fields under which one stands if it looks like one."""
HEADERS = re.compile(r"(?:^|[-_.])headers$", re.IGNORECASE)
ENVIRONMENTS = re.compile(r"^(?:env|environ|environment|environment[-_]variables)$", re.IGNORECASE)
_ANY_NAME = rf"{_STRONG}|{_WEAK}|key|auth|sig|signature|account|code|headers|env|environ|environment[-_]?variables"
NAMES = (
    rf"(?i)(?:{_ANY_NAME.replace('[-_]?', '[-_]').replace('[-_]', '[-_]?')}|environment)[\\\"']*\s*[:=,]"
    r"|header\.|(?:bearer|basic)\s|x-amz-[a-z-]{1,30}=|://[^\s/\"]{0,200}@|\bsk-[0-9a-z_-]{6}|eyJ"
    r"|-[a-z-]{0,30}(?:key|token|secret|passwd|password|credentials?)(?:[ =]|\\*\")"
)
"""Stands in every text of settings or of an error in which a name tells of a key, for the engine of Polars."""
_SPEECH_FIELDS = frozenset(
    (
        *("messages", "input", "prompt", "system", "instructions", "context", "initial_messages", "final_observation"),
        *("state", "action", "reasoning", "tool_calls", "ground_truth", "content", "arguments", "result", "text"),
        *("input_schema", "schema", "json_schema", "properties", "definitions", "$defs", "task_id"),
    )
)
_QUOTING = re.compile(
    r"(?:^|[._-])(?:urls?|uri|http|exception|errors?|process|server|net|network|peer|db|client|command|args|argv|config"
    r"|status|(?:invocation|model|request)_parameters|endpoint|headers?|stacktrace|traceback|failed_requests)(?:$|[._-])|^(?:reason|message|raw|stop_reason|parameters)$",
    re.IGNORECASE,
)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_HARMLESS = re.compile(
    r"(?:accept|accept-.*|allow|anthropic-(?:beta|version)|cache-control|connection|content-.*|date|dnt|etag|expect|from"
    r"|host|if-.*|keep-alive|openai-(?:beta|organization|project)|origin|pragma|priority|proxy-connection|range|referer"
    r"|sec-.*|server|te|trace(?:parent|state)|baggage|trailer|transfer-encoding|upgrade.*|user-agent|vary|via"
    r"|x-(?:forwarded-.*|real-ip|request-id|correlation-id|stainless-.*|trajlake-(?!token).*|session-id|title)"
    r"|(?:x-)?request-id|http-referer|idempotency-key)",
    re.IGNORECASE,
)
"""Headers that hold no key. `X-Session-ID` names a rollout; what it says is recorded."""
_TELLING = re.compile(
    r"auth|cookie|key|token|secret|passw|credential|signature|jwt|access|session|bearer|client-id|csrf|xsrf"
    r"|(?:^|[-_])(?:pat|sid|sig|api)(?:$|[-_])",
    re.IGNORECASE,
)


def has_key(name: str, value: object = None, *, is_request: bool = False) -> bool:
    """Whether a key or a password stands under the name of a field.

    Args:
        name: of `http.request.header.authorization` the last part counts.
        value: decides where the name alone says little.
        is_request: a field of a request, in which settings are few and keys likely.
    """
    if (strength := _strength(name)) == 0:
        return False
    if strength == _STRONG_NAME:
        return not isinstance(value, bool)
    if not isinstance(value, str):
        return False
    is_likely = is_request or _SECRET.search(name) is not None
    return looks_like_key(value) or (is_likely and len(value) >= _SHORTEST and " " not in value)


def is_name_of_key(name: str) -> bool:
    """Whether the name of a field or an option says that a key stands there, whatever its value is."""
    return _strength(name) == _STRONG_NAME or _SECRET.search(name) is not None


_STRONG_NAME = 2
_SECRET = re.compile(r"(?:^|[-_.])(?:secrets?|pwd)$", re.IGNORECASE)
_SHORTEST = 8
"""Characters of a key under such a name: the secret of a word game is shorter."""


@lru_cache(10_000)
def _strength(name: str) -> int:
    name = _CAMEL.sub("_", name.rpartition(".")[2])
    return _STRONG_NAME if STRONG.match(name) else 1 if WEAK.match(name) else 0


def is_header_of_key(name: str, value: str = "") -> bool:
    """Whether a header may hold a key: its name says so, or it is not known and its value looks like one."""
    if _HARMLESS.fullmatch(name):
        return False
    return _TELLING.search(name) is not None or any(map(looks_like_key, re.split(r"[\s;,=]+", value)))


def is_header_known(name: str) -> bool:
    """Whether a header is known to hold no key."""
    return _HARMLESS.fullmatch(name) is not None


def is_speech(field: str) -> bool:
    """Whether a field holds what was said, or a schema, whose names are of parameters."""
    return field.rpartition(".")[2] in _SPEECH_FIELDS


@lru_cache(10_000)
def is_quoting(field: str) -> bool:
    """Whether texts of a field quote addresses, headers and settings."""
    return _QUOTING.search(field) is not None


def looks_like_key(text: str) -> bool:
    """Whether a text looks like a key: no word, number, path or address, but letters and digits without a space."""
    if not 12 <= len(text) <= 8192 or not re.fullmatch(r"[\w.~+/=:|-]+", text, re.ASCII) or "//" in text:
        return False
    return any(map(str.isdigit, text)) and any(map(str.isalpha, text)) and not _ORDINARY.fullmatch(text)


_ORDINARY = re.compile(
    r"\d{4}-\d\d-\d\d(?:[T ].*)?"  # a time
    r"|[a-z.+-]+/[a-z0-9.+/;=-]*|[./~][\w.+/-]*"  # a type of media, or a path
    r"|(?:[a-z]+[-_:.])*[a-z]+[-_:.]?\d{1,6}"  # a name and a number
    r"|[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"  # a UUID
    r"|[\d.:-]+[a-z]{0,3}",  # a version, or a quantity
)
