"""TextWorldExpress: fast text games with dense rewards (coin, cookingworld, twc, mapreader, ...).

The games run in Java. One JVM per process serves all episodes, each with its own game object. A hundred games need
hardly more memory than one, while a separate JVM needs 60 MB each. Only a few calls run concurrently, since the JVM
accepts connections from a short queue and resets the rest.

Worlds come from the seeds of each fold (train, dev, test), as the package lists them. The same number in another fold
would be the same house in some games.

Facts: https://github.com/cognitiveailab/TextWorldExpress, version 1.1.0 (`textworld_express.py`).
"""

import json
import shutil
import threading
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel, Field

from lake.errors import MissingExtraError, UsageError
from lake.settings import validate
from pipelines.collect.environments import Outcome, Task
from pipelines.collect.policies import Message

_JVM = ("-Xmx1g", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
"""Small and quick to start; the games are too short for the optimising compiler."""
_CALLS_AT_ONCE = 8


class TextWorldExpressSettings(BaseModel, frozen=True, extra="allow"):
    """Settings of `--env textworld-express:GAME`; any other `--env-arg` is a property of the game (numLocations=3)."""

    split: Literal["train", "dev", "test"] = "train"
    """Fold to draw worlds from."""
    max_steps: int = Field(default=50, ge=1)
    """Maximum actions of an episode."""
    show_state: bool = False
    """Append the results of `look around` and `inventory` to each observation, so that equal states read equal."""


def build_maker(game_name: str, arguments: Mapping[str, Any]) -> Callable[[], "TextWorldExpress"]:
    """Return a function that makes environments of a game; start the JVM now.

    Raises:
        MissingExtraError: the package or Java is not installed.
        UsageError: the game or a property does not exist.
    """
    settings = validate(TextWorldExpressSettings, arguments, "--env-arg of textworld-express: ")
    properties = settings.model_extra or {}
    for name, value in properties.items():
        if not isinstance(value, int):
            raise UsageError(f"--env-arg {name}={value}: properties of games are whole numbers, true or false")
    jvm = _start_jvm()
    parameters = ",".join(f"{name}={int(value)}" for name, value in properties.items())
    game = jvm.call(jvm.new_game)
    try:
        if fault := jvm.call(game.load, game_name, parameters):
            raise UsageError(f"--env textworld-express:{game_name}: {' '.join(str(fault).split())}")
        seeds = jvm.call(lambda: list(getattr(game, f"getSeeds{settings.split.capitalize()}")()))
    finally:
        jvm.call(jvm.forget, game)
    return lambda: TextWorldExpress(jvm, game_name, parameters, seeds, settings)


class _Jvm:
    """The Java process of the games."""

    def __init__(self) -> None:
        from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway
        from textworld_express.constants import BASEPATH, JAR_PATH

        port, process = launch_gateway(
            classpath=JAR_PATH, die_on_exit=True, cwd=BASEPATH, javaopts=list(_JVM), return_proc=True
        )
        parameters = GatewayParameters(auto_field=True, port=port)
        self._gateway = JavaGateway(gateway_parameters=parameters, java_process=process)
        self._calls = threading.BoundedSemaphore(_CALLS_AT_ONCE)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call one of its objects; limits concurrent calls."""
        with self._calls:
            return function(*arguments)

    def new_game(self) -> Any:
        """Create an empty game object."""
        return self._gateway.jvm.textworldexpress.runtime.PythonInterface()

    def forget(self, game: Any) -> None:
        """Let the JVM collect a game."""
        self._gateway.detach(game)


@cache
def _start_jvm() -> _Jvm:
    """Start the JVM of this process once. Raises MissingExtraError."""
    try:
        import textworld_express  # noqa: F401
    except ImportError as error:
        msg = 'the package textworld-express is not installed: pip install "trajlake[textworld]"'
        raise MissingExtraError(msg) from error
    if shutil.which("java") is None:
        msg = "textworld-express runs in Java, and there is no `java` on PATH: apt-get install default-jre-headless"
        raise MissingExtraError(f"{msg} (or brew install openjdk, or https://adoptium.net)")
    return _Jvm()


class TextWorldExpress:
    """One game of TextWorldExpress. Its calls block, so it runs in a thread."""

    def __init__(
        self, jvm: _Jvm, game_name: str, parameters: str, seeds: list[int], settings: TextWorldExpressSettings
    ) -> None:
        self.name = f"textworld-express:{game_name}"
        self.split = settings.split
        self._jvm = jvm
        self._load = (game_name, parameters)
        self._seeds = seeds
        self._settings = settings
        self._game: Any = None
        self._facts: dict[str, Any] = {}
        self._step_count = 0

    def reset(self, task: Task) -> Outcome:
        """Start the fold's world with the task's number. Raises UsageError: the number is too high."""
        if not 0 <= task.seed < len(self._seeds):
            msg = f"{self.name} has {len(self._seeds)} worlds in {self.split}; there is no seed {task.seed}"
            raise UsageError(f"{msg}; valid: 0 to {len(self._seeds) - 1}")
        if self._game is None:
            self._game = self._jvm.call(self._jvm.new_game)
            self._jvm.call(self._game.load, *self._load)
        self._step_count = 0
        self._facts = self._call_json(self._game.generateNewGameJSON, self._seeds[task.seed], self.split, False)
        description = str(self._jvm.call(self._game.getTaskDescription))
        return Outcome(
            messages=[{"role": "user", "content": f"{description}\n\n{self._view()}"}],
            task_id=f"{self.name}/{self._load[1]}/{self.split}/{task.seed}",
            admissible=self._admissible(),
        )

    def step(self, action: Message) -> Outcome:
        """Pass the text of an answer to the game."""
        command = str(action.get("content") or "").strip()
        before = self._facts
        is_valid = command in before["validActions"]
        self._step_count += 1
        self._facts = after = self._call_json(self._game.stepJSON, command)
        is_over = after["tasksuccess"] or after["taskfailure"] or after["score"] >= 1
        return Outcome(
            messages=[{"role": "user", "content": self._view()}],
            reward=float(after["score"]) - float(before["score"]),
            terminated=bool(is_over),
            truncated=not is_over and self._step_count >= self._settings.max_steps,
            is_action_valid=is_valid,
            is_error=not is_valid,
            admissible=self._admissible(),
            extra={"score": float(after["score"]), "success": bool(after["tasksuccess"])},
        )

    def close(self) -> None:
        """Let the JVM collect the game."""
        if self._game is not None:
            self._jvm.call(self._jvm.forget, self._game)

    def _call_json(self, function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads(self._jvm.call(function, *arguments))
        return facts

    def _view(self) -> str:
        paragraphs = [self._facts["observation"]]
        if self._settings.show_state:
            paragraphs += [part for part in (self._facts["look"], self._facts["inventory"]) if part not in paragraphs]
        return "\n\n".join(str(part).strip() for part in paragraphs)

    def _admissible(self) -> tuple[str, ...]:
        return tuple(sorted(self._facts["validActions"]))
