"""Adapters of environments before the real packages, each in its own environment; `make test-slow`.

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


def played(kind: str, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What the script found, twice the same: in two processes, so that equal seeds are seen to begin alike."""
    python = with_packages(kind.replace("-", "_"), PACKAGES[kind])
    arguments = (CHECKOUT, kind, name, json.dumps(settings), EPISODES)
    first, second = (said_by(python, "environments", *arguments) for _ in range(2))
    assert first["episodes"] == second["episodes"]
    assert first["together"], "episodes at once are those that were played one by one"
    assert len(first["episodes"]) == EPISODES
    report: dict[str, Any] = first
    return report


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
    report = played("textworld-express", game, settings)
    for episode, bare in zip(report["episodes"], report["direct"], strict=False):
        texts = [words(messages[0]) for messages in episode["shown"]]
        assert all(words(observation) in text for text, (observation, _, _) in zip(texts, bare, strict=True))
        assert episode["rewards"] == pytest.approx([reward for _, reward, _ in bare[1:]])
        assert episode["terminated"] is bare[-1][2]
        assert not any(done for _, _, done in bare[:-1])
        assert episode["truncated"] is (not episode["terminated"])
        assert len(episode["said"]) <= settings["max_steps"]
        assert [text == "gibberish" for text in episode["said"]] == [not valid for valid in episode["valid"]]
        if settings.get("show_state"):
            assert all("Inventory" in text for text in texts)
    assert any(reward > 0 for episode in report["episodes"] for reward in episode["rewards"])
    assert len({episode["shown"][0][0] for episode in report["episodes"]}) > EPISODES / 4
    unknown_game, unknown_property, wrong_setting, beyond = report["told"]
    assert "Unknown game (nothing-like-it). Valid game names: cookingworld, twc, coin" in unknown_game
    assert "Unrecognized property name (nothing_like_it). Known properties: numLocations" in unknown_property
    assert wrong_setting == "" or "Unrecognized property name (prompt)" in wrong_setting
    assert "there is no seed 1000000; valid: 0 to " in beyond


@pytest.mark.parametrize("data_set", ["spiral_matrix", "leg_counting", "graph_color", "simple_integration"])
def test_reasoning_gym_is_scored_by_its_own_scorer(data_set: str) -> None:
    report = played("reasoning-gym", data_set, {})
    for episode, bare in zip(report["episodes"], report["direct"], strict=False):
        assert episode["shown"][0][1] == bare[0][0]
        assert episode["rewards"] == [bare[1][1]]
        assert (episode["terminated"], episode["truncated"]) == (True, False)
    assert len({episode["shown"][0][1] for episode in report["episodes"]}) > EPISODES / 4
    unknown_set, unknown_setting, wrong_setting, files = report["told"]
    assert "Dataset 'nothing-like-it' not registered" in unknown_set
    assert "unexpected keyword argument 'nothing_like_it'" in unknown_setting
    assert "`prompt`" in wrong_setting
    if data_set == "spiral_matrix":
        assert files == "by_package", "its scorer runs what the model wrote, and only in the sandbox"


def test_openenv_is_the_servers_own() -> None:
    report = played("openenv", "", {})
    assert report["name"] == "openenv:Guessing"
    for episode, bare in zip(report["episodes"], report["direct"], strict=False):
        steps = iter(bare[1:])
        rewards = [next(steps) if valid else None for valid in episode["valid"]]
        assert episode["shown"][0][0] == bare[0][0]
        assert episode["rewards"] == [step and step[1] for step in rewards]
        assert episode["terminated"] is bare[-1][2] is True
        for (text,), step in zip(episode["shown"][1:], rewards, strict=True):
            assert text == step[0] if step else text.startswith("That is not")
    assert {reward for episode in report["episodes"] for reward in episode["rewards"]} == {None, 0.0, 1.0}
    nobody, _, wrong_setting, lost = report["told"]
    assert "no OpenEnv server answers" in nobody
    assert "`prompt`" in wrong_setting
    assert "the server was lost" in lost
    assert "the session" in lost
