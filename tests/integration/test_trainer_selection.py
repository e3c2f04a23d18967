"""What is trained on and what is not, on real lakes: every step is trained or has exactly one reason."""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from lake import Lake, ids
from lake.errors import ContractError, DataRefusedError, UsageError
from lake.judgements.credit import find_credit, find_jobs, read_advantages
from lake.records import EpisodeRecord
from pipelines.credit.estimators.grpo import GRPO
from pipelines.credit.job import run_credit
from testkit.lakes import add_credit, build_lake
from testkit.training import config, token_episodes, token_lake, token_step
from trainer.data.plan import Plan
from trainer.data.selection import (
    TrainingSelection,
    _compute_normalisation,
    resolve_provenance,
    select,
    select_episodes,
)
from trainer.losses import LOSSES

RNG = np.random.default_rng(1)


def selected(lk: Lake, loss: str = "sft", *, credit: bool = False, **fields: Any) -> TrainingSelection:
    snapshot = lk.snapshot()
    source = find_credit(snapshot, None) if credit else None
    return select(snapshot, config(loss, **fields), LOSSES[loss]().needs, source=source)


def drops(selection: TrainingSelection) -> dict[str, int]:
    return dict(selection.drops.select("reason", "steps").rows())


def trained_steps(selection: TrainingSelection) -> list[int]:
    return selection.members.filter(pl.col("trained"))["step_index"].to_list()


def one_episode(tmp_path: Path, steps: list[Any], **fields: Any) -> Lake:
    return token_lake(tmp_path, [EpisodeRecord(task_id="t", steps=steps, **fields)])


def test_every_step_is_trained_or_dropped_once(tmp_path: Path) -> None:
    lk = token_lake(tmp_path, token_episodes(tasks=6))
    add_credit(lk)
    selection = selected(lk, "awr", credit=True, max_length=20)
    total = lk.sql("SELECT count(*) AS n FROM steps")["n"][0]
    assert selection.members["trained"].sum() + sum(drops(selection).values()) == total
    assert set(drops(selection)) == {"dead_group", "over_length"}
    assert (selection.episodes, selection.groups, selection.dead_groups) == (24, 6, 3)


@pytest.mark.parametrize(
    ("reason", "step", "tokens"),
    [
        ("not_trainable", {"trainable": False}, {}),
        ("copied_context", {"is_copied_context": True}, {}),
        ("inactive", {"is_active": False}, {}),
        ("no_action_tokens", {}, {"action_mask": [False, False]}),
    ],
)
def test_a_step_without_loss_stays_as_context(
    tmp_path: Path, reason: str, step: dict[str, Any], tokens: dict[str, Any]
) -> None:
    lk = one_episode(tmp_path, [token_step(RNG, 3, 2, step=step, **tokens), token_step(RNG, 3, 2)])
    selection = selected(lk)
    assert drops(selection) == {reason: 1}
    assert selection.members.select("step_index", "trained").rows() == [(0, False), (1, True)]
    assert Plan(selection, config()).tokens == 10


def test_what_follows_the_last_trained_step_is_cut_off(tmp_path: Path) -> None:
    lk = one_episode(tmp_path, [token_step(RNG, 3, 2), token_step(RNG, 3, 2, step={"trainable": False})])
    assert selected(lk).members["step_index"].to_list() == [0]


def test_a_long_sequence_is_cut_at_a_step(tmp_path: Path) -> None:
    lk = one_episode(tmp_path, [token_step(RNG, 3, 2) for _ in range(4)])
    assert trained_steps(selected(lk, max_length=15)) == [0, 1, 2], "to its very end"
    selection = selected(lk, max_length=14)
    assert trained_steps(selection) == [0, 1]
    assert drops(selection) == {"over_length": 2}
    assert selection.drops["tokens"].to_list() == [4]


def test_an_action_that_nothing_predicts_is_dropped(tmp_path: Path) -> None:
    lk = one_episode(tmp_path, [token_step(RNG, 0, 2), token_step(RNG, 0, 2)])
    selection = selected(lk)
    assert trained_steps(selection) == [1]
    assert drops(selection) == {"no_context": 1}


def test_a_fork_trains_each_action_once(tmp_path: Path) -> None:
    steps = [token_step(RNG, 3, 2), token_step(RNG, 3, 2), token_step(RNG, 1, 2, prefix_step_index=0)]
    selection = selected(one_episode(tmp_path, steps))
    rows = selection.members.select("sequence", "step_index", "trained", "loss_tokens").rows()
    assert rows == [(0, 0, True, 2), (0, 1, True, 2), (1, 0, False, 0), (1, 2, True, 2)]


def test_steps_without_tokens_are_counted(tmp_path: Path) -> None:
    silent = token_step(RNG, 1, 1)
    silent.tokens = None
    episodes = [
        EpisodeRecord(task_id="half", steps=[token_step(RNG, 3, 2), silent]),
        EpisodeRecord(task_id="text", steps=[silent, silent]),
    ]
    selection = selected(token_lake(tmp_path, episodes))
    assert drops(selection) == {"no_tokens": 3}
    assert selection.drops["episodes"].to_list() == [2]


def test_an_unknown_advantage_drops_the_step_and_keeps_its_tokens(tmp_path: Path) -> None:
    episodes = token_episodes(tasks=1, siblings=2, max_steps=1)
    for episode in episodes:
        episode.steps = [token_step(RNG, 3, 2, step={"reward": r}) for r in (0.0, None, episode.env_return)]
    lk = token_lake(tmp_path, episodes)
    add_credit(lk)
    selection = selected(lk, "awr", credit=True)
    assert drops(selection) == {"no_advantage": 4}
    assert selection.members.filter(pl.col("episode_id") == selection.members["episode_id"][0])[
        "trained"
    ].to_list() == [False, False, True]
    assert drops(selected(lk, "sft")) == {}


def test_dead_groups_are_left_out_where_advantages_are_used_unless_wanted(tmp_path: Path) -> None:
    lk = token_lake(tmp_path)
    add_credit(lk)
    assert "dead_group" in drops(selected(lk, "ppo", credit=True))
    assert drops(selected(lk, "ppo", credit=True, live_only=False)) == {}
    assert drops(selected(lk, "sft")) == {}
    assert "dead_group" in drops(selected(lk, "sft", credit=True, live_only=True))


def test_awr_gets_normalised_advantages_and_ppo_the_stored_ones(tmp_path: Path) -> None:
    lk = token_lake(tmp_path)
    add_credit(lk)
    awr = selected(lk, "awr", credit=True)
    values = awr.members.filter(pl.col("trained"))["advantage"]
    assert values.mean() == pytest.approx(0, abs=1e-12)
    assert values.std(ddof=0) == pytest.approx(1)
    ppo = selected(lk, "ppo", credit=True).members.filter(pl.col("trained"))
    stored = read_advantages(lk.snapshot(), find_credit(lk.snapshot(), None))
    joined = ppo.join(stored, on=["episode_id", "step_index"], suffix="_stored")
    assert joined["advantage"].to_list() == joined["advantage_stored"].to_list()
    rescaled = values * awr.advantage_scale + awr.advantage_mean
    assert rescaled.to_list() == pytest.approx(ppo["advantage"].to_list())


def test_equal_advantages_become_zero(tmp_path: Path) -> None:
    lk = token_lake(tmp_path, token_episodes(tasks=2, max_steps=1)[4:])
    add_credit(lk)
    selection = selected(lk, "awr", credit=True, live_only=False)
    assert set(selection.members["advantage"]) == {0.0}
    assert selection.advantage_scale == 1.0


@pytest.mark.parametrize(
    ("values", "scale", "ties"),
    [
        ([0.3, 0.1 + 0.2, 0.3], 1.0, True),  # rounding is no signal
        ([1e6, 1e6 + 1e-4], 1.0, True),
        ([1.0, -1.0], 1.0, False),  # a deviation of 1 is no tie
        ([0.5, 0.5 + 1e-6], 5e-7, False),
    ],
)
def test_advantages_are_equal_up_to_rounding(values: list[float], scale: float, ties: bool) -> None:
    members = pl.DataFrame({"advantage": values, "trained": [True] * len(values)})
    mean, found_scale, found_ties = _compute_normalisation(members)
    assert mean == pytest.approx(sum(values) / len(values))
    assert (found_scale, found_ties) == (pytest.approx(scale, rel=1e-3), ties)


def test_where_selects_episodes(tmp_path: Path) -> None:
    lk = token_lake(tmp_path)
    assert selected(lk, where="task_id = 't1' AND env_return > 0.5 -- only these").episodes == 4
    with pytest.raises(DataRefusedError, match="no episode satisfies --where \"task_id = 'nothing'\""):
        selected(lk, where="task_id = 'nothing'")
    with pytest.raises(UsageError, match="colour"):
        selected(lk, where="colour = 'red'")


def test_an_empty_lake_says_so(tmp_path: Path) -> None:
    lk = token_lake(tmp_path, [], writes=1)
    with pytest.raises(DataRefusedError, match="lake holds no episodes"):
        select_episodes(lk.snapshot(), None)


def test_nothing_left_to_train_on_lists_the_reasons(tmp_path: Path) -> None:
    selection = selected(one_episode(tmp_path, [token_step(RNG, 3, 2)]), max_length=4)
    with pytest.raises(DataRefusedError, match=r"1 episode selected, steps dropped: over_length 1"):
        Plan(selection, config())


def test_a_choice_of_tokens_follows_what_is_there(tmp_path: Path) -> None:
    engine, text = token_lake(tmp_path / "engine"), build_lake(tmp_path / "text")
    for lk, expected in ((engine, "engine"), (text, "rendered")):
        snapshot = lk.snapshot()
        episodes = select_episodes(snapshot, None)["episode_id"]
        assert resolve_provenance(snapshot, episodes, "auto") == expected
        assert resolve_provenance(snapshot, episodes, "rendered") == "rendered"


def test_several_encodings_need_a_choice_or_the_models_own(tmp_path: Path) -> None:
    episodes = token_episodes(tasks=2)
    for episode in episodes[:3]:
        episode.tokenizer = "other"
    lk = token_lake(tmp_path, episodes)
    with pytest.raises(ContractError, match=r"have 2 encodings.*\(5 episodes\)"):
        selected(lk)
    task_hash = ids.key_hash("engine", "other", None)
    selection = select(
        lk.snapshot(), config(), LOSSES["sft"]().needs, own_encoding=None if task_hash is None else lambda: task_hash
    )
    assert selection.members["episode_id"].n_unique() == 3
    assert selection.drops.filter(pl.col("reason") == "no_tokens")["episodes"].to_list() == [5]


def test_the_series_of_the_newest_credit_job_is_the_default(tmp_path: Path) -> None:
    lk = token_lake(tmp_path)
    with pytest.raises(DataRefusedError, match="trajlake credit gigpo"):
        find_credit(lk.snapshot(), None)
    first, second = add_credit(lk, gamma=0.5), add_credit(lk, gamma=0.9)
    snapshot = lk.snapshot()
    newest = find_credit(snapshot, None)
    assert (newest.job_id, find_jobs(snapshot, newest)) == (None, (second,))
    assert newest.series_id == find_credit(snapshot, ids.to_text(second)).series_id
    assert find_credit(snapshot, ids.to_text(first)).job_id == first
    with pytest.raises(UsageError, match=r"names no estimator.*" + newest.text):
        find_credit(snapshot, ids.to_text(5))
    with pytest.raises(UsageError, match="advantages 'seven' names no estimator"):
        find_credit(snapshot, "seven", option="advantages")


def test_a_series_takes_each_group_from_its_newest_job(tmp_path: Path) -> None:
    lk = token_lake(tmp_path)
    first, second = add_credit(lk), add_credit(lk)
    snapshot = lk.snapshot()
    series = find_credit(snapshot, ids.to_text(first)).series_id
    source = find_credit(snapshot, ids.to_text(series))
    assert (source.series_id, source.job_id, find_jobs(snapshot, source)) == (series, None, (second,))
    keys = ["episode_id", "step_index"]
    advantages = read_advantages(snapshot, find_credit(snapshot, ids.to_text(second))).sort(keys)
    assert read_advantages(snapshot, source).sort(keys).equals(advantages)
    some = advantages["episode_id"].unique().head(2)
    assert set(read_advantages(snapshot, source, some)["episode_id"]) == set(some)


def test_rows_that_two_jobs_rendered_at_once_count_once(tmp_path: Path) -> None:
    lk = token_lake(tmp_path)
    rows = lk.scan("tokens").drop("write_id").with_columns(provenance=pl.lit("rendered"), encoding_id=7).collect()
    for _ in range(2):
        with lk.job(kind="render") as job:
            job.write("tokens", rows)
    selection = selected(lk, tokens="rendered")
    assert selection.members.height == rows.height
    assert selection.members["trained"].sum() == rows.height


def test_a_loss_on_step_advantages_gets_those(tmp_path: Path) -> None:
    lk = token_lake(tmp_path, token_episodes())
    add_credit(lk)
    selection = selected(lk, "bc_exp", credit=True, live_only=False)
    expected = lk.sql("SELECT a_step FROM advantages ORDER BY episode_id, step_index")["a_step"]
    advantage = selection.members["advantage"] * selection.advantage_scale + selection.advantage_mean
    assert advantage.to_list() == pytest.approx(expected.to_list())
    assert expected.n_unique() > 2
    run_credit(lk, GRPO(), force=True)
    with pytest.raises(DataRefusedError, match=r"step advantage A_S, .* have none"):
        selected(lk, "bc_exp", credit=True)
