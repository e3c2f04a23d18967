"""Write a Harbor job with the tool's own models; needs its own environment, with Python 3.12:

    python3.12 -m venv /tmp/env-harbor && /tmp/env-harbor/bin/pip install harbor==0.25.0
    /tmp/env-harbor/bin/python tests/golden/formats/make_harbor.py

With an older Python, its models alone do: `pip install --ignore-requires-python --no-deps harbor==0.25.0`, and
pydantic and shortuuid. No agent runs: the trajectories are what terminus-2 writes when it summarises its context with
`linear_history`, shortened.
"""

import json
import sys
import typing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

if sys.version_info < (3, 12):
    import typing_extensions

    for name in ("TypedDict", "override"):
        setattr(typing, name, getattr(typing_extensions, name))

from harbor.models.agent.context import AgentContext
from harbor.models.job.result import JobResult, JobStats
from harbor.models.task.id import LocalTaskId
from harbor.models.trajectories import (
    Agent,
    FinalMetrics,
    Metrics,
    Observation,
    ObservationResult,
    Step,
    SubagentTrajectoryRef,
    ToolCall,
    Trajectory,
)
from harbor.models.trial.config import TrialConfig
from harbor.models.trial.result import AgentInfo, ExceptionInfo, ModelInfo, StepResult, TrialResult
from harbor.models.verifier.result import VerifierResult

JOB = Path(__file__).parent / "harbor" / "2026-01-01__00-00-00"
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
AGENT = Agent(name="terminus-2", version="2.0.0", model_name="m", extra={"temperature": 0.7})


def at(seconds: int) -> str:
    """A time of the trial."""
    return (BEGIN + timedelta(seconds=seconds)).isoformat()


def act(number: int, text: str, keys: str, seen: str, **fields: Any) -> Step:
    """A step that types into the terminal."""
    return Step(
        step_id=number,
        timestamp=at(number),
        source="agent",
        model_name="m",
        message=text,
        tool_calls=[
            ToolCall(tool_call_id=f"call_{number}", function_name="bash_command", arguments={"keystrokes": keys})
        ],
        observation=Observation(results=[ObservationResult(content=seen)]),
        **fields,
    )


def write(path: Path, value: Any) -> None:
    """Write a model as Harbor does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(value.to_json_dict()) if isinstance(value, Trajectory) else value.model_dump_json()
    path.write_text(text + "\n", "utf-8")


def result(name: str, number: int, **fields: Any) -> TrialResult:
    """The result of a trial."""
    task = {"path": "tasks/count"}
    config = {"task": task, "trial_name": name, "trials_dir": f"jobs/{JOB.name}", "job_id": str(UUID(int=9))}
    return TrialResult(
        id=UUID(int=number),
        task_name="demo/count",
        trial_name=name,
        trial_uri=f"file:///jobs/{JOB.name}/{name}",
        task_id=LocalTaskId(path=Path("tasks/count")),
        source="demo",
        task_checksum="0" * 64,
        config=TrialConfig.model_validate(config),
        agent_info=AgentInfo(name="terminus-2", version="2.0.0", model_info=ModelInfo(name="m", provider="p")),
        started_at=BEGIN,
        finished_at=BEGIN + timedelta(minutes=1),
        **fields,
    )


def summarised(trial: Path) -> None:
    """A trial whose history was summarised by a sub-agent, and continued in a second file."""
    first = [
        Step(step_id=1, timestamp=at(1), source="user", message="Count to three."),
        act(2, "One.", "1", "$ 1", metrics=Metrics(prompt_tokens=3, completion_tokens=2, cost_usd=0.5)),
        Step(
            step_id=3,
            timestamp=at(3),
            source="system",
            message="Performed context summarization and handoff to continue task.",
            observation=Observation(
                results=[
                    ObservationResult(
                        subagent_trajectory_ref=[
                            SubagentTrajectoryRef(
                                session_id="s-summarization-1-summary",
                                trajectory_path="trajectory.summarization-1-summary.json",
                            )
                        ]
                    )
                ]
            ),
        ),
    ]
    write(
        trial / "agent/trajectory.json",
        Trajectory(
            session_id="s",
            agent=AGENT,
            steps=first,
            continued_trajectory_ref="trajectory.cont-1.json",
            final_metrics=FinalMetrics(total_prompt_tokens=9, total_completion_tokens=6, total_cached_tokens=1),
        ),
    )
    copied = [Step(step_id=1, source="user", message="Count to three.", is_copied_context=True)]
    copied += [Step(step_id=2, source="agent", message="One.", is_copied_context=True)]
    write(
        trial / "agent/trajectory.summarization-1-summary.json",
        Trajectory(
            session_id="s-summarization-1-summary",
            agent=Agent(name="terminus-2-summarization-summary", version="2.0.0", extra={"summarization_index": 1}),
            steps=[
                *copied,
                Step(step_id=3, source="user", message="Sum up."),
                Step(step_id=4, source="agent", message="It counts; one is done.", metrics=Metrics(prompt_tokens=7)),
            ],
        ),
    )
    second = [*copied, Step(step_id=3, source="user", message="It counts; one is done. Go on.")]
    second += [act(4, "Two.", "2", "$ 2"), act(5, "Three.", "3", "$ 3", reasoning_content="Then done.")]
    write(
        trial / "agent/trajectory.cont-1.json",
        Trajectory(
            session_id="s-cont-1",
            agent=AGENT.model_copy(update={"extra": {"continuation_index": 1}}),
            steps=second,
        ),
    )
    agent = AgentContext(n_input_tokens=20, n_output_tokens=9, cost_usd=1.5)
    rewards = VerifierResult(rewards={"reward": 0.75, "order": 1})
    write(trial / "result.json", result(trial.name, 1, agent_result=agent, verifier_result=rewards))


def without_trajectory(trial: Path) -> None:
    """A trial that ran out of time, whose agent left tokens alone."""
    detail = {
        "prompt_token_ids": [[1, 2], [1, 2, 3, 4]],
        "completion_token_ids": [[3], [5, 6]],
        "logprobs": [[-1], [-2, 0]],
    }
    fault = ExceptionInfo(
        exception_type="AgentTimeoutError",
        exception_message="too slow",
        exception_traceback="",
        occurred_at=BEGIN,
    )
    agent = AgentContext(rollout_details=[detail])
    outcome = VerifierResult(rewards={"reward": 0.0})
    write(
        trial / "result.json",
        result(trial.name, 2, agent_result=agent, verifier_result=outcome, exception_info=fault),
    )


def of_several_steps(trial: Path) -> None:
    """A trial of a task of two steps."""
    for step in ("make", "test"):
        steps = [Step(step_id=1, source="user", message=f"Do: {step}."), act(2, "Done.", step, "$")]
        write(trial / f"steps/{step}/agent/trajectory.json", Trajectory(session_id=step, agent=AGENT, steps=steps))
    steps = [
        StepResult(step_name="make", verifier_result=VerifierResult(rewards={"reward": 1})),
        StepResult(step_name="test", verifier_result=VerifierResult(rewards={"reward": 0})),
    ]
    whole = VerifierResult(rewards={"reward": 0.5})
    write(trial / "result.json", result(trial.name, 3, step_results=steps, verifier_result=whole))


summarised(JOB / "count__AAAAAAA")
without_trajectory(JOB / "count__BBBBBBB")
of_several_steps(JOB / "count__CCCCCCC")
stats = JobStats(n_completed_trials=3)
write(JOB / "result.json", JobResult(id=UUID(int=9), started_at=BEGIN, n_total_trials=3, stats=stats))
