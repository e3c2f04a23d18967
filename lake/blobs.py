"""Payloads too big for a row: images and texts over 64 KB move to `blobs` and are referred to by hash.

In a JSON column, a long text (an image as a data URI is one) is replaced by the text `blob:sha256:<64 digits>`, and a
document that is long without holding a long text (a list of tools) is replaced as a whole. What a step's `state` and
`action` say stays in the row: they are what SQL and credit look at. `inlined` puts everything back, byte for byte.

A write attempt stores a payload once, for its own episodes and for no others: so whether a payload is still needed is
known without looking at any other write, and erasure races with nobody.
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import polars as pl

from lake import ids
from lake.columns import Table, Type
from lake.reading import collected
from lake.snapshot import Snapshot
from lake.tables import BLOBS

LIMIT = 64 << 10
"""Bytes of UTF-8 that stay in a row."""
_REFERENCE = re.compile(r'"blob:sha256:([0-9a-f]{64})"')
_DOCUMENT, _TEXT = "application/json", "text/plain"


class Blob(msgspec.Struct, frozen=True):
    """A payload that was moved out."""

    sha256: str
    media_type: str
    """application/json: it stands for a whole document; anything else: for a text."""
    payload: bytes

    @property
    def blob_id(self) -> int:
        """Its key: the first 63 bits of the hash."""
        return int(self.sha256[:16], 16) & ids.MASK


class Moved(msgspec.Struct):
    """Frames without their big payloads, and the payloads."""

    episodes: pl.DataFrame
    steps: pl.DataFrame
    blobs: dict[int, Blob]


def moved_out(episodes: pl.DataFrame, steps: pl.DataFrame, tables: tuple[Table, Table]) -> Moved:
    """Move big payloads out of frames of `episodes` and `steps`; `episodes.blob_ids` says which an episode refers to.

    Args:
        episodes: rows of `episodes`.
        steps: their steps.
        tables: the specs of both.
    """
    blobs: dict[int, Blob] = {}
    used: dict[int, set[int]] = {}
    frames = [_without(frame, table, blobs, used) for frame, table in zip((episodes, steps), tables, strict=True)]
    if used:
        lists = [sorted(used[key]) if key in used else None for key in episodes["episode_id"]]
        frames[0] = frames[0].with_columns(pl.Series("blob_ids", lists, dtype=pl.List(pl.Int64)))
    return Moved(frames[0], frames[1], blobs)


def blobs_frame(blobs: Sequence[Blob], write_id: int) -> pl.DataFrame:
    """Rows of `blobs`."""
    columns = {
        "blob_id": [blob.blob_id for blob in blobs],
        "write_id": [write_id] * len(blobs),
        "sha256": [blob.sha256 for blob in blobs],
        "media_type": [blob.media_type for blob in blobs],
        "n_bytes": [len(blob.payload) for blob in blobs],
        "payload": [blob.payload for blob in blobs],
    }
    return pl.DataFrame(columns, schema=BLOBS.polars())


def inlined(snapshot: Snapshot, frame: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
    """The frame with references in JSON columns replaced by what they stand for.

    A text that looks like a reference, but to nothing the lake holds, stays as it is.
    """

    def find(hashes: list[str]) -> pl.DataFrame:
        rows = snapshot.scan("blobs").filter(pl.col("sha256").is_in(hashes))
        return collected(rows.select("sha256", "media_type", "payload"))

    return put_back(frame, columns, find)


def put_back(frame: pl.DataFrame, columns: Sequence[str], find: Callable[[list[str]], pl.DataFrame]) -> pl.DataFrame:
    """As `inlined`, for whoever reads blobs another way.

    Args:
        frame: rows with JSON columns.
        columns: which of them to look at.
        find: gives the rows (sha256, media_type, payload) of `blobs` for some hashes.
    """
    found = {
        sha256
        for name in columns
        for text in frame[name].filter(frame[name].str.contains('"blob:sha256:', literal=True).fill_null(value=False))
        for sha256 in _REFERENCE.findall(text)
    }
    if not found:
        return frame
    known = {sha256: _literal(media_type, payload) for sha256, media_type, payload in find(sorted(found)).iter_rows()}

    def back(text: str | None) -> str | None:
        return text and _REFERENCE.sub(lambda match: known.get(match[1], match[0]), text)

    return frame.with_columns(
        pl.Series(name, [back(text) for text in frame[name]], dtype=pl.String) for name in columns
    )


def _literal(media_type: str, payload: bytes) -> str:
    """JSON text that a payload stood as."""
    text = payload.decode()
    return text if media_type == _DOCUMENT else msgspec.json.encode(text).decode()


def _without(frame: pl.DataFrame, table: Table, blobs: dict[int, Blob], used: dict[int, set[int]]) -> pl.DataFrame:
    for column in table.columns:
        if column.type is not Type.JSON:
            continue
        texts = frame[column.name]
        long = (texts.str.len_bytes() > LIMIT).fill_null(value=False).arg_true()
        if long.is_empty():
            continue
        values = texts.to_list()
        for row in long:
            moved: list[Blob] = []
            values[row] = _shortened(values[row], moved)
            blobs.update((blob.blob_id, blob) for blob in moved)
            used.setdefault(frame["episode_id"][row], set()).update(blob.blob_id for blob in moved)
        frame = frame.with_columns(pl.Series(column.name, values, dtype=pl.String))
    return frame


def _shortened(text: str, moved: list[Blob]) -> str:
    """A document with its long texts replaced, or replaced as a whole if that is not enough."""
    short = msgspec.json.encode(_replaced(msgspec.json.decode(text), moved)).decode()
    if len(short.encode()) <= LIMIT:
        return short
    moved.clear()
    return msgspec.json.encode(_moved(text, _DOCUMENT, moved)).decode()


def _replaced(value: Any, moved: list[Blob]) -> Any:
    if isinstance(value, dict):
        return {key: _replaced(item, moved) for key, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item, moved) for item in value]
    if isinstance(value, str) and len(value) > LIMIT // 4 and len(value.encode()) > LIMIT:
        return _moved(value, _media_type(value), moved)
    return value


def _moved(text: str, media_type: str, moved: list[Blob]) -> str:
    payload = text.encode()
    blob = Blob(hashlib.sha256(payload).hexdigest(), media_type, payload)
    moved.append(blob)
    return f"blob:sha256:{blob.sha256}"


def _media_type(text: str) -> str:
    """Of a data URI, what it says of itself; the payload is the URI as it stood."""
    found = re.match(r"data:([\w.+-]+/[\w.+-]+)[;,]", text)
    return found[1] if found and found[1] != _DOCUMENT else _TEXT
