"""An OpenEnv environment: a number below 10 has to be guessed, in four tries.

Run as a program, it is served at a port.
"""

import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Guess(Action):  # type: ignore[misc]
    number: int


class Told(Observation):  # type: ignore[misc]
    text: str


class Guessing(Environment):  # type: ignore[misc]
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Told:
        self.number, self.left = random.Random(seed).randrange(10), 4
        return Told(text=f"Guess a number below 10; I like {random.Random(seed).randrange(10**6)}.")

    def step(self, action: Guess, timeout_s: float | None = None, **options: Any) -> Told:
        self.left -= 1
        is_right = action.number == self.number
        text = "right" if is_right else "too high" if action.number > self.number else "too low"
        return Told(text=text, done=is_right or not self.left, reward=float(is_right))

    @property
    def state(self) -> State:
        return State()


app = create_app(Guessing, Guess, Told, env_name="guessing", max_concurrent_envs=256)

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
