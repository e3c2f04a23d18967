"""What training did with the tokens of a step: weights, advantage and clip, each known or said why not."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from lake import Lake
from lake.read.training import ClipFlag
from lake.records import TokensRecord
from testkit.lakes import add_credit, build_lake, rollout
from testkit.training import config
from trainer.losses import LOSSES
from viewer.queries import training_data, transcripts
from viewer.transcript import tokens

BEHAVIOUR = [-1.0, -1.0, -1.0, -1.0]
THEN = [-1.0, -0.5, -2.0, 0.0]
"""Ratios 1, 1.65, 0.37 and, of a token that was not sampled, 2.7."""


@pytest.fixture
def lk(tmp_path: Path) -> Lake:
    """Two siblings with tokens in their two steps, and credit: +1 for the first, -1 for the other."""
    records = [rollout("t", index, 1.0 - index, num_steps=2) for index in (0, 1)]
    sampling: dict[str, Any] = {"temperature": 1.0, "logprobs_mode": "processed", "action_mask": [True] * 3 + [False]}
    for record in records:
        for step in record.steps:
            step.tokens = TokensRecord(
                context_ids=[1], action_ids=[5, 6, 7, 8], action_logprobs=list(BEHAVIOUR), **sampling
            )
    lk = build_lake(tmp_path, records)
    add_credit(lk)
    return lk


def loss(name: str, **options: Any) -> Any:
    return config(name, options).loss.model_dump(mode="json")


def trained(lk: Lake, parameters: dict[str, Any], *, run: str = "run", weights: list[float] | None = None) -> None:
    """A job whose updates 4 and 7 consumed the first step of the first episode; saved after 4 and 9 updates."""
    at = datetime(2026, 1, 1, tzinfo=UTC)
    rows = [
        {"optimizer_step": update, "episode_id": episode(lk, 0), "first_step": 0, "last_step": 1, "action_tokens": 6}
        | {"epoch": 0, "token_weights": weights}
        for update in (4, 7)
    ]
    saved = [
        {"optimizer_step": done, "run_id": run, "policy_version": done, "uri": "x", "sha256": f"{run} {done}", "at": at}
        | {"data_snapshot": "{}", "cursor": f'{{"model_sha256": "{run} 0"}}', "attempt": 0}
        for done in (4, 9)
    ]
    with lk.job(kind="train", run_id=run, parameters=parameters) as job:
        job.write("batches", pl.DataFrame(rows, schema_overrides={"token_weights": pl.List(pl.Float32)}))
        job.write("checkpoints", pl.DataFrame(saved))


def rescore(lk: Lake, name: str, sha256: str, logprobs: list[float] = THEN, steps: tuple[int, ...] = (0, 1)) -> None:
    query = "SELECT episode_id, step_index, encoding_id, group_id, run_id FROM tokens"
    rows = [row for row in lk.sql(query).to_dicts() if row["step_index"] in steps]
    d = sum(logprobs[:3]) - sum(BEHAVIOUR[:3])
    new = {"checkpoint": name, "temperature": 1.0, "n_action": 4, "log_ratio": d, "logprobs": logprobs}
    with lk.job(kind="rescore", parameters={"checkpoint": name, "weights_sha256": sha256}, series={"w": sha256}) as job:
        job.write("ratios", pl.DataFrame([row | new | {"entropies": [0.5, 0.25, 1.0, 0.0]} for row in rows]))


def episode(lk: Lake, index: int) -> int:
    return int(lk.sql("SELECT episode_id FROM episodes ORDER BY rollout_index")["episode_id"][index])


def strip(lk: Lake, step: int = 0) -> dict[str, Any]:
    snapshot, mine = lk.snapshot(), episode(lk, 0)
    rows = [
        query(snapshot, mine, step).to_dicts() for query in (transcripts.read_tokens, transcripts.read_rescored_tokens)
    ]
    (strip_row,) = tokens.build_strips(*rows, training_data.read_step_uses(snapshot, mine, step))
    return strip_row


def clips(strip_tokens: dict[str, Any]) -> dict[str, list[str | None]]:
    return {
        track["label"]: [None if value is None else track["names"][value] for value in track["values"]]
        for track in strip_tokens["tracks"]
        if track["kind"] == "fate"
    }


def test_a_clip_is_that_of_an_update_only_where_the_checkpoint_holds_its_weights(lk: Lake) -> None:
    trained(lk, {"loss": loss("ppo")}, weights=[0.25, 0.0])
    rescore(lk, "run@4", "run 4")
    rescore(lk, "run@9", "run 9", BEHAVIOUR)
    rescore(lk, "stranger", "no job's")
    strip_tokens = strip(lk)
    flags = clips(strip_tokens)
    assert list(flags.values()) == [
        [ClipFlag.KEPT, ClipFlag.ABOVE, ClipFlag.KEPT, None],
        [ClipFlag.KEPT, ClipFlag.KEPT, ClipFlag.KEPT, None],
    ]
    of_the_update, later = flags
    assert of_the_update.startswith("run: clip at run@4,")
    assert of_the_update.endswith("which update 4 began")
    assert later == "run: clip at run@9, after 9 updates"
    assert [track["label"] for track in strip_tokens["tracks"] if track["kind"] == "entropy"] == [
        "run@4: entropy",
        "run@9: entropy",
        "stranger: entropy",
    ]
    (fact,) = strip_tokens["facts"]
    assert fact.startswith("run (ppo) consumed the step 2 times, in update 4, 7; advantage ")
    assert "a token's loss counted 0.25 of the update's" in fact
    assert strip(lk, 1)["facts"] == [], "a step inside the span that weighed nothing was not trained on"


def test_a_reference_is_named_as_such(lk: Lake) -> None:
    trained(lk, {"loss": loss("ppo", kl={"coefficient": 0.1}), "reference": None})
    trained(lk, {"loss": loss("dpo"), "reference": "elsewhere"}, run="other")
    rescore(lk, "base", "run 0")
    labels = [track["label"] for track in strip(lk)["tracks"]]
    assert "base: log-probability (reference of run)" in labels


def test_a_unit_is_clipped_as_a_whole_or_not_told(lk: Lake) -> None:
    trained(lk, {"loss": loss("gspo", clip_high=0.1, clip_low=0.1)}, weights=[0.1, 0.1])
    rescore(lk, "run@4", "run 4", [-0.8, -0.8, -0.8, 0.0], steps=(0,))
    assert clips(strip(lk)) == {}
    assert "of the whole episode" in strip(lk)["notes"][-1]
    rescore(lk, "run@4", "run 4", [-0.8, -0.8, -0.8, 0.0], steps=(1,))
    (clip,) = clips(strip(lk)).values()
    assert clip == [ClipFlag.ABOVE] * 3 + [None]


@pytest.mark.parametrize(
    ("parameters", "policy", "why"),
    [
        ({"loss": "ppo"}, "run 4", "version in which losses did not own their options"),
        pytest.param({"loss": loss("awr")}, "run 4", "awr limits no ratio", marks=pytest.mark.slow),
        ({"loss": loss("ppo")}, "no job's", "none of its policies was rescored on this step"),
        pytest.param(
            {"loss": loss("ppo"), "advantages": "nobody"},
            "run 4",
            "its advantage is unknown",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["former", "no limit", "no policy", "no advantage"],
)
def test_what_is_not_known_is_said_and_not_drawn(lk: Lake, parameters: Any, policy: str, why: str) -> None:
    trained(lk, parameters)
    rescore(lk, "some", policy)
    strip_tokens = strip(lk)
    assert clips(strip_tokens) == {}
    assert why in strip_tokens["notes"][-1]
    assert "was not recorded" in strip_tokens["facts"][0]


def test_a_step_that_nothing_trained_on_has_no_word_of_training(lk: Lake) -> None:
    assert training_data.read_step_uses(lk.snapshot(), episode(lk, 1), 0) == []
    assert strip(lk)["facts"] == []


def test_losses_of_readers_and_trainer_have_the_same_names() -> None:
    """The names that `viewer.queries.training_data` knows a reference by are those of losses that always take one."""
    assert {name for name, loss in LOSSES.items() if loss().needs.reference_logprobs} == training_data.WITH_REFERENCE
