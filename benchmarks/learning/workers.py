"""End a pool's processes with their parent: no run of a killed study writes while the next study runs.

This file imports nothing heavy: its test starts real processes.
"""

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """Make this process end as soon as its parent has ended, even by SIGKILL. For the initializer of a pool."""
    threading.Thread(target=_await_parent, name="end-with-parent", daemon=True).start()


def _await_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)  # the main thread is in the middle of a run, which resumes from its last commit
