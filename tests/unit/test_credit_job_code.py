"""What belongs to a series' code, what a step costs in memory, and parts of jobs that other processes write."""

import ast
import inspect
import pickle
import pkgutil
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import polars as pl
import pytest

import pipelines.credit
from lake import EpisodeRecord, Lake, StepRecord
from lake.errors import ConflictError, ContractError, UsageError
from lake.write.jobs import JobPart, WrittenRows
from pipelines.credit import inputs
from pipelines.credit.estimators import ESTIMATORS
from pipelines.credit.inputs import compute_budget_rows, estimate_bytes_per_step, find_deciding_modules
from testkit.copies import empty_lake

HOW_A_JOB_RUNS = ("job", "inputs", "commands", "health", "compare", "step_log", "anchors.measures")


def names(modules: tuple[ModuleType, ...]) -> set[str]:
    return {module.__name__.removeprefix("pipelines.credit.") for module in modules}


# ---------------------------------------------------------------- code


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimators_code_is_its_own_and_what_it_imports(name: str) -> None:
    modules = names(find_deciding_modules(*ESTIMATORS[name].code()))
    assert {"steps", "estimators.normalise", "estimators.protocol", f"estimators.{name}"} <= modules
    assert not modules & set(HOW_A_JOB_RUNS), "how a job runs decides no number"


def test_code_that_an_estimator_does_not_use_is_not_its_code() -> None:
    assert "estimators.anchored" in names(find_deciding_modules(*ESTIMATORS["gigpo"].code()))
    assert "estimators.anchored" not in names(find_deciding_modules(*ESTIMATORS["grpo"].code()))
    assert "estimators.gae" not in names(find_deciding_modules(*ESTIMATORS["gigpo"].code()))


def test_imports_are_followed_wherever_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "import os.path, pipelines.credit.compare\n"
        "from pipelines.credit.anchors import similar\n"
        "def f():\n    from pipelines.credit.estimators.normalise import Norm\n    from . import nothing\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    mine = __import__("mine")
    monkeypatch.setitem(sys.modules, "mine", mine)
    modules = names(find_deciding_modules(mine))
    assert {"mine", "compare", "anchors.similar", "estimators.normalise", "steps"} <= modules
    assert not modules & {"estimators.gae", "job"}


# ---------------------------------------------------------------- memory


@pytest.fixture
def lk(tmp_path: Path) -> Lake:
    lk = empty_lake(tmp_path / "lake")
    steps = [StepRecord(state="x" * 1000, action="go") for _ in range(3)]
    lk.append([EpisodeRecord(run_id="r", task_id="t", steps=steps)])
    return lk


def test_texts_make_ranges_shorter_and_workers_share_the_budget(lk: Lake) -> None:
    snapshot = lk.snapshot()
    hashes = estimate_bytes_per_step(snapshot, ["episode_id", "state_hash"])
    texts = estimate_bytes_per_step(snapshot, ["episode_id", "state"])
    numbers = compute_budget_rows(hashes, 1.0, 1)
    assert 5 < numbers / compute_budget_rows(texts, 1.0, 1) < 15
    assert abs(compute_budget_rows(hashes, 1.0, 4) - numbers // 4) <= 1
    assert compute_budget_rows(hashes, 1e-9, 1) == 1


def test_a_lake_without_steps_has_a_budget_too(tmp_path: Path) -> None:
    empty = empty_lake(tmp_path / "empty").snapshot()
    assert estimate_bytes_per_step(empty, ["state"]) == estimate_bytes_per_step(empty, ["state_hash"])


@pytest.mark.parametrize("budget", [0.0, -1.0, float("nan")])
def test_a_budget_that_holds_nothing_is_refused(budget: float) -> None:
    with pytest.raises(UsageError, match=r"default is 2\.0"):
        compute_budget_rows(400.0, budget, 1)


# ---------------------------------------------------------------- parts of jobs


def label(lk: Lake) -> pl.DataFrame:
    """A row for the table `groupings`."""
    inputs = lk.scan("episodes").select("episode_id", "group_id", "run_id").collect()
    return inputs.with_columns(grouping=pl.lit("g"), collected_group_id="group_id")


def test_a_part_writes_elsewhere_and_counts_when_it_is_taken(lk: Lake) -> None:
    with lk.job(kind="group") as job:
        part: JobPart = pickle.loads(pickle.dumps(job.part()))
        accepted, lost = part.write("groupings", label(lk)), part.write("groupings", label(lk))
        assert isinstance(accepted, WrittenRows)
        assert lost is not None
        assert accepted.rows == 1
        job.take(accepted)
        assert lk.scan("groupings").collect().is_empty(), "not before the job has ended"
    rows = lk.scan("groupings").collect()
    assert rows["write_id"].to_list() == [accepted.write_id]
    assert rows["job_id"].to_list() == [job.job_id]
    assert lk.snapshot().dead_write_ids == {lost.write_id}


def test_a_part_of_no_rows_writes_nothing(lk: Lake) -> None:
    with lk.job(kind="group") as job:
        assert job.part().write("groupings", label(lk).clear()) is None


@pytest.mark.parametrize("name", ["episodes", "jobs", "nonsense"])
def test_a_part_writes_only_what_a_job_writes(lk: Lake, name: str) -> None:
    with lk.job(kind="group") as job, pytest.raises(ContractError, match=f"has no table `{name}`; valid: "):
        job.part().write(name, label(lk))


def test_what_a_part_wrote_of_a_forgotten_episode_makes_the_job_fail(lk: Lake) -> None:
    """The job notices as if it had written the rows itself."""
    rows = label(lk)
    job = lk.job(kind="group")

    def forgets_and_takes() -> None:
        with job:
            lk.forget(rows["episode_id"].to_list())
            written = job.part().write("groupings", rows)
            assert written is not None
            job.take(written)

    with pytest.raises(ConflictError, match="forgotten while it ran"):
        forgets_and_takes()
    assert lk.scan("groupings").collect().is_empty()


def test_imports_are_found_as_a_parser_finds_them() -> None:
    """The series of a job hangs on them: for every module of the package."""

    def parsed(module: ModuleType) -> set[str]:
        names = set()
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported = [(f"{node.module}.{alias.name}", node.module) for alias in node.names]
                names |= {name if inputs._is_module(name) else module for name, module in imported}
        return {name for name in names if name.startswith("pipelines.credit.")}

    modules = [import_module(m.name) for m in pkgutil.walk_packages(pipelines.credit.__path__, "pipelines.credit.")]
    assert len(modules) > 30
    assert {m.__name__: set(inputs._iterate_imports(m)) for m in modules} == {m.__name__: parsed(m) for m in modules}
