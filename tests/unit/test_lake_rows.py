"""From records to rows: which column gets what, and how unknown, empty and zero stay three things."""

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import msgspec
import polars as pl
import pytest

from lake import EpisodeRecord, StepRecord, TokensRecord, ids
from lake.records import identify
from lake.tables import EPISODES, STEPS, TOKENS
from lake.write.rows import build_episodes_frame, build_steps_frame, build_tokens_frame, encode_json
from testkit.episodes import episode

WRITE_ID = 99


def frames(*records: EpisodeRecord) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """Rows of `episodes`, `steps` and `tokens`."""
    for record in records:
        record.run_id = record.run_id or "run"
    identities = [identify(record, record.run_id or "") for record in records]
    records_made = [
        make(records, identities, WRITE_ID) for make in (build_episodes_frame, build_steps_frame, build_tokens_frame)
    ]
    return records_made[0], records_made[1], records_made[2]


def step(**fields: Any) -> StepRecord:
    return StepRecord(**({"state": "s", "action": "a"} | fields))


def tokens(context: list[int], action: list[int], **fields: Any) -> TokensRecord:
    return TokensRecord(context_ids=context, action_ids=action, **fields)


def with_tokens(*tokens_S: TokensRecord | None, **fields: Any) -> EpisodeRecord:
    return EpisodeRecord(task_id="t", steps=[step(tokens=t) for t in tokens_S], **fields)


# ---------------------------------------------------------------- episodes and steps


def test_rows_have_the_columns_and_types_of_their_table() -> None:
    for frame, table in zip(frames(episode(tokens=True)), (EPISODES, STEPS, TOKENS), strict=True):
        assert frame.schema == table.polars()
    for frame, table in zip(frames(), (EPISODES, STEPS, TOKENS), strict=True):
        assert frame.schema == table.polars()
        assert frame.is_empty()


def test_every_row_carries_the_write_id_and_the_ids_of_its_episode() -> None:
    records = [episode("a", steps=3, tokens=True), episode("b", 1, tokens=True)]
    episodes, steps, rows = frames(*records)
    identities = [identify(record, "run") for record in records]
    assert episodes["episode_id"].to_list() == [identity.episode_id for identity in identities]
    assert episodes["source_id"].to_list() == [identity.source_id for identity in identities]
    for frame in (steps, rows):
        expected = [identities[0].episode_id] * 3 + [identities[1].episode_id] * 2
        assert frame["episode_id"].to_list() == expected
        assert frame["step_index"].to_list() == [0, 1, 2, 0, 1]
    for frame in (episodes, steps, rows):
        assert set(frame["write_id"]) == {WRITE_ID}
        assert set(frame["run_id"]) == {"run"}


def test_fields_go_to_the_columns_of_their_name() -> None:
    record = episode("t", 2, env_return=0.25, policy="p", policy_version=3, collection_round=4, seed=-5, error="e")
    record.steps[1] = step(reward=-1.0, model="m", latency=0.5, is_action_valid=False, is_active=False, reasoning="r")
    episodes, steps, _ = frames(record)
    row = episodes.row(0, named=True)
    expected = {"task_id": "t", "rollout_index": 2, "env_return": 0.25, "policy": "p", "policy_version": 3, "seed": -5}
    assert {key: row[key] for key in expected} == expected
    assert (row["num_steps"], row["status"], row["error"], row["collection_round"]) == (2, "completed", "e", 4)
    row = steps.row(1, named=True)
    expected = {"reward": -1.0, "model": "m", "latency": 0.5, "is_action_valid": False, "is_active": False}
    assert {key: row[key] for key in expected} == expected
    assert row["reasoning"] == "r"


def test_unknown_empty_and_zero_are_three_things() -> None:
    record = EpisodeRecord(
        task_id="",
        steps=[step(state="", action="", reward=None), step(reward=0.0, reasoning="", tool_calls=[])],
        env_return=None,
        extra={},
        tools=[],
    )
    episodes, steps, _ = frames(record)
    assert episodes.select("task_id", "env_return", "extra", "tools", "sampling").row(0) == ("", None, "{}", "[]", None)
    assert steps["reward"].to_list() == [None, 0.0]
    assert steps["reasoning"].to_list() == [None, ""]
    assert steps["tool_calls"].to_list() == [None, "[]"]
    assert steps["state"].to_list() == ["", "s"]


def test_the_state_hash_is_of_the_exact_text() -> None:
    texts = ["", " ", "a", "a ", "A", "e\u0301", "\u00e9"]
    _, steps, _ = frames(EpisodeRecord(task_id="t", steps=[step(state=text) for text in texts]))
    assert steps["state_hash"].to_list() == [ids.text_hash(text) for text in texts]
    assert steps["state_hash"].n_unique() == len(texts)


def test_payloads_are_compact_json_in_utf8() -> None:
    payload = {"b": [1, 2.5, None, True], "a": "\u00e9\U0001f600\n\x00", "big": 2**64 + 1}
    episodes, steps, _ = frames(episode(extra=payload, steps=1, initial_messages=[{"role": "user", "content": "hi"}]))
    text = episodes["extra"][0]
    assert msgspec.json.decode(text) == payload
    assert " " not in text
    assert "\u00e9\U0001f600" in text
    assert episodes["initial_messages"][0] == '[{"role":"user","content":"hi"}]'
    assert steps["context"].to_list() == ["[]"]
    assert encode_json(None) is None


@pytest.mark.parametrize(
    "moment",
    [
        datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC),
        datetime(2026, 1, 2, 4, 4, 5, 678901, tzinfo=timezone(timedelta(hours=1))),
        datetime(2026, 1, 2, 3, 4, 5, 678901),  # noqa: DTZ001 - a time without a zone is UTC
    ],
)
def test_times_are_utc_to_the_microsecond(moment: datetime) -> None:
    record = episode(started_at=moment)
    record.steps[0].started_at = moment
    episodes, steps, _ = frames(record)
    expected = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    assert episodes["started_at"].to_list() == [expected]
    assert steps["started_at"].to_list() == [expected, None]


@pytest.mark.parametrize("year", [1, 1969, 9999])
def test_times_of_any_year_are_kept(year: int) -> None:
    moment = datetime(year, 6, 1, tzinfo=UTC)
    assert frames(episode(started_at=moment))[0]["started_at"].to_list() == [moment]


def test_ids_of_relatives_are_stored_as_numbers() -> None:
    text = ids.to_text(12345)
    episodes, _, _ = frames(episode(parent_episode_id=text, root_episode_id=text.upper(), relation="fork"))
    assert episodes.select("parent_episode_id", "root_episode_id").row(0) == (12345, 12345)


# ---------------------------------------------------------------- tokens


def test_a_step_without_tokens_has_no_row() -> None:
    _, steps, rows = frames(with_tokens(None, tokens([1], [2], prefix_step_index=None), None))
    assert steps.height == 3
    assert rows["step_index"].to_list() == [1]


def test_counts_come_from_the_lists() -> None:
    _, _, rows = frames(with_tokens(tokens([1, 2, 3], [4, 5], action_mask=[True, False], action_logprobs=[-1.0, -2.0])))
    row = rows.row(0, named=True)
    assert (row["n_context"], row["n_action"], row["n_trained"], row["has_logprobs"]) == (3, 2, 1, True)
    assert row["action_logprobs"] == [-1.0, -2.0]
    assert (row["provenance"], row["constrained"], row["temperature"]) == ("engine", None, None)


def test_every_sampled_token_is_trained_unless_a_mask_says_otherwise() -> None:
    row = frames(with_tokens(tokens([], [4, 5, 6])))[2].row(0, named=True)
    assert row["action_mask"] == [True] * 3
    assert (row["n_context"], row["n_trained"], row["has_logprobs"], row["action_logprobs"]) == (0, 3, False, None)


def test_each_step_extends_the_one_before_unless_it_says_otherwise() -> None:
    _, _, rows = frames(
        with_tokens(
            tokens([1, 2], [3]),  # opens a sequence
            tokens([4], [5, 6]),  # extends step 0: 3 tokens before it
            tokens([7], [8], prefix_step_index=None),  # opens another one
            tokens([9], [10], prefix_step_index=0),  # a fork of step 0
            tokens([11], [], prefix_step_index=1),  # extends step 1: 3 + 3 before it
            tokens([], [12]),  # extends step 4
        )
    )
    assert rows["prefix_step_index"].to_list() == [None, 0, None, 0, 1, 4]
    assert rows["prefix_length"].to_list() == [0, 3, 0, 3, 6, 7]


def test_an_encoding_is_a_tokenizer_and_a_template() -> None:
    records = [
        with_tokens(tokens([1], [2]), tokenizer=tokenizer, chat_template=template)
        for tokenizer, template in [("a", "x"), ("a", "x"), ("b", "x"), ("a", "y"), (None, None), (None, "x")]
    ]
    encodings = [frames(record)[2]["encoding_id"][0] for record in records]
    assert encodings[0] == encodings[1]
    assert len(set(encodings)) == 5


def test_version_spans_are_json() -> None:
    row = frames(with_tokens(tokens([], [1, 2], policy_version=3, version_spans=[(3, 0, 0), (4, 1, 1)])))[2]
    assert row["version_spans"].to_list() == ["[[3,0,0],[4,1,1]]"]
    assert row["policy_version"].to_list() == [3]
