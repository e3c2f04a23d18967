"""The command `credit`: every estimator and verb, its options, and what it tells."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

from lake import EpisodeRecord, Lake, StepRecord, TokensRecord, ids
from lake.judgements.credit import find_credit
from pipelines.credit.commands import credit
from pipelines.credit.estimators import ALONE, ESTIMATORS, REFUSED, read_title
from pipelines.credit.estimators.protocol import PRESETS
from testkit.command_line import Cli, runner
from testkit.copies import copied, empty_lake
from testkit.shared import shared_data
from testkit.wording import Wording


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run a command line in this process."""
    return runner(monkeypatch, capsys)


def rollouts(run: str, scores: Sequence[float | None], reward: float | None = None) -> list[EpisodeRecord]:
    return [
        EpisodeRecord(
            run_id=run,
            task_id="t",
            rollout_index=index,
            env_return=score,
            steps=[StepRecord(state="hall", action="go", reward=reward)],
        )
        for index, score in enumerate(scores)
    ]


@pytest.fixture
def lk(tmp_path: Path) -> Lake:
    def make(template: Path) -> None:
        empty_lake(template).append(rollouts("a", [0.0, 1.0]))

    return copied("a group of two rollouts", make, tmp_path / "lake")


def test_no_estimator_is_called_like_a_verb_or_like_what_is_refused() -> None:
    assert not set(ESTIMATORS) & set(credit.commands)
    assert not set(ESTIMATORS) & set(REFUSED)


def test_the_help_lists_every_estimator_and_verb_with_a_line(cli: Cli) -> None:
    help_text = " ".join(cli("credit", "-h").out.split())
    for name in ESTIMATORS:
        assert f" {name} {read_title(name)}" in help_text
    for name, command in credit.commands.items():
        assert f" {name} {command.get_short_help_str()}" in help_text


@pytest.mark.parametrize("name", [*ESTIMATORS, *credit.commands])
def test_every_command_explains_itself(cli: Cli, name: str) -> None:
    command = cli("credit", name, "-h")
    assert command.code == 0
    assert command.out.startswith(f"Usage: trajlake credit {name} [OPTIONS]")
    if name in ESTIMATORS:
        words = " ".join(command.out.split())
        assert all(option in words for option in ESTIMATORS[name].model_fields)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why_and_what_to_use(cli: Cli, name: str) -> None:
    fault = cli("credit", name, "--lake", "x").fault
    assert REFUSED[name] in fault


def test_an_unknown_name_is_answered_with_the_known_ones(cli: Cli) -> None:
    assert "no estimator 'nope'; valid: batch_std, " in cli("credit", "nope", "--lake", "x").fault


def test_a_job_is_told_in_words_and_the_next_one_does_only_what_is_new(cli: Cli, lk: Lake, wording: Wording) -> None:
    first = cli("credit", "gigpo", "--lake", lk.uri)
    assert "last step's reward" in first.err
    current = find_credit(lk.snapshot())
    job = lk.sql("SELECT id_text(max(job_id)) FROM credit_groups").item()
    wording(first.out, SERIES=ids.to_text(current.series_id), JOB=job)
    assert "2 episodes, 2 steps in 1 group: 1 live" in first.out
    assert "100.0% of the steps " in first.out
    assert "1 group computed, 0 unchanged" in first.out
    assert f"series {ids.to_text(current.series_id)}" in first.out
    again = cli("credit", "gigpo", "--lake", lk.uri).out
    assert again.startswith("nothing changed since job ")
    assert "; gigpo is still the current credit" in again
    lk.append(rollouts("b", [0.5]))
    second = cli("credit", "gigpo", "--lake", lk.uri)
    assert "1 group computed, 1 unchanged, 0 removed" in second.out
    assert "singleton: " in second.err
    assert "2 groups computed" in cli("credit", "gigpo", "--lake", lk.uri, "--force").out


def test_lone_episodes_are_refused_before_a_job_begins(cli: Cli, tmp_path: Path) -> None:
    lone = empty_lake(tmp_path / "lone")
    for run in ("a", "b"):
        lone.append(rollouts(run, [1.0]))
    assert all(name in cli("credit", "gigpo", "--lake", lone.uri).fault for name in ("gigpo", *ALONE, "singleton"))
    assert lone.sql("SELECT count(*) FROM jobs WHERE kind = 'credit'").item() == 0
    assert cli("credit", "gigpo", "--lake", lone.uri, "--set", "singleton=raw").code == 0


def test_recorded_rewards_are_taken_unless_told_otherwise(cli: Cli, lk: Lake) -> None:
    lk.append(rollouts("b", [0.5, 1.0], reward=0.5))
    assert "last step's reward" not in cli("credit", "gigpo", "--lake", lk.uri).err
    command = cli("credit", "gigpo", "--lake", lk.uri, "--set", "step_source=terminal_score")
    assert "last step's reward" not in command.err, "it was asked for"
    parameters = lk.sql("SELECT parameters FROM job_runs WHERE kind = 'credit' ORDER BY started_at")["parameters"]
    assert ['"step_source":"rewards"' in text for text in parameters] == [True, False]


def test_options_come_from_a_file_and_the_command_line_wins(cli: Cli, lk: Lake, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text('[credit.rloo]\ntruncated = "mask"\n[credit.integrity]\nsingleton = "refuse"\n')
    lk.append(rollouts("b", [0.5]))
    options = ("credit", "rloo", "--lake", lk.uri, "--config", str(config))
    assert "singleton: " in cli(*options).fault
    assert cli(*options, "--check", "singleton=off", "--set", "truncated=exclude").code == 0
    (parameters,) = lk.sql("SELECT parameters FROM job_runs WHERE status = 'succeeded' AND kind = 'credit'")[
        "parameters"
    ]
    assert '"truncated":"exclude"' in parameters


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--set", "omga=1"), "gigpo: there is no option `omga`. Options: default_step_reward"),
        (("--set", "gamma=2"), "gigpo: `gamma` is 2; valid: 1.0 or less"),
        (("--check", "sngleton=off"), "credit.integrity: there is no option `sngleton`"),
        (("--check", "singleton=maybe"), "`singleton` is 'maybe'; valid: 'off', 'warn' or 'refuse'"),
        (("--set", 'anchors={"kind":'), "`anchors` is not JSON: Expecting value at character 9 of '{\"kind\":'"),
        (("--set", 'anchors={"kind":'), "`trajlake anchors --anchors FILE --lake "),
        (("--set", 'anchors={"kind":"jsn"}'), "`anchors` has the kind 'jsn'; valid: 'chain', 'json'"),
        (("--where", "nope = 1"), "nope"),
        (("--score", "judge"), "no scores of 'judge' for episodes"),
    ],
)
def test_what_cannot_be_meant_is_one_line(cli: Cli, lk: Lake, options: tuple[str, ...], words: str) -> None:
    assert words in cli("credit", "gigpo", "--lake", lk.uri, *options).fault


def test_a_file_with_unknown_options_names_the_valid_ones(cli: Cli, lk: Lake, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("[credit.rloo]\ngama = 1\n")
    fault = cli("credit", "rloo", "--lake", lk.uri, "--config", str(config)).fault
    assert "[credit.rloo] has unknown options ['gama']; valid: " in fault


def test_an_estimator_that_needs_a_batch_says_so(cli: Cli, lk: Lake) -> None:
    assert "batch_key" in cli("credit", "batch_std", "--lake", lk.uri).fault


def test_executors_and_budgets_are_options(cli: Cli, lk: Lake) -> None:
    done = cli("credit", "grpo", "--lake", lk.uri, "--executor", "local", "--workers", "1", "--memory-limit", "500MB")
    assert "1 group computed" in done.out
    assert cli("credit", "grpo", "--lake", lk.uri, "--memory", "0").code == 2


def test_compare_hangs_below_credit() -> None:
    context = click.Context(credit, info_name="credit")
    assert credit.list_commands(context) == [*sorted(ESTIMATORS), "compare"]
    command = credit.get_command(context, "compare")
    assert command is not None
    assert command.name == "compare"


def test_a_series_that_is_asked_for_again_is_current_again(cli: Cli, lk: Lake) -> None:
    """Nothing is computed, and training takes what was run last."""
    for name in ("grpo", "rloo"):
        cli("credit", name, "--lake", lk.uri)
    assert find_credit(lk.snapshot()).estimator == "rloo"
    assert "; grpo is now the current credit" in cli("credit", "grpo", "--lake", lk.uri).out
    assert find_credit(lk.snapshot()).estimator == "grpo"
    jobs = lk.sql("SELECT count(*) FROM jobs").item()
    assert "; grpo is still the current credit" in cli("credit", "grpo", "--lake", lk.uri).out
    assert lk.sql("SELECT count(*) FROM jobs").item() == jobs, "it is current: nothing is written"


# ---------------------------------------------------------------- help and presets


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_help_of_an_estimator_tells_each_option_s_default_and_meaning(cli: Cli, name: str) -> None:
    words = " ".join(cli("credit", name, "-h").out.split("Options of the estimator")[1].split())
    for option, field in ESTIMATORS[name].model_fields.items():
        # A description may hold the name of a later option as a word; options come in the order of their fields.
        _, _, words = words.partition(f" {option} ")
        after = words
        meaning, _, _ = after.partition("[default: ")
        assert len(meaning.split()) >= 3, option
        if option in ("batch_key", "components") and name != "gae":
            assert "Required." in meaning
        elif option != "anchors":
            default = field.get_default()
            default_text = (
                "none" if default is None else str(default).lower() if isinstance(default, bool) else str(default)
            )
            assert after.removeprefix(meaning).startswith(f"[default: {default_text}]"), option


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("01_basic_sparse", ()),
        ("02_edges_dense", ("gamma=0.9", "omega=0.5")),
    ],
)
def test_a_preset_gives_the_numbers_of_the_code_it_names(
    cli: Cli, tmp_path: Path, name: str, settings: tuple[str, ...]
) -> None:
    """The golden vectors of the authors' functions, through a lake and the command.

    Not the vector of similar anchors: they depend on the order of a batch, which a lake does not keep.
    """
    document = json.loads(shared_data("gigpo_golden", f"{name}.json").read_text())
    rows = [row for row in document["rows"] if row["active"]]
    lk = empty_lake(tmp_path / "lake")
    lk.append(golden_episodes(rows))
    options = [word for setting in settings for word in ("--set", setting)]
    done = cli("credit", "gigpo", "--lake", lk.uri, "--preset", "verl-agent", *options, "--check", "one_start=off")
    assert done.code == 0, done.fault
    advantages = lk.sql(
        "SELECT e.task_id, e.agent_id AS traj_id, a.step_index, a.advantage FROM latest_advantages a "
        "JOIN episodes e USING (episode_id)"
    )
    ours = {(row["traj_id"], row["step_index"]): row["advantage"] for row in advantages.iter_rows(named=True)}
    theirs = {(row["traj_id"], row["step_index"]): row["A_mean_norm"] for row in rows}
    assert ours == pytest.approx(theirs, abs=5e-6, rel=0)


def golden_episodes(rows: list[dict[str, Any]]) -> list[EpisodeRecord]:
    """The trajectories of a golden document; the agent's name holds the trajectory's."""
    by_trajectory: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_trajectory.setdefault(row["traj_id"], []).append(row)
    return [
        EpisodeRecord(
            run_id="golden",
            task_id=steps[0]["group_id"],
            rollout_index=index,
            agent_id=name,
            env_return=sum(row["reward"] for row in steps),
            steps=[
                StepRecord(state=row["state"], action="go", reward=row["reward"], is_action_valid=row["valid"])
                for row in sorted(steps, key=lambda row: row["step_index"])
            ],
        )
        for index, (name, steps) in enumerate(by_trajectory.items())
    ]


def test_options_beside_a_preset_win_and_what_was_resolved_is_recorded(cli: Cli, lk: Lake, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("[credit.gigpo]\nomega = 0.5\ngamma = 0.8\n")
    options = ("--preset", "verl-agent", "--config", str(config), "--set", "gamma=0.9")
    assert cli("credit", "gigpo", "--lake", lk.uri, *options).code == 0
    (text,) = lk.sql("SELECT parameters FROM job_runs WHERE status = 'succeeded' AND kind = 'credit'")["parameters"]
    recorded = json.loads(text)["config"]
    assert (recorded["gamma"], recorded["omega"]) == (0.9, 0.5)
    assert (recorded["baseline"], recorded["episode_norm"], recorded["singleton"]) == ("rows", "mean_norm", "raw")
    # No step reward is recorded: the score is the sum of a reward that came at the end.
    assert (recorded["episode_source"], recorded["step_source"]) == ("score", "terminal_score")
    assert lk.sql("SELECT count(*) AS n FROM latest_advantages WHERE advantage IS NULL")["n"].item() == 0


def test_a_preset_sums_rewards_where_they_are_recorded(cli: Cli, lk: Lake) -> None:
    lk.append(rollouts("b", [0.5, 1.0], reward=0.5))
    assert cli("credit", "gigpo", "--lake", lk.uri, "--where", "run_id = 'b'", "--preset", "verl-agent").code == 0
    (text,) = lk.sql("SELECT parameters FROM job_runs WHERE status = 'succeeded' AND kind = 'credit'")["parameters"]
    recorded = json.loads(text)["config"]
    assert (recorded["episode_source"], recorded["step_source"]) == ("sum_rewards", "rewards")


def test_an_unknown_preset_is_answered_with_the_known_ones(cli: Cli, lk: Lake) -> None:
    fault = cli("credit", "gigpo", "--lake", lk.uri, "--preset", "verl").fault
    assert fault.strip() == "trajlake: gigpo has no preset 'verl'; valid: verl-agent"
    assert "No such option" in cli("credit", "rloo", "--lake", lk.uri, "--preset", "verl-agent").err


@pytest.mark.parametrize(
    ("estimator", "name"), [(estimator, name) for estimator, named in PRESETS.items() for name in named]
)
def test_presets_are_options(estimator: str, name: str) -> None:
    assert ESTIMATORS[estimator].model_validate(PRESETS[estimator][name])


def played(number: int, score: float) -> EpisodeRecord:
    """A rollout of two steps: a call of a tool in a state that all share, and an answer."""
    tool_call = {"id": f"c{number}", "type": "function", "function": {"name": "look", "arguments": '{"at": "door"}'}}
    tokens = TokensRecord(context_ids=[1], action_ids=[2, 3], action_logprobs=[-0.25, -0.5])
    observation = {"role": "tool", "tool_call_id": f"c{number}", "content": f"room {number}\x1b[31m"}
    return EpisodeRecord(
        task_id="t",
        run_id="a",
        rollout_index=number,
        env_return=score,
        steps=[
            StepRecord(state="hall", action="", tool_calls=[tool_call], reward=0.0, value_estimate=0.75, tokens=tokens),
            StepRecord(state=f"room {number}", action="done", context=[observation], reward=score),
        ],
    )


def test_debug_shows_each_step_and_what_its_credit_is_made_of(tmp_path: Path, cli: Cli) -> None:
    lk = empty_lake(tmp_path / "lake")
    lk.append([played(0, 1.0), played(1, 0.0)])
    quiet = cli("credit", "gigpo", "--lake", lk.uri)
    command = cli("credit", "gigpo", "--lake", lk.uri, "--log-level", "debug", "--log-episodes", "rollout_index = 0")
    assert "observation" not in quiet.err
    assert "\x1b" not in command.err
    first, second = lk.sql(
        "SELECT * FROM current_advantages JOIN episodes USING (episode_id) WHERE rollout_index = 0 ORDER BY step_index"
    ).to_dicts()
    lines = [line.strip() for line in command.err.splitlines()]
    steps = [index for index, line in enumerate(lines) if line.startswith("step ")]
    assert len(steps) == 2, "of the chosen episode alone"
    state_line, acted, tool, advantage_line = lines[steps[0] : steps[0] + 4]
    assert "'hall'" in state_line
    assert {"-0.75", "0.75"} <= set(acted.replace(";", " ").replace(",", " ").split())
    assert "look({" in tool
    assert "room 0" in tool
    for name, row, line in (("G", first, advantage_line), ("A_S", second, lines[steps[1] + 2])):
        assert row["return_to_go"] is not None, name
        figures = [f"{row[column]:.6g}" for column in ("return_to_go", "a_episode", "a_step", "advantage")]
        assert all(figure in line for figure in figures), (figures, line)
        assert ids.to_text(row["anchor_key"]) in line
    anchors = [line for line in lines if line.startswith("anchor ")]
    assert ids.to_text(first["anchor_key"]) in anchors[0]
    assert ids.to_text(ids.text_hash("hall")) in anchors[0]
    of_anchor = lines[lines.index(anchors[0]) + 1 : lines.index(anchors[0]) + 3]
    shared = lk.sql("SELECT episode_id, return_to_go, a_step FROM current_advantages WHERE step_index = 0")
    for row in shared.to_dicts():
        (line,) = (line for line in of_anchor if ids.to_text(row["episode_id"]) in line)
        assert f"{row['return_to_go']:.6g}" in line
        assert f"{row['a_step']:.6g}" in line
    (group,) = (line for line in lines if line.startswith("group "))
    assert {"0.5", "0.707107"} <= set(group.replace(",", " ").split())


def test_episodes_to_log_are_a_predicate_and_need_the_level(lk: Lake, cli: Cli) -> None:
    assert cli("credit", "gigpo", "--lake", lk.uri, "--log-episodes", "true").fault
    wrong = cli("credit", "gigpo", "--lake", lk.uri, "--log-level", "debug", "--log-episodes", "no such column")
    assert "--log-episodes" in wrong.fault
    assert lk.sql("FROM advantages").is_empty(), "told before anything is computed"
    nobody = cli("credit", "gigpo", "--lake", lk.uri, "--log-level", "debug", "--log-episodes", "false")
    assert "--log-episodes" in nobody.fault


def test_without_a_choice_the_first_groups_are_logged_and_the_rest_is_counted(tmp_path: Path, cli: Cli) -> None:
    lk = empty_lake(tmp_path / "lake")
    tasks = [msgspec.structs.replace(played(n, float(n)), task_id=f"t{task}") for task in range(4) for n in range(2)]
    lk.append(tasks)
    log = cli("credit", "gigpo", "--lake", lk.uri, "--log-level", "debug").err
    assert sum(line.startswith("group ") for line in log.splitlines()) == 2
    assert sum(line.strip().startswith("step ") for line in log.splitlines()) == 8
    assert any(line.startswith("2 ") and "--log-episodes" in line for line in log.splitlines())
