"""Incremental credit is full credit: no matter what happened to the lake, the series shows what a computation from the
start shows, and only groups whose inputs changed were computed.
"""

import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from lake.execution.local import LocalExecutor
from pipelines.credit import GiGPO
from pipelines.credit.estimators import ESTIMATORS
from testkit.credit_history import GROUPING, JUDGE, Choice, History

GIGPO = GiGPO(default_step_reward=0.0)
CHOICES = (
    Choice(GIGPO),
    Choice(GIGPO, score=JUDGE),
    Choice(GIGPO, grouping=GROUPING),
    Choice(GIGPO, score=JUDGE, grouping=GROUPING),
    Choice(ESTIMATORS["rloo"](), score=JUDGE),
    Choice(ESTIMATORS["batch_std"].model_validate({"batch_key": "run_id"})),
)
HAPPENINGS = ("record", "retract", "judge", "judge", "regroup", "compact")
BUDGETS = st.sampled_from([None, 1e-6])
"""Everything in one range, or every group in another process."""


class CreditMachine(RuleBasedStateMachine):
    """Records, retries, retractions, scores, groupings, compaction; and credit jobs between them."""

    @initialize(number=st.integers(0, 2**16), choice=st.sampled_from(CHOICES))
    def start(self, number: int, choice: Choice) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="credit")
        self.history = History(Path(self.folder.name), random.Random(number))
        self.choice = choice
        """The series that is kept up to date; others run now and then."""
        self.history.record()
        self.history.judge()
        self.history.regroup()

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()

    @rule(happening=st.sampled_from(HAPPENINGS), budget=BUDGETS)
    def update(self, happening: str, budget: float | None) -> None:
        getattr(self.history, happening)()
        self.credit(self.choice, budget, force=False)

    @rule(
        happenings=st.lists(st.sampled_from(HAPPENINGS), max_size=3),
        choice=st.sampled_from(CHOICES),
        force=st.booleans(),
    )
    def more_happens(self, happenings: list[str], choice: Choice, force: bool) -> None:
        for happening in happenings:
            getattr(self.history, happening)()
        self.credit(choice, None, force=force)
        if self.history.possible(choice):
            assert self.history.credit(choice).skipped

    def credit(self, choice: Choice, budget: float | None, *, force: bool) -> None:
        if self.history.possible(choice):
            options = {} if budget is None else {"memory_gb": budget, "executor": LocalExecutor(1)}
            self.history.credit(choice, force=force, **options)


def run(*, examples: int, steps: int, number: int) -> None:
    options = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, database=None, phases=[Phase.generate]
    )
    run_state_machine_as_test(seed(number)(CreditMachine), settings=options)


def test_incremental_credit_is_full_credit() -> None:
    run(examples=1, steps=10, number=0)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, 13))
def test_incremental_credit_is_full_credit_for_long(number: int) -> None:
    run(examples=5, steps=20, number=number)
