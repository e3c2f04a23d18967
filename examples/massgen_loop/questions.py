"""Questions whose answers can be checked, two words to be translated: writes train.jsonl and held_out.jsonl.

No held-out pair of words is ever trained on; each of the words is, in nine other pairs.
"""

import json
from pathlib import Path

QUALITIES = {
    "blue": "blua",
    "big": "granda",
    "new": "nova",
    "good": "bona",
    "fast": "rapida",
    "young": "juna",
    "strong": "forta",
    "long": "longa",
    "green": "verda",
    "old": "maljuna",
    "white": "blanka",
    "black": "nigra",
}
THINGS = {
    "house": "domo",
    "tree": "arbo",
    "dog": "hundo",
    "cat": "kato",
    "book": "libro",
    "town": "urbo",
    "bird": "birdo",
    "road": "vojo",
    "river": "rivero",
    "table": "tablo",
    "wolf": "lupo",
    "child": "infano",
}


def write(file: str, differences: set[int]) -> None:
    """The pairs whose places in the two lists differ by one of these numbers, modulo 12."""
    rows = [
        {"name": f"{quality} {thing}", "prompt": f"Say in Esperanto: {quality} {thing}", "ground_truth": f"{one} {two}"}
        for place, (quality, one) in enumerate(QUALITIES.items())
        for other, (thing, two) in enumerate(THINGS.items())
        if (place - other) % len(THINGS) in differences
    ]
    Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


if __name__ == "__main__":
    write("train.jsonl", {0, 1, 2, 4, 5, 6, 8, 9, 11})
    write("held_out.jsonl", {3, 7, 10})
