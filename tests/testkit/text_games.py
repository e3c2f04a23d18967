"""Steps of text games as anchor definitions are judged by: the example's, and small worlds walked through at random."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import polars as pl

from examples.text_game import episodes
from pipelines.credit.anchors.measures import Walks

Row = dict[str, Any]
SCHEMA = {
    "group_id": pl.Int64,
    "episode_id": pl.Int64,
    "step_index": pl.Int32,
    "state": pl.String,
    "action": pl.String,
    "episode_score": pl.Float64,
    "truth": pl.String,
}
World = Mapping[str, Mapping[str, str]]
"""Place -> what can be done there -> the place it leads to."""


def game_rows(worlds: int, seed: int, *, counter: bool = False, errors: bool = False) -> list[Row]:
    """The example's game; `truth` is the state, no matter what the text says."""
    return [
        {
            "group_id": number // 8,
            "episode_id": number,
            "step_index": index,
            "state": step["state"],
            "action": step["action"],
            "episode_score": episode["env_return"],
            "truth": step["extra"]["truth"],
        }
        for number, episode in enumerate(episodes(worlds=worlds, seed=seed, counter=counter, errors=errors))
        for index, step in enumerate(episode["steps"])
    ]


def walk_rows(
    world: World, seed: int, *, groups: int = 10, siblings: int = 8, steps: int = 12, start: str | None = None
) -> list[Row]:
    """Random walks; a text is the name of the place. Every group is in the same world."""
    rows = []
    for number in range(groups * siblings):
        rng = random.Random(f"{seed} {number}")
        room, score = start or rng.choice(sorted(world)), float(rng.random() < 0.5)
        for index in range(steps):
            action = rng.choice(sorted(world[room]))
            rows.append(
                {
                    "group_id": number // siblings,
                    "episode_id": number,
                    "step_index": index,
                    "state": room,
                    "action": action,
                    "episode_score": score,
                    "truth": room,
                }
            )
            room = world[room][action]
    return rows


def reworded(rows: Sequence[Row], text: Callable[[Row], str]) -> list[Row]:
    """The same steps under other texts."""
    return [row | {"state": text(row)} for row in rows]


def walks_of(rows: Sequence[Row]) -> Walks:
    """The steps, as the command reads them."""
    return Walks.of(pl.LazyFrame(rows, schema=SCHEMA), ("state",))
