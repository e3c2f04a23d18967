"""docs/guides/estimators*.md: the numbers are those of the real data, and no estimator or option goes unmentioned."""

import contextlib
import io
import re
from typing import Any

import duckdb
import polars as pl
import pytest
from polars.testing import assert_frame_equal

import lake
from lake.write.ingest import ingest
from pipelines.credit.estimators import ESTIMATORS, REFUSED
from pipelines.credit.estimators.sql import TWINS, estimator_relation
from testkit.shared import CHECKOUT, shared_data

GUIDES = CHECKOUT / "docs" / "guides"
PAGE = (GUIDES / "estimators.md").read_text("utf-8")
FAMILIES = [(GUIDES / name).read_text("utf-8") for name in ("estimators-group.md", "estimators-step.md", "gigpo.md")]
HEAD = "| estimator | A > 0 |"
COMMON = {"episode_source", "step_source", "default_step_reward", "truncated"}

BATCH = {"batch_key": "all"}
TERMINAL = {"step_source": "terminal_score"}
OPTIONS = {
    "batch_std": BATCH,
    "gdpo": {**BATCH, "components": {"success": 1.0, "brevity": 0.5}},
    "opo": {"length": "steps"},
    "reinforce_pp": {**BATCH, **TERMINAL},
    "reinforce_pp_baseline": BATCH,
    **dict.fromkeys(("discounted_grpo", "gae", "gigpo", "gigpo_loo", "hgpo"), TERMINAL),
}
"""What the page says the table was made with."""


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> pl.DataFrame:
    lk = lake.open(tmp_path_factory.mktemp("estimators") / "lake", create=True)
    ingest(lk, shared_data("tau_bench", "gpt-4o-airline.json"))
    episodes = lk.scan("episodes").select(
        "episode_id",
        "status",
        "completion_tokens",
        "final_value_estimate",
        episode_score="env_return",
        score_success="env_return",
        score_brevity=-pl.col("num_steps").cast(pl.Float64),
    )
    return lk.scan("steps").join(episodes, on="episode_id").collect()


def advantages(steps: pl.DataFrame, name: str) -> pl.Series:
    return ESTIMATORS[name](**OPTIONS.get(name, {})).advantages(steps.lazy()).collect()["advantage"]


def signs(values: pl.Series) -> list[int | None]:
    return [None if a is None else 0 if abs(a) <= 1e-9 else 1 if a > 0 else -1 for a in values]


def line(name: str, values: pl.Series, grpo: list[int | None]) -> str:
    """A row of the page's table."""
    own_signs = signs(values)
    counts = [own_signs.count(1), own_signs.count(-1), own_signs.count(0), own_signs.count(None)]
    extremes = ["-" if a is None else f"{a:.3f}" for a in (values.max(), values.min())]
    turned = sum(a is not None and a != b for a, b in zip(own_signs, grpo, strict=True))
    return " | ".join([f"| `{name}`", *(f"{count:,}" for count in counts), *extremes, f"{turned:,} |"])


def table() -> dict[str, str]:
    rows = PAGE.partition(HEAD)[2].partition("\n\n")[0].splitlines()[2:]
    return {row.split("`")[1]: row for row in rows}


def test_the_table_has_every_estimator() -> None:
    assert sorted(table()) == sorted(ESTIMATORS)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_a_row_of_the_table(steps: pl.DataFrame, name: str) -> None:
    assert line(name, advantages(steps, name), signs(advantages(steps, "grpo"))) == table()[name]


def test_the_figures_of_the_text(steps: pl.DataFrame) -> None:
    assert f"{steps.height:,} steps" in PAGE
    assert (steps["episode_id"].n_unique(), steps["group_id"].n_unique()) == (200, 50)
    mixed = steps.group_by("group_id").agg(pl.col("episode_score").n_unique() == 2)["episode_score"].sum()
    assert mixed == 26
    assert "24 of the 50 groups" in PAGE
    pairs = list(zip(signs(advantages(steps, "gigpo")), signs(advantages(steps, "grpo")), strict=True))
    spoken, turned = (sum(a != b and (b == 0) is silent for a, b in pairs) for silent in (True, False))
    sentence = f"GiGPO speaks on {spoken} steps of groups that are silent otherwise"
    text = " ".join(PAGE.split())
    assert sentence in text
    assert f"and turns the sign of {turned};" in text


def test_the_examples_print_what_the_page_says() -> None:
    blocks = re.findall(r"^```(?:python|text)\n(.+?)\n```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, Any] = {}
    for code, printed in zip(blocks[::2], blocks[1::2], strict=True):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, "estimators.md", "exec"), names)
        assert out.getvalue().rstrip() == printed


@pytest.mark.parametrize("name", TWINS)
def test_the_sql_twin_says_the_same_of_real_data(steps: pl.DataFrame, name: str) -> None:
    estimator = ESTIMATORS[name](**OPTIONS.get(name, {}))
    connection = duckdb.connect()
    connection.register("stored", steps.to_arrow())
    frame = estimator_relation(connection, estimator, "stored").pl()
    expected = estimator.advantages(steps.lazy()).collect()
    assert_frame_equal(frame, expected, abs_tol=1e-9, rel_tol=1e-9)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_every_estimator_has_a_section_with_its_options_and_its_source(name: str) -> None:
    (page,) = [text for text in FAMILIES if f"\n## {name}\n" in text] or [FAMILIES[2]]
    section = page if page is FAMILIES[2] else page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    assert re.search(r"arXiv \d{4}\.\d{5}", section), "no source"
    assert f"`{name}`](" in PAGE, "not on the page that says which one when"
    options = set(ESTIMATORS[name].model_fields) - COMMON
    for option in {"gigpo_loo": {"revisits"}, "dr_grpo": set()}.get(name, options):
        assert f"`{option}" in section, f"option {option} is not explained"
    for option in COMMON:
        assert f"**`{option}`**" in PAGE


def test_every_refusal_is_mentioned() -> None:
    for name in REFUSED:
        assert f"`{name}`" in PAGE


def test_the_two_baselines_do_to_long_failures_what_the_page_shows() -> None:
    page = (GUIDES / "gigpo.md").read_text("utf-8").split("### What the baseline does to long failures")[1]
    ((code, expected_text),) = re.findall(
        r"^```python\n(.+?)^```\n\n```text\n(.+?)^```", page, re.MULTILINE | re.DOTALL
    )
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "gigpo.md", "exec"), {})
    assert printed.getvalue() == expected_text
