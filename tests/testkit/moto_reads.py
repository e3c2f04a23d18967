"""What moto is asked most, answered from moto's own memory: one object, its head, and plain lists.

Nine of ten requests of a lake in a bucket read, and each costs moto three milliseconds of CPU, for its tables of
services and its serializers. Writes, and all that is out of the ordinary, stay moto's.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import parse_qsl
from xml.sax.saxutils import escape

from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.s3.models import FakeBucket, FakeKey, s3_backends

Application = Callable[..., Iterable[bytes]]
_OBJECT = re.compile(r"/([a-z0-9-]+)/([\w.=/-]+)")
_BUCKET = re.compile(r"/([a-z0-9-]+)/?")
_PLAIN = re.compile(r"[\w.=/-]*")
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_LIST_MOST = 1000
_MISSING = "<Error><Code>NoSuchKey</Code><Message>The specified key does not exist.</Message><Key>{}</Key></Error>"


def before(moto: Application) -> Application:
    """Moto's WSGI application, with what can be read at once in front of it."""

    def call(self: Any, request: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        answer = _answer(request)
        if answer is None:
            return moto(self, request, start)
        status, headers, body = answer
        length = headers.pop("length", str(len(body)))
        start(status, [*headers.items(), ("Content-Length", length)])
        return [] if request["REQUEST_METHOD"] == "HEAD" else [body]

    return call


Answer = tuple[str, dict[str, str], bytes]


def _answer(request: dict[str, Any]) -> Answer | None:
    method, query = request["REQUEST_METHOD"], request.get("QUERY_STRING") or ""
    path = request.get("RAW_URI", "%").partition("?")[0]
    if method not in ("GET", "HEAD"):
        return None
    if not query and (named := _OBJECT.fullmatch(path)):
        bucket = _bucket(named[1])
        return bucket and _object(bucket, named[2], request.get("HTTP_RANGE"), is_head=method == "HEAD")
    if method == "GET" and query.startswith(("list-type=", "delimiter=")) and (named := _BUCKET.fullmatch(path)):
        bucket = _bucket(named[1])
        return bucket and _listed(bucket, dict(parse_qsl(query, keep_blank_values=True)))
    return None


def _bucket(name: str) -> Any:
    return s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets.get(name)


def _object(bucket: FakeBucket, name: str, byte_range: str | None, *, is_head: bool) -> Answer | None:
    key = bucket.keys.get(name)
    if key is None:
        return "404 Not Found", {"Content-Type": "application/xml"}, b"" if is_head else _MISSING.format(name).encode()
    if not isinstance(key, FakeKey):
        return None
    headers = dict(key.metadata) | {"ETag": key.etag, "Last-Modified": key.last_modified_RFC1123}
    if is_head:
        return "200 OK", headers | {"length": str(key.size)}, b""
    data = key.value
    if byte_range is None:
        return "200 OK", headers, data
    limits = _RANGE.fullmatch(byte_range)
    if limits is None or int(limits[1]) >= len(data):
        return None
    first, last = int(limits[1]), min(int(limits[2]), len(data) - 1)
    return (
        "206 Partial Content",
        headers | {"Content-Range": f"bytes {first}-{last}/{len(data)}"},
        data[first : last + 1],
    )


def _listed(bucket: FakeBucket, options: dict[str, str]) -> Answer | None:
    """ListObjectsV2 of a page."""
    prefix, after, delimiter = (options.pop(name, "") for name in ("prefix", "start-after", "delimiter"))
    if options != {"list-type": "2"} or delimiter not in ("", "/") or not _PLAIN.fullmatch(prefix + after):
        return None
    items: list[str] = []
    folders: set[str] = set()
    for name in sorted(name for name in dict.keys(bucket.keys) if name.startswith(prefix) and name > after):
        key = bucket.keys.get(name)
        folder, inside, _ = name[len(prefix) :].partition("/")
        if delimiter and inside:
            folders.add(prefix + folder + inside)
        elif not isinstance(key, FakeKey):
            return None
        else:
            items.append(
                f"<Contents><Key>{escape(name)}</Key><LastModified>{key.last_modified_ISO8601}</LastModified>"
                f"<ETag>{key.etag}</ETag><Size>{key.size}</Size></Contents>"
            )
    if len(items) + len(folders) > _LIST_MOST:
        return None
    items += [f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in sorted(folders)]
    body = (
        '<?xml version="1.0" encoding="utf-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<IsTruncated>false</IsTruncated>{''.join(items)}<KeyCount>{len(items)}</KeyCount></ListBucketResult>"
    )
    return "200 OK", {"Content-Type": "application/xml"}, body.encode()
