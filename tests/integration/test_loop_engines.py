"""What `trajlake loop` does with its engines: it waits for them, tells what is wrong with them, and lets them sleep.

Engines are conforming servers (`testkit.token_engine`) whose answers are actions drawn by chance; that sleeping frees a
GPU cannot be tried without one. The loop with a real vLLM is `test_loop_vllm.py`.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import lake
from lake.errors import UsageError
from pipelines.collect.environments.house import vocabulary
from pipelines.collect.manager.run import StoppedError
from testkit.token_engine import TokenEngine, token_engine
from trainer.online.demo import TinyPolicyConfig, save_policy
from trainer.online.settings import OnlineConfig, read_config
from trainer.online.start import run_loop

CONFIG = """
[loop]
rounds = 2
[loop.collect]
groups = 2
group_size = 2
[loop.collect.player]
env = "house"
max_steps = 2
sampling = { max_tokens = 4 }
[loop.sync]
probe = false
[trainer]
loss = { name = "ppo" }
tokens = "engine"
threads = 1
"""
WORDS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_policy(folder, vocabulary(), TinyPolicyConfig(), 0)
    return folder


def any_word(prompt_ids: Sequence[int], seed: int, most: int) -> list[int]:
    return [random.Random(f"{list(prompt_ids)} {seed}").randrange(3, 3 + WORDS), 2]


def config_of(folder: Path, model: Path, url: str, **sync: Any) -> OnlineConfig:
    file = folder / "loop.toml"
    file.write_text(CONFIG)
    player = {"engines": [url]} if url else {}
    return read_config(
        str(file), {"loop": {"sync": sync, "collect": {"player": player}}, "trainer": {"model": str(model)}}
    )


def play(folder: Path, config: OnlineConfig, say: Callable[[str], None] = lambda _: None, **resumes: bool) -> Any:
    uri = str(folder / "lake")
    one, other = lake.open(uri, create=True), lake.open(uri)
    given = {"resumes": False, "say": say, "progress": lambda _: None} | resumes
    return run_loop(one, other, config, folder / "out", "run", **given)


def versions(folder: Path) -> list[tuple[int, int]]:
    """Rounds, and the versions that their tokens carry."""
    rows = lake.open(str(folder / "lake")).sql(
        "SELECT DISTINCT collection_round, tokens.policy_version FROM tokens JOIN episodes USING (episode_id) "
        "ORDER BY ALL"
    )
    return rows.rows()


def test_engines_sleep_while_the_trainer_computes_and_wake_for_the_next_weights(tmp_path, model):
    with token_engine(TokenEngine(any_word)) as engine:
        play(tmp_path, config_of(tmp_path, model, engine.url, sleep=True))
    wanted = ("generate", "/sleep", "/wake_up", "reload")
    asked = [next((name for name in wanted if name in each), "") for each in _of_weights(engine.asked)]
    shown = [name for name, before in zip(asked, ["", *asked], strict=False) if name and name != before]
    one_round = ["/wake_up", "reload", "generate", "/sleep"]
    assert shown == [*one_round, *one_round, "/wake_up", "reload"]
    assert versions(tmp_path) == [(0, 0), (1, 1)]


def _of_weights(asked: list[str]) -> list[str]:
    """Requests, the ones that ask or say something about versions left out."""
    posted = [each.replace("collective_rpc", "reload") for each in asked if each.startswith("POST")]
    return [each for each in posted if not any(name in each for name in ("version", "pause", "resume", "reset"))]


def test_a_push_waits_for_an_engine_that_is_restarted(tmp_path, model):
    said: list[str] = []
    with token_engine(TokenEngine(any_word)) as engine:

        def say(line: str) -> None:
            said.append(line)
            if line.startswith("round 1/2"):
                engine.stop()
            if "waiting for it" in line:
                engine.start()

        play(tmp_path, config_of(tmp_path, model, engine.url), say)
        assert engine.starts == 2
    assert f"no engine answers at {engine.url}; waiting for it" in said
    assert versions(tmp_path) == [(0, 0), (1, 1)]


def test_a_run_whose_engine_stays_away_ends_and_is_resumed_with_another(tmp_path, model):
    with token_engine(TokenEngine(any_word)) as engine:

        def say(line: str) -> None:
            if line.startswith("round 1/2"):
                engine.stop()

        with pytest.raises(StoppedError, match=r"no engine answers at .* with --resume goes on"):
            play(tmp_path, config_of(tmp_path, model, engine.url, patience=0.01), say)
    with token_engine(TokenEngine(any_word)) as other:
        done = play(tmp_path, config_of(tmp_path, model, other.url), resumes=True)
    assert done.rounds == 2
    assert versions(tmp_path) == [(0, 0), (1, 1)]


def test_an_engine_that_does_not_answer_at_the_start_leaves_no_run(tmp_path, model):
    with token_engine() as engine:
        url = engine.url
    with pytest.raises(UsageError, match="nothing answers at"):
        play(tmp_path, config_of(tmp_path, model, url))
    assert lake.open(str(tmp_path / "lake")).sql("SELECT * FROM job_runs").is_empty()


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        ({"sync": {"sleep": True}}, "`sync.sleep` is for engines"),
        ({"sync": {"sleep": True}, "ahead": 1, "engine": {"serve": True}}, "needs `ahead = 0`"),
        ({"engine": {"serve": True}, "collect": {"player": {"engines": ["http://x"]}}}, "leave one of them out"),
    ],
)
def test_settings_of_engines_that_do_not_go_together_are_refused(tmp_path, model, loop, message):
    file = tmp_path / "loop.toml"
    file.write_text(CONFIG)
    with pytest.raises(UsageError, match=message):
        read_config(str(file), {"loop": loop, "trainer": {"model": str(model)}})
