"""TextWorldExpress: fast text games with dense rewards (coin, cookingworld, twc, mapreader, ...).

The games run in Java. One JVM per process serves all episodes, each with a game object of its own in it: a hundred
games need hardly more memory than one, where a JVM each would need 60 MB. A few calls at once are let through to it,
since it accepts connections from a short queue and resets the rest.

Worlds are drawn from the fold's own seeds, as the package gives them (train, dev, test): the same number in another
fold would be the same house in some games.

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
from lake.settings import validated
from pipelines.collect.environments import Outcome, Task
from pipelines.collect.policies import Message

_JVM = ("-Xmx1g", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
"""Small and quick to start; the games do not run long enough for the optimising compiler."""
_CALLS_AT_ONCE = 8


class TextWorldExpressSettings(BaseModel, frozen=True, extra="allow"):
    """Settings of `--env textworld-express:GAME`; any other `--env-arg` is a property of the game (numLocations=3)."""

    split: Literal["train", "dev", "test"] = "train"
    """Fold that worlds are drawn from."""
    max_steps: int = Field(default=50, ge=1)
    """Actions after which an episode is cut off."""
    show_state: bool = False
    """Each observation is followed by what `look around` and `inventory` would say, so that equal states read equal."""


def maker(what: str, arguments: Mapping[str, Any]) -> Callable[[], "TextWorldExpress"]:
    """Makes environments of a game; the JVM is started now.

    Raises:
        MissingExtraError: the package or Java is not installed.
        UsageError: no such game, or a property that it does not have.
    """
    settings = validated(TextWorldExpressSettings, arguments, "--env-arg of textworld-express: ")
    properties = settings.model_extra or {}
    for name, value in properties.items():
        if not isinstance(value, int):
            raise UsageError(f"--env-arg {name}={value}: properties of games are whole numbers, true or false")
    jvm = _started()
    parameters = ",".join(f"{name}={int(value)}" for name, value in properties.items())
    game = jvm.call(jvm.new_game)
    try:
        if fault := jvm.call(game.load, what, parameters):
            raise UsageError(f"--env textworld-express:{what}: {' '.join(str(fault).split())}")
        seeds = jvm.call(lambda: list(getattr(game, f"getSeeds{settings.split.capitalize()}")()))
    finally:
        jvm.call(jvm.forget, game)
    return lambda: TextWorldExpress(jvm, what, parameters, seeds, settings)


class _Jvm:
    """The process that the games run in."""

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
        """A call of one of its objects, a few at a time."""
        with self._calls:
            return function(*arguments)

    def new_game(self) -> Any:
        """A game object, which holds no game yet."""
        return self._gateway.jvm.textworldexpress.runtime.PythonInterface()

    def forget(self, game: Any) -> None:
        """Let the JVM collect a game."""
        self._gateway.detach(game)


@cache
def _started() -> _Jvm:
    """The JVM of this process. Raises MissingExtraError."""
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
    """One game of TextWorldExpress. Its calls block: it is played in a thread."""

    def __init__(
        self, jvm: _Jvm, what: str, parameters: str, seeds: list[int], settings: TextWorldExpressSettings
    ) -> None:
        self.name = f"textworld-express:{what}"
        self.split = settings.split
        self._jvm = jvm
        self._load = (what, parameters)
        self._seeds = seeds
        self._settings = settings
        self._game: Any = None
        self._facts: dict[str, Any] = {}
        self._taken = 0

    def reset(self, task: Task) -> Outcome:
        """Begin with the fold's world of that number. Raises UsageError: it has fewer."""
        if not 0 <= task.seed < len(self._seeds):
            msg = f"{self.name} has {len(self._seeds)} worlds in {self.split}; there is no seed {task.seed}"
            raise UsageError(f"{msg}; valid: 0 to {len(self._seeds) - 1}")
        if self._game is None:
            self._game = self._jvm.call(self._jvm.new_game)
            self._jvm.call(self._game.load, *self._load)
        self._taken = 0
        self._facts = self._asked(self._game.generateNewGameJSON, self._seeds[task.seed], self.split, False)
        description = str(self._jvm.call(self._game.getTaskDescription))
        return Outcome(
            messages=[{"role": "user", "content": f"{description}\n\n{self._view()}"}],
            task_id=f"{self.name}/{self._load[1]}/{self.split}/{task.seed}",
            admissible=self._admissible(),
        )

    def step(self, action: Message) -> Outcome:
        """Say the text of an answer to the game."""
        said = str(action.get("content") or "").strip()
        before = self._facts
        is_valid = said in before["validActions"]
        self._taken += 1
        self._facts = after = self._asked(self._game.stepJSON, said)
        is_over = after["tasksuccess"] or after["taskfailure"] or after["score"] >= 1
        return Outcome(
            messages=[{"role": "user", "content": self._view()}],
            reward=float(after["score"]) - float(before["score"]),
            terminated=bool(is_over),
            truncated=not is_over and self._taken >= self._settings.max_steps,
            is_action_valid=is_valid,
            is_error=not is_valid,
            admissible=self._admissible(),
            extra={"score": float(after["score"]), "success": bool(after["tasksuccess"])},
        )

    def close(self) -> None:
        """Let the JVM collect the game."""
        if self._game is not None:
            self._jvm.call(self._jvm.forget, self._game)

    def _asked(self, function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads(self._jvm.call(function, *arguments))
        return facts

    def _view(self) -> str:
        parts = [self._facts["observation"]]
        if self._settings.show_state:
            parts += [part for part in (self._facts["look"], self._facts["inventory"]) if part not in parts]
        return "\n\n".join(str(part).strip() for part in parts)

    def _admissible(self) -> tuple[str, ...]:
        return tuple(sorted(self._facts["validActions"]))
