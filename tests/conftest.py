"""Tests, made repeatable: one torch thread; the same examples on every run and machine, no deadline on a busy one.

`HYPOTHESIS_PROFILE=explore pytest` draws fresh examples, more of them.
"""

import os

# Before torch is loaded anywhere: the tests' models are so small that two threads only get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("explore", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
