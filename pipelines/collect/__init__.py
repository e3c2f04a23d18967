"""Collect: groups of rollouts from identical starts, as records for a lake.

An environment speaks text (`environments`), and a policy decides for many rollouts (`policies`). `play` combines them,
and `collect_groups` arranges starts and siblings. Nothing here writes to a lake; a job records the results. Importing
this package loads neither torch nor transformers.
"""

from pipelines.collect.environments.games import GroupConfig, collect_groups, distinct_seeds, play

__all__ = ["GroupConfig", "collect_groups", "distinct_seeds", "play"]
