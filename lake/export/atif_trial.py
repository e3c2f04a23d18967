"""The result of a Harbor trial, result.json: what stands around an ATIF document.

What `lake.formats.atif.trial` kept of a result is put back. Of an episode of another source a result is made: its
status is the exception that Harbor would have told, and the time of that is the episode's end.
"""

import uuid
from datetime import UTC, datetime
from typing import Any

from lake import ids
from lake.export.atif_steps import Prompts
from lake.export.target import Exported, Row
from lake.formats.atif.reader import NAME
from lake.formats.base.fields import number
from lake.records import EpisodeRecord, ScoreRecord

_NAMESPACE = uuid.UUID("0f3b6d1e-5f0b-4a1c-8b43-3f1d2c9e7a55")
_EXCEPTIONS = {"truncated": "AgentTimeoutError", "aborted": "CancelledError", "failed": "RuntimeError"}
_TOLD_APART = ("step", "agent_result", "verifier_result", "unreadable")
"""Of what was kept of a trial: what has a place of its own in the result."""


def is_bare_outcome(record: EpisodeRecord) -> bool:
    """Whether an episode was read from a trial's result alone."""
    return record.source_format == NAME and "agent" not in (record.extra or {})


def step_name(record: EpisodeRecord) -> str | None:
    """The step of a trial of several steps that an episode is."""
    step = _kept(record).get("step")
    name = step.get("step_name") if isinstance(step, dict) else None
    return name if isinstance(name, str) else None


def result_of(exported: Exported, trial_name: str, details: list[Row]) -> Row | None:
    """The result of an episode's trial; None if it was read without one."""
    record = exported.record
    rewards = _rewards(exported)
    counted: Row = {"n_input_tokens": record.prompt_tokens, "n_output_tokens": record.completion_tokens}
    counted |= {"cost_usd": record.cost, "rollout_details": details or None}
    bill = {key: value for key, value in counted.items() if value is not None}
    verified = {"rewards": rewards} if rewards else None
    times = {"started_at": record.started_at, "finished_at": record.ended_at}
    if record.source_format != NAME:
        agent = {"agent_result": bill, "verifier_result": verified, "exception_info": _exception(record)}
        return _made(exported, trial_name) | agent | times
    kept = _kept(record)
    result = {key: value for key, value in kept.items() if key not in _TOLD_APART}
    if not result:
        return None
    own: Row = {"agent_result": _object(kept.get("agent_result")) | bill, "verifier_result": verified}
    task = record.task_id
    if isinstance(step := kept.get("step"), dict):
        task = task.removesuffix(f"/{step.get('step_name')}")
        own = {"step_results": [step | own], "verifier_result": kept.get("verifier_result")}
    return {"trial_name": None, "task_name": task, "source": record.environment} | result | own | times


def rewards_beside(exported: Exported) -> Row:
    """The rewards of an episode without a result, as far as its document does not say them."""
    rewards, said = _rewards(exported), _object((exported.record.extra or {}).get("extra"))
    return {} if rewards == {"reward": number(said.get("reward"))} else rewards


def turns_of(record: EpisodeRecord) -> list[Row]:
    """The exact tokens of an episode as a chat history of its trial; nothing if it has none."""
    prompts, turns = Prompts(record.steps), []
    for index, step in enumerate(record.steps):
        if step.tokens is not None:
            more = _object((step.extra or {}).get("rollout_details"))
            turns.append((prompts.before(index, step.tokens), step.tokens, more))
    if not turns:
        return []
    found: Row = {
        "prompt_token_ids": [prompt for prompt, _, _ in turns],
        "completion_token_ids": [tokens.action_ids for _, tokens, _ in turns],
    }
    if all(tokens.action_logprobs is not None for _, tokens, _ in turns):
        found["logprobs"] = [tokens.action_logprobs for _, tokens, _ in turns]
    if names := dict.fromkeys(name for _, _, more in turns for name in more):
        found["extra"] = {name: [more.get(name) for _, _, more in turns] for name in names}
    return [found]


def _kept(record: EpisodeRecord) -> Row:
    return _object((record.extra or {}).get("trial"))


def _object(value: Any) -> Row:
    return value if isinstance(value, dict) else {}


def _rewards(exported: Exported) -> Row:
    """The score that counts, and what came with the whole episode; what was computed here stands in the document."""
    rewards: Row = {}
    if exported.record.source_format != NAME and exported.score is not None:
        rewards["reward"] = exported.score
    for _, score in exported.came_with:
        if is_reward(exported, score):
            value = score.value if score.value is not None else (score.metrics or {}).get("value")
            rewards.setdefault(score.scorer, value)
    return rewards


def is_reward(exported: Exported, score: ScoreRecord) -> bool:
    """Whether a score that came with an episode stands among its trial's rewards, which Harbor takes as numbers alone.

    What was read from such rewards stands there again, whatever it was. Of another source, `reward` is the score that
    counts.
    """
    is_own = exported.record.source_format == NAME
    return score.step_index is None and (is_own or (score.value is not None and score.scorer != "reward"))


def _exception(record: EpisodeRecord) -> Row | None:
    if (kind := _EXCEPTIONS.get(record.status)) is None:
        return None
    return {
        "exception_type": kind,
        "exception_message": record.error or record.stop_reason or record.status,
        "exception_traceback": "",
        "occurred_at": record.ended_at or datetime.fromtimestamp(0, UTC),
    }


def _made(exported: Exported, trial_name: str) -> Row:
    """What Harbor wants to know of a trial, of an episode that was none."""
    record = exported.record
    model = {"name": record.policy, "provider": None} if record.policy is not None else None
    task = {"path": record.task_id}
    return {
        "id": str(uuid.uuid5(_NAMESPACE, ids.to_text(exported.episode.episode_id))),
        "task_name": record.task_id,
        "trial_name": trial_name,
        "trial_uri": f"trajlake:{ids.to_text(exported.episode.episode_id)}",
        "task_id": task,
        "source": record.environment,
        "task_checksum": "",
        "config": {
            "task": task,
            "trial_name": trial_name,
            "trials_dir": record.run_id,
            "job_id": str(uuid.uuid5(_NAMESPACE, record.run_id or "")),
        },
        "agent_info": {"name": record.agent_id or record.policy or "agent", "version": "unknown", "model_info": model},
    }
