"""Rounds of parts: what others commit in the meantime, functions that a node does not have, and parts whose time is
up."""

import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lake import Lake
from lake.errors import SandboxUnavailableError
from lake.execution.executor import NodeResult, reuse_in_worker
from lake.execution.local import LocalExecutor
from lake.read.episodes import KEYS
from pipelines.score.functions import PartLimits, ScoreConfig, make_scorer
from pipelines.score.job import run_score
from pipelines.score.sandbox.contract import SandboxLimits
from testkit.score_lakes import InProcess, conversations, module, score_rows


class Rounds(LocalExecutor):
    """An executor that is elsewhere, as the job sees it; `then` is done when all parts of a round are."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        super().__init__(2)
        self.is_here = False
        self.then = then

    def map(self, task: Any, items: Iterable[Any], *, without: Collection[str] = ()) -> Iterator[Any]:
        yield from map(task, items)
        self.then()


def test_a_round_keeps_what_others_have_not_scored_or_taken_out(tmp_path: Path) -> None:
    lk = conversations(tmp_path / "lake")

    def meanwhile() -> None:
        run_score(lk, InProcess(lambda unit: [2.0] * len(unit)), where="task_id = 't0'")
        lk.retract(lk.sql("SELECT episode_id FROM episodes WHERE task_id = 't1' AND rollout_index = 0")["episode_id"])

    report = run_score(lk, InProcess(lambda unit: [1.0] * len(unit)), executor=Rounds(meanwhile))
    assert (report.scored, report.overtaken, report.with_score) == (5, 4, 5)
    values = [(row["task_id"], row["value"]) for row in score_rows(lk)]
    assert values == [("t0", 2.0)] * 3 + [("t1", 1.0)] * 2 + [("t2", 1.0)] * 3
    jobs = lk.sql("SELECT status, count(*) FROM job_runs WHERE kind = 'score' GROUP BY 1 ORDER BY 1").rows()
    assert jobs == [("failed", 1), ("succeeded", 2)]


def test_a_function_that_this_machine_does_not_have_is_run_from_the_text_that_was_sent(tmp_path: Path) -> None:
    lk = conversations(tmp_path / "lake", tasks=1)
    folder = tmp_path / "functions"
    module(folder, "def third(n):\n    return n / 3\n", "helpers.py")
    path = module(folder, "from helpers import third\ndef judged(num_steps): return third(num_steps)\n")
    work = make_scorer(f"{path}:judged", ScoreConfig(limits=SandboxLimits(rows_per_batch=1)))
    shutil.rmtree(folder)
    snapshot = lk.snapshot()
    episodes = snapshot.scan("episodes").select(*KEYS, "num_steps").collect()
    try:
        share = PartLimits(until=float("inf"), level="basic")
        rows = [row for scored in work.score(snapshot, episodes, share) for row in scored.rows]
        assert [(row["value"], row["isolation"]) for row in rows] == [(1.0, "basic")] * 3
        late = PartLimits(until=0.0, level=None)
        assert len([row for scored in work.score(snapshot, episodes, late) for row in scored.rows]) == 1
        assert late.stopped, "its time was up after the first calls"
    finally:
        reuse_in_worker("sandbox", None, lambda: None)


def test_where_no_node_is_strong_enough_nothing_runs_and_each_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lk: Lake = conversations(tmp_path / "lake", tasks=1)
    work = make_scorer(f"{module(tmp_path, 'def one(messages): return 1.0')}:one", ScoreConfig())
    executor = Rounds()
    weak = [NodeResult(name, name, (None, "no seccomp")) for name in ("left", "right")]
    monkeypatch.setattr(executor, "on_nodes", lambda *_: weak)
    message = "node left gets no part: no seccomp; node right gets no part: no seccomp"
    with pytest.raises(SandboxUnavailableError, match=message):
        run_score(lk, work, executor=executor)
    assert lk.sql("SELECT count(*) FROM jobs WHERE kind = 'score'").item() == 0
