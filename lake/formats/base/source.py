"""The bytes of a source file, unpacked on the way if it is gzip or zstd.

Damage of a packed file is no exception here: what was unpacked before it is read like the rest, the file seems to end
there, and `Source.fault` says why.

How far into a file a reader is: what batches are bounded by and what progress shows.
"""

import io
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import msgspec


class Meter(msgspec.Struct):
    """Bytes of a file that its reader has made into items, up to a window ahead of the item in hand."""

    done: int = 0


@dataclass(slots=True)
class Input:
    """A file that is read: where it lies, and what its records are called unless they say so themselves."""

    path: Path
    run_id: str
    """The run of episodes whose source names none."""
    meter: Meter = field(default_factory=Meter)
    from_line: int = 0
    """Lines before this file's first one, and where they end: a file that grows is read on from there."""
    from_byte: int = 0
    until_byte: int | None = None
    """The place of a line's beginning where to stop; None reads to the end."""
    may_grow: bool = False
    """Somebody still writes it: a last line without an end is left for the next time."""
    memory: dict[str, Any] = field(default_factory=dict)
    """What a reader has to know of the lines before, when a file that grows is read on."""

    def next_index(self, *key: Any) -> int:
        """0, 1, 2, ... for every key: numbers of siblings, where the source has none."""
        numbers: dict[Any, int] = self.memory.setdefault("next_index", {})
        numbers[key] = numbers.get(key, -1) + 1
        return numbers[key]


_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
"""How packed files begin; what they are called does not matter."""
SUFFIXES = (".gz", ".zst")
"""Endings that are no part of a run's name."""
_PIECE = 1 << 16
"""Bytes unpacked at a time."""
_BUFFER = 1 << 20


class Source(io.BufferedReader):
    """A source file, open for reading; a packed one reads like the text it holds. Raises OSError."""

    def __init__(self, path: Path, buffering: int = _BUFFER) -> None:
        raw: io.RawIOBase = io.FileIO(path)
        head = raw.read(4) or b""
        raw.seek(0)
        for magic, codec in _MAGIC.items():
            if head.startswith(magic):
                raw = _Unpacked(raw, path, codec)
        super().__init__(raw, buffering)

    @property
    def is_packed(self) -> bool:
        """Whether the text is not what lies on the disk."""
        return isinstance(self.raw, _Unpacked)

    @property
    def fault(self) -> str | None:
        """Why a packed file ended before its end, as far as it was read; None if it did not."""
        return self.raw.fault if isinstance(self.raw, _Unpacked) else None

    @property
    def is_cut(self) -> bool:
        """The fault is that packed data is missing at the end."""
        return isinstance(self.raw, _Unpacked) and self.raw.is_cut


def is_packed(path: Path) -> bool:
    """Whether a file's text is not what lies on the disk. Raises OSError."""
    with Source(path) as file:
        return file.is_packed


class _Unpacked(io.RawIOBase):
    """What a packed file holds; several packed pieces in a row are one text."""

    def __init__(self, packed: io.RawIOBase, path: Path, codec: str) -> None:
        import pyarrow as pa

        self.fault: str | None = None
        self.is_cut = False
        self._packed = packed
        self._path = path
        self._codec = codec
        self._given = 0
        self._stream = pa.CompressedInputStream(pa.PythonFile(packed, mode="r"), codec)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        size = min(len(buffer), _PIECE)
        try:
            data = self._stream.read(size)
        except OSError as error:
            damaged = self._packed.tell()
            rest = self._up_to_damage(damaged)
            self.is_cut = "runcated" in str(error)
            what = "is cut" if self.is_cut else f"is damaged ({error})"
            self.fault = (
                f"the {self._codec} data of {self._path.name} {what}: {self._given + len(rest):,} bytes could be "
                f"unpacked, up to about byte {damaged:,} of the file"
            )
            self._stream = io.BytesIO(rest)
            data = self._stream.read(size)
        buffer[: len(data)] = data
        self._given += len(data)
        return len(data)

    def _up_to_damage(self, damaged: int) -> bytes:
        """What was not given and can be unpacked all the same: damage costs what is unpacked together with it."""
        import pyarrow as pa

        found = bytearray()
        with _Drops(self._path, damaged - 2 * _PIECE) as packed:
            stream = pa.CompressedInputStream(pa.PythonFile(packed, mode="r"), self._codec)
            try:
                left = self._given
                while left and (known := stream.read(min(left, _PIECE))):
                    left -= len(known)
                while byte := stream.read(1):
                    found += byte
            except OSError:
                pass
        return bytes(found)

    def close(self) -> None:
        self._packed.close()
        super().close()


class _Drops(io.FileIO):
    """A packed file that is read byte by byte from some place on."""

    def __init__(self, path: Path, start: int) -> None:
        super().__init__(path)
        self._start = start

    def read(self, size: int | None = -1, /) -> bytes:
        """As many bytes as are left before the place, or one."""
        return super().read(min(size or 1, max(1, self._start - self.tell()))) or b""


def stem(path: PurePath) -> str:
    """A file's name without its ending, and without that of a packed file: `a.jsonl.gz` is `a`."""
    return PurePath(path.stem).stem if path.suffix in SUFFIXES else path.stem
