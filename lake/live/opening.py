"""Open a recorder. A switched-off recorder imports nothing."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lake.live.null_recorder import OFF

if TYPE_CHECKING:
    from lake.live.recorder import Recorder

_WORDS_FOR_OFF = frozenset(("off", "0", "false", "no"))


def recorder(uri: str | Path, *, run: str, enabled: bool | None = None, **options: Any) -> "Recorder":
    """Record agents of this process into a lake; see `lake.live.recorder.Recorder`.

    Args:
        uri: folder or address of the lake; a missing lake is created.
        run: run of the episodes.
        enabled: False records nothing, at no cost. Default: the environment variable TRAJLAKE_RECORD (`off`).
        options: options of `Recorder`.

    Raises:
        UsageError: options that are not valid.
        LakeAccessError: the lake's folder, or that of the spool, cannot be made or written.
    """
    if enabled is None:
        enabled = os.environ.get("TRAJLAKE_RECORD", "").strip().lower() not in _WORDS_FOR_OFF
    if not enabled:
        off: Recorder = OFF
        return off
    from lake.live.recorder import Recorder as RealRecorder

    return RealRecorder(uri, run=run, **options)
