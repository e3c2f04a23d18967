"""Pairs and labels from a lake to the weights: what batches hold, that runs learn, resume and refuse."""

import csv
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch  # noqa: TID253 - a script that does nothing without it
from click.testing import CliRunner
from pydantic import ValidationError

from lake import Lake
from lake.cli import trajlake
from lake.errors import DataRefusedError, UsageError
from lake.judgements.credit import find_credit
from lake.records import EpisodeRecord
from pipelines.credit.estimators.grpo import GRPO
from pipelines.credit.job import run_credit
from testkit.examples import mostly_slow, mostly_slow_cases
from testkit.lakes import add_credit
from testkit.offline_runs import configured, interrupted
from testkit.pair_worlds import context_of, meeting_episodes, world
from testkit.sampled_lake import play, recorded, save_model
from testkit.training import config, gradients, random_backend, random_model, token_episodes, token_lake, token_step
from trainer.backends.base import FrozenPolicy
from trainer.data.batch import PackedBatch
from trainer.data.plan import OptimizerStep, Plan
from trainer.data.selection import select
from trainer.data.stream import Stream
from trainer.policy.model import PackedPolicy
from trainer.runs.loop import fill_batches
from trainer.runs.offline import resume, train

STEPS = {"kind": "step", "graft": True}


def streamed(
    lk: Lake, loss: str, *, rank: int = 0, world_size: int = 1, **fields: Any
) -> tuple[Plan, list[tuple[OptimizerStep, list[PackedBatch]]]]:
    settings, snapshot = config(loss, **fields), lk.snapshot()
    needs = settings.loss.needs
    plan = Plan(select(snapshot, settings, needs, source=find_credit(snapshot, None)), settings)
    with Stream(snapshot, plan, needs, settings, rank=rank, world_size=world_size) as stream:
        return plan, list(stream.steps())


def sequences_of(batch: PackedBatch) -> list[tuple[list[int], list[int]]]:
    """Of each sequence of a buffer: token ids, and positions of those that carry loss."""
    found = []
    for low, high in pairwise(batch.boundaries):
        mine = [int(at) + 1 - low for at in batch.predictor_N if low <= int(at) < high]
        found.append((batch.input_ids_T[low:high].tolist(), mine))
    return found


@pytest.fixture(scope="module")
def lk(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Three tasks of six siblings that meet: shared anchors, forks, identical contexts."""
    return world(tmp_path_factory.mktemp("lake"), meeting_episodes(3, tasks=3, siblings=6))


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> tuple[Lake, Path]:
    """A small model, and games that it played, with credit."""
    folder = tmp_path_factory.mktemp("games")
    model = save_model(folder / "model")
    lk = recorded(folder / "lake", play(model, tasks=6, siblings=6, turns=2))
    add_credit(lk)
    return lk, model


# ---------------------------------------------------------------- what batches hold


def test_a_pair_is_what_one_would_collate_by_hand(tmp_path: Path) -> None:
    """Two siblings; the first did better; one step of theirs is a fork."""
    episodes = token_episodes(tasks=1, siblings=2, seed=4)
    for sibling, episode in enumerate(episodes):
        episode.env_return = episode.steps[-1].reward = 1.0 - sibling
    lk = token_lake(tmp_path, episodes)
    add_credit(lk)
    plan, [(step, [batch])] = streamed(lk, "dpo")
    ids, targets, steps, units = [], [], [], []
    boundaries = [0]
    for unit, episode in enumerate(episodes):
        for number, turn in enumerate(episode.steps):
            assert turn.tokens is not None
            ids += turn.tokens.context_ids
            for token in turn.tokens.action_ids:
                targets.append(len(ids))
                steps.append(number)
                units.append(unit)
                ids.append(token)
        boundaries.append(len(ids))
    assert batch.input_ids_T.tolist() == ids
    assert batch.boundaries == boundaries
    assert batch.position_ids_T.tolist() == [*range(boundaries[1]), *range(boundaries[2] - boundaries[1])]
    assert batch.predictor_N.tolist() == [at - 1 for at in targets]
    assert batch.target_N.tolist() == [ids[at] for at in targets]
    assert batch.step_index_N is not None
    assert batch.step_index_N.tolist() == steps
    for name, expected in {"unit_N": units, "weight_U": [0.5, 0.5], "pair_U": [0, 0], "sign_U": [1.0, -1.0]}.items():
        assert getattr(batch, name).tolist() == expected
    assert (step.units, step.loss_tokens, plan.episodes) == (2, len(targets), 2)


def test_the_sides_of_a_grafted_pair_have_one_context_and_two_actions(lk: Lake) -> None:
    plan, steps = streamed(lk, "dpo", options={"pairs": STEPS})
    pairs = 0
    for step, batches in steps:
        for batch in batches:
            assert batch.sign_U is not None
            assert batch.pair_U is not None
            assert batch.weight_U is not None
            sides = sequences_of(batch)
            assert batch.sign_U.tolist() == [1.0, -1.0] * (len(sides) // 2)
            assert batch.pair_U.tolist() == [number // 2 for number in range(len(sides))]
            assert batch.weight_U.tolist() == pytest.approx([1 / step.units] * len(sides))
            for (chosen, carries), (rejected, others) in zip(sides[::2], sides[1::2], strict=True):
                assert chosen[: carries[0]] == rejected[: others[0]], "the same context, token by token"
                assert chosen[carries[0] :] != rejected[others[0] :], "another action"
                assert carries == list(range(carries[0], len(chosen))), "the action alone carries loss, to its end"
                assert others == list(range(others[0], len(rejected)))
                pairs += 1
    assert pairs == plan.members.filter("trained").height // 2 > 5


def test_a_grafted_side_is_the_chosen_context_and_the_rejected_action(tmp_path: Path) -> None:
    """Against the records: forks and new sequences included."""
    episodes = meeting_episodes(5, tasks=3, siblings=6)
    lk = world(tmp_path, episodes)
    keys = lk.scan("episodes").select("task_id", "rollout_index", "episode_id").collect()
    record = {
        key: episodes[[(e.task_id, e.rollout_index) for e in episodes].index((t, r))] for t, r, key in keys.rows()
    }
    plan, steps = streamed(lk, "dpo", options={"pairs": STEPS}, episodes_per_step=1000, token_budget=10**6)
    ((_, [batch]),) = steps
    compared = plan.members.filter("trained").select("pair", "sign", "episode_id", "step_index").rows()
    by_side = {(pair, sign): (episode, step) for pair, sign, episode, step in compared}
    expected = []
    for (pair, _), (owner, own) in by_side.items():
        episode, number = by_side[pair, 1]
        tokens = record[owner].steps[own].tokens
        assert tokens is not None
        expected.append(context_of(record[episode], number) + tokens.action_ids)
    assert sorted(ids for ids, _ in sequences_of(batch)) == sorted(expected)
    assert any(plan.members.filter(~pl.col("takes_action"))["prefix_step_index"].is_null()), "graft onto an opening"


def test_tokens_that_nobody_sampled_carry_no_loss_in_a_graft_either(tmp_path: Path) -> None:
    """The rejected action is masked in the middle; its own context is another one and longer."""
    rng = np.random.default_rng(0)
    chosen = token_step(rng, 3, 2, step={"reward": 1.0})
    rejected = token_step(rng, 6, 4, action_mask=[True, False, False, True])
    episodes = [
        EpisodeRecord(task_id="t", rollout_index=number, seed=1, env_return=1.0 - number, steps=[turn])
        for number, turn in enumerate((chosen, rejected))
    ]
    lk = token_lake(tmp_path, episodes)
    add_credit(lk)
    _, [(step, [batch])] = streamed(lk, "dpo", options={"pairs": STEPS})
    assert chosen.tokens is not None
    assert rejected.tokens is not None
    context = chosen.tokens.context_ids
    expected = [(context + chosen.tokens.action_ids, [3, 4]), (context + rejected.tokens.action_ids, [3, 6])]
    assert sequences_of(batch) == expected
    assert batch.target_N.tolist() == [*chosen.tokens.action_ids, *rejected.tokens.action_ids[::3]]
    assert step.loss_tokens == 4


@pytest.mark.slow("pairs are the same however little of the lake is read at once")
@pytest.mark.parametrize("pairs", [{}, STEPS])
def test_reading_in_small_windows_changes_nothing(tmp_path: Path, pairs: dict[str, Any]) -> None:
    lk = world(tmp_path, meeting_episodes(3, siblings=6), writes=3)
    found = []
    for cache_bytes in (0, 1 << 30):
        _, steps = streamed(lk, "dpo", options={"pairs": pairs}, episodes_per_step=4, cache_bytes=cache_bytes, epochs=2)
        found.append([sequences_of(batch) for _, batches in steps for batch in batches])
    assert found[0] == found[1]
    assert len(found[0]) > 3


@pytest.mark.parametrize(
    ("pairs", "budget"),
    mostly_slow_cases(
        [(pairs, budget) for pairs in ({}, STEPS, {"kind": "step"}) for budget in (1, 20)], ({}, 20), (STEPS, 1)
    ),
)
def test_pairs_are_never_split_and_a_step_is_a_fixed_set_of_them(lk: Lake, pairs: dict[str, Any], budget: int) -> None:
    whole, reference = streamed(lk, "dpo", options={"pairs": pairs}, episodes_per_step=4, token_budget=10**6)
    _, steps = streamed(lk, "dpo", options={"pairs": pairs}, episodes_per_step=4, token_budget=budget)
    assert [step.episodes_E.tolist() for step, _ in steps] == [step.episodes_E.tolist() for step, _ in reference]
    number = whole.members["pair"].n_unique()
    assert sum(len(step.episodes_E) for step, _ in steps) == 2 * number
    for step, batches in steps:
        assert len(step.episodes_E) <= 4
        assert step.units == len(step.episodes_E)
        for batch in batches:
            assert batch.sign_U is not None
            assert batch.pair_U is not None
            assert batch.sign_U.tolist() == [1.0, -1.0] * (len(batch.sign_U) // 2)
            assert batch.pair_U.tolist() == [unit // 2 for unit in range(len(batch.sign_U))]
            if budget == 1:
                assert len(batch.sign_U) == 2, "an atom of its own"
        weights = torch.cat([batch.weight_U for batch in batches if batch.weight_U is not None])
        assert float(weights.sum()) == pytest.approx(1.0)


def test_batches_are_told_by_episode_and_span_of_steps(lk: Lake) -> None:
    plan, steps = streamed(lk, "dpo", options={"pairs": STEPS})
    rows = pl.concat([plan.list_consumed(step) for step, _ in steps])
    assert (rows["first_step"] == rows["last_step"]).all()
    trained = plan.members.filter("trained")
    assert sorted(rows.select("episode_id", "first_step", "action_tokens").rows()) == sorted(
        trained.select("episode_id", "step_index", "loss_tokens").rows()
    )
    assert plan.episodes == trained["episode_id"].n_unique() < rows.height


def gradient(lk: Lake, loss: str, world_size: int, **fields: Any) -> dict[str, torch.Tensor]:
    """Gradient of the first optimizer step; ranks one after the other, their statistics those of all."""
    settings = config(loss, minibatches=2, **fields)
    backend, batches = random_backend(), []
    for rank in range(world_size):
        _, steps = streamed(lk, loss, rank=rank, world_size=world_size, minibatches=2, **fields)
        batches += steps[0][1]
    reference = FrozenPolicy(PackedPolicy(random_model(seed=7)))
    filled, statistics = fill_batches(backend, reference, settings.loss, batches)
    for batch in filled:
        backend.forward_backward(batch, settings.loss, statistics)
    return gradients(backend)


@pytest.mark.parametrize("loss", mostly_slow(["dpo", "dmpo", "kto"], "kto"))
def test_cuts_and_ranks_do_not_matter(lk: Lake, loss: str) -> None:
    """On more ranks than there are pairs, and cut into many buffers."""
    for options, world_size, budget in (({}, 9, 60), ({"pairs": STEPS}, 1, 30))[: 2 if loss == "dpo" else 1]:
        whole = gradient(lk, loss, 1, token_budget=10**6, options=options)
        assert max(float(tensor.abs().max()) for tensor in whole.values()) > 1e-4
        found = gradient(lk, loss, world_size, token_budget=budget, options=options)
        for name, tensor in whole.items():
            torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=1e-3, msg=name)


# ---------------------------------------------------------------- runs


def metric(lk: Lake, job_id: int, name: str) -> list[float]:
    query = "SELECT value FROM run_metrics WHERE job_id = ? AND name = ? ORDER BY step"
    return lk.sql(query, [job_id, name])["value"].to_list()


RAISING: list[tuple[str, dict[str, Any]]] = [
    ("dpo", {}),
    ("dmpo", {}),
    ("dpo", {"kind": "step"}),
    ("dpo", {**STEPS, "margin": 0.5}),
]


@pytest.mark.parametrize(("loss", "pairs"), mostly_slow_cases(RAISING, RAISING[3]))
def test_a_run_raises_the_margin_of_its_pairs(
    games: tuple[Lake, Path], tmp_path: Path, loss: str, pairs: dict[str, Any]
) -> None:
    lk, model = games
    settings = configured(
        model,
        loss=loss,
        options={"pairs": pairs},
        epochs=6,
        episodes_per_step=100,
        learning_rate=1e-2,
        schedule={"shape": "constant"},
    )
    result = train(lk, settings, tmp_path / "out", run_id="pairs")
    losses, margins = metric(lk, result.job_id, "loss"), metric(lk, result.job_id, "margin")
    assert losses[0] == pytest.approx(0.6931, abs=1e-3), "the reference is the model it starts from"
    assert margins[0] == pytest.approx(0, abs=1e-3)
    assert losses[-1] < losses[0] - 0.05
    assert margins[-1] > 0.1
    assert metric(lk, result.job_id, "accuracy")[-1] > 0.6


def test_kto_moves_good_episodes_up_against_bad_ones(games: tuple[Lake, Path], tmp_path: Path) -> None:
    lk, model = games
    settings = configured(
        model, loss="kto", epochs=6, episodes_per_step=100, learning_rate=1e-2, schedule={"shape": "constant"}
    )
    result = train(lk, settings, tmp_path / "out", run_id="kto")
    good, bad = (metric(lk, result.job_id, name) for name in ("reward_chosen", "reward_rejected"))
    assert good[0] == pytest.approx(0, abs=1e-3)
    assert good[-1] - bad[-1] > 0.1
    assert metric(lk, result.job_id, "loss")[-1] < 0.49
    signs = lk.sql("SELECT count(DISTINCT episode_id) FILTER (a_episode <> 0) AS n FROM advantages")["n"][0]
    assert metric(lk, result.job_id, "desirable")[0] + metric(lk, result.job_id, "undesirable")[0] == signs


STOPPED = [{"loss": "dpo"}, {"loss": "dpo", "options": {"pairs": STEPS}}, {"loss": "kto"}]


@pytest.mark.parametrize("fields", mostly_slow(STOPPED, STOPPED[1]))
def test_a_run_that_was_stopped_ends_with_the_same_weights(
    games: tuple[Lake, Path], tmp_path: Path, fields: dict[str, Any]
) -> None:
    lk, model = games
    settings = configured(model, episodes_per_step=8, checkpoint_every=2, **fields)
    straight = train(lk, settings, tmp_path / "straight", run_id="straight")
    assert straight.optimizer_steps > 4
    interrupted(lk, settings, tmp_path / "stopped", 3)
    assert resume(lk, tmp_path / "stopped").weights_sha256 == straight.weights_sha256


def test_the_plan_says_what_each_condition_left(games: tuple[Lake, Path], tmp_path: Path) -> None:
    lk, model = games
    toml = tmp_path / "c.toml"
    toml.write_text('[trainer.loss]\nname = "dpo"\npairs.kind = "step"\n')
    arguments = ["train", "--lake", lk.uri, "--model", model, "--out", tmp_path / "o", "--config", toml]
    done = CliRunner().invoke(trajlake, [*map(str, arguments), "--plan", "--format", "csv"])
    assert done.exit_code == 0, (done.output, done.exception)
    rows = list(csv.reader(done.stdout.splitlines()))
    shown = [(item, int(value)) for item, value, *_ in rows if item.startswith("preferences: ")]
    names = ["same anchor, other episode", "distinct actions", "margin", "identical contexts", "chosen"]
    assert [item.removeprefix("preferences: ") for item, _ in shown] == names
    numbers = [value for _, value in shown]
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[-1] > 0
    assert "unpaired" in done.stdout


@pytest.mark.slow("a loss on pairs or labels is named on the command line")
@pytest.mark.parametrize("loss", ["dmpo", "kto"])
def test_the_command_line_names_the_loss(games: tuple[Lake, Path], tmp_path: Path, loss: str) -> None:
    lk, model = games
    arguments = ["train", "--lake", lk.uri, "--model", model, "--out", tmp_path / "o", "--loss", loss]
    done = CliRunner().invoke(trajlake, [*map(str, arguments), "--set", "episodes_per_step=100"])
    assert done.exit_code == 0, (done.output, done.exception)
    assert done.stdout.splitlines()[-1].startswith("weights sha256 ")


# ---------------------------------------------------------------- who takes part, and refusals


def test_pairs_stay_inside_a_source_of_a_mixture(tmp_path: Path) -> None:
    lk = world(tmp_path, meeting_episodes(3, tasks=2, siblings=8))
    apart = [{"where": "rollout_index < 4", "weight": 3}, {"where": "rollout_index >= 4", "weight": 1}]
    plan, _ = streamed(lk, "dpo", mixture=apart)
    index = dict(lk.scan("episodes").select("episode_id", "rollout_index").collect().iter_rows())
    halves = [index[e] // 4 for e in plan.episode_ids_E.tolist()]
    assert halves[::2] == halves[1::2]
    assert set(halves) == {0, 1}
    drawn = [half for step in plan.steps for half in plan.source_E[step.episodes_E].tolist()]  # type: ignore[index]
    assert len(drawn) == len(halves)
    assert drawn.count(0) == pytest.approx(0.75 * len(drawn), abs=2)


def test_truncated_episodes_that_credit_masks_are_compared_with_nobody(tmp_path: Path) -> None:
    episodes = token_episodes(tasks=1, siblings=4)
    episodes[1].status = "truncated"
    lk = token_lake(tmp_path, episodes)
    add_credit(lk)
    plan, _ = streamed(lk, "dpo")
    assert plan.episodes == 4
    add_credit(lk, truncated="mask")
    plan, _ = streamed(lk, "dpo")
    masked = lk.sql("SELECT episode_id FROM episodes WHERE status = 'truncated'")["episode_id"][0]
    assert plan.episodes == 2
    assert masked not in plan.episode_ids_E


def test_labels_by_a_threshold_need_no_credit(tmp_path: Path) -> None:
    lk = token_lake(tmp_path, token_episodes(tasks=2))
    settings, snapshot = config("kto", options={"threshold": 1.0}), lk.snapshot()
    selection = select(snapshot, settings, settings.loss.needs)
    signs = dict(selection.members.select("episode_id", "sign").unique().iter_rows())
    returns = dict(lk.scan("episodes").select("episode_id", "env_return").collect().iter_rows())
    assert signs == {episode: 1 if value >= 1 else -1 for episode, value in returns.items()}
    assert [tuple(finding)[:2] for finding in selection.candidate_counts] == [
        ("desirable", 6),
        ("undesirable", 2),
        ("neither", 0),
    ]
    unknown = config("kto", options={"threshold": 1.0, "score": "nobody"})
    with pytest.raises(UsageError, match="no scores of 'nobody' for episodes"):
        select(snapshot, unknown, unknown.loss.needs)


def test_what_came_out_neither_well_nor_badly_has_no_label(tmp_path: Path) -> None:
    lk = token_lake(tmp_path, token_episodes(tasks=2))
    add_credit(lk)
    settings, snapshot = config("kto"), lk.snapshot()
    needs, source = settings.loss.needs, find_credit(snapshot, None)
    selection = select(snapshot, settings, needs, source=source)
    assert sorted(selection.members.select("episode_id", "sign").unique()["sign"]) == [-1, -1, 1, 1]
    dead = lk.sql("SELECT count(*) AS n FROM steps JOIN episodes USING (episode_id) WHERE task_id = 't1'")["n"][0]
    assert dict(selection.drops.select("reason", "steps").iter_rows()) == {"unlabelled": dead}


def test_an_episode_that_max_length_cuts_is_in_no_pair(tmp_path: Path) -> None:
    lk = token_lake(tmp_path, token_episodes(tasks=1, max_steps=4))
    add_credit(lk)
    snapshot, source = lk.snapshot(), find_credit(lk.snapshot(), None)
    lengths = lk.sql(
        "SELECT episode_id, sum(n_context + n_action)::BIGINT AS n FROM tokens GROUP BY 1 ORDER BY n"
    ).rows()
    limit = lengths[-1][1] - 1
    settings = config("dpo", max_length=limit)
    selection = select(snapshot, settings, settings.loss.needs, source=source)
    compared = set(selection.members["episode_id"])
    assert compared
    assert compared.isdisjoint(episode for episode, length in lengths if length > limit)
    assert "whole within max_length" in [finding.name for finding in selection.candidate_counts]
    settings = config("dpo", max_length=lengths[0][1] - 1)
    with pytest.raises(DataRefusedError, match=r"whole within max_length: 0 possible.*raise it"):
        select(snapshot, settings, settings.loss.needs, source=source)


@pytest.fixture(scope="module")
def equals(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Siblings of one task that all did equally well."""
    episodes = token_episodes(tasks=1)
    for episode in episodes:
        episode.env_return = 1.0
        for step in episode.steps:
            step.reward = 0.0
    lk = token_lake(tmp_path_factory.mktemp("equals"), episodes)
    add_credit(lk)
    return lk


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ({}, ["scored siblings: 6 possible, in 1 groups; margin: 0 possible, in 0 groups", "lower loss.pairs.margin"]),
        ({"kind": "step"}, ["margin: 0 possible", "lower loss.pairs.margin"]),
        ({"kind": "step", "margin": 100}, ["margin: 0 possible"]),
    ],
)
def test_equals_are_refused_with_counts_and_advice(equals: Lake, pairs: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(DataRefusedError) as caught:
        streamed(equals, "dpo", options={"pairs": pairs})
    assert str(caught.value).startswith("dpo refused (no_pairs): ")
    for word in words:
        assert word in str(caught.value)


def test_different_histories_are_refused_and_the_graft_is_offered(tmp_path: Path) -> None:
    lk = token_lake(tmp_path, token_episodes(tasks=1))
    add_credit(lk)
    with pytest.raises(
        DataRefusedError, match=r"margin: [1-9]\d* possible, in 1 anchors; identical contexts: 0"
    ) as caught:
        streamed(lk, "dpo", options={"pairs": {"kind": "step"}})
    assert "set loss.pairs.graft" in str(caught.value)
    plan, _ = streamed(lk, "dpo", options={"pairs": STEPS})
    assert plan.members["pair"].n_unique() > 1
    longest = plan.tokens_Q.max()
    shorter, _ = streamed(lk, "dpo", options={"pairs": STEPS}, max_length=int(longest) - 1)
    assert shorter.tokens_Q.max() < longest


def test_a_graft_must_fit(tmp_path: Path) -> None:
    """Both steps fit, but not the rejected action after the chosen one's context."""
    rng = np.random.default_rng(0)
    turns = [token_step(rng, 10, 1, step={"reward": 1.0}), token_step(rng, 1, 5)]
    episodes = [
        EpisodeRecord(task_id="t", rollout_index=number, seed=1, env_return=1.0 - number, steps=[turn])
        for number, turn in enumerate(turns)
    ]
    lk = token_lake(tmp_path, episodes)
    add_credit(lk)
    with pytest.raises(DataRefusedError, match=r"grafted within max_length: 0 .*raise max_length"):
        streamed(lk, "dpo", options={"pairs": STEPS}, max_length=14)
    plan, _ = streamed(lk, "dpo", options={"pairs": STEPS}, max_length=15)
    assert plan.tokens_Q.tolist() == [11, 15]


def test_an_estimator_without_anchors_has_no_step_pairs(tmp_path: Path) -> None:
    lk = token_lake(tmp_path, token_episodes(tasks=1))
    run_credit(lk, GRPO(), force=True)
    with pytest.raises(DataRefusedError, match=r"same anchor, other episode: 0 .*trajlake credit gigpo"):
        streamed(lk, "dpo", options={"pairs": STEPS})
    plan, _ = streamed(lk, "dpo")
    assert plan.episodes == 4


def test_one_label_is_refused(tmp_path: Path) -> None:
    lk = token_lake(tmp_path / "lake", token_episodes(tasks=2))
    model = save_model(tmp_path / "model")
    settings = configured(model, loss="kto", options={"threshold": -5.0}, learning_rate=1e-3)
    with pytest.raises(DataRefusedError, match=r"kto refused \(one_label\)|all desirable or"):
        train(lk, settings, tmp_path / "out", run_id="r")


def test_a_side_is_the_unit_of_pairs() -> None:
    with pytest.raises(ValidationError, match="unit"):
        config("dpo", {"unit": "turn"})


def test_options_of_preferences_without_effect_are_faults() -> None:
    with pytest.raises(ValidationError, match="graft is for pairs"):
        config("dpo", options={"pairs": {"graft": True}})
    with pytest.raises(ValidationError, match=r"score 'judge' .* set threshold"):
        config("kto", options={"score": "judge"})
