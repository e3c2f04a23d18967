"""Harbor's trial folders: what stands around the trajectory of a trial.

.. code-block:: text

    <job>/config.json, result.json, lock.json     of the job: statistics, no trajectories
    <job>/<trial>/result.json                     task_name, trial_name, config, agent_info, agent_result,
                                                  verifier_result {rewards}, exception_info, times, step_results[]
    <job>/<trial>/agent/trajectory.json           ATIF; further files of it where a history was cut or handed on
    <job>/<trial>/verifier/reward.json|txt        the rewards, if result.json has none
    <job>/<trial>/steps/<step>/{agent,verifier}   the same for each step of a task of several steps
    <job>/<trial>/user-agent/trajectory.json      of the simulated user

Facts from the models of harbor 0.25.0.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from lake.formats.base.documents import companion
from lake.formats.base.fields import moment, number
from lake.formats.base.look import Look
from lake.formats.base.rows import rest
from lake.formats.base.secrets import without_secrets
from lake.formats.base.source import Source
from lake.records import EpisodeRecord

IS_ATIF = re.compile(r'"schema_version"\s*:\s*"ATIF')
_BUDGET = frozenset(
    (
        "AgentTimeoutError",
        "ContextWindowExceededError",
        "ContextLengthExceededError",
        "OutputTokenExceededError",
        "OutputLengthExceededError",
    )
)
"""Exceptions that are a limit which the agent ran into."""
_VERIFIER = frozenset(
    (
        "VerifierTimeoutError",
        "RewardFileNotFoundError",
        "RewardFileEmptyError",
        "VerifierOutputParseError",
        "AddTestsDirError",
        "DownloadVerifierDirError",
    )
)
"""Exceptions after the agent was done."""
_PARTS = frozenset(("trial_uri", "agent_info", "agent_result", "verifier_result"))
_CHAT = ("messages", "history", "trajectory", "steps", "traj", "conversations")
_HEAD = 1 << 16


class Trial(msgspec.Struct):
    """What a trial says of one run of its agent: the trial's result, or that of one step of several."""

    result: dict[str, Any]
    """result.json; empty if there is none."""
    step: dict[str, Any] = {}
    """The element of `step_results`, where the task has several steps."""
    rewards: dict[str, Any] = {}
    problems: dict[str, str] = {}
    """Companions that could not be read, and why."""

    @property
    def own(self) -> dict[str, Any]:
        """The part of the result that speaks of this run of the agent."""
        return self.step or self.result

    @property
    def name(self) -> str | None:
        """What tells the trial from every other."""
        return next((name for key in ("id", "trial_name") if isinstance(name := self.result.get(key), str)), None)

    @property
    def task(self) -> str | None:
        """The task; a step of several is a task of its own, because siblings of it begin alike."""
        task = _text(self.result.get("task_name"))
        step = _text(self.step.get("step_name"))
        return task if task is None or step is None else f"{task}/{step}"

    @property
    def run(self) -> str | None:
        """The job's name, if a job ran the trial."""
        config = _object(self.result.get("config"))
        if not (job := _text(config.get("job_id"))):
            return None
        folder = _text(config.get("trials_dir"))
        return re.split(r"[/\\]", folder.rstrip("/\\"))[-1] if folder else job

    @property
    def agent_result(self) -> dict[str, Any]:
        """Tokens and cost of the agent."""
        return _object(self.own.get("agent_result"))

    @property
    def rollout_details(self) -> list[dict[str, Any]]:
        """The exact tokens of the agent's calls, a chat history each; the main agent's is the first."""
        details = self.agent_result.get("rollout_details")
        return [detail for detail in details if isinstance(detail, dict)] if isinstance(details, list) else []

    def tell(self, record: EpisodeRecord) -> None:
        """Write on a record what the trial says of its end, its model, its times and its bill."""
        result, own = self.result, self.own
        record.environment = _text(result.get("source"))
        record.policy = record.policy or _text(_object(_object(result.get("agent_info")).get("model_info")).get("name"))
        execution = _object(own.get("agent_execution"))
        for field, key in (("started_at", "started_at"), ("ended_at", "finished_at")):
            if (time := moment(execution.get(key)) or moment(result.get(key))) is not None:
                setattr(record, field, time)
        for field, key in (("prompt_tokens", "n_input_tokens"), ("completion_tokens", "n_output_tokens")):
            count = self.agent_result.get(key)
            if getattr(record, field) is None and type(count) is int and 0 <= count < 1 << 63:
                setattr(record, field, count)
        if record.cost is None:
            record.cost = number(self.agent_result.get("cost_usd"))
        self._end(record)

    def _end(self, record: EpisodeRecord) -> None:
        fault = _object(self.own.get("exception_info") or self.result.get("exception_info"))
        kind = _text(fault.get("exception_type"))
        if kind is None:
            record.terminated = True if self.result else None
            return
        record.stop_reason = kind
        record.error = f"{kind}: {fault.get('exception_message')}"
        if kind in _BUDGET:
            record.status, record.terminated = "truncated", False
        elif kind in _VERIFIER:
            record.terminated = True
        else:
            record.status = "aborted" if kind == "CancelledError" else "failed"

    def extra(self) -> dict[str, Any] | None:
        """What no column holds."""
        known = ("task_name", "source", "started_at", "finished_at", "step_results", "verifier_result", "agent_result")
        agent = rest(self.agent_result, "n_input_tokens", "n_output_tokens", "cost_usd", "rollout_details")
        kept = without_secrets(rest(self.result, *known) or {}) | ({"agent_result": agent} if agent else {})
        if self.step and (step := rest(self.step, "verifier_result", "agent_result")):
            kept["step"] = step
        if self.step and (whole := rest(_object(self.result.get("verifier_result")))):
            kept["verifier_result"] = whole
        return kept | ({"unreadable": self.problems} if self.problems else {}) or None


def is_result(value: Any) -> bool:
    """Whether a JSON object is the result of a trial."""
    return isinstance(value, dict) and "trial_name" in value and "task_name" in value and bool(_PARTS & value.keys())


def trial_around(path: Path) -> Trial | None:
    """The trial that a trajectory's file lies in; None if it lies in none."""
    base = path.parent.parent if path.parent.name in ("agent", "user-agent") else path.parent
    is_step = base.parent.name == "steps"
    result, problem = companion((base.parent.parent if is_step else base) / "result.json")
    trial = Trial(result if is_result(result) else {})
    if problem is not None:
        trial.problems["result.json"] = problem
    if is_step:
        trial.step = next((step for step in _steps(trial.result) if step.get("step_name") == base.name), {})
        trial.step = trial.step or {"step_name": base.name}
    trial.rewards = _object(_object(trial.own.get("verifier_result")).get("rewards"))
    if not trial.rewards:
        trial.rewards = _rewards(base / "verifier", trial.problems)
    return trial if trial.result or trial.rewards or trial.problems else None


def trials_of(result: dict[str, Any]) -> Iterator[Trial]:
    """A result without trajectories as what each run of the agent came to."""
    for step in _steps(result) or [{}]:
        verified = _object((step or result).get("verifier_result"))
        yield Trial(result, step, _object(verified.get("rewards")))


def trajectory_of(path: Path) -> Path | None:
    """A trajectory of the trial whose result this is."""
    for pattern in ("agent/trajectory.json", "agent/*.json", "steps/*/agent/*.json", "trajectory*.json"):
        for found in sorted(path.parent.glob(pattern)):
            if _is_atif(found):
                return found
    return None


def no_trajectory(look: Look) -> str | None:  # noqa: PLR0911 - a list of independent rules
    """What a file of Harbor, Terminal-Bench or SWE-bench is that holds no trajectory."""
    first = look.first
    if look.kind in ("object", "lines") and is_result(first):
        found = trajectory_of(look.path)
        if found is None:
            return None
        return f"it is the result of a Harbor trial and is read together with the trial's {found.name}; ingest that"
    if look.has("n_total_trials", "stats"):
        return "it is the result of a Harbor job; ingest the job's folder, which holds the trials"
    if look.has("jobs_dir", "n_attempts") or look.has("job_name", "jobs_dir"):
        return "it is the configuration of a Harbor job; ingest the job's folder, which holds the trials"
    if look.has("trial_name", "trials_dir") and "messages" not in first:
        return "it is the configuration of a Harbor trial; ingest the trial's folder"
    is_reward = look.path.name == "reward.txt" or (look.path.name == "reward.json" and _is_flat(first))
    if is_reward and look.path.parent.name == "verifier":
        return "it holds the rewards of a Harbor trial and is read together with the trial's trajectory"
    if _is_terminal_bench(first):
        return (
            "it is a results file of Terminal-Bench: trials with `is_resolved` and no messages. Import it as scores, "
            "or ingest the agents' own logs"
        )
    if any(_is_prediction(value) for value in (*look.objects[:20], *first.values())):
        return (
            "it holds predictions for SWE-bench: patches by instance. Ingest the trajectories (.traj, .traj.json) that "
            "they come from"
        )
    agent = next((folder for folder in look.path.parents if folder.name == "agent"), None)
    if agent is not None and IS_ATIF.search(look.text[:_HEAD]) is None:
        found = next((path for path in (agent / "trajectory.json",) if _is_atif(path)), None)
        if found is not None and trial_around(found) is not None:
            return "it is a raw log of a Harbor trial, whose rollout is in agent/trajectory.json"
    return None


def _is_terminal_bench(first: dict[str, Any]) -> bool:
    if any(key in first for key in _CHAT):
        return False
    results = first.get("results")
    trials = [first, *results[:5]] if isinstance(results, list) else [first]
    return any(isinstance(trial, dict) and "is_resolved" in trial and "task_id" in trial for trial in trials)


def _is_prediction(value: Any) -> bool:
    keys = value.keys() if isinstance(value, dict) else frozenset()
    return {"instance_id", "model_patch"} <= keys and not any(key in keys for key in _CHAT)


def _is_flat(value: dict[str, Any]) -> bool:
    return bool(value) and all(item is None or number(item) is not None for item in value.values())


def _is_atif(path: Path) -> bool:
    try:
        with Source(path) as file:
            return IS_ATIF.search(file.read(_HEAD).decode("utf-8", "replace")) is not None
    except OSError:
        return False


def _rewards(folder: Path, problems: dict[str, str]) -> dict[str, Any]:
    rewards, problem = companion(folder / "reward.json")
    if isinstance(rewards, dict):
        return rewards
    if number(rewards) is None:
        rewards, other = companion(folder / "reward.txt")
        problem = problem or other
    if problem is not None:
        problems["verifier"] = problem
    return {} if number(rewards) is None else {"reward": rewards}


def _steps(result: dict[str, Any]) -> list[dict[str, Any]]:
    steps = result.get("step_results")
    return [step for step in steps if isinstance(step, dict)] if isinstance(steps, list) else []


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
