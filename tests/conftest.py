"""Tests, made repeatable: one torch thread; the same examples on every run and machine, no deadline on a busy one.

`HYPOTHESIS_PROFILE=explore pytest` draws fresh examples, more of them.
"""

import os
import signal
import sys
import tempfile
from collections.abc import Iterator

# Before torch is loaded anywhere: the tests' models are so small that two threads only get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Indexes of the tests' lakes go with the temporary folder of the machine.
os.environ.setdefault("TRAJLAKE_CACHE", tempfile.mkdtemp(prefix="trajlake-test-cache-"))

# Writers and committers of the tests' lakes meet in their own folder, which goes with the run: a committer that is
# still there then ends. The paths of sockets have to be short.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _RUNTIME = tempfile.TemporaryDirectory(prefix="trajlake-run-", dir="/tmp", ignore_cleanup_errors=True)
    os.environ["XDG_RUNTIME_DIR"] = _RUNTIME.name

# Tests that run side by side start clusters, which Ray would find instead of starting one for each.
os.environ.setdefault("RAY_ADDRESS", "local")

# A shell starts what runs in the background with Ctrl-C ignored, and every child would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from hypothesis import settings

pytest_plugins = ["testkit.file_budgets", "testkit.object_store", "testkit.wording"]

settings.register_profile("ci", max_examples=40, derandomize=True, deadline=None)
settings.register_profile("explore", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(autouse=True)
def _main_module() -> Iterator[None]:
    """Streamlit's page tests leave their script behind as `__main__`, which processes that are spawned then run."""
    main = sys.modules["__main__"]
    yield
    sys.modules["__main__"] = main
