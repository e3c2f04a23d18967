"""The lake that several modules look at in a browser: the usual content, hostile texts, and long episodes."""

from pathlib import Path
from typing import Any

from lake import Lake
from lake.records import StepRecord
from testkit.lakes import add_credit, add_training, build_lake, rollout, sample_episodes

MARK = "window.hostile = (window.hostile || 0) + 1"
HTML = f"<script>{MARK}</script><img src=x onerror='{MARK}'><svg onload='{MARK}'></svg> \x1b[31m"
MARKDOWN = f"![beacon](http://beacon.invalid/x.png) [click](javascript:{MARK}) **bold** <img src=x onerror='{MARK}'>"
HOSTILE = f"{HTML} {MARKDOWN}"
"""Name of the run and the task in which everything is hostile."""
LONG = 1000
"""Steps of the eight episodes of run and task `long`."""


def browsed_lake(folder: Path) -> Lake:
    """The usual content, which alone was trained on; runs of two hostile siblings and of eight long ones."""
    fields = {"environment": HOSTILE, "policy": HOSTILE, "stop_reason": HOSTILE}
    hostile = [rollout(HOSTILE, 0, 0.0, error=HOSTILE, **fields), rollout(HOSTILE, 1, 1.0, **fields)]
    for record in hostile:
        for step, text in zip(record.steps, (HTML, f"{MARKDOWN} {record.rollout_index}", HOSTILE), strict=True):
            step.state = step.action = step.reasoning = text
            step.tool_calls = [{"function": {"name": HOSTILE, "arguments": HOSTILE}}]
            step.context = [{"role": HOSTILE, "content": "more " + HOSTILE}]
    lk = build_lake(folder, sample_episodes())
    with lk.job(kind="collect", run_id=HOSTILE) as job:
        job.record(hostile)
    add_credit(lk)
    add_training(lk)
    with lk.job(kind="collect", run_id="long") as job:
        job.record([_long_rollout(index) for index in range(8)])
    return lk


def _long_rollout(index: int) -> Any:
    """Each goes its own way, and meets the others in every tenth room."""
    record = rollout("long", index, float(index), num_steps=1)
    record.steps = [
        StepRecord(state=f"room {n}" if n % 10 == 0 else f"room {n} of {index}", action=f"go {n} {index}", reward=0.0)
        for n in range(LONG)
    ]
    return record
