"""Tokenizers of a lake: their definitions by hash, and the encodings of `tokens` that each of them made.

Training stores the tokenizer of its model with the first checkpoint, `collect` that of its policy with each round. The
viewer shows the text of tokens with it. They are objects under `_trajlake/tokenizers/`, not rows, because a new table
would lock older versions out of the lake.

Anyone who can write to the lake can write a definition. So only its vocabulary is read, and not by the
tokenizer's library: a definition may hold regular expressions that never end.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lake import ids
from lake.documents import parse_json_object
from lake.storage.objects import Objects

MAX_BYTES = 64 << 20
"""Largest definition that is stored and read."""
_FOLDER = "_trajlake/tokenizers"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_BYTES_OF_CHARACTERS = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + place): byte for place, byte in enumerate(sorted(set(range(256)).difference(_PRINTABLE)))
}
"""Characters that stand for bytes in byte-level vocabularies: printable ones for themselves."""


def store_tokenizer(objects: Objects, definition: str, encoding_ids: Sequence[int]) -> None:
    """Store the definition of a fast tokenizer (`tokenizer.json`) once, under the encodings that it makes."""
    content = definition.encode("utf-8", "surrogatepass")
    digest = ids.to_text(ids.bytes_hash(content))
    if len(content) > MAX_BYTES:
        return
    if not objects.exists(path := f"{_FOLDER}/{digest}.json"):
        objects.create(path, content)
    for encoding_id in encoding_ids:
        objects.create(f"{_FOLDER}/of-{ids.to_text(encoding_id)}", digest.encode())


def read_vocabulary(objects: Objects, encoding_id: int) -> dict[int, bytes] | None:
    """Return the bytes of each token of an encoding; None if the lake has no intact tokenizer of it."""
    digest = (objects.get(f"{_FOLDER}/of-{ids.to_text(encoding_id)}") or b"").decode("ascii", "replace")
    content = objects.get(f"{_FOLDER}/{digest}.json") if ids.is_text(digest) else None
    if content is None or len(content) > MAX_BYTES or ids.to_text(ids.bytes_hash(content)) != digest:
        return None
    return parse_vocabulary(content.decode("utf-8", "replace")) or None


def parse_vocabulary(definition: str) -> dict[int, bytes]:
    """Return the bytes of each token of a `tokenizer.json`; entries of another shape are left out."""
    document = parse_json_object(definition)
    model = document.get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    pieces: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(vocabulary, Mapping):
        pieces = iter(vocabulary.items())
    elif isinstance(vocabulary, list):  # a unigram model: piece and score, by id
        pieces = ((entry[0], index) for index, entry in enumerate(vocabulary) if isinstance(entry, list) and entry)
    kinds = {str(decoder.get("type")) for decoder in _list_decoders(document.get("decoder"))}
    texts = {index: _decode_piece(piece, kinds) for piece, index in pieces if _is_entry(piece, index)}
    added = document.get("added_tokens")
    for token in added if isinstance(added, list) else []:
        if isinstance(token, Mapping) and _is_entry(token.get("content"), token.get("id")):
            texts[token["id"]] = token["content"].encode("utf-8", "replace")
    return texts


def _is_entry(piece: Any, index: Any) -> bool:
    return isinstance(piece, str) and isinstance(index, int)


def _list_decoders(decoder: Any) -> list[Mapping[str, Any]]:
    """Return a decoder, or the parts of a sequence of them."""
    parts = decoder.get("decoders") if isinstance(decoder, Mapping) else None
    listed = parts if isinstance(parts, list) else [decoder]
    return [part for part in listed if isinstance(part, Mapping)]


def _decode_piece(piece: str, kinds: set[str]) -> bytes:
    if "ByteLevel" in kinds:
        codes = [_BYTES_OF_CHARACTERS.get(character) for character in piece]
        return piece.encode("utf-8", "replace") if None in codes else bytes(code for code in codes if code is not None)
    if "ByteFallback" in kinds and (byte := _BYTE.fullmatch(piece)):
        return bytes([int(byte[1], 16)])
    if "WordPiece" in kinds:
        piece = piece.removeprefix("##")
    if kinds & {"Metaspace", "Replace", "ByteFallback"}:
        piece = piece.replace("\N{LOWER ONE EIGHTH BLOCK}", " ")
    return piece.encode("utf-8", "replace")
