"""How many examples a law is tried on."""

from hypothesis import settings


def examples(usual: int) -> int:
    """`usual` in the default profile; ten times as many with HYPOTHESIS_PROFILE=explore."""
    return max(1, usual * settings().max_examples // 100)
