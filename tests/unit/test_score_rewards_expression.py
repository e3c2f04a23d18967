"""SQL expressions over scores: what they may say, and all that they may not."""

from pathlib import Path

import duckdb
import polars as pl
import pytest

from lake.errors import UsageError
from pipelines.score import rewards
from pipelines.score.rewards import FUNCTIONS, Expression

FRAME = pl.DataFrame({"a": [1.0, 4.0, None, -1.0], "b": [2.0, 0.0, 1.0, 0.5]})


def values(text: str) -> list[float | None]:
    return Expression(text, ["a", "b"]).values(FRAME).to_list()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", [1.0, 4.0, None, -1.0]),
        ("-power(a - b, 2)", [-1.0, -16.0, None, -2.25]),
        ("-abs(a - b)", [-1.0, -4.0, None, -1.5]),
        ("A + B", [3.0, 4.0, None, -0.5]),
        ("coalesce(a, 0)", [1.0, 4.0, 0.0, -1.0]),
        ("CASE WHEN a > 0 THEN 1 ELSE b END", [1.0, 1.0, 1.0, 0.5]),
        ("a > 0 AND b > 0", [1.0, 0.0, None, 0.0]),
        ("a IS NULL", [0.0, 0.0, 1.0, 0.0]),
        ("a BETWEEN 0 AND 2", [1.0, 0.0, None, 0.0]),
        ("a IN (1, 4)", [1.0, 1.0, None, 0.0]),
        ("least(a, b)", [1.0, 0.0, 1.0, -1.0]),
        ("0.1 * a + 2 -- a comment", [2.1, 2.4, None, 1.9]),
        ("1", [1.0, 1.0, 1.0, 1.0]),
        ("1.5", [1.5, 1.5, 1.5, 1.5]),
        ('"a"', [1.0, 4.0, None, -1.0]),
        ("(((a)))", [1.0, 4.0, None, -1.0]),
        ("if(a > 0, a, 0)", [1.0, 4.0, 0.0, 0.0]),
    ],
)
def test_formulas(text: str, expected: list[float | None]) -> None:
    assert values(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["sqrt(a)", "ln(a)", "a / (b * 0)", "exp(a * 1000)"])
def test_what_cannot_be_computed_spoils_its_row_alone(text: str) -> None:
    series = pl.Series(values(text))
    assert len(series) == 4
    assert series[2] is None or text == "sqrt(a)"


def test_rows_keep_their_order() -> None:
    frame = pl.DataFrame({"a": [float(n) for n in range(50_000)]})
    assert Expression("a + 0.0", ["a"]).values(frame).equals(frame["a"].alias("value"))


def test_no_rows() -> None:
    values_of_none = Expression("a + b", ["a", "b"]).values(FRAME.clear())
    assert values_of_none.dtype == pl.Float64
    assert values_of_none.is_empty()


SECRET = "only the owner may know"
HOSTILE = [
    "(SELECT 1)",
    "a + (SELECT count(*) FROM components)",
    "EXISTS (SELECT 1)",
    "a IN (SELECT 1)",
    "(SELECT content FROM read_text('{secret}'))",
    "read_text('{secret}')",
    "length((SELECT content FROM read_text('{secret}')))",
    "(FROM '{secret}')",
    "a) FROM read_csv('{secret}') --",
    "a FROM '{secret}'",
    "a FROM components",
    "a; SELECT 1",
    "a; COPY (SELECT 1) TO '{target}'",
    "1) AS x, (SELECT 2",
    "a AS b",
    "a, b",
    "*",
    "COLUMNS('a')",
    "components",
    "components.a",
    "rowid",
    "a UNION SELECT 1",
    "a WHERE true",
    "a GROUP BY ALL",
    "a ORDER BY a",
    "a LIMIT 1",
    "a QUALIFY true",
    "a USING SAMPLE 1",
    "DISTINCT a",
    "sum(a)",
    "row_number() OVER ()",
    "getenv('HOME')",
    "current_setting('threads')",
    "set_config('threads', '1')",
    "pg_sleep(10)",
    "repeat('x', 1000000000)",
    "random()",
    "uuid()",
    "now()",
    "current_date",
    "nextval('s')",
    "glob('/*')",
    "query('SELECT 1')",
    "main.abs(a)",
    "system.main.abs(a)",
    "[a][1]",
    "{{'x': a}}.x",
    "list_transform([a], x -> x)",
    "unnest([1, 2])",
    "generate_series(1, 1000000000)",
    "a::VARCHAR",
    "CAST('{secret}' AS DOUBLE)",
    "'x'",
    "NULL",
    "a || 'x'",
    "a LIKE 'x'",
    "$1",
    "?",
    "$name",
    "c",
    "",
    "  ",
    "--",
    "/*",
    "a /*",
    "a\x00b",
    "\x00",
    "a +",
    "SELECT a",
    "DROP TABLE components",
    "ATTACH '{target}'",
    "LOAD httpfs",
    "PRAGMA database_list",
    "a COLLATE nocase",
    "INTERVAL 1 DAY",
    "\u0430",  # a Cyrillic a
]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_expression_is_refused(text: str, tmp_path: Path) -> None:
    secret, target = tmp_path / "secret.csv", tmp_path / "written"
    secret.write_text(SECRET)
    spelled = text.format(secret=secret, target=target)
    with pytest.raises(UsageError, match="one numeric expression") as refused:
        Expression(spelled, ["a", "b"])
    assert SECRET not in str(refused.value)
    assert not target.exists()


@pytest.mark.parametrize(
    "text", ["(" * 1900 + "a" + ")" * 1900, "a+" * 1900 + "a", "a" * 5000, "-" * 3999 + "a", "CASE " * 700]
)
def test_an_endless_expression_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Expression(text, ["a"])


def test_the_second_wall_holds_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check of its parts an expression still reaches nothing: no file, no setting."""
    monkeypatch.setattr(rewards, "_require_formula", lambda *_: None)
    secret = tmp_path / "secret.csv"
    secret.write_text("value\n1\n")
    reads = f"(SELECT max(value) FROM read_csv('{secret}'))"
    with duckdb.connect() as open_:
        assert open_.sql(f"SELECT {reads}").fetchall() == [(1,)]
    for text in (reads, f"(SELECT count(*) FROM read_text('{secret}'))", f"(SELECT count(*) FROM '{secret}')"):
        with pytest.raises(UsageError, match=r"(?i)disabled|permission|does not exist"):
            Expression(text, ["a"])
    with rewards._connect() as connection:
        for statement in ("SET enable_external_access = true", "LOAD httpfs", f"ATTACH '{tmp_path / 'x.db'}'"):
            with pytest.raises(duckdb.Error):
                connection.execute(statement)


def test_functions_are_all_there_and_pure() -> None:
    with duckdb.connect() as connection:
        rows = connection.execute("SELECT DISTINCT function_name, stability FROM duckdb_functions()").fetchall()
    stability = dict(rows)
    grammar = {"coalesce", "if", "ifnull", "nullif"}
    assert {name: stability.get(name) for name in FUNCTIONS - grammar if name != "**"} == dict.fromkeys(
        FUNCTIONS - grammar - {"**"}, "CONSISTENT"
    )
