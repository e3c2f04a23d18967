"""States that say nothing: anything may lead to them, so siblings that meet in one do not share a situation.

They are few texts, so they are known by `steps.state_hash`, and no text is read to count them: for frames here, for SQL
by the macro `is_empty_state`, which is made of the same hashes.
"""

from itertools import product

from lake import ids

_TEXTS = ("", "[]", "{}", '""', "null", "None")
_BLANKS = ("", " ", "\n", "\r\n")

EMPTY_STATES = tuple(sorted({ids.text_hash("".join(parts)) for parts in product(_BLANKS, _TEXTS, _BLANKS)}))
"""Hashes of these states: nothing, an empty list, object or text, and null, perhaps with a blank before or after."""
