"""--where is one expression: text that would add rows, tables or statements is refused before it runs."""

from pathlib import Path

import pytest

from lake.errors import DataRefusedError, UsageError
from lake.judgements.selections import bracket_predicate, check_predicate, select_where
from testkit.command_line import runner
from testkit.lakes import build_lake, siblings

HOSTILE = [
    "true) UNION SELECT (5",
    "true) UNION ALL SELECT * FROM steps --",
    "true) FROM steps WHERE (true",
    "true), (false",
    "true, false",
    "true) OR (true",
    "false) AND (true -- the rest",
    "true) ORDER BY (1",
    "true) LIMIT (1",
    "true) GROUP BY (1",
    "true) QUALIFY (true",
    "true) HAVING (true",
    "1=1; DROP TABLE episodes",
    "1=1); COPY episodes TO '/tmp/stolen.csv'; SELECT (1",
    "task_id = 'a' /*",
    "task_id = 'a",
    "x AS y",
    "x := 5",
    ")(",
    ";",
    "",
    " \n ",
    "-- all of it",
]


@pytest.mark.parametrize("where", HOSTILE)
def test_more_than_an_expression_is_refused(where: str) -> None:
    with pytest.raises(UsageError, match="--where"):
        check_predicate(where)


@pytest.mark.parametrize(
    "where",
    [
        "env_return > 0.5",
        "env_return > 0.5 -- only the good ones",
        "task_id IN (SELECT task_id FROM groups WHERE NOT dead)",
        "status = 'completed' AND (run_id LIKE 'a%' OR run_id = ')')",
        "episode_id = id('0123456789abc')",
        "task_id = 'it''s) UNION SELECT (1'",
        "CASE WHEN true THEN false ELSE true END",
    ],
)
def test_an_expression_passes(where: str) -> None:
    check_predicate(where)
    assert bracket_predicate(where) == f"(\n{where}\n)"


def test_no_predicate_selects_all() -> None:
    assert bracket_predicate(None) == "true"


def test_selected_rows_are_sorted_and_only_those(tmp_path: Path) -> None:
    snapshot = build_lake(tmp_path, siblings("t", [1.0, 0.0, 1.0])).snapshot()
    frame = select_where(snapshot, ("episode_id", "env_return"), "env_return > 0.5 -- good")
    assert frame["env_return"].to_list() == [1.0, 1.0]
    assert frame["episode_id"].is_sorted()
    assert select_where(snapshot, ("episode_id",), None).height == 3
    liveliest = "group_id IN (SELECT group_id FROM groups WHERE NOT dead)"
    assert select_where(snapshot, ("episode_id",), liveliest).height == 3


def test_what_is_no_predicate_over_episodes_is_named(tmp_path: Path) -> None:
    snapshot = build_lake(tmp_path, siblings("t", [1.0])).snapshot()
    with pytest.raises(UsageError, match=r"--where \"colour = 'red'\" .* `episodes`: .*colour"):
        select_where(snapshot, ("episode_id",), "colour = 'red'")
    with pytest.raises(UsageError, match="aggregate"):
        select_where(snapshot, ("episode_id",), "count(*) > 1")
    with pytest.raises(UsageError, match=r"(?i)permission|disabled"):
        select_where(snapshot, ("episode_id",), "EXISTS (SELECT * FROM read_csv('/etc/passwd'))")
    with pytest.raises(DataRefusedError, match="no episode satisfies"):
        select_where(snapshot, ("episode_id",), "false")


# ---------------------------------------------------------------- every command that takes --where

OUTSIDE = "status = 'nope') UNION ALL (SELECT 42"
"""Pasted into a WHERE clause, it selects an episode that does not exist."""
COMMANDS = {
    "retract": ["retract"],
    "forget": ["forget", "--yes"],
    "credit": ["credit", "gigpo"],
    "anchors": ["anchors"],
    "group": ["group", "half", "--step", "subsample:size=2"],
    "select": ["select", "short", "--filter", "max_steps=30"],
    "score": ["score", "env_return"],
    "eval": ["eval"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_more_than_a_predicate(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lk = build_lake(tmp_path / "lake")
    before = lk.snapshot().versions
    cli = runner(monkeypatch, capsys)
    fault = cli(*COMMANDS[command], "--where", OUTSIDE, "--lake", lk.uri).fault
    assert "--where" in fault
    assert "predicate over `episodes`" in fault
    assert lk.snapshot().versions == before


def test_training_refuses_more_than_a_predicate_wherever_it_stands(tmp_path: Path) -> None:
    from trainer.config import MixtureSource
    from trainer.data.selection import assign_sources, select_episodes

    snapshot = build_lake(tmp_path / "lake").snapshot()
    for option in ("--where", "validation.where"):
        with pytest.raises(UsageError, match=rf"{option} \"status = .* (no predicate|more than one)"):
            select_episodes(snapshot, OUTSIDE + ", 7", option=option)
    mixture = [MixtureSource(where=OUTSIDE, weight=1.0)]
    with pytest.raises(UsageError, match="mixture source 0: where"):
        assign_sources(snapshot, mixture, select_episodes(snapshot, None))
