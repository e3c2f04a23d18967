"""Adapters of environments before the real packages, each in an environment of its own; `make test-slow`.

Random actions are played through the adapter and, the same ones, through the package's own classes.
"""

import json
from typing import Any

import pytest

from testkit.consumers import said_by, with_packages
from testkit.shared import CHECKOUT

pytestmark = pytest.mark.slow

EPISODES = 128
PACKAGES = {
    "textworld-express": ("textworld-express==1.1.0",),
    "reasoning-gym": ("reasoning-gym==0.1.25",),
    "openenv": ("openenv==0.10.0",),
}


def played(kind: str, what: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What the script found, twice the same: in two processes, so that equal seeds are seen to begin alike."""
    python = with_packages(kind.replace("-", "_"), PACKAGES[kind])
    arguments = (CHECKOUT, kind, what, json.dumps(settings), EPISODES)
    first, second = (said_by(python, "environments", *arguments) for _ in range(2))
    assert first["episodes"] == second["episodes"]
    assert first["together"], "episodes at once are those that were played one by one"
    assert len(first["episodes"]) == EPISODES
    found: dict[str, Any] = first
    return found


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize(
    ("game", "settings"),
    [
        ("coin", {"numLocations": 4, "max_steps": 20}),
        ("twc", {"numLocations": 2, "max_steps": 12, "split": "test", "show_state": True}),
        ("cookingworld", {"numLocations": 1, "includeDoors": False, "max_steps": 15, "split": "dev"}),
    ],
)
def test_textworld_express_is_the_packages_own(game: str, settings: dict[str, Any]) -> None:
    found = played("textworld-express", game, settings)
    for one, bare in zip(found["episodes"], found["direct"], strict=False):
        shown = [words(messages[0]) for messages in one["shown"]]
        assert all(words(observation) in text for text, (observation, _, _) in zip(shown, bare, strict=True))
        assert one["rewards"] == pytest.approx([reward for _, reward, _ in bare[1:]])
        assert one["terminated"] is bare[-1][2]
        assert not any(done for _, _, done in bare[:-1])
        assert one["truncated"] is (not one["terminated"])
        assert len(one["said"]) <= settings["max_steps"]
        assert [text == "gibberish" for text in one["said"]] == [not valid for valid in one["valid"]]
        if settings.get("show_state"):
            assert all("Inventory" in text for text in shown)
    assert any(reward > 0 for one in found["episodes"] for reward in one["rewards"])
    assert len({one["shown"][0][0] for one in found["episodes"]}) > EPISODES / 4
    unknown_game, unknown_property, wrong_setting, beyond = found["told"]
    assert "Unknown game (nothing-like-it). Valid game names: cookingworld, twc, coin" in unknown_game
    assert "Unrecognized property name (nothing_like_it). Known properties: numLocations" in unknown_property
    assert wrong_setting == "" or "Unrecognized property name (prompt)" in wrong_setting
    assert "there is no seed 1000000; valid: 0 to " in beyond


@pytest.mark.parametrize("data_set", ["spiral_matrix", "leg_counting", "graph_color", "simple_integration"])
def test_reasoning_gym_is_scored_by_its_own_scorer(data_set: str) -> None:
    found = played("reasoning-gym", data_set, {})
    for one, bare in zip(found["episodes"], found["direct"], strict=False):
        assert one["shown"][0][1] == bare[0][0]
        assert one["rewards"] == [bare[1][1]]
        assert (one["terminated"], one["truncated"]) == (True, False)
    assert len({one["shown"][0][1] for one in found["episodes"]}) > EPISODES / 4
    unknown_set, unknown_setting, wrong_setting, files = found["told"]
    assert "Dataset 'nothing-like-it' not registered" in unknown_set
    assert "unexpected keyword argument 'nothing_like_it'" in unknown_setting
    assert "`prompt`" in wrong_setting
    if data_set == "spiral_matrix":
        assert files == "by_package", "its scorer runs what the model wrote, and only in the sandbox"


def test_openenv_is_the_servers_own() -> None:
    found = played("openenv", "", {})
    assert found["name"] == "openenv:Guessing"
    for one, bare in zip(found["episodes"], found["direct"], strict=False):
        steps = iter(bare[1:])
        told = [next(steps) if valid else None for valid in one["valid"]]
        assert one["shown"][0][0] == bare[0][0]
        assert one["rewards"] == [step and step[1] for step in told]
        assert one["terminated"] is bare[-1][2] is True
        for (text,), step in zip(one["shown"][1:], told, strict=True):
            assert text == step[0] if step else text.startswith("That is not")
    assert {reward for one in found["episodes"] for reward in one["rewards"]} == {None, 0.0, 1.0}
    nobody, _, wrong_setting, lost = found["told"]
    assert "no OpenEnv server answers" in nobody
    assert "`prompt`" in wrong_setting
    assert "the server was lost" in lost
    assert "the session" in lost
