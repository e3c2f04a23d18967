"""Collect: groups of rollouts from identical starts, as records that a lake takes.

An environment speaks text (`environments`), a policy decides for many rollouts at once (`policies`), `play` brings
them together and `collect_groups` arranges starts and siblings. Nothing here writes to a lake: a job records what is
yielded. Importing this loads neither torch nor transformers.
"""

from pipelines.collect.rollouts import GroupConfig, collect_groups, distinct_seeds, play

__all__ = ["GroupConfig", "collect_groups", "distinct_seeds", "play"]
