"""The stream against a slow reader: every trained token, once, with its neighbours, from any files."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch  # noqa: TID253 - a script that does nothing without it

from lake import Lake
from lake.errors import ContractError
from lake.judgements.credit import find_credit, read_advantages
from lake.records import EpisodeRecord
from testkit.copies import copied
from testkit.examples import mostly_slow_cases
from testkit.lakes import add_credit
from testkit.training import config, token_episodes, token_lake, token_step
from trainer.config import TrainConfig
from trainer.data.batch import PackedBatch
from trainer.data.plan import Plan
from trainer.data.selection import select
from trainer.data.stream import Stream
from trainer.losses import LOSSES

PPO = LOSSES["ppo"]().needs


def plan_of(lk: Lake, settings: TrainConfig) -> tuple[Any, Plan]:
    snapshot = lk.snapshot()
    selection = select(snapshot, settings, PPO, source=find_credit(snapshot, None))
    return snapshot, Plan(selection, settings)


def streamed(lk: Lake, settings: TrainConfig, first: int = 0) -> list[list[PackedBatch]]:
    snapshot, plan = plan_of(lk, settings)
    with Stream(snapshot, plan, PPO, settings) as stream:
        return [batches for _, batches in stream.steps(first)]


Trained = tuple[tuple[int, ...], int, float, float, float]
"""Tokens before the target in its sequence, the target, its advantage, log-probability and temperature."""


def tokens_of(batch: PackedBatch) -> Iterator[Trained]:
    assert batch.advantages_N is not None
    assert batch.behaviour_logprobs_N is not None
    temperature_N = torch.ones(len(batch.target_N)) if batch.temperature_N is None else batch.temperature_N
    ids_T, positions_T = batch.input_ids_T.tolist(), batch.position_ids_T.tolist()
    columns = (batch.predictor_N, batch.target_N, batch.advantages_N, batch.behaviour_logprobs_N, temperature_N)
    for predictor, target, advantage, logprob, temperature in zip(*(c.tolist() for c in columns), strict=True):
        assert ids_T[predictor + 1] == target
        before = tuple(ids_T[predictor - positions_T[predictor] : predictor + 1])
        yield before, target, round(advantage, 4), round(logprob, 4), round(temperature, 4)


def expected_tokens(lk: Lake) -> Counter[Trained]:
    """The same, read row by row with Polars: append-only episodes, every step with an advantage of a live group."""
    snapshot = lk.snapshot()
    credit = read_advantages(snapshot, find_credit(snapshot, None))
    advantage_of = {(e, s): (a, f) for e, s, _, a, f in credit.iter_rows()}
    expected: Counter[Trained] = Counter()
    rows = snapshot.scan("tokens").collect().sort("episode_id", "step_index")
    for part in rows.partition_by("episode_id"):
        sequence: list[int] = []
        for row in part.iter_rows(named=True):
            sequence = sequence if row["prefix_step_index"] is not None else []
            sequence = sequence + row["context_ids"]
            advantage, flags = advantage_of[row["episode_id"], row["step_index"]]
            for token, logprob, mask in zip(row["action_ids"], row["action_logprobs"], row["action_mask"], strict=True):
                if mask and "dead_group" not in flags:
                    key = (tuple(sequence), token, round(advantage, 4), round(logprob, 4), row["temperature"])
                    expected[key] += 1
                sequence = [*sequence, token]
    return expected


def varied_episodes() -> list[EpisodeRecord]:
    """Mixed groups whose steps differ in everything the stream handles."""
    rng = np.random.default_rng(4)
    episodes = token_episodes(tasks=6, siblings=4, seed=2)
    for number, episode in enumerate(episodes):
        episode.steps.append(token_step(rng, 0, 3, temperature=0.5, action_mask=[True, False, True]))
        episode.steps.append(token_step(rng, 2, 2, prefix_step_index=None, temperature=1.5))
        episode.steps[-1].reward = float(number % 3 == 0)
    return episodes


def varied_lake(folder: Path, writes: int) -> Lake:
    def make(template: Path) -> None:
        add_credit(token_lake(template, varied_episodes(), writes=writes))

    return copied(f"varied episodes in {writes} writes", make, folder)


@pytest.fixture(scope="module")
def varied(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Lake]:
    """Their lake, with credit, in a number of writes; to be read only."""
    return cache(lambda writes: varied_lake(tmp_path_factory.mktemp("varied"), writes))


CUT = [(writes, budget) for writes in (1, 5) for budget in (1, 60, 10_000)]


@pytest.mark.parametrize(("writes", "token_budget"), mostly_slow_cases(CUT, (1, 1), (5, 60)))
def test_every_trained_token_comes_once_with_what_it_follows(
    varied: Callable[[int], Lake], writes: int, token_budget: int
) -> None:
    lk = varied(writes)
    steps = streamed(lk, config("ppo", token_budget=token_budget, episodes_per_step=5, cache_bytes=0))
    assert Counter(t for batches in steps for batch in batches for t in tokens_of(batch)) == expected_tokens(lk)
    longest = max(
        high - low for bs in steps for b in bs for low, high in zip(b.boundaries, b.boundaries[1:], strict=False)
    )
    assert all(len(b.input_ids_T) <= max(token_budget, longest) for batches in steps for b in batches)


def test_the_files_do_not_matter(varied: Callable[[int], Lake]) -> None:
    """One write or five: the same steps, the same buffers, the same plan hash."""
    settings = config("ppo", episodes_per_step=5, token_budget=50)
    results = []
    for writes in (1, 5):
        lk = varied(writes)
        _, plan = plan_of(lk, settings)
        buffers = [[b.input_ids_T.tolist() for b in batches] for batches in streamed(lk, settings)]
        results.append((plan.plan_hash, buffers))
    assert results[0] == results[1]


def test_compaction_does_not_matter(tmp_path: Path) -> None:
    """Rows move to other files; a plan of the new snapshot is the same, and so is every tensor."""
    lk = varied_lake(tmp_path, 5)
    settings = config("ppo", episodes_per_step=5, token_budget=50, epochs=2)
    before, old = plan_of(lk, settings)[1], streamed(lk, settings)
    files = len(lk.snapshot().files("tokens"))
    lk.compact("tokens")
    after, new = plan_of(lk, settings)[1], streamed(lk, settings)
    assert len(lk.snapshot().files("tokens")) == 1 < files
    assert before.plan_hash == after.plan_hash
    assert [[batch.boundaries for batch in batches] for batches in old] == [[b.boundaries for b in bs] for bs in new]
    for first, second in zip((b for bs in old for b in bs), (b for bs in new for b in bs), strict=True):
        for name in type(first).__slots__:
            value = getattr(first, name)
            assert not isinstance(value, torch.Tensor) or torch.equal(value, getattr(second, name)), name


@pytest.mark.parametrize(("threads", "prefetch"), mostly_slow_cases([(1, 1), (4, 3)], (4, 3)))
def test_threads_and_prefetch_do_not_matter_and_a_run_may_start_anywhere(
    varied: Callable[[int], Lake], threads: int, prefetch: int
) -> None:
    lk = varied(5)

    def buffers(first: int = 0, **fields: Any) -> list[list[list[int]]]:
        settings = config("ppo", epochs=2, episodes_per_step=3, **fields)
        return [[b.input_ids_T.tolist() for b in batches] for batches in streamed(lk, settings, first)]

    first_pass = buffers()
    assert buffers(read_threads=threads, prefetch=prefetch) == first_pass
    for first in (1, len(first_pass) - 1, len(first_pass)):
        assert buffers(first, read_threads=threads, prefetch=prefetch) == first_pass[first:]


def on_ranks(lk: Lake, settings: TrainConfig, ranks: int, first: int = 0) -> list[list[list[PackedBatch]]]:
    """For each rank the micro-batches of each optimizer step."""
    snapshot, plan = plan_of(lk, settings)
    dealt = []
    for rank in range(ranks):
        with Stream(snapshot, plan, PPO, settings, rank=rank, world_size=ranks) as stream:
            dealt.append([batches for _, batches in stream.steps(first)])
    return dealt


DEALT = [(unit, ranks) for unit in ("token", "turn", "sequence", "episode") for ranks in (1, 2, 5)]


@pytest.mark.parametrize(("unit", "ranks"), mostly_slow_cases(DEALT, ("token", 5), ("episode", 2)))
def test_over_all_ranks_every_trained_token_comes_once_and_a_steps_weights_sum_to_one(
    varied: Callable[[int], Lake], ranks: int, unit: str
) -> None:
    lk = varied(1)
    mode = "token_mean" if unit == "token" else "unit_mean_token_mean"
    settings = config("ppo", episodes_per_step=4, token_budget=60, options={"unit": unit, "aggregation": mode})
    _, plan = plan_of(lk, settings)
    dealt = on_ranks(lk, settings, ranks)
    tokens: Counter[Trained] = Counter()
    for step, of_ranks in zip(plan.steps, zip(*dealt, strict=True), strict=True):
        assert len({len(batches) for batches in of_ranks}) == 1, "equally many forward passes"
        real = [batch for batches in of_ranks for batch in batches if not batch.dummy]
        tokens.update(token for batch in real for token in tokens_of(batch))
        assert step.loss_tokens == sum(len(batch.target_N) for batch in real)
        assert step.tokens == sum(len(batch.input_ids_T) for batch in real)
        weight_N = torch.cat([batch.weight_N for batches in of_ranks for batch in batches])
        assert float(weight_N.double().sum()) == pytest.approx(1, abs=1e-6)
        if unit != "token":
            weight_U = torch.cat([b.weight_U for batches in of_ranks for b in batches if b.weight_U is not None])
            assert float(weight_U.double().sum()) == pytest.approx(1, abs=1e-6)
            assert int((weight_U > 0).sum()) == step.units
    assert tokens == expected_tokens(lk)


def test_a_run_may_go_on_with_another_number_of_ranks(varied: Callable[[int], Lake]) -> None:
    lk = varied(1)
    settings = config("ppo", episodes_per_step=3, epochs=2)

    def trained(dealt: list[list[list[PackedBatch]]]) -> list[Counter[Trained]]:
        steps = zip(*dealt, strict=True)
        return [Counter(t for bs in of for b in bs if not b.dummy for t in tokens_of(b)) for of in steps]

    on_one = trained(on_ranks(lk, settings, 1))
    assert trained(on_ranks(lk, settings, 3))[:2] + trained(on_ranks(lk, settings, 2, first=2)) == on_one


def test_a_rank_without_work_gets_batches_that_weigh_nothing(tmp_path: Path) -> None:
    """One episode for three ranks."""
    lk = token_lake(tmp_path, token_episodes(tasks=1, siblings=2))
    add_credit(lk)
    dealt = on_ranks(lk, config("ppo", episodes_per_step=1, options={"unit": "episode"}), 3)
    for of_ranks in zip(*dealt, strict=True):
        batches = [batch for (batch,) in of_ranks]
        assert [batch.dummy for batch in batches] == [False, True, True]
        for batch in batches[1:]:
            assert float(batch.weight_N.sum()) == 0
            assert batch.weight_U is not None
            assert float(batch.weight_U.sum()) == 0
            missing = [
                n for n in type(batch).__slots__ if (getattr(batch, n) is None) != (getattr(batches[0], n) is None)
            ]
            assert missing == []


def test_episodes_across_row_groups_are_read_whole(tmp_path: Path) -> None:
    """More rows than a row group holds, so that some episode lies in two."""
    rng = np.random.default_rng(0)
    episodes = [
        EpisodeRecord(
            task_id=f"t{n // 2}",
            rollout_index=n % 2,
            env_return=n % 2,
            steps=[token_step(rng, 1, 1) for _ in range(21)],
        )
        for n in range(420)
    ]
    lk = token_lake(tmp_path, episodes)
    add_credit(lk, step_source="terminal_score")
    settings = config("ppo", episodes_per_step=64)
    snapshot, plan = plan_of(lk, settings)
    with Stream(snapshot, plan, PPO, settings) as stream:
        counts = Counter(t for _, batches in stream.steps() for batch in batches for t in tokens_of(batch))
    assert counts == expected_tokens(lk)
    file = snapshot.files("tokens")[0]
    ends = {row // 8192 for row in plan.members.filter(pl.col("file") == 0)["row"]}
    assert (file.rows, len(ends)) == (420 * 21, 2)


def test_lists_that_do_not_match_their_lengths_name_the_row(tmp_path: Path) -> None:
    lk = token_lake(tmp_path, token_episodes(tasks=1, siblings=2))
    rows = lk.scan("tokens").drop("write_id").collect()
    broken = rows.with_columns(
        encoding_id=9,
        provenance=pl.lit("rendered"),
        n_context=pl.col("n_context") + 1,
        prefix_length=0,
        prefix_step_index=None,
    )
    with lk.job(kind="render") as job:
        job.write("tokens", broken)
    settings = config("sft", tokens="rendered")
    snapshot = lk.snapshot()
    plan = Plan(select(snapshot, settings, LOSSES["sft"]().needs), settings)
    with (
        Stream(snapshot, plan, LOSSES["sft"]().needs, settings) as stream,
        pytest.raises(ContractError, match=r"row episode_id=\w+, step_index=\d+: n_context \d+ .* do not match"),
    ):
        list(stream.steps())
