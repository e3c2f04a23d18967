"""Conversations that take turns, through the proxy: their rows are the golden files', and can be trained on.

`make golden` writes the files again; whether they are right is for people to say, row by row.
"""

from collections import Counter

import pytest

import lake
from pipelines.credit.estimators import ESTIMATORS
from pipelines.credit.job import run_credit
from testkit.proxy_scenarios import GOLDEN, SCENARIOS, golden_text, play_all
from testkit.training import config
from trainer.data.plan import Plan
from trainer.data.preparation import find_source
from trainer.data.refusals import find_refusals
from trainer.data.selection import select
from trainer.data.stream import Stream


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> lake.Lake:
    lk = play_all(tmp_path_factory.mktemp("recorded"))
    run_credit(lk, ESTIMATORS["grpo"]())
    return lk


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_rows_are_those_of_the_golden_file(recorded: lake.Lake, name: str) -> None:
    assert golden_text(recorded, name) == (GOLDEN / f"{name}.json").read_text("utf-8")


def test_every_golden_file_is_of_a_scenario() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == SCENARIOS.keys()


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_ratio_loss_takes_every_action_once_with_its_log_probabilities(recorded: lake.Lake, name: str) -> None:
    mine = "run_id = 'live'" if name == "unnamed" else f"run_id = '{name}'"
    snapshot, settings = recorded.snapshot(), config("grpo", where=mine, minibatches=1)
    needs = settings.loss.needs
    selection = select(snapshot, settings, needs, source=find_source(snapshot, settings))
    assert find_refusals(snapshot, selection.members, settings.loss) == []
    with Stream(snapshot, Plan(selection, settings), needs, settings) as stream:
        ((_, batches),) = stream.steps()
    learned = Counter(token for batch in batches for token in batch.target_N.tolist())
    sampled = recorded.sql(f"SELECT action_ids FROM tokens WHERE {mine}").to_dicts()
    assert learned == Counter(token for row in sampled for token in row["action_ids"])
