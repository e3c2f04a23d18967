"""Four agents, each a process, that search a tower for a lamp and are recorded while they do: `python players.py`.

Each plays its share of the rollouts of every tower; the lake gets all of them, in groups by tower.
"""

import os
import random
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import lake

PLAYERS, TOWERS, SIBLINGS, FLOORS, MOVES = 4, 24, 8, 5, 8


def play(player: int) -> int:
    """Record one player's rollouts; how many there were."""
    with lake.recorder(os.environ["TRAJLAKE_LAKE"], run="players", environment="tower") as recorder:
        mine = [(tower, sibling) for tower in range(TOWERS) for sibling in range(player, SIBLINGS, PLAYERS)]
        for tower, sibling in mine:
            lamp = random.Random(tower).randrange(1, FLOORS)
            rng = random.Random(f"{tower} {sibling}")
            with recorder.episode(f"tower-{tower}", rollout_index=sibling) as episode:
                floor, found = 0, False
                for _ in range(MOVES):
                    with episode.step(state=f"Floor {floor} of tower {tower}. The lamp is on floor {lamp}.") as step:
                        action = rng.choice(["up", "up", "down", "take"])
                        step.action(action)
                        found = action == "take" and floor == lamp
                        step.reward(float(found))
                    floor = min(FLOORS - 1, max(0, floor + {"up": 1, "down": -1, "take": 0}[action]))
                    if found:
                        break
                episode.reward(float(found))
    return len(mine)


def main() -> None:
    """Let all of them play."""
    with ProcessPoolExecutor(PLAYERS, mp_context=get_context("spawn")) as pool:
        print(f"{sum(pool.map(play, range(PLAYERS)))} episodes recorded by {PLAYERS} processes")


if __name__ == "__main__":
    main()
