"""How many examples a law is tried on."""

from hypothesis import settings


def examples(usual: int) -> int:
    """So many per 100 of the profile's: two fifths of `usual` by default, ten times as many with `explore`."""
    return max(1, usual * settings().max_examples // 100)
