"""What all built-in scorers promise: checked inputs, sound outputs, versions, documentation; reading from a lake."""

import inspect
from pathlib import Path
from typing import Any, ClassVar

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import lake
from lake import EpisodeRecord, StepRecord
from lake.errors import ContractError
from lake.tables import TABLES
from pipelines.score import scorers
from pipelines.score.scorers import SCORERS, Coordination, EnvReturn, Scorer, ScorerColumns, ScorerInputs, read_inputs
from pipelines.score.scorers.forms import LengthPenalty
from pipelines.score.scorers.protocol import SCORES
from testkit.examples import examples
from testkit.scorer_frames import assert_sound, inputs, scored, values

REQUIRED: dict[str, dict[str, Any]] = {
    "format_validity": {"rule": {"kind": "json"}},
    "length": {"max_length": 10},
    "kl_in_reward": {"checkpoint": "ref"},
}
"""Options without a default."""
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, REQUIRED.get(name, {})) for name in SCORERS),
    ("env_return", {"source": "rewards"}),
    ("exact_match", {"mode": "contains", "answer": "all", "extract": r"<(.*)>"}),
    ("fuzzy_match", {"measure": "difflib"}),
    ("fuzzy_match", {"measure": "jaccard"}),
    ("tool_success", {"source": "spans"}),
    ("tool_success", {"error_objects": True}),
    ("answer_quality", {"reference": "ground_truth"}),
    ("coordination", {"quality": "answer", "consensus": "plurality"}),
    ("voting", {"winner": "extra"}),
    ("format_validity", {"rule": {"kind": "tags"}, "of": "actions"}),
    ("format_validity", {"rule": {"kind": "json_schema", "schema": {"type": "object"}}}),
    ("format_validity", {"rule": {"kind": "regex", "pattern": "x", "full": True}}),
    ("length", {"max_length": 10, "unit": "words", "of": "answer"}),
    ("length", {"max_length": 10, "unit": "characters", "of": "steps", "cache": 5, "min_length": 2}),
    ("kl_in_reward", {"checkpoint": "ref", "policy_version": 3}),
    ("rubric_terms", {"coverage_weight": 0.0}),
]


def build(variant: tuple[str, dict[str, Any]]) -> Scorer:
    name, options = variant
    return SCORERS[name](**options)


each = pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: f"{variant[0]}-{len(variant[1])}")


# ---------------------------------------------------------------- the registry


def test_the_registry_has_every_scorer_under_its_name() -> None:
    assert list(SCORERS) == [scorer.name for scorer in SCORERS.values()]
    assert set(SCORERS.values()) == {
        part
        for part in vars(scorers).values()
        if inspect.isclass(part) and issubclass(part, Scorer) and part is not Scorer
    }


@pytest.mark.parametrize("scorer", SCORERS.values(), ids=list(SCORERS))
def test_a_scorer_is_documented_with_source_complexity_and_every_option(scorer: type[Scorer]) -> None:
    text = inspect.getdoc(scorer) or ""
    assert "Source:" in text or "arXiv" in text
    assert "O(" in text
    assert scorer.model_config.get("frozen")
    assert scorer.model_config.get("extra") == "forbid"
    source = inspect.getsource(scorer)
    for option in scorer.__annotations__:
        if option not in ("name", "columns", "helpers"):
            assert f"    {option}: " in source
            assert '"""' in source.split(f"    {option}: ")[1].split("\n    def ")[0], option


@each
def test_a_scorer_reads_columns_that_there_are_and_no_more_than_it_says(variant: Any) -> None:
    scorer = build(variant)
    tables = scorer.columns.tables()
    for table, columns in scorer.reads().tables().items():
        assert set(columns) <= set(TABLES[table].names)
        assert set(columns) <= set(tables[table])


@each
def test_options_are_kept_from_mistakes(variant: Any) -> None:
    name, options = variant
    with pytest.raises(ValidationError):
        SCORERS[name](**options, no_such_option=1)
    with pytest.raises(ValidationError):
        build(variant).name_of_nothing = 1  # type: ignore[attr-defined]
    again = SCORERS[name].model_validate_json(build(variant).model_dump_json(by_alias=True))
    assert again == build(variant)
    assert again.version == build(variant).version


# ---------------------------------------------------------------- versions


def test_versions_tell_scorers_and_options_apart() -> None:
    versions = [build(variant).version for variant in VARIANTS]
    assert len(set(versions)) == len({(name, repr(sorted(options.items()))) for name, options in VARIANTS})
    assert all(len(version) == 13 for version in versions)
    assert LengthPenalty(max_length=10).version == LengthPenalty(max_length=10, cache=0).version


def test_a_version_changes_with_the_source_of_what_decides_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipelines.score.scorers import answers, protocol

    before, independent = Coordination().version, EnvReturn().version
    real = protocol._read_source

    def source(module: Any) -> str:
        return real(module) + ("# changed" if module is answers else "")

    monkeypatch.setattr(protocol, "_read_source", source)
    assert Coordination().version != before
    assert EnvReturn().version == independent


# ---------------------------------------------------------------- inputs


@each
def test_nothing_gives_nothing(variant: Any) -> None:
    scorer = build(variant)
    for frame in (scorer.scores(inputs(scorer, [])), scorer.scores(ScorerInputs(pl.DataFrame()))):
        assert frame.schema == SCORES
        assert frame.is_empty()


@each
def test_episodes_without_anything_are_unknown_with_a_reason(variant: Any) -> None:
    scorer = build(variant)
    scores = scored(scorer, [{"episode_id": 5}, {"episode_id": 3}])
    assert scores["value"].null_count() == scores.height == 2
    assert scores["reason"].str.len_chars().min() > 5
    assert scores["error"].null_count() == 2, "nothing failed"
    # A frame whose columns are all NULL has no types to speak of.
    tables = scorer.reads().tables()
    untyped = {
        name: pl.DataFrame({c: [5, 3] if c == "episode_id" else [None, None] for c in columns})
        for name, columns in tables.items()
        if name == "episodes"
    }
    assert scorer.scores(ScorerInputs(**untyped)).equals(scores)


@each
def test_a_missing_column_is_named(variant: Any) -> None:
    scorer = build(variant)
    frames = inputs(scorer, [{"episode_id": 1}])
    for table, columns in scorer.reads().tables().items():
        full = getattr(frames, table)
        frames_read = {name: getattr(frames, name) for name in scorer.reads().tables()}
        without = frames_read | {table: full.drop(columns[-1])}
        if len(columns) == 1:
            continue
        with pytest.raises(ContractError, match=rf"`{scorer.name}`: `{table}` lacks the columns \['{columns[-1]}'\]"):
            scorer.scores(ScorerInputs(**without))


@each
def test_a_wrong_type_is_named(variant: Any) -> None:
    scorer = build(variant)
    wrong = pl.Series([True])
    for table, columns in scorer.reads().tables().items():
        schema = TABLES[table].polars()
        for column in columns:
            row = pl.DataFrame({name: [None] for name in columns}).with_columns(episode_id=pl.lit(1))
            value = wrong if schema[column] != pl.Boolean else pl.Series(["text"])
            row = row.with_columns(value.alias(column))
            tables = {"episodes": pl.DataFrame({"episode_id": [1]} | {key: [None] for key in scorer.reads().episodes})}
            with pytest.raises(ContractError, match=rf"column `{column}` of `{table}` is (Boolean|String); valid"):
                scorer.scores(ScorerInputs(**(tables | {table: row})))


def test_whole_numbers_pass_for_any_number() -> None:
    frame = pl.DataFrame({"episode_id": pl.Series([1, 2], dtype=pl.Int32), "env_return": [3, None]})
    assert values(EnvReturn().scores(ScorerInputs(frame))) == {(1, None): 3.0, (2, None): None}


def test_an_episode_that_stands_there_twice_is_named() -> None:
    frame = pl.DataFrame({"episode_id": [7, 8, 7], "env_return": [1.0, 2.0, 1.0]})
    with pytest.raises(ContractError, match="episode 7 is in `episodes` twice"):
        EnvReturn().scores(ScorerInputs(frame))


def test_rows_of_other_episodes_count_nothing() -> None:
    steps = [{"episode_id": e, "step_index": 0, "reward": 1.0, "is_active": True} for e in (1, 2)]
    scores = scored(EnvReturn(source="rewards"), [{"episode_id": 2}], steps=steps)
    assert values(scores) == {(2, None): 1.0}


# ---------------------------------------------------------------- outputs


class Odd(Scorer):
    """Non-numbers."""

    name: ClassVar[str] = "odd"
    columns: ClassVar[ScorerColumns] = ScorerColumns()

    def _score(self, inputs: ScorerInputs) -> pl.DataFrame:
        series = pl.Series("value", [float("nan"), float("inf"), 1.0, None])
        return inputs.episodes.with_columns(
            series, reason=pl.lit("r" * 99_999), error=pl.Series([None, None, None, "why"])
        )


def test_a_value_is_finite_or_unknown_and_texts_have_an_end() -> None:
    frame = Odd().scores(ScorerInputs(pl.DataFrame({"episode_id": [1, 2, 3, 4]})))
    assert_sound(frame, [1, 2, 3, 4])
    assert frame["value"].to_list() == [None, None, 1.0, None]
    assert frame["error"].str.contains("not a finite number").to_list() == [True, True, None, False]
    assert frame["error"][3] == "why"
    assert frame["reason"].str.len_chars().max() == 8192
    assert frame.schema == SCORES


@settings(max_examples=examples(20))
@given(numbers=st.lists(st.one_of(st.none(), st.floats()), max_size=9))
def test_env_return_is_the_return(numbers: list[float | None]) -> None:
    episodes = [{"episode_id": n, "env_return": value} for n, value in enumerate(numbers)]
    actual = values(scored(EnvReturn(), episodes))
    for n, value in enumerate(numbers):
        finite = value is not None and abs(value) != float("inf") and value == value
        assert actual[n, None] == (value if finite else None)


@pytest.mark.parametrize(
    ("rewards", "expected", "reason"),
    [
        ([1.0, 0.5], 1.5, None),
        ([0.0], 0.0, None),
        ([1.0, None], None, "1 active steps have no reward"),
        ([], None, "the episode has no active step"),
    ],
)
def test_env_return_from_rewards(rewards: list[Any], expected: float | None, reason: str | None) -> None:
    steps = [{"episode_id": 1, "step_index": n, "reward": r, "is_active": True} for n, r in enumerate(rewards)]
    steps.append({"episode_id": 1, "step_index": 9, "reward": 100.0, "is_active": False})
    scores = scored(EnvReturn(source="rewards"), [{"episode_id": 1}], steps=steps)
    assert (scores["value"].item(), scores["reason"].item()) == (expected, reason)


# ---------------------------------------------------------------- from a lake


def test_inputs_are_read_with_the_columns_asked_for_and_big_payloads_in_place(tmp_path: Path) -> None:
    long = "x" * 70_000
    lk = lake.open(tmp_path / "lake", create=True)
    for run, answers in (("one", ["a", "b"]), ("two", ["c"])):
        lk.append(
            [
                EpisodeRecord(
                    task_id=f"t{n}", ground_truth=long, steps=[StepRecord(state="s", action=text)], env_return=1.0
                )
                for n, text in enumerate(answers)
            ],
            run_id=run,
        )
    snapshot = lk.snapshot()
    keys = snapshot.sql("SELECT run_id, group_id, episode_id FROM episodes ORDER BY ALL")
    read = ScorerColumns(episodes=("ground_truth",), steps=("action",))
    whole_inputs = read_inputs(snapshot, keys, read)
    assert sorted(whole_inputs.steps["action"].to_list()) == ["a", "b", "c"]
    assert whole_inputs.episodes["ground_truth"].str.len_chars().to_list() == [len(long) + 2] * 3
    assert whole_inputs.episodes.columns == ["episode_id", "ground_truth"]
    assert whole_inputs.spans.is_empty()
    some = read_inputs(snapshot, keys["episode_id"][:1], read)
    assert (
        some.steps["episode_id"].to_list() == some.episodes["episode_id"].to_list() == keys["episode_id"][:1].to_list()
    )
    assert read_inputs(snapshot, keys[:0], read).episodes.is_empty()
    assert read_inputs(snapshot, keys[:0], read).episodes.columns == ["episode_id", "ground_truth"]
