"""One trace of verifiers as episodes: one for each branch of its graph, the trunk first.

See `lake.formats.verifiers.traces`.
"""

from typing import Any

import msgspec

from lake.formats.base.fields import Scores, moment, number, whole
from lake.formats.base.rows import episode_text_id, rest
from lake.formats.base.secrets import without_secrets
from lake.formats.base.source import Input
from lake.formats.chat.messages import checked
from lake.formats.verifiers import graph as verifiers_graph
from lake.formats.verifiers.annotations import LATER, STAMPED, Annotations
from lake.formats.verifiers.graph import Branch, Node, Talk
from lake.formats.verifiers.messages import as_object, filled, message
from lake.records import EpisodeRecord, StepRecord, sampling_of

NAME = "verifiers_traces"
COUNTED = ("num_input_tokens", "num_output_tokens", "num_total_tokens")
"""Sums over the calls."""
_LIMITS = frozenset(
    ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "context_length", "compaction_failed")
)
_OF_A_NODE = ("message", "parent", "sampled", "logprobs", *LATER)
_OF_A_TRACE = ("nodes", "calls", "rewards", "tools", "id", "version", "task", "run", "stop_condition", "errors", "info")


class Agent(msgspec.Struct):
    """Who acted."""

    name: str | None = None
    trainable: bool = True
    model: str | None = None
    config: Any = None
    sampling: Any = None


class Trace(msgspec.Struct):
    """What must be of its type."""

    nodes: list[Node]
    id: str | None = None
    version: int = 1
    agent: Agent = msgspec.field(default_factory=Agent)
    calls: list[dict[str, Any]] = []
    rewards: dict[str, Any] = {}
    tools: list[Any] = []
    errors: list[Any] = []
    stop_condition: str | None = None


class Shared(msgspec.Struct):
    """What the traces of a line share."""

    fields: dict[str, Any]
    """Of every record."""
    version: int | None
    """Of the policy, if it is certain."""


class Reading:
    """A trace that becomes episodes; `value` is what it was made of, `called` the agent's id."""

    def __init__(self, trace: Trace, value: dict[str, Any], shared: Shared, called: str | None) -> None:
        self.trace, self.value, self.shared, self.called = trace, value, shared, called
        self.fields = dict(shared.fields)
        self._calls: dict[int, list[dict[str, Any]]] = {}
        """Those that led to a message, by node."""
        self._lost = []
        for call in trace.calls:
            if isinstance(at := call.get("node"), int) and 0 <= at < len(trace.nodes):
                self._calls.setdefault(at, []).append(call)
            else:
                self._lost.append(call)

    def records(self, root: EpisodeRecord | None, file: Input, later: Annotations) -> list[EpisodeRecord]:
        """The episodes of its branches; `root` is that of the line, None if it is this one's."""
        nodes = self.trace.nodes
        verifiers_graph.check(nodes)
        found, left = verifiers_graph.branches(nodes)
        told = later.of(self.trace.id, nodes, self.value)
        made: list[EpisodeRecord] = []
        for branch in found or [Branch(0, [])]:
            is_trunk = not made
            record = self._record(verifiers_graph.talk(branch, nodes, self._messages(branch)), is_trunk=is_trunk)
            parent = root if branch.parent is None else made[branch.parent]
            if branch.relation is not None:
                record.agent_id = f"{self.called or 'agent'}/branch_{branch.index}"
            if parent is not None:
                record.relation = branch.relation or "subagent"
                record.parent_episode_id = _text_id(parent, file)
                record.root_episode_id = _text_id(root or made[0], file)
                record.parent_step_index = branch.parent_step
            scores = Scores()
            for name, reward in self.trace.rewards.items() if is_trunk else ():
                score, weight = _weighted(reward)
                scores.add(name, score, metrics={"weight": weight} if isinstance(reward, dict) else None)
            told.add(scores, branch.decisions, is_trunk=is_trunk)
            record.scores = scores.records
            made.append(record)
        if left:
            made[0].extra = (made[0].extra or {}) | {"other_nodes": {str(at): self.value["nodes"][at] for at in left}}
        return made

    def _messages(self, branch: Branch) -> list[dict[str, Any]]:
        """The messages of a branch's nodes; what a node has beside its message and tokens stays with it."""
        messages: list[dict[str, Any]] = [{}] * len(self.trace.nodes)
        last = branch.decisions[-1] if branch.decisions else -1
        for at in branch.path:
            given = self.value["nodes"][at]
            # Tokens behind the last decision have no record.
            known = _OF_A_NODE if at > last else (*_OF_A_NODE, "token_ids", "mask")
            place = f"nodes[{at}].message"
            messages[at] = checked(message(given["message"], place), place) | filled(rest(given, *known) or {})
            if self.trace.nodes[at].sampled:
                messages[at]["node"] = at
        return messages

    def _record(self, talk: Talk, *, is_trunk: bool) -> EpisodeRecord:
        trace, value, agent = self.trace, self.value, self.trace.agent
        for step in talk.steps:
            self._learn(step)
        timing, config = as_object(value.get("timing")), as_object(agent.config)
        ends = [number(as_object(span).get("end")) for span in timing.values()]
        models = [config.get("model"), agent.model, *(step.model for step in talk.steps)]
        sampling = [config.get("sampling"), agent.sampling, *(call.get("sampling") for call in trace.calls)]
        status, terminated = self._end()
        record = EpisodeRecord(
            steps=talk.steps,
            agent_id=self.called,
            policy=next((name for name in models if isinstance(name, str) and name), None),
            policy_version=self.shared.version if agent.trainable else None,
            status=status,
            terminated=terminated,
            sampling=without_secrets(next((s for s in sampling if isinstance(s, dict) and s), None)),
            tools=trace.tools or None,
            prompt_tokens=_total([step.prompt_tokens for step in talk.steps]),
            completion_tokens=_total([step.completion_tokens for step in talk.steps]),
            cost=_total([step.cost for step in talk.steps]),
            started_at=_when(timing.get("start")),
            ended_at=_when(max((end for end in ends if end), default=None)),
            initial_messages=talk.initial_messages,
            final_observation=talk.final_observation,
            source_version=_text(as_object(value.get("verifiers")).get("version")),
            **self.fields,
        )
        if not is_trunk:
            record.ground_truth = None
            return record
        record.stop_reason, record.error = trace.stop_condition, error_text(trace.errors)
        record.env_return = _return(trace.rewards)
        record.extra = filled(
            {
                **(rest(value, *_OF_A_TRACE, *COUNTED) or {}),
                "trace_id": trace.id,
                "trace_version": trace.version,
                "errors": trace.errors,
                "info": rest(as_object(value.get("info")), *STAMPED),
                "calls_without_message": self._lost,
            }
        )
        return record

    def _end(self) -> tuple[str, bool | None]:
        """Status, and whether the agent or the environment ended it."""
        trace, value = self.trace, self.value
        answered = [call for call in trace.calls if not call.get("error")]
        if value.get("is_timeout") is True or trace.stop_condition in _LIMITS:
            return "truncated", False
        if value.get("ok") is False or (value.get("ok") is None and trace.errors):
            return "failed", None
        if answered and answered[-1].get("finish_reason") == "length":
            return "truncated", False
        if value.get("is_completed") is False:
            return "aborted", None
        return "completed", True if value.get("is_completed") is True else None

    def _learn(self, step: StepRecord) -> None:
        """What the calls say of a decision, the last one that led to its message."""
        extra = dict(step.extra or {})
        *earlier, call = self._calls.get(extra["node"]) or [{}]
        usage = as_object(call.get("usage") or extra.pop("usage", None))
        time, sampling = as_object(call.get("time")), as_object(call.get("sampling"))
        start, end = number(time.get("start")), number(time.get("end"))
        prompt = whole(usage.get("prompt_tokens"))
        step.agent_id, step.trainable = self.trace.agent.name, self.trace.agent.trainable
        step.policy_version = self.shared.version if step.trainable else None
        step.model = _text(call.get("model"))
        step.finish_reason = _text(call.get("finish_reason") or extra.pop("finish_reason", None))
        step.prompt_tokens = None if prompt is None else prompt + (whole(usage.get("cached_input_tokens")) or 0)
        step.completion_tokens = whole(usage.get("completion_tokens"))
        step.cost = number(usage.get("cost"))
        if start:
            step.started_at = moment(start)
            step.latency = end - start if end and end >= start else None
        if step.tokens is not None:
            step.tokens.policy_version = step.policy_version
            for name, value in sampling_of(sampling).items():
                setattr(step.tokens, name, value)
        extra["usage"] = rest(usage, "prompt_tokens", "completion_tokens", "cost")
        extra["call"] = filled(rest(call, "node", "model", "finish_reason", "usage", "time") or {})
        extra["earlier_calls"] = earlier
        step.extra = filled(extra) or None


def error_text(errors: list[Any] | None) -> str | None:
    """The last error, in words."""
    if not errors:
        return None
    last = as_object(errors[-1])
    return ": ".join(str(last[name]) for name in ("type", "message") if last.get(name)) or str(errors[-1])


def _weighted(reward: Any) -> tuple[Any, Any]:
    """A reward's score and weight."""
    return (reward.get("score"), reward.get("weight", 1.0)) if isinstance(reward, dict) else (reward, 1.0)


def _return(rewards: dict[str, Any]) -> float | None:
    """The weighted sum; None if a part of it is unknown."""
    parts = []
    for score, weight in map(_weighted, rewards.values()):
        value, factor = number(score), number(weight)
        if value is None or factor is None:
            return None
        parts.append(value * factor)
    return sum(parts) if parts else None


def _total(values: list[Any]) -> Any:
    """The sum of what is known; None if nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _text_id(record: EpisodeRecord, file: Input) -> str:
    """The id that a record will have, of its key alone: hashing its content is not needed for it."""
    names = ("task_id", "run_id", "rollout_index", "attempt", "agent_id", "collection_round", "seed")
    key = {name: getattr(record, name) for name in names}
    return episode_text_id(EpisodeRecord(steps=[], source_format=NAME, **key), file)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _when(seconds: Any) -> Any:
    """A time; 0 is one that was never set."""
    return moment(seconds) if number(seconds) else None
