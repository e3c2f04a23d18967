"""The entries of a zip archive, one at a time, whatever packs them: nothing, deflate, or zstd (method 93).

The standard library lists the entries, and reads zstd only from Python 3.14 on; here every entry is unpacked from its
bytes. An archive that is cut has lost its directory, which stands at the end: its entries are found by the header that
stands before each.
"""

import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import msgspec

ENTRY_LIMIT = 1 << 30
"""Bytes of an entry, unpacked."""
_LOCAL = struct.Struct("<4s5H3L2H")
_SIGNATURE = b"PK\x03\x04"
_STORED, _DEFLATE, _ZSTD = 0, 8, 93
_ENCRYPTED, _SIZES_BEHIND, _UTF8 = 0x1, 0x8, 0x800
_PIECE = 1 << 20
_NO_DIRECTORY = (zipfile.BadZipFile, ValueError, OSError, struct.error, NotImplementedError, EOFError)


class EntryError(ValueError):
    """An entry that cannot be unpacked; the message says why."""


class Entry(msgspec.Struct, frozen=True):
    """What the directory says of an entry."""

    name: str
    method: int
    offset: int
    """Of its header in the file."""
    packed: int
    """Bytes in the file."""
    length: int
    crc: int
    is_encrypted: bool = False

    def read(self, file: BinaryIO) -> bytes:
        """Its bytes, unpacked. Raises EntryError."""
        if self.is_encrypted:
            raise EntryError("it is encrypted; unpack the archive with its password and zip it again")
        if self.length > ENTRY_LIMIT:
            raise EntryError(f"it is {self.length:,} bytes long; valid: at most {ENTRY_LIMIT >> 20} MB")
        if self.method not in _UNPACK:
            raise EntryError(f"it is packed by method {self.method}; known: 0 (stored), 8 (deflate), 93 (zstd)")
        is_inside = self.offset >= 0 and self.offset + self.packed <= file.seek(0, 2)
        file.seek(max(self.offset, 0))
        header = file.read(_LOCAL.size) if is_inside else b""
        if len(header) < _LOCAL.size or not header.startswith(_SIGNATURE):
            raise EntryError(f"no such entry stands at byte {self.offset:,}, where the directory has it")
        *_, name_size, extra_size = _LOCAL.unpack(header)
        file.seek(name_size + extra_size, 1)
        data = _UNPACK[self.method](file.read(self.packed))
        if len(data) != self.length or zlib.crc32(data) != self.crc:
            raise EntryError(f"its {len(data):,} bytes are not the {self.length:,} that were packed (CRC-32)")
        return data


def listed(path: Path) -> tuple[list[Entry], str | None]:
    """The entries of an archive in order, the last of each name; and what is wrong where the directory is lost."""
    found: list[Entry]
    fault = None
    try:
        with zipfile.ZipFile(path) as archive:
            found = [
                Entry(
                    name=info.filename,
                    method=info.compress_type,
                    offset=info.header_offset,
                    packed=info.compress_size,
                    length=info.file_size,
                    crc=info.CRC,
                    is_encrypted=bool(info.flag_bits & _ENCRYPTED),
                )
                for info in archive.infolist()
            ]
    except _NO_DIRECTORY:
        found, fault = _without_directory(path)
    return list({entry.name: entry for entry in found}.values()), fault


def _without_directory(path: Path) -> tuple[list[Entry], str]:
    """The whole entries of an archive that is cut, and where it ends."""
    found: list[Entry] = []
    end = f"its directory is missing; {{}} whole entries stand before it ends at byte {path.stat().st_size:,}"
    with path.open("rb") as file:
        size = path.stat().st_size
        while len(header := file.read(_LOCAL.size)) == _LOCAL.size and header.startswith(_SIGNATURE):
            _, _, flags, method, _, _, crc, packed, length, name_size, extra_size = _LOCAL.unpack(header)
            offset = file.tell() - _LOCAL.size
            name = file.read(name_size).decode("utf-8" if flags & _UTF8 else "cp437", "replace")
            length, packed = _wide_sizes(file.read(extra_size), length, packed)
            if flags & _SIZES_BEHIND and not packed:
                return found, f"{end.format(len(found))}; where {name} ends it does not say"
            file.seek(packed, 1)
            if file.tell() > size:
                return found, f"the archive is cut: it ends inside {name}, and {end.format(len(found))}"
            found.append(Entry(name, method, offset, packed, length, crc, bool(flags & _ENCRYPTED)))
    return found, f"the archive is cut: {end.format(len(found))}"


def _wide_sizes(extra: bytes, length: int, packed: int) -> tuple[int, int]:
    """The sizes of an entry; those of 4 GB and more stand in the extra field."""
    while len(extra) >= 4:
        kind, size = struct.unpack_from("<HH", extra)
        field, extra = extra[4 : 4 + size], extra[4 + size :]
        if kind == 1 and len(field) >= 16 and 0xFFFFFFFF in (length, packed):
            wide_length, wide_packed = struct.unpack_from("<QQ", field)
            return int(wide_length), int(wide_packed)
    return length, packed


def _inflated(data: bytes) -> bytes:
    try:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, ENTRY_LIMIT + 1)
    except zlib.error as error:
        raise EntryError(f"its deflate data is damaged ({error})") from error


def _from_zstd(data: bytes) -> bytes:
    import pyarrow as pa

    pieces: list[bytes] = []
    size = 0
    try:
        with pa.CompressedInputStream(pa.BufferReader(data), "zstd") as stream:
            while size <= ENTRY_LIMIT and (piece := stream.read(_PIECE)):
                pieces.append(piece)
                size += len(piece)
    except (OSError, pa.ArrowException) as error:
        raise EntryError(f"its zstd data is damaged ({error})") from error
    return b"".join(pieces)


_UNPACK: dict[int, Callable[[bytes], bytes]] = {_STORED: bytes, _DEFLATE: _inflated, _ZSTD: _from_zstd}
