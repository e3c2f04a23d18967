"""Identifiers: stable 63-bit hashes and their text form.

An id is the hash of a natural key, so the same rollout has the same id on every machine and in every process. 63 bits
fit a signed int64, the widest integer that Delta stores exactly. People see 13 characters of base32, because JSON
readers lose integers above 2^53.

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


def bytes_hash(content: bytes | bytearray) -> int:
    """Hash bytes to 63 bits: 0 <= h < 2^63."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") & MASK


def text_hash(text: str) -> int:
    """Hash a text's UTF-8 bytes to 63 bits; different lone surrogates give different hashes."""
    return bytes_hash(text.encode("utf-8", "surrogatepass"))


def key_hash(*fields: str | int | float | bool | None) -> int:
    """Hash a natural key to 63 bits. Fields keep their type: 1, "1" and None give different hashes."""
    return text_hash(_KEY.encode(fields))


def hash_engine_encoding(tokenizer: str | None, chat_template: str | None) -> int:
    """Hash what made the tokens that an engine recorded: the encoding_id of their rows. None: not named."""
    return key_hash("engine", tokenizer, chat_template)


def fresh_id() -> int:
    """Return a random 63-bit id, for write attempts and jobs, which have no natural key."""
    return secrets.randbits(63)


def splitmix64(states_N: "npt.NDArray[np.uint64]") -> "npt.NDArray[np.uint64]":
    """Return the first output of SplitMix64 for each state, uint64 [N], the same on every machine.

    Draws and orders of episodes use it. It is a bijection (Steele, Lea and Flood, 2014).
    """
    import numpy as np

    # Array arithmetic wraps around without a warning.
    mixed_N = states_N + np.uint64(0x9E3779B97F4A7C15)
    mixed_N = (mixed_N ^ (mixed_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed_N = (mixed_N ^ (mixed_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed_N ^ (mixed_N >> np.uint64(31))


def to_text(identifier: int) -> str:
    """Return the 13 base32 characters of an id."""
    return "".join(ALPHABET[(identifier >> shift) & 31] for shift in range(60, -1, -5))


def is_text(text: str) -> bool:
    """Return whether a text has the form of an id: 13 characters of the alphabet, the first below 8 (63 bits)."""
    folded = text.lower()
    return len(folded) == TEXT_LENGTH and all(char in ALPHABET for char in folded) and folded[0] < "8"


def from_text(text: str) -> int:
    """Return the id of 13 base32 characters. Raises ValueError: any other text."""
    folded = text.strip().lower()
    if not is_text(folded):
        raise ValueError(f"{text!r} is not an id: expected {TEXT_LENGTH} characters of {ALPHABET}, the first below 8")
    identifier = 0
    for char in folded:
        identifier = identifier << 5 | ALPHABET.index(char)
    return identifier


def parse_ids(identifiers: Iterable[int | str]) -> list[int]:
    """Convert ids, integers or texts of 13 characters, to sorted integers without repetitions.

    Raises:
        UsageError: an invalid id, or not a list.
    """
    if isinstance(identifiers, str) or not isinstance(identifiers, Iterable):
        raise UsageError(f"{identifiers!r} is not a list; give a list of ids")
    numbers = set()
    for identifier in identifiers:
        try:
            number = from_text(identifier) if isinstance(identifier, str) else identifier
        except ValueError as error:
            raise UsageError(str(error)) from error
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= MASK:
            msg = (
                f"{identifier!r} is not an id: valid are integers from 0 to 2^63 - 1, or their {TEXT_LENGTH} characters"
            )
            raise UsageError(msg)
        numbers.add(number)
    return sorted(numbers)
