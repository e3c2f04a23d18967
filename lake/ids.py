"""Identifiers: stable 63-bit hashes, and how people see them.

An id is the hash of a natural key, so the same rollout has the same id on every machine and in every process. 63 bits
fit a signed int64, the widest integer Delta stores faithfully. People see 13 characters of base32: JSON readers lose
integers above 2^53.

The hash is BLAKE2b (RFC 7693), 8 bytes read little-endian with the sign bit cleared.
"""

import hashlib
import json
import secrets
from collections.abc import Iterable
from typing import TYPE_CHECKING

from lake.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base32, lower case: no i, l, o, u
MASK = (1 << 63) - 1
TEXT_LENGTH = 13
_KEY = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def bytes_hash(data: bytes | bytearray) -> int:
    """63-bit hash of bytes: 0 <= h < 2^63."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") & MASK


def text_hash(text: str) -> int:
    """63-bit hash of a text's UTF-8 bytes (lone surrogates are kept apart, not an error)."""
    return bytes_hash(text.encode("utf-8", "surrogatepass"))


def key_hash(*parts: str | int | float | bool | None) -> int:
    """63-bit hash of a natural key. Parts keep their type: 1, "1" and None give different keys."""
    return text_hash(_KEY.encode(parts))


def fresh_id() -> int:
    """A random 63-bit id (for write attempts and jobs, which have no natural key)."""
    return secrets.randbits(63)


def splitmix64(values_N: "npt.NDArray[np.uint64]") -> "npt.NDArray[np.uint64]":
    """Evenly mixed numbers, uint64 [N], the same on every machine: the first output of SplitMix64 for each state.

    Draws and orders of episodes are made of it. It is a bijection (Steele, Lea and Flood, 2014).
    """
    import numpy as np

    # Arithmetic of arrays wraps around without a warning.
    mixed_N = values_N + np.uint64(0x9E3779B97F4A7C15)
    mixed_N = (mixed_N ^ (mixed_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed_N = (mixed_N ^ (mixed_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed_N ^ (mixed_N >> np.uint64(31))


def to_text(value: int) -> str:
    """An id as people see it: 13 base32 characters."""
    return "".join(ALPHABET[(value >> shift) & 31] for shift in range(60, -1, -5))


def is_text(text: str) -> bool:
    """Whether a text has the form of an id: 13 characters of the alphabet, the first of them below 8 (63 bits)."""
    folded = text.lower()
    return len(folded) == TEXT_LENGTH and all(char in ALPHABET for char in folded) and folded[0] < "8"


def from_text(text: str) -> int:
    """The id behind 13 base32 characters. Raises ValueError: not 13 characters of the alphabet."""
    folded = text.strip().lower()
    if not is_text(folded):
        raise ValueError(f"{text!r} is not an id: expected {TEXT_LENGTH} characters of {ALPHABET}, the first below 8")
    value = 0
    for char in folded:
        value = value << 5 | ALPHABET.index(char)
    return value


def as_ids(values: Iterable[int | str]) -> list[int]:
    """Ids given as integers or as the 13 characters that people see, as integers, each once and in order.

    Raises:
        UsageError: something that is no id, or no list of them.
    """
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise UsageError(f"{values!r} is no list; give a list of ids")
    found = set()
    for value in values:
        try:
            number = from_text(value) if isinstance(value, str) else value
        except ValueError as error:
            raise UsageError(str(error)) from error
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= MASK:
            msg = f"{value!r} is not an id: valid are integers from 0 to 2^63 - 1, or their {TEXT_LENGTH} characters"
            raise UsageError(msg)
        found.add(number)
    return sorted(found)
