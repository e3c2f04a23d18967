"""gymnasium's environments in text: against the package itself, played with the same actions."""

import asyncio
import random
from collections.abc import Iterable
from typing import Any

import pytest

from lake.errors import UsageError
from pipelines.collect.environments import Outcome, Task
from pipelines.collect.environments.gymnasium_text import convert_ansi
from pipelines.collect.environments.loading import load_environment

gymnasium = pytest.importorskip("gymnasium", reason='pip install "trajlake[gymnasium]"')

ACTIONS = {
    "FrozenLake-v1": ["left", "down", "right", "up"],
    "Taxi-v4": ["south", "north", "east", "west", "pickup", "dropoff"],
    "CliffWalking-v1": ["up", "right", "down", "left"],
    "Blackjack-v1": ["stick", "hit"],
    "CartPole-v1": ["0", "1"],
}


class Parrot(gymnasium.Env):  # type: ignore[name-defined, misc]
    """Repeats three texts; a Text space for actions and observations."""

    action_space = gymnasium.spaces.Text(8, charset="abc ")
    observation_space = gymnasium.spaces.Text(20)
    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - as gymnasium has it

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.said = 0
        return f"hello {self.np_random.integers(1000)}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.said += 1
        return action, 0.5, self.said == 3, self.said == 3, {}


gymnasium.register("Parrot-v0", Parrot, disable_env_checker=True)


def play(name: str, arguments: dict[str, Any], seed: int, texts: Iterable[str]) -> list[Outcome]:
    """All outcomes of an episode."""

    async def episode() -> list[Outcome]:
        environment = load_environment(f"gymnasium:{name}", arguments)()
        outcomes = [await environment.reset(Task(seed=seed))]
        for text in texts:
            if outcomes[-1].done:
                break
            outcomes.append(await environment.step({"role": "assistant", "content": text}))
        await environment.close()
        return outcomes

    return asyncio.run(episode())


@pytest.mark.parametrize("name", ACTIONS)
def test_rewards_and_ends_are_the_packages_own(name: str) -> None:
    """Random actions, by name and by number in turn."""
    for seed in range(5):
        rng = random.Random(seed)
        numbers = [rng.randrange(len(ACTIONS[name])) for _ in range(250)]
        texts = [ACTIONS[name][n] if i % 2 else str(n) for i, n in enumerate(numbers)]
        opening, *outcomes = play(name, {"max_steps": 250}, seed, texts)
        bare = gymnasium.make(name)
        bare.reset(seed=seed)
        expected = []
        for number in numbers:
            observation, reward, terminated, truncated, _ = bare.step(number)
            expected.append((float(reward), bool(terminated), bool(truncated and not terminated)))
            if terminated or truncated:
                break
        if not (terminated or truncated):  # CliffWalking ends nowhere alone
            expected[-1] = (expected[-1][0], False, True)
        assert [(o.reward, o.terminated, o.truncated) for o in outcomes] == expected
        assert outcomes[-1].extra is not None
        assert outcomes[-1].extra["observation"] == pytest.approx(
            list(observation) if hasattr(observation, "__len__") else observation
        )
        assert (opening.reward, opening.task_id) == (None, f"gymnasium:{name}/{seed}")


def test_a_drawing_says_where_the_player_is_without_escapes() -> None:
    outcomes = play("FrozenLake-v1", {"is_slippery": False}, 0, ["right", "down"])
    boards = [str(outcome.messages[0]["content"]).split("\n")[-4:] for outcome in outcomes]
    assert boards[0] == ["[S]FFF", "FHFH", "FFFH", "HFFG"]
    assert boards[1] == ["S[F]FF", "FHFH", "FFFH", "HFFG"]
    assert boards[2] == ["SFFF", "F[H]FH", "FFFH", "HFFG"]
    assert outcomes[2].terminated


def test_different_states_of_a_taxi_read_differently() -> None:
    """Where the passenger waits and where to is said by colours alone."""
    environment = load_environment("gymnasium:Taxi-v4", {})()
    bare = gymnasium.make("Taxi-v4")
    threads: dict[int, str] = {}

    async def begin() -> None:
        for seed in range(200):
            drawn = str((await environment.reset(Task(seed=seed))).messages[0]["content"])
            assert "\x1b" not in drawn
            assert threads.setdefault(int(bare.reset(seed=seed)[0]), drawn) == drawn

    asyncio.run(begin())
    assert len(set(threads.values())) == len(threads) > 100


def test_what_is_no_action_is_answered_costs_a_step_and_does_not_reach_the_environment() -> None:
    texts = ["fly", "", "up and down", "7", "right"]
    outcomes = play("FrozenLake-v1", {"is_slippery": False, "max_steps": 5}, 0, texts)
    assert [o.is_action_valid for o in outcomes[1:]] == [False, False, False, False, True]
    assert [o.reward for o in outcomes[1:]] == [None, None, None, None, 0.0]
    assert "That is not an" in outcomes[1].messages[0]["content"]
    assert "[S]FFF" in outcomes[4].messages[0]["content"]
    assert outcomes[4].admissible == ("down", "left", "right", "up")
    assert "S[F]FF" in outcomes[5].messages[0]["content"]
    assert [o.truncated for o in outcomes[1:]] == [False] * 4 + [True]
    assert not outcomes[5].terminated


@pytest.mark.parametrize("text", ["right", "Right.", "2", " **right** ", "I think.\nRIGHT", '"right"', "- right"])
def test_an_action_is_read_from_the_whole_answer_or_its_last_line(text: str) -> None:
    outcomes = play("FrozenLake-v1", {"is_slippery": False}, 0, [text])
    assert outcomes[1].extra == {"observation": 1}


def test_actions_may_be_named() -> None:
    outcomes = play("CartPole-v1", {"actions": "push left|push right", "prompt": "Balance."}, 4, ["Push right"])
    assert str(outcomes[0].messages[0]["content"]).startswith("Balance.\n\n[")
    assert outcomes[1].is_action_valid
    with pytest.raises(UsageError, match=r"has 2 actions; valid: "):
        play("CartPole-v1", {"actions": ["a", "A"]}, 4, [])


def test_texts_are_actions_and_termination_wins_over_truncation() -> None:
    name = "Parrot-v0"
    opening, *outcomes = play(name, {}, 3, ["abc", "xyz", "a b", "c"])
    assert opening.messages[0]["content"].startswith("You play Parrot-v0. ")
    assert "at most 8 characters" in opening.messages[0]["content"]
    assert play(name, {}, 3, [])[0] == opening
    assert play(name, {}, 4, [])[0].messages != opening.messages
    assert [o.messages[0]["content"] for o in outcomes if o.is_action_valid] == ["abc", "a b", "c"]
    assert [o.is_action_valid for o in outcomes] == [True, False, True, True]
    assert (outcomes[-1].terminated, outcomes[-1].truncated) == (True, False)


@pytest.mark.parametrize(
    ("name", "arguments", "fragment"),
    [
        ("NoSuch-v0", {}, "NoSuch` doesn't exist"),
        ("FrozenLake-v1", {"size": 3}, "unexpected keyword argument 'size'"),
        ("FrozenLake-v1", {"max_steps": 0}, "max_steps"),
        ("Pendulum-v1", {}, "its actions are Box"),
    ],
)
def test_what_cannot_be_played_is_told(name: str, arguments: dict[str, Any], fragment: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_environment(f"gymnasium:{name}", arguments)
    assert fragment in str(caught.value)


@pytest.mark.parametrize(
    ("drawing", "text"),
    [
        ("\x1b[41mS\x1b[0mFFF", "[S]FFF"),
        ("\x1b[43mR\x1b[44mG\x1b[mF", "[RG]F"),
        ("\x1b[35m\x1b[34;1m\x1b[43mR\x1b[0m\x1b[0m\x1b[0mY", "[R]Y\nblue: R; magenta: R"),
        ("\n\x1b[2J\x1b[1;1Hplain  \n", "plain"),
        ("\x1b(Ba\x1b[32mb\x1b[39mc", "abc\ngreen: b"),
    ],
)
def test_escapes_become_brackets_and_a_legend(drawing: str, text: str) -> None:
    assert convert_ansi(drawing) == text
