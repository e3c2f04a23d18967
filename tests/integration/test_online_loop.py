"""`trajlake loop`: what a run leaves in the tables, what ends it, what a resumed one may differ in."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest
from safetensors.torch import load_file

import lake
from lake.errors import CheckpointError, DataRefusedError, UsageError
from lake.lake import Lake
from lake.progress import ProgressRow, show_progress
from testkit.loops import facts, looped, write_config
from testkit.word_game import save_model
from trainer.online.loop import LoopResult
from trainer.online.settings import EvaluationConfig, OnlineConfig, read_config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "random")


def config_of(folder: Path, model: Path, **settings: Any) -> OnlineConfig:
    return read_config(str(write_config(folder, model)), settings)


def without_evaluation(config: OnlineConfig) -> OnlineConfig:
    return config.model_copy(update={"loop": config.loop.model_copy(update={"evaluation": None})})


@pytest.fixture(scope="module")
def spoken() -> list[str]:
    """What the runs `asking` and `both` said."""
    return []


@pytest.fixture(scope="module")
def shown() -> list[ProgressRow]:
    """The progress of the runs `asking` and `both`."""
    return []


@pytest.fixture(scope="module")
def finished_loop(
    tmp_path_factory: pytest.TempPathFactory, model: Path, spoken: list[str], shown: list[ProgressRow]
) -> tuple[Path, LoopResult]:
    """An undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    with show_progress(shown.append, seconds=0):
        return folder, looped(folder, config_of(folder, model), lines=spoken)


@pytest.fixture(scope="module")
def lk(finished_loop: tuple[Path, LoopResult]) -> Lake:
    return lake.open(finished_loop[0] / "lake")


def test_every_round_is_played_by_the_weights_of_the_rounds_before(lk: Lake) -> None:
    rows = lk.sql(
        "SELECT DISTINCT e.run_id, e.collection_round, t.policy_version FROM episodes AS e "
        "JOIN tokens AS t USING (episode_id) ORDER BY ALL"
    )
    rounds = [("asking", number, number) for number in range(3)]
    assert rows.rows() == [*rounds, ("asking-eval", 0, 0), ("asking-eval", 1, 2), ("asking-eval", 2, 3)]
    counts = lk.sql("SELECT count(*) FROM episodes GROUP BY run_id ORDER BY 1")
    assert counts.to_series().to_list() == [18, 48]


def test_updates_consume_their_round_whole_and_nothing_else(lk: Lake) -> None:
    wrong = lk.sql(
        "SELECT * FROM trained_batches AS b JOIN episodes AS e USING (episode_id) "
        "WHERE e.run_id <> 'asking' OR e.collection_round <> b.optimizer_step // 2"
    )
    assert wrong.is_empty()
    missing = lk.sql(
        "SELECT episode_id FROM episodes WHERE run_id = 'asking' AND group_id IN "
        "(SELECT group_id FROM episodes GROUP BY ALL HAVING count(DISTINCT env_return) > 1) "
        "EXCEPT SELECT episode_id FROM trained_batches"
    )
    assert missing.is_empty()


def test_checkpoints_say_which_version_they_are(lk: Lake, finished_loop: tuple[Path, LoopResult]) -> None:
    rows = lk.sql("SELECT optimizer_step, policy_version, sha256 FROM checkpoints WHERE run_id = 'asking' ORDER BY 1")
    assert [row[:2] for row in rows.iter_rows()] == [(2, 1), (4, 2), (6, 3)]
    assert rows["sha256"][-1] == finished_loop[1].weights_sha256


def test_the_final_model_is_the_last_version_and_the_best_one_lies_beside_it(
    finished_loop: tuple[Path, LoopResult],
) -> None:
    folder, done = finished_loop
    final = load_file(done.model / "model.safetensors")
    last = load_file(folder / "out" / "versions" / "v3" / "model.safetensors")
    assert all((final[name] == last[name]).all() for name in final)
    assert done.best_version == max(done.evaluations, key=lambda version: (done.evaluations[version].score, -version))
    assert (folder / "out" / "best" / "model.safetensors").is_file()
    assert not (folder / "out" / "versions" / "v0").exists()  # no one plays it again


def test_what_was_decided_by_is_in_the_metrics_of_the_loop(lk: Lake, finished_loop: tuple[Path, LoopResult]) -> None:
    rows = lk.sql("SELECT name, step, value FROM run_metrics WHERE kind = 'loop'")
    metric_values = {(name, step): value for name, step, value in rows.iter_rows()}
    assert [metric_values["loop/episodes", number] for number in range(3)] == [16, 16, 16]
    mean, tokens = lk.sql(
        "SELECT avg(env_return), (SELECT sum(len(context_ids) + len(action_ids)) FROM tokens WHERE episode_id IN "
        "(SELECT episode_id FROM episodes WHERE run_id = 'asking' AND collection_round = 1)) "
        "FROM episodes WHERE run_id = 'asking' AND collection_round = 1"
    ).row(0)
    assert (metric_values["loop/return", 1], metric_values["loop/tokens", 1]) == (pytest.approx(mean), tokens)
    assert (
        {step for name, step in metric_values if name == "eval/score"} == {0, 2, 3} == set(finished_loop[1].evaluations)
    )
    counts = lk.sql("SELECT status, counts FROM job_runs WHERE kind = 'loop'").row(0)
    assert counts[0] == "succeeded"
    assert '"stopped_by":"rounds"' in counts[1]


def test_a_finished_run_says_what_it_came_to(finished_loop: tuple[Path, LoopResult], model: Path) -> None:
    folder, done = finished_loop
    before = facts(lake.open(folder / "lake"))
    assert looped(folder, config_of(folder, model), resumes=True) == done
    assert facts(lake.open(folder / "lake")) == before


def test_a_name_that_is_taken_is_refused(finished_loop: tuple[Path, LoopResult], model: Path) -> None:
    folder, _ = finished_loop
    with pytest.raises(UsageError, match=r"holds a run 'asking' .*\(--resume\), or"):
        looped(folder, config_of(folder, model))


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[Lake, LoopResult]:
    """A run that collects a round ahead and learns from pairs."""
    folder = tmp_path_factory.mktemp("ahead")
    trainer = {"loss": {"name": "dpo", "pairs": {"kind": "episode"}}, "live_only": None}
    done = looped(folder, without_evaluation(config_of(folder, model, loop={"ahead": 1}, trainer=trainer)))
    return lake.open(folder / "lake"), done


def test_a_round_ahead_is_one_version_stale(ahead: tuple[Lake, LoopResult]) -> None:
    rows = ahead[0].sql(
        "SELECT DISTINCT e.collection_round, t.policy_version FROM episodes AS e JOIN tokens AS t USING (episode_id) "
        "ORDER BY ALL"
    )
    assert rows.rows() == [(0, 0), (1, 0), (2, 1)]
    assert ahead[1].rounds == 3


def test_pairs_are_made_by_the_credit_of_their_round(ahead: tuple[Lake, LoopResult]) -> None:
    assert ahead[1].optimizer_steps > 0
    wrong = ahead[0].sql(
        "SELECT * FROM checkpoints AS c JOIN trained_batches AS b ON b.optimizer_step = c.optimizer_step - 1 "
        "JOIN episodes USING (episode_id) WHERE collection_round <> c.policy_version - 1"
    )
    assert wrong.is_empty()


@pytest.fixture(scope="module")
def early(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[Path, LoopResult, list[str]]:
    """A run whose tokens are used up by its first round, in which every group is dead: siblings say the same."""
    folder, lines = tmp_path_factory.mktemp("early"), list[str]()
    alike = {"group_size": 2, "player": {"sampling": {"temperature": 1e-4}}}
    settings = {"tokens": 1, "collect": alike, "evaluation": {"tasks": 1}}
    return folder, looped(folder, config_of(folder, model, loop=settings), lines=lines), lines


def test_what_ends_a_run_early(early: tuple[Path, LoopResult, list[str]]) -> None:
    """By tokens here; hours and patience are in `test_online_rounds.py`."""
    done = early[1]
    assert (done.stopped_by, done.rounds) == ("tokens", 1)
    assert set(done.evaluations) == {0, 1}, "the last weights are evaluated, whatever ended the run"


@pytest.mark.slow("Hours and patience end a run as tokens do, and the last weights are evaluated.")
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"hours": 1e-9}, "hours"),
        ({"evaluation": {"patience": 1, "min_improvement": 1.0, "every": 1}}, "patience"),
    ],
)
def test_hours_and_patience_end_a_run_early(tmp_path: Path, model: Path, settings: dict[str, Any], reason: str) -> None:
    done = looped(tmp_path, config_of(tmp_path, model, loop=settings))
    assert (done.stopped_by, done.rounds, max(done.evaluations)) == (reason, 1, 1)


def test_a_round_without_signal_trains_nothing(early: tuple[Path, LoopResult, list[str]], model: Path) -> None:
    """Weights stay as they are, and an alarm says why."""
    folder, done, lines = early
    (groups,) = lake.open(folder / "lake").sql("SELECT count(DISTINCT group_id) FROM latest_advantages").row(0)
    assert sum(f"{groups} of {groups} groups are dead" in line for line in lines) == 1
    assert done.optimizer_steps == 0
    assert lake.open(folder / "lake").sql("SELECT * FROM checkpoints").is_empty()
    start, end = (load_file(folder / "model.safetensors") for folder in (model, done.model))
    assert all((start[name] == end[name]).all() for name in end)


@pytest.fixture(scope="module")
def staged(
    tmp_path_factory: pytest.TempPathFactory,
    model: Path,
    finished_loop: tuple[Path, LoopResult],
    spoken: list[str],
    shown: list[ProgressRow],
) -> tuple[Path, LoopResult]:
    """A run `both` in the lake of another: traces of that are learned from (sft), then a round is scored."""
    folder = tmp_path_factory.mktemp("staged")
    shutil.copytree(finished_loop[0] / "lake", folder / "lake")
    reward = folder / "short.py"
    reward.write_text('def short(messages, most):\n    return most / len(messages[-1]["content"] or "x")\n')
    scorer = {"target": f"{reward}:short", "arguments": {"most": 4.0}}
    traces = "env_return > 0 AND run_id = 'asking' AND collection_round = 0"
    settings = {
        "mode": "sft+rl",
        "rounds": 1,
        "sft": {"where": traces, "epochs": 1},
        "score": {"targets": [scorer], "rewards": ["brief"]},
        "credit": {"score": "brief"},
        "evaluation": {"score": "brief", "tasks": 2},
    }
    config = write_config(folder, model)
    config.write_text(config.read_text() + '[reward.brief]\ncomponents = ["short"]\nsql = "2 * short"\n')
    config_read = read_config(str(config), {"loop": settings})
    with show_progress(shown.append, seconds=0):
        return folder, looped(folder, config_read, run="both", lines=spoken)


def test_scorers_and_rewards_made_of_them_see_a_round_before_credit_does(staged: tuple[Path, LoopResult]) -> None:
    lk = lake.open(staged[0] / "lake")
    query = """
        SELECT DISTINCT e.run_id, brief.value = 2 * short.value AS is_double
        FROM scores AS brief JOIN scores AS short USING (episode_id) JOIN episodes AS e USING (episode_id)
        WHERE brief.scorer = 'brief' AND short.scorer = 'short' ORDER BY 1
    """
    assert lk.sql(query).rows() == [("both", True), ("both-eval", True)]
    credit = lk.sql("SELECT parameters FROM job_runs WHERE kind = 'credit' ORDER BY started_at DESC LIMIT 1").item()
    assert "brief" in credit


def test_the_stage_before_is_trained_first_and_the_rounds_start_from_it(
    staged: tuple[Path, LoopResult], model: Path
) -> None:
    """Version 0 is what came of the traces."""
    folder, done = staged
    stage, first = (
        load_file(folder / "out" / stage_folder / "model.safetensors") for stage_folder in ("sft/final", "versions/v0")
    )
    assert done.rounds == 1
    assert all((stage[name] == first[name]).all() for name in stage)
    assert any((stage[name] != value).any() for name, value in load_file(model / "model.safetensors").items())


def test_every_stage_says_what_it_does(
    staged: tuple[Path, LoopResult], spoken: list[str], shown: list[ProgressRow]
) -> None:
    del staged
    assert sum(line.startswith("sft: trained: ") for line in spoken) == 1
    assert sum(line.startswith("sft: last: update ") for line in spoken) == 1
    last = {row.stage: row for row in shown}
    steps = ("collect", "score short", "compute the reward brief", "compute the advantages", "write the weights")
    assert {f"round 1/1: {step}" for step in steps} <= set(last)
    updates = [last[stage] for stage in ("round 1/3: train", "sft: train")]
    assert all(row.done == row.total and row.unit == "updates" and "loss " in row.note for row in updates)
    assert {"round 1/1: evaluate", "round 1/1: evaluate: score short", "sft: load the model"} <= set(last)
    assert (last["round 3/3"].done, last["round 3/3"].total) == (3, 3)


def test_updates_and_rounds_are_lines_of_a_file_too(finished_loop: tuple[Path, LoopResult], lk: Lake) -> None:
    lines = [json.loads(line) for line in (finished_loop[0] / "out" / "metrics.jsonl").read_text().splitlines()]
    updates = [line for line in lines if "loop/round" not in line]
    assert [line["step"] for line in updates] == list(range(6))
    rows = lk.sql("SELECT step, value FROM run_metrics WHERE name = 'grad_norm' ORDER BY step")
    assert [(line["step"], line["grad_norm"]) for line in updates] == rows.rows()
    rounds = [line for line in lines if "loop/return" in line]
    assert [(line["loop/round"], line["step"]) for line in rounds] == [(0, 1), (1, 3), (2, 5)]
    assert lines[-1]["eval/success"] == finished_loop[1].evaluations[3].success


LATE = """
def late(messages):
    said = "".join(message["content"] or "" for message in messages if message["role"] == "assistant")
    return float(sum(map(ord, said)) % 97)
"""
"""A score that siblings seldom share."""


@pytest.fixture(scope="module")
def best_of_round(
    tmp_path_factory: pytest.TempPathFactory, model: Path
) -> tuple[Lake, list[dict[str, float]], list[str]]:
    """Two of four siblings are kept, the best by a scorer, some of those filtered; what wandb got, what was said."""
    folder = tmp_path_factory.mktemp("chosen")
    reward = folder / "late.py"
    reward.write_text(LATE)
    settings = {
        "groups": 4,
        "group_size": 2,
        "oversample": 2,
        "keep": "best",
        "filters": ["min_reward=40", "dead_groups"],
    }
    loop = {"rounds": 3, "sync_every": 2, "collect": settings, "score": {"targets": [f"{reward}:late"]}}
    arguments = {"loop": loop | {"credit": {"score": "late"}}, "trainer": {"loggers": ["wandb"]}}
    logged: list[dict[str, float]] = []
    lines: list[str] = []
    run = SimpleNamespace(log=lambda metrics, step: logged.append(metrics | {"step": step}), finish=lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: run, Error=OSError))
        looped(folder, without_evaluation(config_of(folder, model, **arguments)), lines=lines)
    return lake.open(folder / "lake"), logged, lines


Chosen = tuple[Lake, list[dict[str, float]], list[str]]


def test_the_best_siblings_by_the_score_that_is_trained_on_are_all_that_credit_sees(best_of_round: Chosen) -> None:
    groups = best_of_round[0].sql(
        "SELECT count(*) FILTER (seen) AS n, min(value) FILTER (seen) >= max(value) FILTER (NOT seen) AS are_best "
        "FROM (SELECT e.group_id, value, episode_id IN (SELECT episode_id FROM latest_advantages) AS seen "
        "FROM episodes AS e JOIN current_scores USING (episode_id)) GROUP BY group_id"
    )
    assert groups.unique().rows() == [(2, True)]
    assert best_of_round[0].sql("SELECT count(*) FROM left_out_siblings").item() == 24, (
        "of all rounds, not of the last one"
    )
    assert groups.height == 12


def test_filters_say_of_each_rollout_of_a_round_why_it_is_not_trained_on(best_of_round: Chosen) -> None:
    lk, _, lines = best_of_round
    rows = lk.sql(
        "SELECT s.kept, s.filter, e.episode_id, v.value, "
        "e.episode_id IN (SELECT episode_id FROM trained_batches) AS is_trained "
        "FROM selections AS s JOIN episodes AS e USING (episode_id) JOIN current_scores AS v USING (episode_id) "
        "WHERE selection = 'loop-asking'"
    )
    assert rows["episode_id"].n_unique() == rows.height == 48
    assert rows.filter("kept")["is_trained"].all()
    assert not rows.filter(~pl.col("kept"))["is_trained"].any()
    assert set(rows["filter"].drop_nulls()) >= {"top_q", "min_reward"}
    assert rows.filter(filter="min_reward")["value"].max() < 40
    left_out = lk.sql("SELECT sum(value) FROM run_metrics WHERE name = 'loop/left_out'").item()
    assert left_out == rows.height - rows["kept"].sum()
    assert any("by min_reward" in line for line in lines)


def test_weights_are_delivered_every_few_rounds(best_of_round: Chosen) -> None:
    rows = best_of_round[0].sql(
        "SELECT DISTINCT collection_round, t.policy_version FROM episodes JOIN tokens AS t USING (episode_id) "
        "ORDER BY ALL"
    )
    assert rows.rows() == [(0, 0), (1, 0), (2, 2)]


def test_loggers_are_given_updates_and_rounds(best_of_round: Chosen) -> None:
    lk, logged, _ = best_of_round
    updates = lk.sql("SELECT count(*) FROM run_metrics WHERE name = 'loss'").item()
    assert sum("loss" in metrics for metrics in logged) == updates > 0
    assert [metrics["loop/round"] for metrics in logged if "loop/score" in metrics] == [0, 1, 2]
    assert [metrics["step"] for metrics in logged] == sorted(metrics["step"] for metrics in logged)


def test_the_score_that_is_trained_on_is_shown_by_its_name_and_the_return_beside_it(best_of_round: Chosen) -> None:
    lk, _, loop_lines = best_of_round
    rounds = lk.sql(
        "SELECT collection_round, avg(value), avg(env_return) FROM current_scores JOIN episodes USING (episode_id) "
        "GROUP BY 1 ORDER BY 1"
    ).rows()
    updates = lk.sql(
        "SELECT optimizer_step, avg(value), avg(env_return) FROM trained_batches JOIN episodes USING (episode_id) "
        "JOIN current_scores USING (episode_id) GROUP BY 1 ORDER BY 1"
    ).rows()
    for name, beside, expected in (("loop/score", "loop/return", rounds), ("reward", "env_return", updates)):
        rows = [dict(lk.sql(MEANS, [which]).iter_rows()) for which in (name, beside)]
        for step, mean, returned in expected:
            assert (rows[0][step], rows[1][step]) == pytest.approx((mean, returned))
            assert mean != pytest.approx(returned)
    lines = [line for line in loop_lines if line.startswith("round ") and "mean return" in line]
    for line, (_, mean, returned) in zip(lines, rounds, strict=True):
        assert f"mean late {mean:.3g}" in line
        assert f"mean return {returned:.3g}" in line


MEANS = "SELECT step, value FROM run_metrics WHERE name = ?"


def test_a_resumed_run_keeps_its_configuration_but_where_it_is_played(tmp_path: Path, model: Path) -> None:
    from trainer.online.start import _check_started, _RunJobs, build_job_parameters

    config = config_of(tmp_path, model)
    started = _RunJobs(1, 2, build_job_parameters(config), "started")
    for settings in ({"tokens": 5}, {"collect": {"parallel": 2}}, {"collect": {"player": {"engines": ["http://a:1"]}}}):
        _check_started(started, build_job_parameters(config_of(tmp_path, model, loop=settings)), "asking", resumes=True)
    older = build_job_parameters(config)
    del older["loop"]["sync"]  # what the document has gained since a run was started
    _check_started(_RunJobs(1, 2, older, "started"), build_job_parameters(config), "asking", resumes=True)
    with pytest.raises(UsageError, match=r"loop\.rounds 9 \(the run has 3\)"):
        _check_started(
            started, build_job_parameters(config_of(tmp_path, model, loop={"rounds": 9})), "asking", resumes=True
        )
    with pytest.raises(CheckpointError, match="choose another --run"):
        _check_started(_RunJobs(1, 2, {}, "failed"), build_job_parameters(config), "asking", resumes=True)


def test_a_folder_with_another_runs_weights_is_refused(
    tmp_path: Path, finished_loop: tuple[Path, LoopResult], model: Path
) -> None:
    """They would be played as this run's versions: a lake that was removed, and a folder that was not."""
    shutil.copytree(finished_loop[0] / "out" / "versions", tmp_path / "out" / "versions")
    with pytest.raises(UsageError, match="holds versions of another run"):
        looped(tmp_path, config_of(tmp_path, model))
    assert lake.open(tmp_path / "lake").sql("SELECT * FROM jobs").is_empty()


def test_a_finished_run_is_not_said_to_be_in_another_folder(
    tmp_path: Path, finished_loop: tuple[Path, LoopResult], model: Path
) -> None:
    (tmp_path / "lake").symlink_to(finished_loop[0] / "lake")
    with pytest.raises(CheckpointError, match="give the --out"):
        looped(tmp_path, config_of(finished_loop[0], model), resumes=True)


def test_a_predicate_over_columns_that_there_are_not_is_refused_before_a_round(tmp_path: Path, model: Path) -> None:
    with pytest.raises(UsageError, match=r"trainer.where 'nocolumn = 3' .* `episodes`"):
        looped(tmp_path, config_of(tmp_path, model, trainer={"where": "nocolumn = 3"}))
    assert lake.open(tmp_path / "lake").sql("SELECT * FROM jobs").is_empty()


RAISES = """
import dataclasses
from testkit.word_game import Asking


class Raises(Asking):
    def step(self, action):
        raise RuntimeError("the stove\\x1b[31m is cold")


class Silent(Asking):
    def step(self, action):
        return dataclasses.replace(super().step(action), reward=None)


def make(split="train"):
    return {kind}(split)
"""


@pytest.mark.parametrize(
    ("kind", "evaluation", "message"),
    [
        ("Raises", None, r"all 16 rollouts of .*asking' .* failed, the first of them: .*the stove\ufffd\[31m is cold"),
        pytest.param(
            "Raises",
            {"tasks": 1},
            "the rollout of .*asking-eval.* failed, the first of them: .*the stove",
            marks=pytest.mark.slow("Held-out rollouts that all fail end a run with their reason."),
        ),
        ("Silent", {"tasks": 2}, "none of 2 held-out attempts has a score of 'env_return': reward them"),
    ],
)
def test_rollouts_that_came_to_nothing_end_the_run_with_their_reason(
    tmp_path: Path, model: Path, kind: str, evaluation: dict[str, int] | None, message: str
) -> None:
    """A success of 0 would be a figure that no one measured."""
    (tmp_path / "env.py").write_text(RAISES.replace("{kind}", kind))
    settings = {"collect": {"player": {"env": f"{tmp_path}/env.py:make"}, "retries": 0}}
    config = config_of(tmp_path, model, loop=settings)
    loop = config.loop.model_copy(update={"evaluation": evaluation and EvaluationConfig(**evaluation)})
    with pytest.raises(DataRefusedError, match=message):
        looped(tmp_path, config.model_copy(update={"loop": loop}))


def test_a_round_without_pairs_trains_nothing_and_says_why(tmp_path: Path, model: Path) -> None:
    """The next round may have some."""
    lines: list[str] = []
    settings = {"loss": {"name": "dpo", "pairs": {"kind": "episode", "margin": 100.0}}, "live_only": None}
    config = config_of(tmp_path, model, loop={"rounds": 2, "collect": {"groups": 2}}, trainer=settings)
    done = looped(tmp_path, without_evaluation(config), lines=lines)
    assert (done.rounds, done.optimizer_steps) == (2, 0)
    assert sum("refused (no_pairs)" in line for line in lines) == 2
    assert sum("nothing to train on" in line for line in lines) == 2


def test_prompts_are_trained_on_by_a_score_that_every_line_shows(tmp_path: Path, model: Path) -> None:
    """No one else rewards them, so there is no return to show."""
    prompts = tmp_path / "prompts.jsonl"
    rows = ({"prompt": f"say {colour}", "ground_truth": colour} for colour in ("blue", "green", "red", "white"))
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = write_config(tmp_path, model)
    lines = (line for line in config.read_text().splitlines(keepends=True) if not line.startswith("env = "))
    config.write_text("".join(lines))
    (tmp_path / "score.py").write_text(LATE)
    settings: dict[str, Any] = {"rounds": 1, "evaluation": None, "collect": {"prompts": str(prompts)}}
    settings |= {"score": {"targets": [f"{tmp_path}/score.py:late"]}, "credit": {"estimator": "rloo", "score": "late"}}
    loop_lines: list[str] = []
    done = looped(tmp_path, read_config(str(config), {"loop": settings}), lines=loop_lines)
    lk = lake.open(tmp_path / "lake")
    assert lk.sql("SELECT DISTINCT environment, env_return FROM episodes").rows() == [("prompts", None)]
    mean = lk.sql("SELECT avg(value) FROM current_scores").item()
    (line,) = (line for line in loop_lines if line.startswith("round 1/1, mean"))
    assert line.startswith(f"round 1/1, mean late {mean:.3g}, ")
    assert "mean return" not in line
    names = lk.sql("SELECT DISTINCT name FROM run_metrics WHERE name IN ('reward', 'env_return', 'loop/return')")
    assert done.optimizer_steps > 0
    assert names["name"].to_list() == ["reward"]
