"""A process of a pool ends with its parent, so that a killed study leaves no runs that write beside its successor's.

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
