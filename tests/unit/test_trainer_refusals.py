"""What losses refuse, each with counts, an example row and the alternative."""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from lake import Lake, ids
from lake.errors import DataRefusedError
from lake.formats.chat.completions import LOGPROBS_LEFT_OUT
from lake.records import EpisodeRecord
from testkit.training import config, token_episodes, token_lake, token_step
from testkit.wording import Wording
from trainer.data.refusals import build_text_refusal, find_refusals, refuse, refuse_step_advantages
from trainer.data.selection import select, select_episodes
from trainer.losses import LOSSES

FAULTS: list[tuple[str, dict[str, Any], str]] = [
    ("no_logprobs", {"action_logprobs": None}, "no behaviour log-probabilities"),
    ("temperature_zero", {"temperature": 0.0}, "greedily"),
    ("temperature_unknown", {"temperature": None}, "at which temperature"),
    ("truncated_sampling", {"top_p": 0.9}, "support is not stored"),
    ("truncated_sampling", {"top_k": 20}, "support is not stored"),
    ("truncated_sampling", {"min_p": 0.05}, "support is not stored"),
    ("raw_logprobs", {"temperature": 0.7, "logprobs_mode": "raw"}, "processed_logprobs"),
    ("raw_logprobs", {"temperature": 0.7, "logprobs_mode": None}, "processed_logprobs"),
    ("constrained", {"constrained": [False, True, False]}, "under a grammar"),
]


KNOWN: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.0, "logprobs_mode": "raw"},
    {"top_p": None, "top_k": None, "min_p": None},
]
SEVERAL: dict[str, Any] = {"top_p": 0.9, "action_logprobs": None}
ODD = [tokens for _, tokens, _ in FAULTS] + [*KNOWN, SEVERAL]


@pytest.fixture(scope="module")
def lk(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Two good episodes of a step, and for each of `ODD` one of two steps; the second has those fields."""
    rng = np.random.default_rng(0)
    odd = [
        EpisodeRecord(task_id=f"odd{number}", steps=[token_step(rng, 4, 3), token_step(rng, 2, 3, **tokens)])
        for number, tokens in enumerate(ODD)
    ]
    return token_lake(tmp_path_factory.mktemp("lake"), [*token_episodes(tasks=1, siblings=2, max_steps=1), *odd])


def refusals_with(lk: Lake, loss: str, tokens: dict[str, Any]) -> Any:
    """Of the good episodes and an odd one."""
    snapshot, task = lk.snapshot(), f"odd{ODD.index(tokens)}"
    selection = select(snapshot, config("sft", where=f"task_id IN ('t0', '{task}')"), LOSSES["sft"]().needs)
    episode = lk.sql("SELECT episode_id FROM episodes WHERE task_id = ?", [task])["episode_id"][0]
    return find_refusals(snapshot, selection.members, LOSSES[loss]()), ids.to_text(episode)


@pytest.mark.parametrize(("reason", "tokens", "words"), FAULTS)
def test_a_ratio_loss_refuses_what_it_cannot_know(
    lk: Lake, reason: str, tokens: dict[str, Any], words: str, wording: Wording
) -> None:
    (refusal,), episode = refusals_with(lk, "ppo", tokens)
    assert (refusal.reason, refusal.steps) == (reason, 1)
    assert wording(refusal.message, EPISODE=episode).startswith("ppo refused: 1 of 4 ")
    assert f"episode_id={episode}, step_index=1" in refusal.message
    assert words in refusal.message
    assert "--loss awr or" in refusal.message
    with pytest.raises(DataRefusedError, match="1 of 4 steps"):
        refuse([refusal])


@pytest.mark.parametrize("loss", ["sft", "awr"])
def test_likelihood_losses_take_them_all(lk: Lake, loss: str) -> None:
    snapshot = lk.snapshot()
    members = select(snapshot, config("sft"), LOSSES["sft"]().needs).members
    assert members.height == 2 + 2 * len(ODD)
    assert find_refusals(snapshot, members, LOSSES[loss]()) == []


@pytest.mark.parametrize("tokens", KNOWN)
def test_a_ratio_loss_takes_a_known_distribution(lk: Lake, tokens: dict[str, Any]) -> None:
    refusals, _ = refusals_with(lk, "ppo", tokens)
    assert refusals == []


def test_several_faults_are_all_named(lk: Lake) -> None:
    refusals, _ = refusals_with(lk, "ppo", SEVERAL)
    assert [refusal.reason for refusal in refusals] == ["no_logprobs", "truncated_sampling"]
    with pytest.raises(DataRefusedError, match=r"no behaviour.*; ppo refused: .*truncated"):
        refuse(refusals)


def test_log_probabilities_that_an_engine_made_up_are_named_as_the_reason(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    bare = {"action_logprobs": None}
    steps = [token_step(rng, 4, 3), token_step(rng, 2, 3, **bare), token_step(rng, 2, 3, **bare)]
    steps[1].extra = {LOGPROBS_LEFT_OUT: "the engine tells log-probability 5.0; valid: at most 0"}
    lk = token_lake(tmp_path, [EpisodeRecord(task_id="t", steps=steps)])
    snapshot = lk.snapshot()
    members = select(snapshot, config("sft"), LOSSES["sft"]().needs).members
    refusals = find_refusals(snapshot, members, LOSSES["ppo"]())
    assert [(refusal.reason, refusal.steps) for refusal in refusals] == [("wrong_logprobs", 1), ("no_logprobs", 1)]
    assert LOGPROBS_LEFT_OUT in refusals[0].message


def test_rendered_tokens_are_refused_for_that_reason_alone(tmp_path: Path) -> None:
    lk = token_lake(tmp_path, token_episodes(tasks=1))
    snapshot = lk.snapshot()
    members = select(snapshot, config("sft"), LOSSES["sft"]().needs).members
    rendered = members.with_columns(provenance=pl.lit("rendered"), has_logprobs=pl.lit(value=False))
    (refusal,) = find_refusals(snapshot, rendered, LOSSES["ppo"]())
    assert (refusal.reason, refusal.steps) == ("rendered", members.height)


def test_text_only_episodes_are_refused_before_they_are_rendered(tmp_path: Path) -> None:
    lk = token_lake(tmp_path, token_episodes(tasks=2))
    episodes = select_episodes(lk.snapshot(), None)
    refusal = build_text_refusal(episodes, LOSSES["ppo"]())
    steps = lk.sql("SELECT count(*) AS n FROM steps")["n"][0]
    assert refusal.message.startswith(f"ppo refused: {steps} of {steps} steps hold text only")
    assert ids.to_text(episodes["episode_id"][0]) in refusal.message


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, pl.DataFrame]:
    """A snapshot and the members of two episodes of three steps with engine tokens."""
    rng = np.random.default_rng(1)
    episodes = [EpisodeRecord(task_id=f"t{n}", steps=[token_step(rng, 3, 2) for _ in range(3)]) for n in range(2)]
    snapshot = token_lake(tmp_path_factory.mktemp("good"), episodes).snapshot()
    return snapshot, select(snapshot, config("sft"), LOSSES["sft"]().needs).members


@pytest.mark.parametrize("loss", ["reinforce", "ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "dro"])
def test_every_ratio_loss_refuses_tokens_without_log_probabilities(good: tuple[Any, pl.DataFrame], loss: str) -> None:
    snapshot, members = good
    bare = members.with_columns(has_logprobs=pl.lit(value=False), advantage=pl.lit(1.0))
    assert [refusal.reason for refusal in find_refusals(snapshot, bare, config(loss).loss)] == ["no_logprobs"]


@pytest.mark.parametrize("loss", ["sft", "awr", "bc_exp"])
def test_no_likelihood_does(good: tuple[Any, pl.DataFrame], loss: str) -> None:
    snapshot, members = good
    bare = members.with_columns(has_logprobs=pl.lit(value=False), provenance=pl.lit("rendered"))
    assert find_refusals(snapshot, bare, config(loss).loss) == []


def test_reinforce_without_a_correction_compares_with_nobody(good: tuple[Any, pl.DataFrame]) -> None:
    snapshot, members = good
    bare = members.with_columns(has_logprobs=pl.lit(value=False))
    plain = config("reinforce", options={"correction": {"method": "none"}}).loss
    assert find_refusals(snapshot, bare, plain) == []


def test_one_ratio_for_an_episode_needs_one_advantage(good: tuple[Any, pl.DataFrame], wording: Wording) -> None:
    snapshot, members = good
    first = members["episode_id"][0]
    differs = (pl.col("episode_id") == first) & (pl.col("step_index") == 2)
    varied = members.with_columns(advantage=pl.when(differs).then(0.25).otherwise(-1.5))
    (refusal,) = find_refusals(snapshot, varied, config("gspo").loss)
    assert (refusal.reason, refusal.steps) == ("advantages_vary", 3)
    assert wording(refusal.message, EPISODE=ids.to_text(first)).startswith("gspo refused: 1 of 2 ")
    assert f"episode_id={ids.to_text(first)}, step_index=0: from -1.5 to 0.25" in refusal.message
    assert "loss.unit to turn" in refusal.message
    level = members.with_columns(advantage=pl.lit(-1.5))
    assert find_refusals(snapshot, level, config("gspo").loss) == []
    for unit in ("turn", "sequence", "episode"):
        assert find_refusals(snapshot, varied, config("gspo", options={"unit": unit}).loss) == [], "said explicitly"
    assert find_refusals(snapshot, varied, config("ppo").loss) == [], "a ratio per token follows any advantage"


def test_both_labels_must_be_there(good: tuple[Any, pl.DataFrame], wording: Wording) -> None:
    snapshot, members = good
    labelled = members.with_columns(sign=pl.lit(1, pl.Int8))
    (refusal,) = find_refusals(snapshot, labelled, config("kto").loss)
    assert (refusal.reason, refusal.steps) == ("one_label", 6)
    wording(refusal.message, EPISODE=ids.to_text(members["episode_id"][0]))
    first = pl.col("episode_id") == members["episode_id"][0]
    signed = members.with_columns(sign=pl.when(first).then(1).otherwise(-1))
    assert find_refusals(snapshot, signed, config("kto").loss) == []
    assert find_refusals(snapshot, members.clear(), config("kto").loss) == [], "the plan says that it is empty"


def test_a_credit_job_without_step_advantages_is_refused_before_everything_is_dropped() -> None:
    credit = pl.DataFrame(
        {"episode_id": [7, 5], "step_index": [0, 1], "a_step": [None, None]}, schema_overrides={"a_step": pl.Float64}
    )
    with pytest.raises(DataRefusedError, match="2 of 2 steps of series X have none") as caught:
        refuse_step_advantages(credit, "series X")
    assert f"episode_id={ids.to_text(5)}, step_index=1" in str(caught.value)
    assert "trajlake credit gigpo" in str(caught.value)
    refuse_step_advantages(credit.with_columns(a_step=pl.Series([None, 0.0])), "series X")
    refuse_step_advantages(credit.clear(), "series X")
