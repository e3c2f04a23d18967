"""prime-rl token exports: sequences as episodes, each run of trained tokens a decision.

The files are built here from the field table: the exporter needs the trainer, and a GPU for it.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from lake.formats.registry import choose_format
from lake.records import EpisodeRecord, Reject, TokensRecord
from testkit.formats import assert_never_raises, counts, read_file


def row(**fields: Any) -> dict[str, Any]:
    """A sequence with two answers, as it is written since October 2026."""
    mask = [False, False, True, True, False, True]
    row_fields: dict[str, Any] = {
        "schema_version": 1,
        "step": 9,
        "export_step": 4,
        "rank": 1,
        "micro_step": 0,
        "micro_sequence_idx": 0,
    }
    row_fields |= {"export_sequence_idx": 3, "run_id": "run-1", "env_name": "math", "token_ids": [1, 2, 3, 4, 5, 6]}
    row_fields |= {"position_ids": list(range(6)), "loss_mask": mask, "rewards": [0.5] * 6, "advantages": [1.0] * 6}
    logprobs = [-0.5 if trained else 0.0 for trained in mask]
    row_fields |= {"inference_logprobs": logprobs, "trainer_logprobs": logprobs, "is_masked": [None] * 6}
    row_fields |= {"losses": [{"rl": {"advantage": 1.0, "mask": trained}} for trained in mask]}
    return row_fields | fields


def read(folder: Path, *rows: Any) -> tuple[list[EpisodeRecord], list[Reject]]:
    """Records and rejects of rows, or lines of text."""
    path = folder / "rank_1.jsonl"
    path.write_text("".join(f"{item if isinstance(item, str) else json.dumps(item)}\n" for item in rows))
    assert choose_format(path).name == "prime_rl_tokens"
    return read_file(path)


def only(folder: Path, **fields: Any) -> EpisodeRecord:
    """The one record of a row."""
    (record,), rejects = read(folder, row(**fields))
    assert not rejects
    return record


def test_a_run_of_trained_tokens_is_a_decision_with_exact_tokens(tmp_path: Path) -> None:
    record = only(tmp_path)
    assert [step.tokens for step in record.steps] == [
        TokensRecord(context_ids=[1, 2], action_ids=[3, 4], action_logprobs=[-0.5, -0.5], prefix_step_index=None),
        TokensRecord(context_ids=[5], action_ids=[6], action_logprobs=[-0.5], prefix_step_index=0),
    ]
    assert [(step.state, step.action, step.trainable) for step in record.steps] == [(None, "", True)] * 2
    assert counts([record])[:3] == (1, 2, 0)


def test_what_names_a_sequence_is_its_task(tmp_path: Path) -> None:
    record = only(tmp_path)
    assert (record.task_id, record.run_id, record.collection_round) == ("math/1/3", "run-1", 4)
    assert (record.environment, record.env_return, record.source_version) == ("math", 0.5, "1")


def test_what_the_trainer_computed_is_kept_whole(tmp_path: Path) -> None:
    extra = only(tmp_path).extra or {}
    assert extra["advantages"] == [1.0] * 6
    assert extra["is_masked"] == [None] * 6
    assert not {"position_ids", "token_ids", "rewards", "inference_logprobs"} & extra.keys(), "they have a place"
    assert (only(tmp_path, position_ids=[3, 4, 5, 6, 7, 8]).extra or {})["position_ids"] == [3, 4, 5, 6, 7, 8]


def test_rewards_that_differ_along_a_sequence_are_no_return(tmp_path: Path) -> None:
    record = only(tmp_path, rewards=[0.0, 1.0, None, None, None, None])
    assert record.env_return is None
    assert (record.extra or {})["rewards"] == [0.0, 1.0, None, None, None, None]
    assert only(tmp_path, rewards=[None] * 6).env_return is None


def test_of_several_losses_that_of_reinforcement_says_what_was_sampled(tmp_path: Path) -> None:
    """An observation may be trained on as text."""
    losses = [
        {"rl": {"advantage": 1.0, "mask": index == 5}, "ce": {"advantage": 1.0, "mask": True}} for index in range(6)
    ]
    record = only(tmp_path, loss_mask=[True] * 6, losses=losses)
    assert [step.tokens.action_ids for step in record.steps if step.tokens] == [[6]]


def test_log_probabilities_that_are_not_all_known_are_none(tmp_path: Path) -> None:
    record = only(tmp_path, inference_logprobs=[None, None, None, -0.5, None, -0.5])
    assert [step.tokens.action_logprobs for step in record.steps if step.tokens] == [None, [-0.5]]


def test_the_versions_of_may_2026_are_read(tmp_path: Path) -> None:
    left_out = ("run_id", "export_step", "losses")
    early = {key: value for key, value in row(training_mode="rl").items() if key not in left_out}
    (record,), _ = read(tmp_path, early)
    assert (record.collection_round, record.run_id, len(record.steps)) == (9, None, 2)
    listed = (
        "token_ids",
        "position_ids",
        "loss_mask",
        "rewards",
        "advantages",
        "inference_logprobs",
        "trainer_logprobs",
    )
    token = ("id", "position", "loss_mask", "reward", "advantage", "inference_logprob", "trainer_logprob")
    first = {key: value for key, value in early.items() if key not in (*listed, "is_masked")}
    first["tokens"] = [
        {"index": n} | {name: early[key][n] for name, key in zip(token, listed, strict=True)} for n in range(6)
    ]
    (same,), _ = read(tmp_path, first)
    assert (same.steps, same.env_return) == (record.steps, 0.5)


def test_sequences_of_two_ranks_do_not_meet_and_a_repeated_one_is_counted(tmp_path: Path) -> None:
    records, _ = read(tmp_path, row(), row(rank=2), row())
    assert [(r.task_id, r.rollout_index) for r in records] == [("math/1/3", 0), ("math/2/3", 0), ("math/1/3", 1)]


def test_a_newer_version_is_unsupported_and_the_others_are_read(tmp_path: Path) -> None:
    records, (reject,) = read(tmp_path, row(), row(schema_version=2), row())
    assert len(records) == 2
    assert (reject.position, reject.reason) == (2, "unsupported")
    assert "known: 1" in reject.message


@pytest.mark.parametrize(
    ("bad", "reason", "says"),
    [
        ("{", "malformed", "not JSON"),
        (json.dumps(row())[:-9], "malformed", "not JSON"),
        (json.dumps(row(step=0.125)).replace("0.125", "NaN"), "malformed", "NaN"),
        (7, "invalid", "Expected `object`"),
        ({"schema_version": 1}, "invalid", "missing required field `token_ids`"),
        (row(token_ids=["1"]), "invalid", "`$.token_ids[0]`"),
        (row(token_ids=[-1, 2, 3, 4, 5, 6]), "invalid", "`$.token_ids[0]`"),
        (row(loss_mask=[1, 0]), "invalid", "`$.loss_mask[0]`"),
        (row(loss_mask=[True]), "invalid", "`loss_mask` has 1 entries for 6 token ids"),
        (row(rewards=[0.5]), "invalid", "`rewards` has 1 entries"),
        (row(inference_logprobs=[2.0] * 6), "invalid", "`tokens.action_logprobs` holds 2.0"),
        (row(tokens=[5]), "invalid", "not of the type"),
        (row(loss_mask=[False] * 6, losses=None, rewards=None), "invalid", "no decision of an agent, and no outcome"),
    ],
)
def test_a_row_of_the_wrong_shape_is_rejected_and_the_others_are_read(
    tmp_path: Path, bad: Any, reason: str, says: str
) -> None:
    records, (reject,) = read(tmp_path, row(), bad, row(rank=2))
    assert len(records) == 2
    assert (reject.position, reject.reason) == (2, reason)
    assert says in reject.message


def test_nothing_in_a_row_makes_it_raise(tmp_path: Path) -> None:
    assert_never_raises(tmp_path / "rank_0.jsonl", [row(), row(tokens=[{"id": 1, "loss_mask": True}])], lines=True)
