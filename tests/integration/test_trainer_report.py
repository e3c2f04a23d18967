"""What --plan shows: averages, packing, balance over ranks, shares of a mixture, staleness."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lake.records import EpisodeRecord
from testkit.plans import Episodes, plan_of
from testkit.training import config, token_episodes, token_lake, token_step
from testkit.wording import Wording
from trainer.data.plan import Plan
from trainer.data.preparation import PreparedRun
from trainer.data.selection import select
from trainer.losses import Needs
from trainer.runs.report import build_plan_rows, measure_balance, measure_packing, sample_steps


def read_report(folder: Path, episodes: list[EpisodeRecord], **fields: Any) -> dict[str, tuple[str, str | None]]:
    lk = token_lake(folder, episodes)
    snapshot, settings = lk.snapshot(), config(**fields)
    selection = select(snapshot, settings, Needs())
    prepared = PreparedRun(snapshot, selection, Plan(selection, settings), [], [])
    rows = build_plan_rows(prepared, epochs=settings.epochs, seconds=1.5, how="timed")
    return {item: (value, note) for item, value, note in rows.iter_rows()}


def even_episodes(versions: tuple[int | None, ...]) -> list[EpisodeRecord]:
    """Episodes of 10 tokens, 4 of them actions, in two steps each."""
    rng = np.random.default_rng(0)
    return [
        EpisodeRecord(
            task_id=f"t{n}",
            rollout_index=0,
            env_return=1.0,
            policy_version=version,
            steps=[token_step(rng, 3, 2), token_step(rng, 3, 2)],
        )
        for n, version in enumerate(versions)
    ]


def test_how_the_loss_is_averaged_and_what_stays_together(tmp_path: Path) -> None:
    rows = read_report(
        tmp_path, even_episodes((1, 1)), options={"unit": "episode", "aggregation": "unit_mean_token_mean"}
    )
    assert rows["loss average"][0] == "unit_mean_token_mean over episodes"
    assert rows["kept together"][0] == "episode"


def test_packing_and_balance(tmp_path: Path, wording: Wording) -> None:
    rows = read_report(tmp_path, even_episodes((1,) * 8), token_budget=25, minibatches=1)
    assert rows["micro-batches"][0] == "4.0"
    assert "at most 4" in wording(rows["micro-batches"][1])
    assert rows["packing"][0] == "80%"
    assert "budget of 25" in wording(rows["packing"][1])
    assert rows["balance by ranks"][0] == "2: 100%, 4: 100%, 8: 100%"


def test_a_mixture_shows_what_it_draws(tmp_path: Path) -> None:
    sources = [{"where": "task_id = 't0'", "weight": 1}, {"weight": 3}]
    rows = read_report(tmp_path, even_episodes((1,) * 8), mixture=sources)
    assert rows["mixture: where task_id = 't0'"] == ("25.0%", "2 draws per epoch of 1 episode, weight 1")
    assert rows["mixture: everything"] == ("75.0%", "6 draws per epoch of 7 episodes, weight 3")


def test_staleness_and_what_it_drops(tmp_path: Path) -> None:
    rows = read_report(tmp_path, even_episodes((1, 5, 6, None)), max_staleness=3)
    expected = "policy versions behind the newest, median 0.5; at most 3, 2 steps of unknown version"
    assert rows["staleness"] == ("0 to 1", expected)
    assert rows["dropped: stale"] == ("2 steps", "in 1 episode, 4 action tokens")


def test_nothing_is_shown_of_what_there_is_not(tmp_path: Path) -> None:
    rows = read_report(tmp_path, token_episodes(tasks=1))
    assert rows["loss average"][0] == "token_mean"
    assert not [item for item in rows if item.startswith(("mixture", "staleness", "dropped", "refused", "groups"))]
    assert rows["estimated seconds"] == ("1.5", "timed")


@pytest.mark.parametrize(("steps", "judged"), [(1, 1), (100, 100), (101, 51), (250, 84)])
def test_large_plans_are_judged_by_some_of_their_steps(steps: int, judged: int) -> None:
    plan = plan_of({n: [[(2, True)]] for n in range(steps)}, episodes_per_step=1)
    sampled_steps = sample_steps(plan)
    assert len(sampled_steps) == judged
    assert sampled_steps[0] is plan.steps[0]


def test_a_round_takes_as_long_as_its_costliest_part() -> None:
    """Sequences of 10 and of 5 tokens on two ranks: 100 + 25 of 200."""
    episodes: Episodes = {0: [[(9, True)]], 1: [[(4, True)]]}
    plan = plan_of(episodes, token_budget=100)
    assert measure_balance(plan, 1) == 1
    assert measure_balance(plan, 2) == 125 / 200
    assert measure_balance(plan, 4) == 125 / 400, "two ranks have nothing to do"
    assert measure_packing(plan).fill == 0.15
    assert measure_packing(plan_of(episodes, token_budget=5)).fill == 1.5
