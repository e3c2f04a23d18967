"""Any mixture of good and bad calls: every call has its outcome, in its place, as if it had been alone.

The oracle knows what each kind of call comes to when it is asked alone; the sandbox gets them in batches of a random
size, among a random number of workers, and must say the same.
"""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipelines.score.sandbox.contract import FunctionSource, SandboxLimits
from pipelines.score.sandbox.launch import find_obstacle
from pipelines.score.sandbox.pool import Sandbox
from testkit.examples import examples

pytestmark = pytest.mark.skipif(
    find_obstacle("strong") is not None, reason=f"no strong isolation here: {find_obstacle('strong')}"
)

FUNCTION = """
import os, time
def f(kind, value):
    if kind == "raises": raise ValueError(value)
    if kind == "dies": os._exit(1)
    if kind == "starves": bytearray(5 << 30)
    if kind == "hangs": time.sleep(60)
    if kind == "nan": return float("nan")
    if kind == "slow": time.sleep(0.07)
    if kind == "dict": return {"score": value, "steps": [value] * 3}
    return value
"""
QUICK = ("good", "good", "good", "dict", "slow", "raises", "nan")
CALLS = st.lists(st.tuples(st.sampled_from(QUICK), st.floats(-1e9, 1e9)), max_size=40)
DEADLY = st.lists(
    st.tuples(st.sampled_from((*QUICK, "dies", "starves")), st.floats(-1e9, 1e9)), min_size=1, max_size=10
)
LIMITS = st.fixed_dictionaries({"rows_per_batch": st.integers(1, 12), "workers": st.integers(1, 2)})


def oracle(kind: str, value: float) -> tuple[str, Any]:
    """Kind and value of the outcome of a call that is alone."""
    bad = {"raises": "exception", "dies": "killed", "starves": "memory", "hangs": "timeout", "nan": "invalid"}
    if kind in bad:
        return bad[kind], None
    return "ok", {"score": value, "steps": [value] * 3} if kind == "dict" else value


def outcomes(folder: Path, calls: list[tuple[str, float]], **limits: Any) -> list[tuple[str, Any]]:
    path = folder / "f.py"
    path.write_text(FUNCTION)
    with Sandbox(FunctionSource(str(path), "f"), SandboxLimits(**limits)) as sandbox:
        outcomes = sandbox.call([{"kind": kind, "value": value} for kind, value in calls])
    assert all((outcome.error is None) == (outcome.kind == "ok") for outcome in outcomes)
    return [(outcome.kind, outcome.value) for outcome in outcomes]


FOLDER = [HealthCheck.function_scoped_fixture]


@given(CALLS, LIMITS)
@settings(max_examples=6, deadline=None, suppress_health_check=FOLDER)
def test_every_call_has_its_own_outcome(tmp_path: Path, calls: list[tuple[str, float]], limits: dict[str, int]) -> None:
    assert outcomes(tmp_path, calls, **limits) == [oracle(*call) for call in calls]


@given(DEADLY, LIMITS)
@settings(max_examples=4, deadline=None, suppress_health_check=FOLDER)
def test_also_where_calls_kill_their_worker(
    tmp_path: Path, calls: list[tuple[str, float]], limits: dict[str, int]
) -> None:
    assert outcomes(tmp_path, calls, **limits) == [oracle(*call) for call in calls]


@pytest.mark.slow
@given(st.lists(st.sampled_from((*QUICK, "dies", "starves", "hangs")), max_size=80), LIMITS)
@settings(max_examples=examples(60), deadline=None, suppress_health_check=FOLDER)
def test_also_where_calls_hang(tmp_path: Path, kinds: list[str], limits: dict[str, int]) -> None:
    calls = [(kind, float(index)) for index, kind in enumerate(kinds)]
    assert outcomes(tmp_path, calls, seconds_per_row=1.5, **limits) == [oracle(*call) for call in calls]
