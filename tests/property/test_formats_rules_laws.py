"""Rules for the records of every format: who is whose sibling, what is trained on, and what a failed rollout is worth.

Batches of rollouts are drawn and written in each format that has the notion; counts are taken from the draw.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lake.execution.local import LocalExecutor
from lake.formats.base.rules import IGNORES, WEIGHTS
from lake.formats.base.source import Input, Note
from lake.formats.registry import choose_format
from lake.records import EpisodeRecord, identify
from lake.write.ingest import ingest
from lake.write.sources import Report
from testkit.copies import empty_lake
from testkit.shared import shared_data

PROMPT = "<image> Find x."
Rows = list[dict[str, Any]]
Write = Callable[[Path, Rows], Any]


class Rollout(NamedTuple):
    """One rollout of a batch whose prompts are all the same."""

    group: int
    number: int
    reward: float
    has_failed: bool = False

    @property
    def uid(self) -> str:
        """A name of the group as trainers make them."""
        return f"1b1f7a5e-8b4f-4d0a-9d59-{self.group:012}"


def write_lines(path: Path, rows: Rows) -> None:
    """Write rows as JSON Lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def write_table(path: Path, rows: Rows) -> None:
    """Write rows as Parquet."""
    pl.DataFrame(rows).write_parquet(path)


def write_array(path: Path, rows: Rows) -> None:
    """Write rows as one JSON array."""
    path.write_text(json.dumps(rows), "utf-8")


def read(write: Write, rows: Rows, **options: Any) -> tuple[list[EpisodeRecord], Counter[Note]]:
    """The episodes of rows, in order, and what the reader says about the file; nothing is rejected."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "train_data_step1.jsonl")
        write(path, rows)
        file = Input(path, "run", **options)
        return [item[1] for item in choose_format(path).read_items(file)], file.notes  # type: ignore[index]


def count_rules(notes: Mapping[Note, int]) -> int:
    """How often the rules say that they did something."""
    return sum(number for note, number in notes.items() if note.kind == "rule")


# ---------------------------------------------------------------- groups


def make_verl_row(rollout: Rollout, **fields: Any) -> dict[str, Any]:
    output = f"angle {rollout.number}"
    return {"input": PROMPT, "output": output, "score": rollout.reward, "step": 1} | fields


def make_nemo_rl_row(rollout: Rollout, **fields: Any) -> dict[str, Any]:
    content = [PROMPT, f"angle {rollout.number}"]
    return {"idx": rollout.number, "content": [content], "rewards": [rollout.reward], "input_lengths": [7]} | fields


def make_nemo_gym_row(rollout: Rollout, **fields: Any) -> dict[str, Any]:
    answer = {"type": "message", "role": "assistant", "content": f"angle {rollout.number}"}
    request = {"input": [{"role": "user", "content": PROMPT}]}
    return {"responses_create_params": request, "response": {"output": [answer]}, "reward": rollout.reward} | fields


def make_trl_row(rollout: Rollout, **fields: Any) -> dict[str, Any]:
    return {"step": 1, "prompt": PROMPT, "completion": f"angle {rollout.number}", "reward": rollout.reward} | fields


def make_eval_protocol_row(rollout: Rollout, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": f"angle {rollout.number}"}]
    score = {"score": rollout.reward}
    return {"messages": messages, "input_metadata": {}, "rollout_status": {}, "evaluation_result": score} | fields


def make_trace_row(rollout: Rollout) -> dict[str, Any]:
    asked, said = ({"role": role, "content": PROMPT} for role in ("user", "assistant"))
    nodes = [{"message": asked, "sampled": False}, {"message": said, "parent": 0, "sampled": True}]
    trace = {"version": 1, "id": f"t{rollout.number}", "nodes": nodes, "rewards": {"r": rollout.reward}}
    task = {"type": "t", "data": {"answer": "7"}, "key": "t7"}
    return {
        "id": f"e{rollout.number}",
        "env": {"id": "e"},
        "task": task,
        "group": {"id": rollout.uid},
        "traces": [trace],
    }


def make_image_row(rollout: Rollout) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": f"{rollout.group}.png"}}, {"type": "text", "text": PROMPT}]
    answer = {"role": "assistant", "content": f"angle {rollout.number}"}
    return make_nemo_rl_row(rollout, content=[[{"role": "user", "content": parts}, answer]])


GROUPED: dict[str, tuple[Write, Callable[[Rollout], dict[str, Any]]]] = {
    "verl, by its uid": (write_lines, lambda r: make_verl_row(r, uid=f"{r.uid}_{r.number}_0", gts="7")),
    "verl, by a bare uid": (write_lines, lambda r: make_verl_row(r, uid=r.uid, gts="7")),
    "verl, by the truth": (write_lines, lambda r: make_verl_row(r, gts=str(r.group))),
    "nemo_rl, by the sample": (write_lines, lambda r: make_nemo_rl_row(r, sample_id=[f"{r.uid}_g{r.number}"])),
    "nemo_rl, by the group": (write_lines, lambda r: make_nemo_rl_row(r, group_id=[r.uid])),
    "nemo_rl, by the image": (write_lines, make_image_row),
    "nemo_gym, by the group": (write_lines, lambda r: make_nemo_gym_row(r, _ng_group_id=r.uid)),
    "nemo_gym, by the truth": (write_lines, lambda r: make_nemo_gym_row(r, expected_answer=r.group)),
    "nemo_gym, by the group of a task": (
        write_lines,
        lambda r: make_nemo_gym_row(r, _ng_task_index=3, _ng_group_id=r.uid),
    ),
    "verifiers_traces, by the group of a task": (write_lines, make_trace_row),
    "trl, by the truth": (write_table, lambda r: make_trl_row(r, solution=str(r.group))),
    "eval_protocol, by the truth": (write_lines, lambda r: make_eval_protocol_row(r, ground_truth=str(r.group))),
}
BATCHES = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 1.0])), min_size=1, max_size=8).map(
    lambda pairs: [Rollout(group, number, reward) for number, (group, reward) in enumerate(pairs)]
)


@pytest.mark.parametrize("source", GROUPED)
@given(batch=BATCHES)
def test_problems_with_one_text_are_groups_of_their_own(source: str, batch: list[Rollout]) -> None:
    write, make_row = GROUPED[source]
    records, notes = read(write, [make_row(rollout) for rollout in batch])
    groups = defaultdict(list)
    for record, rollout in zip(records, batch, strict=True):
        groups[identify(record, "run").group_id].append(rollout)
    assert sorted(map(len, groups.values())) == sorted(Counter(rollout.group for rollout in batch).values())
    assert all(len({rollout.group for rollout in siblings}) == 1 for siblings in groups.values())
    assert len({identify(record, "run").episode_id for record in records}) == len(batch)
    first = batch[0].group
    assert count_rules(notes) == sum(rollout.group != first for rollout in batch), "the report says who was split off"


@pytest.mark.parametrize("make_row", [make_verl_row, make_nemo_rl_row, make_nemo_gym_row])
def test_groups_that_rest_on_the_text_alone_are_said(make_row: Callable[[Rollout], dict[str, Any]]) -> None:
    records, notes = read(write_lines, [make_row(Rollout(group, group, 1.0)) for group in range(3)])
    assert len({record.task_id for record in records}) == 1
    assert count_rules(notes) == 3


# ---------------------------------------------------------------- padding

PADDED: dict[str, tuple[Callable[[Rollout], dict[str, Any]], dict[str, Any]]] = {
    "verl": (lambda r: make_verl_row(r, uid=f"{r.uid}_{r.number}_0"), {"uid": "pad" + "0" * 32 + "_1_0", "input": ""}),
    "nemo_rl": (make_nemo_rl_row, {"metadata": [{"is_padding": True}]}),
    "nemo_gym": (make_nemo_gym_row, {"is_padding": True}),
    "messages": (lambda r: {"messages": make_chat([1]), "score": r.reward}, {"is_padding": True}),
}


@pytest.mark.parametrize("source", PADDED)
@given(batch=BATCHES, places=st.lists(st.integers(0, 8), max_size=3))
def test_rows_of_padding_are_no_rollouts(source: str, batch: list[Rollout], places: list[int]) -> None:
    make_row, padding = PADDED[source]
    rows = [make_row(rollout) for rollout in batch]
    unpadded, said = read(write_lines, rows)
    for place in places:
        rows.insert(min(place, len(rows)), make_row(batch[0]) | padding)
    records, notes = read(write_lines, rows)
    assert [record.env_return for record in records] == [record.env_return for record in unpadded]
    assert Counter(r.task_id for r in records).total() == len(batch)
    left_out = notes - said
    assert sum(n for note, n in left_out.items() if "to fill its batches" in note.subject) == len(places)


# ---------------------------------------------------------------- errors


def make_verifiers_row(rollout: Rollout) -> dict[str, Any]:
    chat = make_chat([1])
    row = {"example_id": 0, "prompt": chat[:1], "completion": chat[1:], "answer": "7", "task": "t", "info": {}}
    return row | {"reward": rollout.reward, "error": "ModelError()" if rollout.has_failed else None, "total_ms": 1.0}


def make_tau_bench_row(rollout: Rollout) -> dict[str, Any]:
    info = {"error": "boom"} if rollout.has_failed else {"reward_info": {"reward": rollout.reward}}
    return {"task_id": 1, "trial": rollout.number, "reward": rollout.reward, "info": info, "traj": make_chat([1])}


def make_tau2_row(rollout: Rollout) -> dict[str, Any]:
    row = {"id": str(rollout.number), "task_id": "1", "trial": rollout.number, "messages": make_chat([1])}
    end = "infrastructure_error" if rollout.has_failed else "user_stop"
    return row | {"termination_reason": end, "reward_info": {"reward": rollout.reward}}


def make_openhands_row(rollout: Rollout) -> dict[str, Any]:
    user = {"id": 1, "source": "user", "action": "message", "args": {"content": "Fix it."}, "message": "Fix it."}
    agent = {"id": 2, "source": "agent", "action": "message", "args": {"content": f"angle {rollout.number}"}}
    error = "boom" if rollout.has_failed else None
    row = {"instance_id": f"i{rollout.number}", "instruction": "Fix it.", "history": [user, agent], "error": error}
    return row | {"metadata": {}, "metrics": {}, "test_result": {"report": {"resolved": bool(rollout.reward)}}}


FAILING: dict[str, tuple[Write, Callable[[Rollout], dict[str, Any]]]] = {
    "verifiers_results": (write_lines, make_verifiers_row),
    "nemo_gym": (
        write_lines,
        lambda r: make_nemo_gym_row(r, _ng_task_index=0, _ng_failure_class="timeout" if r.has_failed else None),
    ),
    "tau_bench": (write_array, make_tau_bench_row),
    "tau2": (write_array, make_tau2_row),
    "openhands": (write_lines, make_openhands_row),
}


@pytest.mark.parametrize("source", FAILING)
@given(pairs=st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.booleans()), min_size=1, max_size=6))
def test_the_reward_of_a_failed_rollout_is_a_score_and_no_return(source: str, pairs: list[tuple[float, bool]]) -> None:
    write, make_row = FAILING[source]
    batch = [Rollout(0, number, reward, has_failed) for number, (reward, has_failed) in enumerate(pairs)]
    rows = [make_row(rollout) for rollout in batch]
    records, notes = read(write, rows)
    assert [record.env_return for record in records] == [None if r.has_failed else r.reward for r in batch]
    for record, rollout in zip(records, batch, strict=True):
        assert not rollout.has_failed or rollout.reward in [score.value for score in record.scores]
    assert count_rules(notes) == sum(rollout.has_failed for rollout in batch)
    asked, notes = read(write, rows, errors_count=True)
    assert ([record.env_return for record in asked], count_rules(notes)) == ([r.reward for r in batch], 0)


# ---------------------------------------------------------------- loss


def make_chat(weights: list[Any], key: str | None = None) -> list[dict[str, Any]]:
    """A chat with an answer for each weight, written under `key`."""
    chat: list[dict[str, Any]] = []
    for number, weight in enumerate(weights):
        mark = {} if key is None else {key: weight}
        chat += [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": f"angle {number}"} | mark]
    return chat


def make_sharegpt(chat: list[dict[str, Any]]) -> dict[str, Any]:
    names = {"user": "human", "assistant": "gpt"}
    turns = [{"from": names[m["role"]], "value": m["content"]} | dict(list(m.items())[2:]) for m in chat]
    return {"conversations": turns}


CHATS: dict[str, tuple[Write, Callable[[list[dict[str, Any]]], dict[str, Any]]]] = {
    "messages": (write_lines, lambda chat: {"messages": chat}),
    "completion": (write_array, lambda chat: {"prompt": chat[:1], "completion": chat[1:]}),
    "sharegpt": (write_lines, make_sharegpt),
    "eval_protocol": (write_lines, lambda chat: make_eval_protocol_row(Rollout(0, 0, 1.0), messages=chat)),
    "verifiers_results": (
        write_lines,
        lambda chat: make_verifiers_row(Rollout(0, 0, 1.0)) | {"prompt": chat[:1], "completion": chat[1:]},
    ),
    "tau_bench": (write_array, lambda chat: make_tau_bench_row(Rollout(0, 0, 1.0)) | {"traj": chat}),
}
MASKS = st.lists(st.booleans(), min_size=1, max_size=5)


@pytest.mark.parametrize("source", CHATS)
@given(mask=MASKS, key=st.sampled_from([*WEIGHTS, *IGNORES]), as_number=st.booleans())
def test_a_message_that_is_excluded_is_not_trained_on(source: str, mask: list[bool], key: str, as_number: bool) -> None:
    write, make_row = CHATS[source]
    flags: list[Any] = [not is_trained for is_trained in mask] if key in IGNORES else list(mask)
    weights = [int(flag) for flag in flags] if as_number and key in WEIGHTS else flags
    ((record,), _) = read(write, [make_row(make_chat(weights, key))])
    assert [step.trainable for step in record.steps] == mask
    assert [step.action for step in record.steps] == [f"angle {number}" for number in range(len(mask))]


@pytest.mark.parametrize("source", ["messages", "completion", "sharegpt", "verifiers_results"])
@given(mask=MASKS, of_messages=st.booleans(), key=st.sampled_from(["loss_mask", "train", "weight", "ignore"]))
def test_a_row_excludes_messages_by_a_list_and_all_of_them_by_a_flag(
    source: str, mask: list[bool], of_messages: bool, key: str
) -> None:
    write, make_row = CHATS[source]
    flags = [is_trained != (key in IGNORES) for is_trained in mask]
    entries = [entry for flag in flags for entry in ((0, int(flag)) if of_messages else (int(flag),))]
    row = make_row(make_chat(mask))
    ((record,), _) = read(write, [row | {key: entries}])
    assert [step.trainable for step in record.steps] == mask
    ((record,), _) = read(write, [row | {key: flags[0]}])
    assert {step.trainable for step in record.steps} == {mask[0]}


@pytest.mark.parametrize("place", ["row", "message"])
@pytest.mark.parametrize("key", ["turn_mask", "learn", "is_train", "skip", "exclude"])
def test_a_mask_of_unknown_meaning_is_said_once_for_a_file(place: str, key: str) -> None:
    chat = make_chat([1, 0], key if place == "message" else None)
    row = {"messages": chat} | ({} if place == "message" else {key: 0})
    records, notes = read(write_lines, [row] * 3)
    assert all(step.trainable for record in records for step in record.steps)
    (said,) = [number for note, number in notes.items() if note.kind == "rule" and repr(key) in note.subject]
    assert said == 3


@pytest.mark.parametrize(("loss", "is_trained", "said"), [(0, False, 0), (1, True, 0), (0.0, True, 2), (0.7, True, 2)])
def test_a_loss_of_0_excludes_a_row_and_a_logged_loss_is_said(loss: float, is_trained: bool, said: int) -> None:
    records, notes = read(write_lines, [{"messages": make_chat([1, 1]), "loss": loss}] * 2)
    assert {step.trainable for record in records for step in record.steps} == {is_trained}
    assert count_rules(notes) == said


# ---------------------------------------------------------------- inputs with right answers


def list_returns(case: str, tmp_path: Path, **options: Any) -> tuple[list[tuple[Any, ...]], Report]:
    """Group, rollout and return of each episode of a case, in a lake, and the report of the ingest."""
    lk = empty_lake(tmp_path / "lake")
    report = ingest(lk, shared_data("cases", case), **options)
    assert report.rejected == 0
    columns = "dense_rank() OVER (ORDER BY task_id), rollout_index, env_return"
    return lk.sql(f"SELECT {columns} FROM episodes ORDER BY 1, 2").rows(), report


def test_two_verl_problems_with_one_text_are_two_dead_groups(tmp_path: Path) -> None:
    returns, report = list_returns("01_verl_same_text", tmp_path)
    assert returns == [(group, number, 2.0 - group) for group in (1, 2) for number in range(4)]
    assert count_rules(report.count_notes()) == 4


def test_nemo_rl_rows_whose_groups_nothing_tells_apart_are_said(tmp_path: Path) -> None:
    returns, report = list_returns("17_nemo_rl_same_text", tmp_path)
    assert returns == [(1, number, reward) for number, reward in enumerate([1.0, 1.0, 0.0, 0.0])]
    assert count_rules(report.count_notes()) == 4


def test_a_rollout_of_verifiers_that_failed_has_no_return(tmp_path: Path) -> None:
    returns, _ = list_returns("09_verifiers_errored", tmp_path)
    assert returns == [(1, 0, 1.0), (1, 1, 0.0), (1, 2, None), (2, 0, 0.0), (2, 1, 1.0), (2, 2, 0.0)]


def test_the_target_of_a_row_of_nebius_is_a_score() -> None:
    rows = shared_data("cases", "13_nebius_target", "nebius_swe_agent", "rows.jsonl")
    ((record,), _) = read(write_lines, [json.loads(rows.read_text("utf-8"))])
    assert [(score.scorer, score.value) for score in record.scores] == [("target", 1.0)]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_failed_rollout_is_worth_reaches_every_reader_of_parts(tmp_path: Path, workers: int) -> None:
    batch = [Rollout(0, number, 0.0, has_failed=number == 1) for number in range(2)]
    write_lines(tmp_path / "results.jsonl", [make_verifiers_row(rollout) for rollout in batch])
    for name, errors_count in (("kept", False), ("counted", True)):
        lk = empty_lake(tmp_path / name)
        executor = LocalExecutor(workers) if workers else None
        report = ingest(lk, tmp_path / "results.jsonl", errors_count=errors_count, executor=executor)
        rows = lk.sql("SELECT env_return FROM episodes ORDER BY rollout_index").rows()
        assert rows == [(0.0,), (0.0 if errors_count else None,)]
        assert count_rules(report.count_notes()) == (not errors_count)
