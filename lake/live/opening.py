"""Starting to record, or not to: nothing is imported for a recorder that is switched off."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lake.live.off import OFF

if TYPE_CHECKING:
    from lake.live.recorder import Recorder

_WORDS_FOR_OFF = frozenset(("off", "0", "false", "no"))


def recorder(uri: str | Path, *, run: str, enabled: bool | None = None, **options: Any) -> "Recorder":
    """Record agents of this process into a lake; see `lake.live.recorder.Recorder` for what it promises.

    Args:
        uri: the lake's folder or address; it is made if it is missing.
        run: the run of the episodes.
        enabled: False records nothing, at no cost; unless given, the environment variable TRAJLAKE_RECORD says it
            (`off`).
        options: of `Recorder`.

    Raises:
        UsageError: options that are not valid.
        LakeAccessError: the lake's folder, or that of the spool, cannot be made or written.
    """
    if enabled is None:
        enabled = os.environ.get("TRAJLAKE_RECORD", "").strip().lower() not in _WORDS_FOR_OFF
    if not enabled:
        off: Recorder = OFF
        return off
    from lake.live import recorder as on

    return on.Recorder(uri, run=run, **options)
