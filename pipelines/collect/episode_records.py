"""What a rollout of an environment is as records: one rule for rollouts in lock-step and for those at their own pace.

Wall-clock times are left out on purpose: with them, playing the same seeds again would not give the same episode, and
recording it again would be a conflict instead of a replay.
"""

from dataclasses import dataclass
from typing import Any

from lake import ids
from lake.formats.chat.messages import decision as observed
from lake.records import EpisodeRecord, StepRecord
from pipelines.collect.environments import Outcome
from pipelines.collect.players import Ending, Rollout
from pipelines.collect.policies import Decision, PolicyCard

SOURCE_FORMAT = "recorder"
"""`source_format` of rollouts; part of the keys of groups and episodes."""


def rollout_seed(run_seed: int, collection_round: int, start: int, index: int, attempt: int = 0) -> int:
    """Seed of a policy's randomness in one rollout: every sibling, and every attempt, has its own."""
    again = (attempt,) if attempt else ()
    return ids.key_hash("rollout", run_seed, collection_round, start, index, *again)


def begun(rollout: Rollout, first: Outcome, card: PolicyCard, *, environment: str, split: str | None) -> EpisodeRecord:
    """The episode as its environment opened it, without steps."""
    task = rollout.task
    extra: dict[str, Any] = dict(first.extra or {})
    if task.data:
        extra["task"] = task.data
    return EpisodeRecord(
        task_id=task.name or first.task_id or f"{environment}/{task.seed}",
        steps=[],
        run_id=rollout.run_id,
        rollout_index=rollout.rollout_index,
        attempt=rollout.attempt,
        collection_round=rollout.collection_round,
        expected_group_size=rollout.expected_group_size,
        environment=environment,
        split=split,
        policy=card.name,
        policy_version=card.version,
        seed=task.seed,
        ground_truth=first.ground_truth if task.ground_truth is None else task.ground_truth,
        tools=first.tools,
        initial_messages=first.messages,
        sampling=card.sampling,
        tokenizer=card.tokenizer,
        chat_template=card.chat_template,
        source_format=SOURCE_FORMAT,
        extra=extra or None,
    )


def decided(before: Outcome, decision: Decision, after: Outcome, card: PolicyCard, *, is_first: bool) -> StepRecord:
    """A decision, what the policy saw when it took it, and what came of it."""
    step = observed(decision.message, before.messages, is_first=is_first)
    if before.is_error is not None:
        step.state_is_error = before.is_error
    step.reasoning = decision.reasoning
    step.reward = after.reward
    step.is_action_valid = decision.is_action_valid if after.is_action_valid is None else after.is_action_valid
    step.model = decision.model or card.name
    step.policy_version = card.version if decision.policy_version is None else decision.policy_version
    step.finish_reason = decision.finish_reason
    step.tokens = decision.tokens
    step.prompt_tokens, step.completion_tokens = decision.prompt_tokens, decision.completion_tokens
    step.extra = (decision.extra or {}) | (after.extra or {}) or None
    return step


def sampled_tokens(step: StepRecord) -> int | None:
    """Tokens that were sampled for a step; None if nobody counted them."""
    return step.completion_tokens if step.tokens is None else len(step.tokens.action_ids)


@dataclass(slots=True)
class Sums:
    """What the steps of a rollout add up to."""

    num_steps: int = 0
    env_return: float | None = None
    """None if nothing was rewarded."""
    completion_tokens: int | None = None
    """None if nobody counted those of any step."""

    def add(self, step: StepRecord) -> None:
        """Count a step."""
        self.num_steps += 1
        if step.reward is not None:
            self.env_return = (self.env_return or 0.0) + step.reward
        if (tokens := sampled_tokens(step)) is not None:
            self.completion_tokens = (self.completion_tokens or 0) + tokens

    def ending(self, status: str, **fields: Any) -> Ending:
        """A rollout that ended with these steps; `fields` are those of `Ending`."""
        return Ending(
            status=status,
            env_return=self.env_return,
            num_steps=self.num_steps,
            completion_tokens=self.completion_tokens,
            **fields,
        )

    def ended(self, last: Outcome) -> Ending:
        """A rollout that its environment ended."""
        return self.ending(
            "completed" if last.terminated else "truncated",
            terminated=last.terminated,
            stop_reason="environment" if last.terminated else "horizon",
            final_observation=last.messages,
        )
