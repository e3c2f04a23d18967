"""Keys and passwords, which no table, spool or log may hold: the one rule for all input.

`Secrets.remove_keys` returns a value without its keys. Three things identify a key:

1. Its value, in any field: the credentials of the same request. `Secrets` remembers headers, query parameters and
   fields of a body that hold them.
2. Its spelling, in any field (`SHAPES`), also in messages of people and models. These patterns therefore match complete
   keys only: words, variables and examples of documentation stay.
3. The name before it (`api_key`, `Authorization`), in settings, errors and addresses (`QUOTED`). Names in messages do
   not count: a game may ask for a password, and a tool may take one.

`NO_REQUEST.remove_keys` is the rule for values without a request: files, spans of this process, errors.
"""

import base64
import binascii
import json
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import msgspec

REDACTED = "[redacted]"
_DIGIT = r"(?=[\w-]{0,200}\d)"
_PLACEHOLDER = r"(?!(?i:passw(?:or)?d|pass|pwd|pw|secret|token|redacted|x+|\.+|\*+|your[\w-]*|my[\w-]*)@)"


def _issued(beginning: str, rest: str) -> tuple[str, re.Pattern[str], str]:
    """Return the rule of a key with this beginning; only the `n` of a line end in JSON may precede it as a letter."""
    start = re.escape(beginning)
    return beginning, re.compile(rf"{start}(?:(?<![A-Za-z0-9_]{start})|(?<=\\[nrt]{start})){rest}"), REDACTED


def _rule(sign: str, pattern: str) -> tuple[str, re.Pattern[str], str]:
    """Return a rule that keeps its first group."""
    return sign, re.compile(pattern), rf"\1{REDACTED}"


_CONNECTION_STRING = (
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
    # The end may be cut off; line ends may be written as in JSON.
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
    *(_rule(sign, _CONNECTION_STRING) for sign in ("assword=", "wd=", "ASSWORD=", "WD=")),
)
"""Keys in their issuers' spelling, and passwords in addresses and connection strings: a sign that every such text
contains, the pattern, and its replacement."""
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
"""Every text that `SHAPES` change matches one of these. Polars searches for few literals at a time, and for classes of
ASCII, several times as fast as for others."""

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
        # An ordinary word may follow: `Basic understanding`.
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
"""Rules for texts that quote headers, addresses, settings and commands, mostly errors."""

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
"""Names of fields that hold a key, regardless of its look."""
WEAK = re.compile(rf"(?:^|.*[-_.])(?:{_WEAK})$|^(?:key|auth|sig|signature|account)$", re.IGNORECASE)
"""Names of fields that hold a key if the value looks like one."""
HEADERS = re.compile(r"(?:^|[-_.])headers$", re.IGNORECASE)
ENVIRONMENTS = re.compile(r"^(?:env|environ|environment|environment[-_]variables)$", re.IGNORECASE)
_ANY_NAME = rf"{_STRONG}|{_WEAK}|key|auth|sig|signature|account|code|headers|env|environ|environment[-_]?variables"
NAMES = (
    rf"(?i)(?:{_ANY_NAME.replace('[-_]?', '[-_]').replace('[-_]', '[-_]?')}|environment)[\\\"']*\s*[:=,]"
    r"|header\.|(?:bearer|basic)\s|x-amz-[a-z-]{1,30}=|://[^\s/\"]{0,200}@|\bsk-[0-9a-z_-]{6}|eyJ"
    r"|-[a-z-]{0,30}(?:key|token|secret|passwd|password|credentials?)(?:[ =]|\\*\")"
)
"""Pattern, for Polars, that matches every text of settings or of an error in which a name announces a key."""
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
"""Headers that hold no key. `X-Session-ID` names a rollout; its value is recorded."""
_TELLING = re.compile(
    r"auth|cookie|key|token|secret|passw|credential|signature|jwt|access|session|bearer|client-id|csrf|xsrf"
    r"|(?:^|[-_])(?:pat|sid|sig|api)(?:$|[-_])",
    re.IGNORECASE,
)
_STRONG_NAME = 2
_SECRET = re.compile(r"(?:^|[-_.])(?:secrets?|pwd)$", re.IGNORECASE)
_SHORTEST = 8
"""Characters of a key under such a name: the secret of a word game is shorter."""
_ORDINARY = re.compile(
    r"\d{4}-\d\d-\d\d(?:[T ].*)?"  # a time
    r"|[a-z.+-]+/[a-z0-9.+/;=-]*|[./~][\w.+/-]*"  # a media type, or a path
    r"|(?:[a-z]+[-_:.])*[a-z]+[-_:.]?\d{1,6}"  # a name and a number
    r"|[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"  # a UUID
    r"|[\d.:-]+[a-z]{0,3}",  # a version, or a quantity
)


def has_key(name: str, field: object = None, *, is_request: bool = False) -> bool:
    """Return whether a key or a password stands under the name of a field.

    Args:
        name: the name; the last part of `http.request.header.authorization` counts.
        field: the value, which decides when the name alone is not enough.
        is_request: whether it is a field of a request, which has few settings and probably a key.
    """
    if (strength := _rate_name(name)) == 0:
        return False
    if strength == _STRONG_NAME:
        return not isinstance(field, bool)
    if not isinstance(field, str):
        return False
    is_likely = is_request or _SECRET.search(name) is not None
    return looks_like_key(field) or (is_likely and len(field) >= _SHORTEST and " " not in field)


@lru_cache(10_000)
def _rate_name(name: str) -> int:
    name = _CAMEL.sub("_", name.rpartition(".")[2])
    return _STRONG_NAME if STRONG.match(name) else 1 if WEAK.match(name) else 0


def is_secret_name(name: str) -> bool:
    """Return whether a name alone says that its value is a key or a password.

    The last part of a dotted name such as `http.request.header.authorization` counts.
    """
    return _rate_name(name) == _STRONG_NAME or _SECRET.search(name) is not None or _is_secret_field(name, "")


def is_header_of_key(name: str, header: str = "") -> bool:
    """Return whether a header may hold a key, by its name or, if the name is unknown, by the look of its value."""
    if _HARMLESS.fullmatch(name):
        return False
    return _TELLING.search(name) is not None or any(map(looks_like_key, re.split(r"[\s;,=]+", header)))


def is_header_known(name: str) -> bool:
    """Return whether a header is known to hold no key."""
    return _HARMLESS.fullmatch(name) is not None


def is_speech(field_name: str) -> bool:
    """Return whether a field holds messages, or a schema, whose names are those of parameters."""
    return field_name.rpartition(".")[2] in _SPEECH_FIELDS


@lru_cache(10_000)
def is_quoting(field_name: str) -> bool:
    """Return whether texts of a field quote addresses, headers and settings."""
    return _QUOTING.search(field_name) is not None


def looks_like_key(text: str) -> bool:
    """Return whether a text has letters and digits without a space, and is no word, number, path or address."""
    if not 12 <= len(text) <= 8192 or not re.fullmatch(r"[\w.~+/=:|-]+", text, re.ASCII) or "//" in text:
        return False
    return any(map(str.isdigit, text)) and any(map(str.isalpha, text)) and not _ORDINARY.fullmatch(text)


# ---------------------------------------------------------------- redaction

_SPEECH, _SETTINGS, _QUOTED, _MARKED = 0, 1, 2, 3
"""Kinds of context: messages; settings, whose names count; errors, addresses and commands, whose texts quote both; JSON
inside such a text, in which a mark replaces a key."""
_QUERIES = re.compile(r"auth|key|token|secret|passw|credential|sig(?:nature)?$|code$|jwt|session", re.IGNORECASE)
_FLAG = re.compile(r"--?[\w-]*(?:api-?key|token|secret|passw(?:or)?d|credentials?|auth)", re.IGNORECASE)
_IDS = ("token_ids", "prompt_token_ids", "response_token_ids", "prompt_ids", "action_ids", "logprobs")
"""Fields that hold a text as tokens."""
_PREFIX_LENGTH = 12
"""Characters of a key that are searched for: texts may be cut inside a key."""
_TAIL = r"[^\s\"'\\<>,;&]*"
_LONG = 6000
"""Characters from which on Polars searches faster; a call costs 0.1 ms."""
_DEEPEST = 200
_REMOVED: Any = object()
_PLAIN = frozenset({int, float, bool, type(None)})  # a list of token ids has thousands: their types are checked at once
TOKENS_SPELL_KEY = "they spell a key, or extend tokens that do"
"""Reason, in `extra.tokens_left_out`, why a step that lost a key has no tokens."""
TEXT_FIELDS = ("state", "context", "reasoning", "action", "tool_calls")
"""Fields of a step that its tokens spell."""


class Secrets:
    """The rule for one request; see the module.

    Args:
        headers: headers of the request, and those that a proxy adds.
        query: query of its address.
        looks_for_shapes: False skips the patterns of `SHAPES`, after `has_signs` returned False.
    """

    def __init__(
        self, headers: Iterable[tuple[str, str]] = (), query: str = "", *, looks_for_shapes: bool = True
    ) -> None:
        self._looks_for_shapes = looks_for_shapes
        self._keys: set[str] = set()
        self._pattern: re.Pattern[str] | None = None
        self._prefixes: tuple[str, ...] = ()
        for name, header in headers:
            if is_header_of_key(name, header):
                self.add(header)
        self._add_query(query)

    def remove_keys(self, original: Any, field_name: str = "") -> Any:
        """Return a value of JSON without keys; the same object if it holds none.

        Args:
            original: a text, or anything that JSON can hold.
            field_name: the name of its column or field.
        """
        clean = self._clean(original, _get_kind(field_name, _SETTINGS), 0)
        return None if clean is _REMOVED else clean

    def remove_key_fields(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a request's body without the fields that hold keys, and remember these keys; texts stay unchanged."""
        fields = ((name, self._clean_request_field(name, original, 0)) for name, original in body.items())
        return {name: clean for name, clean in fields if clean is not _REMOVED}

    def has_key_in(self, text: str) -> bool:
        """Return whether a text holds a key."""
        return self._clean_text(text, _SPEECH) != text

    def clean_error(self, text: str) -> str:
        """Return the text of an error or an address without keys."""
        return self._clean_text(text, _QUOTED)

    def may_hold_key(self, text: str) -> bool:
        """Return whether JSON text may hold a key by its value or its spelling: a quick check before it is decoded."""
        return self._is_known_in(text) or has_signs(text)

    def add(self, header: str) -> None:
        """Remember a header's value or the like, with its parts: `Bearer KEY`, `a=KEY; b=KEY`, `Basic BASE64`."""
        for part in re.split(r"[\s;,]+", header):
            for piece in (part, part.partition("=")[2].strip('"')):
                is_mixed = any(map(str.isdigit, piece)) and any(map(str.isalpha, piece))
                if len(piece) >= _PREFIX_LENGTH or (len(piece) >= _SHORTEST and is_mixed):
                    self._keys.add(piece)
                    self._pattern = None
        if header.lower().startswith("basic "):
            with suppress(binascii.Error, UnicodeDecodeError):
                self.add(base64.b64decode(header[6:].strip(), validate=True).decode().partition(":")[2])

    def _add_query(self, query: str) -> None:
        for name, parameter in parse_qsl(query, errors="replace"):
            if _QUERIES.search(name):
                self.add(parameter)

    def _add_texts(self, field: Any) -> None:
        for text in _iterate_texts(field):
            self.add(text)

    # ------------------------------------------------------------ fields of a request

    def _clean_request_field(self, name: str, field: Any, depth: int) -> Any:
        """Return a field of a request without the fields inside it that hold keys."""
        if is_speech(name) or depth > _DEEPEST:
            return field
        if has_key(name, field, is_request=True):
            self._add_texts(field)
            return _REMOVED
        if isinstance(field, dict):
            return self._clean_request_object(name, field, depth)
        if isinstance(field, list):
            return self._clean_request_list(name, field, depth)
        if not isinstance(field, str) or not name.endswith(("url", "uri", "endpoint")):
            return field
        with suppress(ValueError):
            address = urlsplit(field)
            self._add_query(address.query)
            self.add(unquote(address.password or ""))
        return self._clean_text(field, _QUOTED)

    def _clean_request_object(self, name: str, fields: dict[str, Any], depth: int) -> Any:
        if isinstance(fields.get("properties"), dict):
            return fields  # a schema, whose names are of parameters
        if HEADERS.search(name) or ENVIRONMENTS.match(name):
            clean = {key: field for key, field in fields.items() if _is_harmless(name, key, field)}
            self._add_texts([field for key, field in fields.items() if key not in clean])
            return clean or _REMOVED
        pairs = ((key, self._clean_request_field(key, field, depth + 1)) for key, field in fields.items())
        return {key: field for key, field in pairs if field is not _REMOVED}

    def _clean_request_list(self, name: str, entries: list[Any], depth: int) -> Any:
        clean = []
        for entry in entries:
            key, field = _split_pair(entry, name)
            if key is not None and (
                _is_secret_header(key, field) if HEADERS.search(name) else _is_secret_field(key, field)
            ):
                self._add_texts(field)
            elif (clean_entry := self._clean_request_field("", entry, depth + 1)) is not _REMOVED:
                clean.append(clean_entry)
        return clean if clean or not entries else _REMOVED

    # ------------------------------------------------------------ values without keys

    def _clean(self, original: Any, kind: int, depth: int) -> Any:
        if isinstance(original, str):
            return self._clean_text(original, kind)
        if depth > _DEEPEST or (kind == _SPEECH and not self._looks_for_shapes and not self._keys):
            return original
        if isinstance(original, dict):
            return self._clean_object(original, kind, depth + 1)
        if isinstance(original, list):
            return original if _PLAIN.issuperset(map(type, original)) else self._clean_list(original, kind, depth + 1)
        return self._clean_struct(original, kind, depth + 1) if isinstance(original, msgspec.Struct) else original

    def _clean_struct(self, struct: msgspec.Struct, kind: int, depth: int) -> Any:
        changes = {}
        for name in struct.__struct_fields__:
            original = getattr(struct, name)
            if type(original) not in _PLAIN:
                clean = self._clean(original, _get_kind(name, kind), depth)
                if clean is not original and clean != original:
                    changes[name] = None if clean is _REMOVED else clean
        return msgspec.structs.replace(struct, **changes) if changes else struct

    def _clean_object(self, fields: dict[str, Any], kind: int, depth: int) -> Any:
        if kind != _SPEECH and (isinstance(fields.get("properties"), dict) or isinstance(fields.get("role"), str)):
            kind = _SPEECH  # a schema, whose names are of parameters; a message
        pair_name, pair_field = _split_pair(fields, "") if kind != _SPEECH else (None, None)
        if pair_name is not None and _is_secret_field(pair_name, pair_field):
            return fields | {"value": REDACTED} if kind == _MARKED else _REMOVED
        clean_fields: dict[str, Any] = {}
        has_changed = False
        for name, original in fields.items():
            if kind != _SPEECH and _is_secret_field(name, original):
                has_changed = True
                if kind == _MARKED:
                    clean_fields[name] = REDACTED
                continue
            inner_kind = _get_kind(pair_name if pair_name is not None and name == "value" else name, kind)
            if kind != _SPEECH and isinstance(original, dict) and (HEADERS.search(name) or ENVIRONMENTS.match(name)):
                clean: Any = {key: entry for key, entry in original.items() if _is_harmless(name, key, entry)}
                clean = self._clean(original if len(clean) == len(original) else clean, inner_kind, depth)
                clean = _REMOVED if original and not clean else clean
            elif kind != _SPEECH and isinstance(original, list) and HEADERS.search(name):
                entries = [entry for entry in original if not _is_secret_header(*_split_pair(entry, name))]
                clean = self._clean(entries, inner_kind, depth)
                clean = original if clean == original else clean
            else:
                clean = self._clean(original, inner_kind, depth)
            has_changed |= clean is not original and (clean is _REMOVED or clean != original)
            if clean is not _REMOVED:
                clean_fields[self._clean_text(name, _SPEECH)] = clean
        if not has_changed and clean_fields.keys() == fields.keys():
            return fields
        for name in _IDS:
            if isinstance(clean_fields.get(name), list | dict):
                clean_fields[name] = None
        return clean_fields

    def _clean_list(self, entries: list[Any], kind: int, depth: int) -> Any:
        clean_entries = []
        is_after_flag = False
        for entry in entries:
            text = entry.get("stringValue") if isinstance(entry, dict) else entry  # OTLP wraps texts
            text = text if isinstance(text, str) else None
            if is_after_flag and text is not None:
                clean: Any = REDACTED if isinstance(entry, str) else entry | {"stringValue": REDACTED}
            else:
                clean = self._clean(entry, kind, depth)
            is_after_flag = kind >= _QUOTED and text is not None and _FLAG.fullmatch(text) is not None
            if clean is not _REMOVED:
                clean_entries.append(clean)
        is_same = len(clean_entries) == len(entries) and all(
            clean is original or (isinstance(clean, str) and clean == original)
            for clean, original in zip(clean_entries, entries, strict=True)
        )
        return entries if is_same else clean_entries

    def _clean_text(self, text: str, kind: int) -> str:
        if self._is_known_in(text):
            assert self._pattern is not None
            text = self._pattern.sub(REDACTED, text)
        if kind >= _QUOTED:
            if text[:1] in ("{", "[") and (document := _decode_document(text)) is not None:
                if (clean := self._clean(document, _MARKED, 0)) is document:
                    return text
                return json.dumps(None if clean is _REMOVED else clean, ensure_ascii=False)
            for pattern, replacement in QUOTED:
                text = pattern.sub(replacement, text)
        if self._looks_for_shapes:
            for sign, pattern, replacement in SHAPES:
                if sign in text:
                    text = pattern.sub(replacement, text)
        return text

    def _is_known_in(self, text: str) -> bool:
        if self._pattern is None and self._keys:
            self._compile()
        return any(prefix in text for prefix in self._prefixes)

    def _compile(self) -> None:
        """Build the pattern of the keys as they are, in JSON inside a text, in base64, and in an address."""
        escaped = {json.dumps(key)[1:-1] for key in self._keys}
        spellings = self._keys | escaped | {key.replace("/", r"\/") for key in escaped}
        spellings |= {quote(key, safe="", errors="replace") for key in self._keys}
        spellings |= {base64.b64encode(key.encode("utf-8", "surrogateescape")).decode() for key in self._keys}
        longest_first = sorted(spellings, key=len, reverse=True)
        patterns = [re.escape(key) for key in longest_first]
        patterns += [re.escape(key[:_PREFIX_LENGTH]) + _TAIL for key in longest_first if len(key) > _PREFIX_LENGTH]
        self._pattern = re.compile("|".join(patterns))
        self._prefixes = tuple({key[:_PREFIX_LENGTH] for key in spellings})


NO_REQUEST = Secrets()
"""The rule for values without a request."""
BY_NAME = Secrets(looks_for_shapes=False)
"""The rule for values without a request in which `has_signs` found no key."""


class KeylessRecords(logging.Filter):
    """Removes keys from log records."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Remove keys from a record, and let it pass."""
        message = record.getMessage()
        if (clean := redact(message)) != message:
            record.msg, record.args = clean, ()
        if record.exc_info:
            record.exc_text = redact(logging.Formatter().formatException(record.exc_info))
        return True


def redact(text: str) -> str:
    """Return the text of an error, an address or a command without recognisable keys and passwords."""
    return NO_REQUEST.clean_error(text)


def remove_keys(original: Any, field_name: str = "") -> Any:
    """Return a value of JSON that came without a request, without keys; the same object if it holds none."""
    return NO_REQUEST.remove_keys(original, field_name)


def has_signs(text: str) -> bool:
    """Return whether a text holds a key by its spelling."""
    if len(text) > _LONG:
        import polars as pl

        texts = pl.Series([text])
        if not any(texts.str.contains(sign)[0] for sign in SIGNS):
            return False
    return any(sign in text and pattern.search(text) is not None for sign, pattern, _ in SHAPES)


def _get_kind(field_name: str, outer_kind: int) -> int:
    """Return the kind of a field, inside a value of kind `outer_kind`."""
    if outer_kind == _SPEECH or is_speech(field_name):
        return _SPEECH
    return max(outer_kind, _QUOTED) if outer_kind >= _QUOTED or is_quoting(field_name) else _SETTINGS


def _is_secret_field(name: str, field: Any) -> bool:
    """Return whether a field is removed for its name."""
    before, is_header, header = name.lower().rpartition("header.")
    if is_header and before.endswith((".", "")):
        return is_header_of_key(header.replace("_", "-"), next(_iterate_texts(field), ""))
    return has_key(name, field.get("stringValue", field) if isinstance(field, dict) else field)


def _is_secret_header(name: str | None, field: Any) -> bool:
    return name is not None and not is_header_known(name) and any(_iterate_texts(field))


def _is_harmless(field_name: str, name: str, field: Any) -> bool:
    """Return whether a header, or a variable of an environment, may stay."""
    if not any(_iterate_texts(field)):
        return True
    if HEADERS.search(field_name):
        return is_header_known(name)
    is_key = is_header_of_key(name.replace("_", "-")) or any(map(looks_like_key, _iterate_texts(field)))
    return not name.isupper() or not is_key


def _split_pair(entry: Any, field_name: str) -> tuple[str | None, Any]:
    """Return the name and value of {name, value} or {key, value}; in headers also of [name, value] and texts."""
    if isinstance(entry, dict) and "value" in entry:
        name = entry.get("key", entry.get("name"))
        return (name, entry["value"]) if isinstance(name, str) else (None, None)
    if HEADERS.search(field_name):
        if isinstance(entry, list | tuple) and len(entry) == 2 and isinstance(entry[0], str):
            return entry[0], entry[1]
        if isinstance(entry, str):
            name, colon, header = entry.partition(":")
            if colon and re.fullmatch(r"[\w-]+", name):
                return name, header.strip()
    return None, None


def _iterate_texts(field: Any) -> Iterator[str]:
    if isinstance(field, str):
        if field:
            yield field
    elif isinstance(field, dict | list | tuple):
        for entry in field.values() if isinstance(field, dict) else field:
            yield from _iterate_texts(entry)
    elif field is not None and not isinstance(field, bool):
        yield str(field)


def _decode_document(text: str) -> Any:
    try:
        document = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return document if isinstance(document, dict | list) else None
