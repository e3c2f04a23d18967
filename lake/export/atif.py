"""ATIF 1.8: a folder for each episode, as Harbor's trials are.

.. code-block:: text

    <run>/<trial>__<episode>/agent/trajectory.json   the document: sub-agents are embedded in it, continuations are
                                                     files beside it
    <run>/<trial>__<episode>/result.json             task, end, bill, and the rewards: `reward` is the return, the
                                                     others are the scores that came with the episode

Exact tokens stand in `metrics`. What ATIF has no place for stands in `extra.trajlake` of a document (what the episode
is called, and all else of it) and of a step (advantage, reward, ...). Reading takes from there what an episode is
called, and nothing else.

An episode that was read from ATIF is written such that reading it again gives the same records: what was kept of its
document and of its trial's result.json is put back. A document outside of a trial gets no result.json; its rewards, if
they do not stand in the document, are in verifier/reward.json. Of a trial without a document there is the result alone.
Each step of a trial of several steps is a trial of its own.

`lake.formats.atif.reader` has the spec. Source: the models of harbor 0.25.0.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from lake import ids
from lake.export.atif_steps import left_of, steps_of, tokens_are_in_trial
from lake.export.atif_trial import is_bare_outcome, is_reward, result_of, rewards_beside, step_name, turns_of
from lake.export.target import Choices, Exported, Losses, Row, Target, file_name, is_decision, put_back
from lake.formats.atif.document import OURS
from lake.formats.atif.document import file_name as name_in
from lake.formats.atif.reader import NAME
from lake.records import EpisodeRecord, StepRecord

_VERSION = "ATIF-v1.8"
_NOT_KEPT = ("agent", "final_metrics", "trial", "rollout_details", "is_cut")
_HAVE_A_PLACE = ("steps", "initial_messages", "final_observation", "tools", "spans", "scores", "sampling", "policy")
_NAMES = ("run_id", "task_id", "rollout_index", "agent_id")
_DEEPEST = 16
"""Sub-agents of sub-agents; what is further down stands for itself."""
_BILL = ("prompt_tokens", "completion_tokens", "cost")


def _files(group: Sequence[Exported], _: Choices, losses: Losses) -> Iterator[Row]:
    for family in _families(group):
        yield from put_back(_family_files, family, losses)


def _family_files(family: Sequence[Exported], losses: Losses) -> list[Row]:
    """The files of an episode and of those that came out of it."""
    root, *others = family
    below: dict[str, list[Exported]] = defaultdict(list)
    for one in others:
        below[one.record.parent_episode_id or ""].append(one)
    return [
        {"path": path, "text": msgspec.json.format(msgspec.json.encode(value), indent=2).decode(), "id": _id(root)}
        for path, value in _Trial(root, below, losses).files()
    ]


def _families(group: Sequence[Exported]) -> Iterator[list[Exported]]:
    """Each episode that stands for itself, followed by those that came out of it, or out of these."""
    by_id = {_id(one): one for one in group}
    children: dict[str, list[Exported]] = defaultdict(list)
    roots = []
    for one in group:
        parent = one.record.parent_episode_id
        if parent in by_id and one.record.relation in ("subagent", "continuation"):
            children[parent].append(one)
        else:
            roots.append(one)
    told: set[str] = set()
    # Those that no root leads to claim to come out of each other: one of each circle stands for itself. So does what
    # is too far down.
    for root in (*roots, *group):
        family: list[Exported] = []
        waiting = [(root, 0)]
        while waiting:
            one, depth = waiting.pop(0)
            if _id(one) not in told:
                told.add(_id(one))
                family.append(one)
                waiting += [(child, depth + 1) for child in children[_id(one)] if depth < _DEEPEST]
        if family:
            yield family


class _Trial:
    """The files of an episode and of those that came out of it."""

    def __init__(self, root: Exported, below: dict[str, list[Exported]], losses: Losses) -> None:
        self._root = root
        self._below = below
        self._losses = losses
        record = root.record
        trial = (record.extra or {}).get("trial") if record.source_format == NAME else None
        name = trial.get("trial_name") if isinstance(trial, dict) else None
        named = file_name(name if isinstance(name, str) else record.task_id)
        self.name = f"{named}__{_id(root)}"
        self._folder = f"{file_name(record.run_id or 'run')}/{self.name}"
        if (step := step_name(record)) is not None:
            self._inner = f"{self._folder}/steps/{file_name(step)}"
        else:
            self._inner = self._folder

    def files(self) -> Iterator[tuple[str, object]]:
        """Each file's path and what it holds."""
        record = self._root.record
        if is_bare_outcome(record):
            others = sorted(self._below.get(_id(self._root), ()), key=lambda one: _number(one.record.agent_id))
            details = [
                turns for one in (self._root, *others) for turns in turns_of(one.record) or _unmatched(one.record)
            ]
            yield f"{self._folder}/result.json", result_of(self._root, self.name, details)
            return
        if record.source_format == NAME or any(map(is_decision, record.steps)):
            is_user = record.source_format == NAME and (record.agent_id or "").startswith("user-agent:")
            folder = f"{self._inner}/{'user-agent' if is_user else 'agent'}"
            yield from self._documents(self._root, f"{folder}/", "trajectory")
            if is_user:
                return
        if (result := result_of(self._root, self.name, self._details())) is not None:
            yield f"{self._folder}/result.json", result
        elif rewards := rewards_beside(self._root):
            yield f"{self._inner}/verifier/reward.json", rewards

    def _details(self) -> list[Row]:
        """The calls of other histories than the document's, after those that would else be taken for its own."""
        record = self._root.record
        others = _unmatched(record)
        if tokens_are_in_trial(record):
            return [*turns_of(record), *others]
        own = [sampled for step in record.steps if (sampled := _sampled(step))]
        return [{"completion_token_ids": own}, *others] if own and others else others

    def _documents(self, one: Exported, folder: str, name: str) -> Iterator[tuple[str, object]]:
        """The document of an episode, and those of the files that it refers to."""
        waiting = [(one, name)]
        while waiting:
            current, name = waiting.pop(0)
            found: list[tuple[Exported, str]] = []
            yield f"{folder}{name}.json", self._document(current, name, found)
            waiting += found

    def _document(self, one: Exported, name: str, files: list[tuple[Exported, str]]) -> Row:
        """A document; what has to be a file of its own is added to `files`."""
        record = one.record
        embedded: list[Exported] = []
        refs: dict[int, list[Row]] = defaultdict(list)
        continued = paths = None
        for child in self._below.get(_id(one), ()):
            if record.source_format == NAME:
                paths = _paths(record) if paths is None else paths
                path = _file_of(child, paths)
                if path is None:
                    embedded.append(child)
                else:
                    files.append((child, path))
            elif child.record.relation == "continuation" and continued is None:
                continued = f"{name}.cont"
                files.append((child, continued))
            else:
                embedded.append(child)
                if child.record.parent_step_index is not None:
                    refs[child.record.parent_step_index].append({"trajectory_id": _id(child)})
        document = self._kept(one) if record.source_format == NAME else self._made(one)
        document["steps"] = steps_of(one, refs, self._losses)
        bill = {f"total_{name}": getattr(record, name) for name in _BILL[:2]} | {"total_cost_usd": record.cost}
        metrics = document.pop("final_metrics", {}) | {key: value for key, value in bill.items() if value is not None}
        if metrics:
            document["final_metrics"] = metrics
        if continued is not None:
            document["continued_trajectory_ref"] = f"{continued}.json"
        if embedded:
            inner = _in_order(embedded) if record.source_format == NAME else embedded
            document["subagent_trajectories"] = [self._document(child, name, files) for child in inner]
        document["extra"] = document.pop("extra")  # last, as a reader wants the steps
        return document

    def _kept(self, one: Exported) -> Row:
        """What a document that was read from ATIF had beside its steps."""
        record = one.record
        extra = dict(record.extra or {})
        called = self._called(one)
        if one is self._root and record.parent_episode_id is not None:
            related = ("parent_episode_id", "root_episode_id", "parent_step_index", "relation")
            called |= {name: getattr(record, name) for name in related if getattr(record, name) is not None}
        agent = extra.get("agent")
        agent = {"name": record.agent_id or "agent"} | (agent if isinstance(agent, dict) else {})
        about = {"model_name": record.policy, "tool_definitions": record.tools}
        kept = {key: value for key, value in extra.items() if key not in _NOT_KEPT}
        said, metrics = kept.get("extra"), extra.get("final_metrics")
        if extra.get("is_cut"):
            self._losses.add("that the document was cut")
        return (
            {"schema_version": record.source_version or _VERSION}
            | {key: value for key, value in kept.items() if key != "extra"}
            | {"agent": agent | {key: value for key, value in about.items() if value is not None}}
            | {"extra": (said if isinstance(said, dict) else {}) | {OURS: called | self._scores(one)}}
            | {"final_metrics": metrics if isinstance(metrics, dict) else {}}
        )

    def _made(self, one: Exported) -> Row:
        """What the document of an episode of another source has beside its steps."""
        record = one.record
        known = (*_HAVE_A_PLACE, *_BILL, *_NAMES, "source_uri")
        agent = {
            "name": record.agent_id or record.policy or "agent",
            "version": "unknown",
            "model_name": record.policy,
            "tool_definitions": [tool for tool in record.tools or () if isinstance(tool, dict)] or None,
            "extra": record.sampling,
        }
        version = {} if record.policy_version is None else {"policy_version": record.policy_version}
        return {
            "schema_version": _VERSION,
            "session_id": _id(self._root),
            "trajectory_id": _id(one),
            "agent": {key: value for key, value in agent.items() if value is not None},
            "extra": version | {OURS: self._called(one) | {"record": left_of(record, *known)} | self._scores(one)},
        }

    def _called(self, one: Exported) -> Row:
        names = {name: getattr(one.record, name) for name in _NAMES}
        return {"id": _id(one), "group_id": ids.to_text(one.episode.group_id)} | names

    def _scores(self, one: Exported) -> Row:
        """What was computed here, and what came with an episode and is no reward of the trial."""
        elsewhere = [score for _, score in one.came_with if one is not self._root or not is_reward(one, score)]
        is_own = one.record.source_format == NAME
        hidden = 0 if is_own else sum((score.scorer, score.step_index) == ("reward", None) for score in elsewhere)
        self._losses.add("scores called `reward` among a trial's rewards, where it is the return", hidden)
        scores = [
            {"scorer": score.scorer, "step_index": score.step_index, "value": score.value}
            for score in (*elsewhere, *one.computed)
        ]
        return {"scores": scores} if scores else {}


def _unmatched(record: EpisodeRecord) -> list[Row]:
    """The chat histories of a trial that are not those of its document."""
    left = (record.extra or {}).get("rollout_details") if record.source_format == NAME else None
    return left if isinstance(left, list) else []


def _sampled(step: StepRecord) -> list[int]:
    """The tokens that a step's metrics say were sampled."""
    if step.tokens is not None:
        return step.tokens.action_ids
    metrics = (step.extra or {}).get("metrics")
    sampled = metrics.get("completion_token_ids") if isinstance(metrics, dict) else None
    return sampled if isinstance(sampled, list) else []


def _file_of(child: Exported, paths: set[str]) -> str | None:
    """The name of the file of its own that a child had, without its ending; None if it was embedded."""
    extra = child.record.extra or {}
    agent = extra.get("agent")
    name = agent.get("name") if isinstance(agent, dict) else None
    called = (child.record.agent_id or "").removeprefix(f"{name}:")
    if child.record.relation == "continuation" or (called in paths and called != extra.get("trajectory_id")):
        return file_name(called)
    return None


def _paths(record: EpisodeRecord) -> set[str]:
    """Names of the files, without their endings, that an episode's messages refer to."""
    waiting: list[Any] = [record.initial_messages, record.final_observation]
    waiting += [part for step in record.steps for part in (step.context, step.extra)]
    found = set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            path = value.get("trajectory_path")
            found.add((name_in(path) or "").split(".json")[0] if isinstance(path, str) else "")
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return found


def _in_order(embedded: list[Exported]) -> list[Exported]:
    """Those that are called by their place in their places, the others around them."""
    placed = {}
    others = []
    for child in embedded:
        place = (child.record.agent_id or "").rpartition(":")[2]
        has_id = (child.record.extra or {}).get("trajectory_id") is not None
        if not has_id and place.isdecimal() and int(place) < len(embedded) and int(place) not in placed:
            placed[int(place)] = child
        else:
            others.append(child)
    return [placed.get(place) or others.pop(0) for place in range(len(embedded))]


def _number(agent_id: str | None) -> int:
    place = (agent_id or "").rpartition(":")[2]
    return int(place) if place.isdecimal() and len(place) < 9 else 0


def _id(one: Exported) -> str:
    return ids.to_text(one.episode.episode_id)


TARGET = Target(
    "atif",
    "ATIF trajectories in folders as Harbor writes them; its own come out as they went in",
    "tree",
    _files,
    holds=frozenset(("tokens", "advantages")),
)
