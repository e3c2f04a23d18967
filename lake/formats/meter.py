"""How far into a file a reader is: what batches are bounded by and what progress shows."""

import msgspec


class Meter(msgspec.Struct):
    """Bytes of a file that its reader has made into items, up to a window ahead of the item in hand."""

    done: int = 0
