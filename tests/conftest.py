"""Hypothesis, made repeatable: the same examples on every run and machine, and no deadline on a busy one.

`HYPOTHESIS_PROFILE=explore pytest` draws fresh examples, more of them.
"""

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("explore", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
