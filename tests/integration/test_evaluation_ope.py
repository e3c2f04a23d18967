"""Off-policy evaluation on real lakes: the truth where it is known, and refusals where the data cannot carry it."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner

from lake import Lake
from lake.cli import trajlake
from lake.errors import DataRefusedError, UsageError
from lake.records import EpisodeRecord
from testkit.sampled_lake import play, recorded, save_model, save_near
from trainer.evaluation.ope import evaluate, read_turns
from trainer.evaluation.ratios import find_rescored
from trainer.evaluation.rescore import rescore

TASKS, SIBLINGS = 12, 25
NESTED = "came out of another episode"
WEIGHED = ("pdis", "wis", "wpdis", "clipped", "dr", "fqe")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """b plays; e is near it, far is not."""
    folder = tmp_path_factory.mktemp("models")
    b = save_model(folder / "b")
    save_near(folder / "e", b, 0.004)
    save_near(folder / "far", b, 0.1)
    return folder


@pytest.fixture(scope="module")
def games(models: Path) -> list[EpisodeRecord]:
    return play(models / "b", tasks=TASKS, siblings=SIBLINGS)


@pytest.fixture(scope="module")
def lk(models: Path, games: list[EpisodeRecord], tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Games that all three have scored."""
    lk = recorded(tmp_path_factory.mktemp("ope") / "lake", games)
    for name in ("b", "e", "far"):
        rescore(lk, str(models / name))
    return lk


SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "no temperature": {"temperature": None},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 3},
    "min_p": {"min_p": 0.1},
    "grammar": {"constrained": [True, False]},
    "no logprobs": {"action_logprobs": None},
    "raw": {"logprobs_mode": "raw", "temperature": 0.5},
}
"""What a run of a few games says of its sampling, by the run's name."""


def fixed_first_choices(models: Path) -> list[EpisodeRecord]:
    """The first choice of every game was not the policy's."""
    episodes = play(models / "b", tasks=4, siblings=20, turns=3)
    for number, episode in enumerate(episodes):
        first = episode.steps[0]
        if number % 2:
            first.trainable = False
        else:
            first.is_copied_context = True
    return episodes


def silent(models: Path) -> list[EpisodeRecord]:
    """Four of these games say nothing, each for another reason."""
    episodes = play(models / "b", tasks=4, siblings=20)
    episodes[0].env_return = None
    episodes[1].relation = "subagent"
    episodes[2].steps[0].tokens = None
    episodes[2].steps = episodes[2].steps[:1]
    for step in episodes[3].steps:
        step.reward = None
    return episodes


@pytest.fixture(scope="module")
def runs(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Runs of games that b played, each of another kind, all scored by b and e."""
    folder = tmp_path_factory.mktemp("runs") / "lake"
    games = {name: play(models / "b", tasks=2, siblings=3, **fields) for name, fields in SAMPLED.items()}
    games["few"] = play(models / "b", tasks=5, siblings=9)
    games["fixed"] = fixed_first_choices(models)
    games["silent"] = silent(models)
    games["unrecorded"] = play(models / "b", tasks=4, siblings=20, action_logprobs=None)
    for name, episodes in games.items():
        for episode in episodes:
            episode.run_id = name
    lk = recorded(folder, [episode for episodes in games.values() for episode in episodes])
    for name in ("b", "e"):
        rescore(lk, str(models / name))
    return lk


def of_run(name: str) -> str:
    return f"run_id = '{name}'"


def table(rows: pl.DataFrame) -> dict[str, dict[str, Any]]:
    return {row["estimator"]: row for row in rows.iter_rows(named=True)}


@pytest.mark.parametrize(("behaviour", "score"), [("b", "env_reward"), ("stored", "env_return")])
def test_the_policy_that_played_has_its_own_value(
    lk: Lake, games: list[EpisodeRecord], behaviour: str, score: str
) -> None:
    rows = table(evaluate(lk.snapshot(), "b", behaviour, score=score).rows)
    mean = sum(episode.env_return or 0.0 for episode in games) / len(games)
    exact = 1e-9 if behaviour == "b" else 1e-4
    for name, row in rows.items():
        assert row["refused"] is None
        assert row["value"] == pytest.approx(mean, abs=exact), name
        assert row["ess"] == pytest.approx(row["ess"] / row["ess_share"], rel=exact)
        assert row["mean_weight"] == pytest.approx(1.0, abs=exact)
        assert (row["episodes"], row["tasks"]) == (len(games), TASKS)
        assert row["low"] < mean < row["high"]
    assert rows["pdis"]["ess"] == pytest.approx(len(games), rel=exact)


def test_the_value_of_another_policy_is_that_of_playing_it(lk: Lake, models: Path) -> None:
    """A second policy with held-out truth: what it plays itself lies in the intervals from the first one's games."""
    played = play(models / "e", tasks=TASKS, siblings=100, seed=7)
    truth = sum(episode.env_return or 0.0 for episode in played) / len(played)
    for score in ("env_return", "env_reward"):
        rows = table(evaluate(lk.snapshot(), "e", "b", score=score).rows)
        assert rows["pdis"]["ess_share"] < 0.99, "the policies should differ"
        for name in WEIGHED:
            row = rows[name]
            assert row["refused"] is None, name
            assert row["low"] < truth < row["high"], (name, row, truth)


def test_what_cannot_be_told_is_not_told(lk: Lake) -> None:
    rows = table(evaluate(lk.snapshot(), "far", "b").rows)
    for name in ("pdis", "wis", "wpdis", "dr"):
        row = rows[name]
        assert (row["value"], row["low"], row["high"]) == (None, None, None)
        assert row["refused"].startswith(f"effective sample size {row['ess']:.1f} of {row['episodes']}, needed are 50")
        assert row["ess"] < 50
    assert rows["clipped"]["value"] is None
    assert rows["behaviour"]["value"] is not None


def test_few_episodes_are_never_enough(runs: Lake) -> None:
    rows = table(evaluate(runs.snapshot(), "b", "b", where=of_run("few")).rows)
    assert rows["pdis"]["refused"] == "effective sample size 45.0 of 45, needed are 50"


# ---------------------------------------------------------------- what is read


def test_turns_are_what_the_tables_say(lk: Lake, games: list[EpisodeRecord]) -> None:
    """Against a loop over steps."""
    snapshot = lk.snapshot()
    target, acted = find_rescored(snapshot, "e"), find_rescored(snapshot, "b")
    data = read_turns(snapshot, target, acted, score="env_reward", gamma=0.9)
    turns = data.turns
    sums: dict[int, dict[tuple[int, int], float]] = {}
    for series_id in (target.series_id, acted.series_id):
        rows = snapshot.scan("ratios").filter(pl.col("series_id") == series_id).collect()
        sums[series_id] = {(r["episode_id"], r["step_index"]): sum(r["logprobs"]) for r in rows.iter_rows(named=True)}
    steps = snapshot.scan("steps").sort("episode_id", "step_index").collect()
    by_episode = {episode_id: rows.to_dicts() for (episode_id,), rows in steps.group_by("episode_id")}
    assert turns.episodes == len(games) == len(by_episode)
    tasks = dict(snapshot.scan("episodes").select("episode_id", "task_id").collect().iter_rows())
    states: dict[int, tuple[str, int]] = {}
    for e, episode_id in enumerate(data.episode_ids_E):
        rows = by_episode[episode_id]
        assert turns.length_E[e] == len(rows)
        for t, row in enumerate(rows):
            key = (episode_id, t)
            expected = sums[target.series_id][key] - sums[acted.series_id][key]
            assert turns.log_ratio_EH[e, t] == pytest.approx(expected, abs=1e-6)
            assert turns.reward_EH[e, t] == row["reward"]
            state = (tasks[episode_id], row["state_hash"])
            assert states.setdefault(int(turns.state_EH[e, t]), state) == state
        assert not turns.log_ratio_EH[e, len(rows) :].any()
        assert (turns.state_EH[e, len(rows) :] == -1).all()
    assert len(set(states.values())) == len(states)
    names = {}
    for e, episode_id in enumerate(data.episode_ids_E):
        assert names.setdefault(int(turns.task_E[e]), tasks[episode_id]) == tasks[episode_id]
    assert sorted(names) == list(range(TASKS))
    ended = read_turns(snapshot, target, acted).turns
    assert ended.return_E == pytest.approx(replace(turns, gamma=1.0).return_E)
    assert (ended.reward_EH != 0).sum(axis=1).max() == 1


def test_choices_that_were_not_the_policy_s_have_ratio_one(runs: Lake) -> None:
    snapshot = runs.snapshot()
    target, acted = find_rescored(snapshot, "e"), find_rescored(snapshot, "b")
    turns = read_turns(snapshot, target, acted, where=of_run("fixed")).turns
    assert not turns.log_ratio_EH[:, 0].any()
    assert turns.log_ratio_EH[:, 1:].any()
    assert turns.horizon == 3


def test_episodes_that_say_nothing_are_left_out_and_counted(runs: Lake) -> None:
    evaluation = evaluate(runs.snapshot(), "e", "b", where=of_run("silent"))
    assert evaluation.left_out == {NESTED: 1, "no score": 1, "a step not scored": 1}
    assert set(evaluation.rows["episodes"]) == {77}
    rewards = evaluate(runs.snapshot(), "e", "b", score="env_reward", where=of_run("silent"))
    assert rewards.left_out == {NESTED: 1, "a step not scored": 1, "a reward unknown": 1}


def test_a_scorer_s_values_are_evaluated(runs: Lake) -> None:
    rows = runs.scan("episodes").filter(pl.col("run_id") == "fixed")
    lengths = rows.select("episode_id", "group_id", "run_id", "num_steps").collect()
    with runs.job(kind="score", parameters={}) as job:
        scores = lengths.with_columns(
            scorer=pl.lit("length"), scorer_version=pl.lit("v1"), value=pl.col("num_steps").cast(pl.Float64)
        )
        job.write("scores", scores.drop("num_steps"))
    fixed_rows = table(evaluate(runs.snapshot(), "b", "b", score="length", where=of_run("fixed")).rows)
    assert fixed_rows["pdis"]["value"] == pytest.approx(lengths["num_steps"].mean())


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("run_id", "behaviour", "fragment"),
    [
        ("greedy", "b", "were decoded greedily"),
        ("no temperature", "b", "do not say at which temperature"),
        ("top_p", "b", "truncated distribution"),
        ("top_k", "stored", "truncated distribution"),
        ("min_p", "b", "truncated distribution"),
        ("grammar", "b", "under a grammar"),
        ("no logprobs", "stored", "no recorded log-probabilities"),
        ("raw", "stored", "of another distribution"),
    ],
)
def test_data_without_support_is_refused(runs: Lake, run_id: str, behaviour: str, fragment: str) -> None:
    with pytest.raises(DataRefusedError, match=fragment) as refused:
        evaluate(runs.snapshot(), "e", behaviour, where=of_run(run_id))
    assert "for example episode_id=" in str(refused.value)
    assert "trajlake eval" in str(refused.value)


def test_two_checkpoints_need_no_recorded_log_probabilities(runs: Lake) -> None:
    evaluation = evaluate(runs.snapshot(), "e", "b", where=of_run("unrecorded"))
    assert table(evaluation.rows)["pdis"]["value"] is not None
    assert any("confirm that 'b'" in note for note in evaluation.notes)


def test_a_behaviour_policy_that_did_not_act_is_refused(lk: Lake) -> None:
    with pytest.raises(DataRefusedError, match=r"'far' is not .*policy_version 0: .* nats per token"):
        evaluate(lk.snapshot(), "e", "far")


def test_checkpoints_scored_by_different_code_are_not_compared(lk: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    import trainer.evaluation.ope as module

    def renamed(snapshot: Any, text: str) -> Any:
        return replace(find_rescored(snapshot, text), code_hash=text)

    monkeypatch.setattr(module, "find_rescored", renamed)
    with pytest.raises(DataRefusedError, match=r"'e' and 'b' .*different versions"):
        evaluate(lk.snapshot(), "e", "b")


def test_a_checkpoint_that_scored_other_episodes_leaves_nothing(models: Path, tmp_path: Path) -> None:
    lk = recorded(tmp_path / "lake", play(models / "b", tasks=2, siblings=3))
    rescore(lk, str(models / "b"), options={"where": "task_id = 'game0'"})
    rescore(lk, str(models / "e"), options={"where": "task_id = 'game1'"})
    with pytest.raises(DataRefusedError, match=r"a step not scored: 6.*`trajlake rescore e`, `trajlake rescore b`"):
        evaluate(lk.snapshot(), "e", "b")


@pytest.mark.parametrize(
    "options", [{"gamma": 0.0}, {"gamma": 1.1}, {"clip": 0.5}, {"ridge": 0.0}, {"ridge": math.inf}, {"clip": math.nan}]
)
def test_options_out_of_range(lk: Lake, options: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=r"0 < gamma <= 1, .*finite ridge > 0"):
        evaluate(lk.snapshot(), "e", "b", **options)  # type: ignore[arg-type]


# ---------------------------------------------------------------- the command


def run(*arguments: object) -> Any:
    return CliRunner().invoke(trajlake, [str(argument) for argument in arguments])


def test_the_command(lk: Lake, models: Path) -> None:
    done = run("ope", "--lake", lk.uri, "--target", models / "e", "--behaviour", "b", "--format", "json")
    assert done.exit_code == 0, done.output
    rows = {row["estimator"]: row for row in json.loads(done.stdout)}
    assert list(rows) == ["behaviour", *WEIGHED]
    direct = table(evaluate(lk.snapshot(), "e", "b").rows)
    assert rows["dr"]["value"] == pytest.approx(direct["dr"]["value"])
    assert "values rank policies" in done.stderr
    assert "'b' differs from the recorded" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["--target", "nobody", "--behaviour", "b"], "checkpoint 'nobody' has scored nothing; name one of: "),
        (["--target", "e", "--behaviour", "nobody"], "checkpoint 'nobody' has scored nothing"),
        (["--target", "e", "--behaviour", "b", "--where", "nonsense"], "is not a predicate"),
        (["--target", "e", "--behaviour", "b", "--score", "nobody"], "no scores of 'nobody' for episodes"),
        (["--target", "e", "--behaviour", "b", "--gamma", "2"], "valid are 0 < gamma <= 1"),
    ],
)
def test_mistakes_are_told(lk: Lake, arguments: list[str], fragment: str) -> None:
    done = run("ope", "--lake", lk.uri, *arguments)
    assert done.exit_code != 0
    assert fragment in str(done.exception)


def test_nothing_of_torch_is_loaded_to_evaluate(lk: Lake) -> None:
    """The estimators, and the two commands that only read, in their own process."""
    import subprocess
    import sys

    from testkit.processes import environment

    code = (
        "import sys; import lake; from trainer.evaluation.ope import evaluate\n"
        "from trainer.evaluation import success\n"
        f"evaluate(lake.open({lk.uri!r}).snapshot(), 'e', 'b')\n"
        "assert 'torch' not in sys.modules, 'torch'"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_weights_are_clipped_where_asked(lk: Lake) -> None:
    tight = table(evaluate(lk.snapshot(), "e", "b", clip=1.0).rows)["clipped"]
    assert tight["mean_weight"] < 1
    assert tight["bias"] == "downward"
    assert np.isfinite(tight["ess"])
