"""Comparing credit jobs of a real lake: which are meant, what is said, what is refused, what the command prints."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest

from lake import Lake, ids
from lake.errors import DataRefusedError, UsageError
from lake.judgements.credit import Credit, find_covering, find_credit, find_jobs
from lake.records import EpisodeRecord, StepRecord
from pipelines.credit.compare import LEVELS, CreditComparison, compare
from testkit.command_line import Cli, runner
from testkit.copies import copied, empty_lake
from testkit.full_lake import advantages
from testkit.wording import Wording

Value = float | None


def record(lk: Lake, tasks: int = 2, run_id: str = "run") -> None:
    """Tasks with two rollouts of three steps each."""
    steps = [
        StepRecord(state="a", action="look\x1b[31m around\n" * 20),
        StepRecord(
            state="b", action="", tool_calls=[{"id": "c", "function": {"name": "find", "arguments": '{"x": 1}'}}]
        ),
        StepRecord(state="c", action="stop"),
    ]
    pairs = [(t, n) for t in range(tasks) for n in range(2)]
    records = [EpisodeRecord(task_id=f"t{t}", rollout_index=n, env_return=float(n), steps=steps) for t, n in pairs]
    lk.append(records, run_id=run_id)


def recorded(folder: Path, tasks: int = 2) -> Lake:
    """A lake of such tasks."""
    return copied(f"{tasks} tasks to compare", lambda template: record(empty_lake(template), tasks), folder)


def rows_for(lk: Lake, values: dict[str, list[Value]], dead: str = "") -> pl.DataFrame:
    """For each task six advantages, of rollout 0 and of rollout 1; tasks left out are not covered."""
    steps = lk.sql(
        "SELECT s.*, e.task_id FROM steps AS s JOIN episodes AS e USING (episode_id)"
        " ORDER BY e.task_id, e.rollout_index, s.step_index"
    )
    return pl.concat(
        advantages(steps.filter(pl.col("task_id") == task)).with_columns(
            pl.Series("advantage", scores, dtype=pl.Float64),
            pl.Series("a_episode", scores, dtype=pl.Float64),
            a_step=pl.lit(0.0),
            group_size=pl.lit(2, pl.Int32),
            flags=pl.lit("dead_group" if task == dead else ""),
        )
        for task, scores in values.items()
    ).with_columns(defined=pl.col("advantage").is_not_null())


GIGPO = {"estimator": "gigpo", "score": "env_return"}


def credit(lk: Lake, values: dict[str, list[Value]], parameters: dict[str, Any] | None = None, dead: str = "") -> int:
    """A credit job with the rows of `rows_for`."""
    with lk.job(kind="credit", parameters=parameters or GIGPO) as job:
        job.write("advantages", rows_for(lk, values, dead))
    return job.job_id


@pytest.fixture(scope="module")
def lk(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Two jobs of one series and one of another."""
    lk = recorded(tmp_path_factory.mktemp("compare") / "lake")
    credit(lk, {"t0": [1, 1, 1, -1, -1, -1], "t1": [0, 0, 0, 0, 0, 0]}, dead="t1")
    credit(
        lk,
        {"t0": [1, 2, -1, -1, None, -1], "t1": [0.5, 0.5, 0.5, -0.5, -0.5, -0.5]},
        {"estimator": "rloo", "score": "judge"},
    )
    credit(lk, {"t1": [0, 0, 0, 0, 0, 1e-12]}, dead="t1")
    return lk


def jobs(lk: Lake) -> list[str]:
    job_ids = lk.sql("SELECT job_id FROM job_runs WHERE kind = 'credit' ORDER BY sequence")
    return [ids.to_text(job) for job in job_ids["job_id"]]


def series(lk: Lake, job: str) -> str:
    return ids.to_text(lk.sql("SELECT DISTINCT series_id FROM jobs WHERE job_id = id($job)", {"job": job}).item())


# ---------------------------------------------------------------- which rows are meant


def test_a_job_is_named_by_its_id_or_by_its_beginning(lk: Lake) -> None:
    snapshot = lk.snapshot()
    for job in jobs(lk):
        for text in (job, job[:6], f" {job.upper()} "):
            assert find_credit(snapshot, text).job_id == ids.from_text(job)
        assert find_credit(snapshot, job).text == job
    first, second, _ = jobs(lk)
    assert find_credit(snapshot, first).title == f"gigpo, series {series(lk, first)}, as of job {first}"
    assert find_credit(snapshot, second).title == f"rloo (score judge), series {series(lk, second)}, as of job {second}"


@pytest.mark.parametrize("how", ["estimator", "series", "beginning of the series", "nothing: the current one"])
def test_a_series_is_named_in_four_ways(lk: Lake, how: str) -> None:
    first, _, last = jobs(lk)
    text = series(lk, first)
    name = {"estimator": "gigpo", "series": text, "beginning of the series": text[:8]}.get(how)
    credit_read = find_credit(lk.snapshot(), name)
    assert (credit_read.job_id, credit_read.text, credit_read.title) == (None, text, f"gigpo, series {text}")
    assert find_jobs(lk.snapshot(), credit_read) == tuple(sorted((ids.from_text(first), ids.from_text(last))))


def test_a_series_takes_each_group_from_its_newest_job(lk: Lake) -> None:
    first, middle, last = jobs(lk)
    comparison = compare(lk.snapshot(), series(lk, first), last)
    assert comparison.levels["shared"].to_list()[0] == 12
    assert comparison.levels["max_change"].to_list()[0] == 0, "t1 comes from the last job, t0 from the first"
    assert compare(lk.snapshot(), first, last).levels["max_change"].to_list()[0] == 1e-12
    assert find_credit(lk.snapshot(), "rloo").series_id == ids.from_text(series(lk, middle))


def test_the_newest_series_of_an_estimator_is_meant_by_its_name(lk: Lake, tmp_path: Path) -> None:
    lk = recorded(tmp_path, tasks=1)
    for omega in (0, 1, 0):
        credit(lk, {"t0": [1, 1, 1, 0, 0, 0]}, {"estimator": "gigpo", "config": {"omega": omega}})
    snapshot = lk.snapshot()
    assert find_credit(snapshot, "gigpo").parameters["config"] == {"omega": 0}
    assert find_credit(snapshot).series_id == find_credit(snapshot, "gigpo").series_id
    last = lk.sql("SELECT max(sequence) FROM job_runs WHERE kind = 'credit'").item()
    before = find_credit(snapshot, before=last)
    assert before.parameters["config"] == {"omega": 1}


@pytest.mark.parametrize("name", ["", "  ", "zzzzz", "not an id", "grpo"])
def test_what_names_nothing_is_refused_with_the_newest(lk: Lake, name: str) -> None:
    newest = rf"the newest: gigpo, series {series(lk, jobs(lk)[0])}; rloo \(score judge\), series \w{{13}}"
    with pytest.raises(UsageError, match=rf"names no estimator, series .*; {newest}"):
        compare(lk.snapshot(), name, jobs(lk)[0])


def test_a_beginning_of_several_is_refused_with_them(tmp_path: Path) -> None:
    lk = empty_lake(tmp_path)
    with pytest.raises(DataRefusedError, match="holds no advantages"):
        find_credit(lk.snapshot(), "0")
    record(lk, tasks=1)
    prefixes: set[str] = set()
    while True:
        first = ids.to_text(credit(lk, {"t0": [1, 1, 1, 0, 0, 0]}))[0]
        if first in prefixes:
            break
        prefixes.add(first)
    with pytest.raises(UsageError, match=rf"'{first}' .* several ids; the newest: gigpo, series "):
        find_credit(lk.snapshot(), first)


def test_a_job_that_failed_cannot_be_meant(tmp_path: Path) -> None:
    lk = recorded(tmp_path, tasks=1)
    job = lk.job(kind="credit", parameters={})
    with pytest.raises(ZeroDivisionError), job:
        raise ZeroDivisionError
    credit(lk, {"t0": [1, 1, 1, 0, 0, 0]})
    with pytest.raises(UsageError, match="names no estimator"):
        find_credit(lk.snapshot(), ids.to_text(job.job_id))


# ---------------------------------------------------------------- what is said


@pytest.fixture(scope="module")
def comparison_of_both(lk: Lake) -> CreditComparison:
    first, second, _ = jobs(lk)
    return compare(lk.snapshot(), first, second, examples=3)


def test_levels_are_compared_over_steps_that_both_define(comparison_of_both: CreditComparison) -> None:
    assert comparison_of_both.levels["level"].to_list() == list(LEVELS)
    row = comparison_of_both.levels.row(0, named=True)
    counts = {name: row[name] for name in ("covered_1", "covered_2", "defined_2", "shared", "only_1", "only_2")}
    assert counts == {"covered_1": 12, "covered_2": 12, "defined_2": 11, "shared": 11, "only_1": 1, "only_2": 0}
    assert (row["flips"], row["gained_sign"], row["lost_sign"]) == (1, 6, 0)
    assert row["flip_share"] == pytest.approx(1 / 11)
    assert row["flip_weight"] == pytest.approx(2 / (2 + 3 + 2 + 2 + 2 + 3)), "1 -> -1 weighs 2 of all |A|"
    steps = comparison_of_both.levels.row(2, named=True)
    assert steps["pearson"] is steps["spearman"] is None, "a constant has no correlation"


def test_groups_whose_signal_changed_come_first(comparison_of_both: CreditComparison) -> None:
    groups = comparison_of_both.groups.select(
        "task_id", "state_1", "state_2", "change", "shared", "only_1", "flips", "max_change"
    )
    assert groups.rows() == [
        ("t1", "dead", "live", "gained", 6, 0, 0, 0.5),
        ("t0", "live", "live", "same", 5, 1, 1, 2.0),
    ]
    assert comparison_of_both.signal.rows() == [("dead", "live", "gained", 1), ("live", "live", "same", 1)]


def test_examples_show_the_values_and_an_excerpt_of_the_action(comparison_of_both: CreditComparison) -> None:
    rows = comparison_of_both.examples.select("step_index", "advantage_1", "advantage_2", "change", "action").rows()
    assert rows[0][:4] == (2, 1.0, -1.0, -2.0)
    assert rows[1] == (1, 1.0, 2.0, 1.0, 'find({"x": 1})')
    assert rows[2][1:4] in [(0.0, 0.5, 0.5), (0.0, -0.5, -0.5)]
    action = next(row[4] for row in rows if row[4].startswith("look"))
    assert len(action) == 120
    assert action.endswith("...")
    assert "\x1b" not in action


def test_only_as_many_examples_as_wanted(lk: Lake) -> None:
    first, second, _ = jobs(lk)
    assert compare(lk.snapshot(), first, second, examples=0).examples.is_empty()
    assert compare(lk.snapshot(), first, second, examples=100, memory="100MB").examples.height == 8


def test_groups_of_one_side_alone_are_named(tmp_path: Path) -> None:
    lk = recorded(tmp_path)
    values = {task: [1.0, 1.0, 1.0, 0.0, 0.0, 0.0] for task in ("t0", "t1")}
    credit(lk, values)
    credit(lk, {"t1": values["t1"]}, {"estimator": "rloo"})
    assert compare(lk.snapshot(), "gigpo", "rloo").groups.select("task_id", "change", "shared").rows() == [
        ("t1", "same", 6),
        ("t0", "only_1", 0),
    ]
    mirrored = compare(lk.snapshot(), "rloo", "gigpo").groups
    assert mirrored.filter(pl.col("change") == "only_2")["task_id"].to_list() == ["t0"]


def test_series_over_other_episodes_have_nothing_to_compare(tmp_path: Path) -> None:
    lk = recorded(tmp_path)
    for task, estimator in (("t0", "gigpo"), ("t1", "rloo")):
        credit(lk, {task: [1, 1, 1, 0, 0, 0]}, {"estimator": estimator})
    with pytest.raises(DataRefusedError, match=r"no group in common \(6 and 6 steps\)"):
        compare(lk.snapshot(), "gigpo", "rloo")


def test_retracted_episodes_are_compared_no_more(tmp_path: Path) -> None:
    lk = recorded(tmp_path)
    first, two = (ids.to_text(credit(lk, {t: [1, 1, v, 0, 0, 0] for t in ("t0", "t1")})) for v in (1, -1))
    lk.retract(lk.sql("SELECT episode_id FROM episodes WHERE task_id = 't0'")["episode_id"])
    level = compare(lk.snapshot(), first, two).levels.row(0, named=True)
    assert (level["shared"], level["flips"]) == (6, 1)


# ---------------------------------------------------------------- jobs that computed only what had changed


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """A series of three jobs: t0 and t1; t2 alone, which came; t0 again, which got a sibling. And one other series."""
    from pipelines.credit import GiGPO
    from pipelines.credit.job import run_credit

    def records(task: str, *rollouts: int) -> list[EpisodeRecord]:
        steps = [StepRecord(state="a", action="go"), StepRecord(state="b", action="stop")]
        return [EpisodeRecord(task_id=task, rollout_index=n, env_return=float(n), steps=steps) for n in rollouts]

    lk = empty_lake(tmp_path_factory.mktemp("grown") / "lake")
    for new in ((("t0", 0, 1), ("t1", 0, 1)), (("t2", 0, 1),), (("t0", 2),)):
        for task, *rollouts in new:
            lk.append(records(task, *rollouts), run_id="run")
        run_credit(lk, GiGPO(step_source="terminal_score"))
    run_credit(lk, GiGPO(step_source="terminal_score", omega=0))
    return lk


def test_a_job_means_its_series_as_it_was_then(grown: Lake) -> None:
    snapshot = grown.snapshot()
    credits_read = [find_credit(snapshot, job) for job in jobs(grown)]
    assert [len(find_jobs(snapshot, side)) for side in credits_read] == [1, 2, 3, 1]
    rows_shown = []
    for side in credits_read:
        groups = grown.sql(
            f"SELECT task_id, count(DISTINCT episode_id) AS n FROM {side.rows} AS a JOIN episodes USING (episode_id)"
            " GROUP BY task_id ORDER BY task_id"
        )
        rows_shown.append(dict(groups.iter_rows()))
    assert rows_shown == [
        {"t0": 2, "t1": 2},
        {"t0": 2, "t1": 2, "t2": 2},
        {"t0": 3, "t1": 2, "t2": 2},
        {"t0": 3, "t1": 2, "t2": 2},
    ]
    series_now = find_credit(snapshot, series(grown, jobs(grown)[0]))
    assert (
        grown.sql(f"FROM {series_now.rows}")
        .sort("episode_id", "step_index")
        .equals(grown.sql(f"FROM {credits_read[2].rows}").sort("episode_id", "step_index"))
    )


def test_a_job_that_ended_right_after_another_one_does_not_count_in_it(tmp_path: Path) -> None:
    """They overlap, so that no other row of `jobs` lies between their ends."""
    lk = recorded(tmp_path)
    credit(lk, {"t0": [0.0] * 6, "t1": [0.0] * 6})
    with lk.job(kind="credit", parameters=GIGPO) as later, lk.job(kind="credit", parameters=GIGPO) as earlier:
        earlier.write("advantages", rows_for(lk, {"t0": [1.0] * 6}))
        later.write("advantages", rows_for(lk, {"t0": [2.0] * 6}))
    ends = lk.sql("SELECT sequence FROM job_runs WHERE kind = 'credit' ORDER BY sequence")["sequence"]
    assert ends[2] - ends[1] == 1
    rows_shown = {
        job: set(lk.sql(f"SELECT advantage FROM {find_credit(lk.snapshot(), ids.to_text(job)).rows}")["advantage"])
        for job in (earlier.job_id, later.job_id)
    }
    assert rows_shown == {earlier.job_id: {0.0, 1.0}, later.job_id: {0.0, 2.0}}


def test_a_series_of_one_job_has_the_rows_that_comparing_all_jobs_would_leave(grown: Lake) -> None:
    snapshot = grown.snapshot()
    credits_read = [find_credit(snapshot, job) for job in jobs(grown)] + [find_credit(snapshot)]
    (group,) = grown.sql("SELECT DISTINCT group_id FROM episodes WHERE task_id = 't0'")["group_id"]
    covers = [cover.credit for cover in find_covering(snapshot, group_id=group)]
    assert covers == [find_credit(snapshot), find_credit(snapshot, series(grown, jobs(grown)[0]))]
    assert [credit.only_job is not None for credit in (*credits_read, *covers)] == [
        True,
        False,
        False,
        True,
        True,
        True,
        False,
    ]
    for credit in credits_read:
        slowly = replace(credit, only_job=None)
        rows_read, expected = (grown.sql(f"FROM {side.rows} ORDER BY ALL") for side in (credit, slowly))
        assert rows_read.equals(expected)


def regrouped(lk: Lake, groups: dict[str, int]) -> None:
    """A grouping `mine` of all episodes: the group of each task."""
    episodes = lk.sql("SELECT episode_id, run_id, task_id, group_id AS collected_group_id FROM episodes")
    group = pl.Series([groups[task] for task in episodes["task_id"]], dtype=pl.Int64)
    with lk.job(kind="group") as job:
        job.write("groupings", episodes.drop("task_id").with_columns(group_id=group, grouping=pl.lit("mine")))


def test_a_group_that_ended_is_not_in_later_jobs(tmp_path: Path) -> None:
    from pipelines.credit import GiGPO
    from pipelines.credit.job import run_credit

    lk = recorded(tmp_path)
    sides = []
    for groups in ({"t0": 1, "t1": 2}, {"t0": 1, "t1": 3}):
        regrouped(lk, groups)
        report = run_credit(lk, GiGPO(step_source="terminal_score"), grouping="mine")
        sides.append(find_credit(lk.snapshot(), ids.to_text(report.job_id)))
    assert (report.groups_kept, report.groups_ended) == (1, 1)
    for side, expected in zip(sides, ([1, 2], [1, 3]), strict=True):
        counts = lk.sql(f"SELECT group_id, count(*) AS n FROM {side.rows} AS a GROUP BY group_id ORDER BY group_id")
        assert counts.rows() == [(group, 6) for group in expected]


# ---------------------------------------------------------------- the command


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    from pipelines import COMMANDS

    monkeypatch.setitem(COMMANDS, "compare", ("pipelines.credit.commands:compare", "Compare."))
    return runner(monkeypatch, capsys)


def test_the_command_talks_to_stderr_and_prints_levels(lk: Lake, cli: Cli, wording: Wording) -> None:
    first, second, _ = jobs(lk)
    done = cli("compare", first[:7], second[:7], "--lake", lk.uri)
    assert done.code == 0
    named = {"S1": series(lk, first), "S2": series(lk, second), "J1": first, "J2": second}
    headline, two, steps, groups = wording(done.err, **named).splitlines()
    assert headline.startswith(f"1: gigpo, series {series(lk, first)}, ")
    assert two.endswith(f" job {second}")
    assert "1 (9.1%)" in steps
    assert groups.startswith("2 groups: 0 ")
    lines = [line.split() for line in done.out.splitlines()]
    assert lines[0] == ["measure", "advantage", "a_episode", "a_step"]
    assert ["shared", "11", "11", "12"] in lines
    assert ["flips", "1", "1", "0"] in lines


@pytest.mark.parametrize(("rows", "first_column"), [("levels", "level"), ("examples", "run_id")])
def test_a_table_can_be_had_as_csv(lk: Lake, cli: Cli, rows: str, first_column: str) -> None:
    first, second, _ = jobs(lk)
    done = cli("compare", first, second, "--lake", lk.uri, "--rows", rows, "--format", "csv")
    assert done.out.startswith(f"{first_column},")


@pytest.mark.parametrize(("rows", "first_column"), [("signal", "state_1"), ("groups", "group_id")])
def test_a_table_can_be_had_as_json(lk: Lake, cli: Cli, rows: str, first_column: str) -> None:
    first, second, _ = jobs(lk)
    rows_read = msgspec.json.decode(
        cli("compare", first, second, "--lake", lk.uri, "--rows", rows, "--format", "json").out
    )
    assert next(iter(rows_read[0])) == first_column
    if first_column.endswith("_id"):
        assert ids.is_text(rows_read[0][first_column])


def test_an_older_state_can_be_asked(tmp_path: Path, cli: Cli) -> None:
    lk = recorded(tmp_path / "lake", tasks=1)
    job = ids.to_text(credit(lk, {"t0": [1, 1, 1, 0, 0, 0]}))
    lk.name_snapshot("before")
    later = ids.to_text(credit(lk, {"t0": [1, 1, 1, 0, 0, 0]}, {"estimator": "other"}))
    assert cli("compare", job, later, "--lake", lk.uri).code == 0
    assert "names no estimator" in cli("compare", job, later, "--lake", lk.uri, "--as-of", "before").fault


@pytest.mark.parametrize(
    ("config", "formula"),
    [
        ({"omega": 1.0}, "A = A_E + A_S"),
        ({"omega": 0.5, "combination": "sum"}, "A = A_E + 0.5 A_S"),
        ({"omega": 0.25, "combination": "convex"}, "A = 0.25 A_E + 0.75 A_S"),
        ({"omega": 0.0}, "A = A_E"),
        ({}, None),
    ],
)
def test_the_formula_says_the_weights_of_the_terms(config: dict[str, Any], formula: str | None) -> None:
    assert Credit(1, "gigpo", {"config": config}).formula == formula
