"""ATIF, the Agent Trajectory Interchange Format, bare or in the trial folders that Harbor writes around it.

.. code-block:: text

    document   schema_version ATIF-v1.0 to v1.8, agent {name, version, model_name, tool_definitions}, steps,
               session_id, trajectory_id, final_metrics, continued_trajectory_ref, subagent_trajectories, notes, extra
    step       step_id, source (system, user, agent), message (text or parts), timestamp, reasoning_content,
               tool_calls [{tool_call_id, function_name, arguments}], observation {results [{source_call_id, content,
               subagent_trajectory_ref}]}, metrics {tokens, cost, prompt_token_ids, completion_token_ids, logprobs},
               is_copied_context, llm_call_count, extra

A document is an episode, and each of its sub-agents another, embedded or in a file of its own; a continuation's file
too. They are called by the trial and by what their parents call them. A file that another one beside it refers to finds
its parent by the file's name. A decision is an agent's step. Its state is what came since the one before: the results
of its calls, and the steps of others. Copied steps are decisions that an earlier document holds, and are not trained
on; nor are steps of no LLM call (`llm_call_count` 0). One that hides several calls is one decision.

The rewards stand in the trial (`lake.formats.atif.trial`): each is a score, `reward` is the return too. A trial whose
agent wrote no trajectory is an episode of its outcome, with the tokens of `rollout_details` where there are any. Task
and run are the trial's (`task_name`, the job); the sibling number is a hash of the trial's id, because a trial does not
know which of its task's it is. Outside of a trial, `extra` may say (task_id, rollout_index, reward, policy_version);
else the session is the task, and the number is a hash of its ids and its first step. What our own export wrote says in
`extra.trajlake` what it is called; the rest of that is not read back.

Exact tokens are those of a step's metrics. Those of `rollout_details` are taken where its turns are as many as the
steps that have a call, and as long as the steps say; where steps have their own, they are a repetition.

Source: Harbor's RFC 0001 and the models of harbor 0.25.0; the older versions by the RFC's history.
"""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import msgspec

from lake.formats.atif import trial as harbor_trial
from lake.formats.atif.document import (
    OURS,
    Agent,
    Document,
    Totals,
    attach,
    chat_of,
    checked,
    complete,
    decisions_in,
    file_name,
    refs,
    without_ours,
)
from lake.formats.atif.trial import Trial
from lake.formats.base.documents import companion, with_parts
from lake.formats.base.fields import Scores, as_object, as_text, free_number, moment, number, sibling_number, whole
from lake.formats.base.format import Format, its_folder
from lake.formats.base.look import Look
from lake.formats.base.rows import Item, episode_text_id, items_of, rest
from lake.formats.base.source import Input
from lake.formats.chat.tokens import Lineage
from lake.records import EpisodeRecord, StepRecord

NAME = "atif"
_REFERENCE = re.compile(rb'"(?:continued_trajectory_ref|trajectory_path)"\s*:\s*"([^"]+)"')
_NEIGHBOURS = 10_000
"""Files of a folder that are looked through for references."""
_DEEPEST = 16
"""Parents of parents that are followed."""


class _Place(msgspec.Struct):
    """Where an episode stands among those of its trial."""

    agent_id: str
    parent: EpisodeRecord | None = None
    """With the parent's key; its steps may be missing."""
    parent_step: int | None = None
    root: EpisodeRecord | None = None
    relation: str | None = None


def recognise(look: Look) -> bool:
    """Whether a file holds ATIF documents, or the result of a trial."""
    if look.kind not in ("object", "lines", "array"):
        return False
    if harbor_trial.is_result(look.first):
        return True
    if any(str(value.get("schema_version")).startswith("ATIF") for value in look.objects):
        return True
    return look.has("schema_version") and harbor_trial.IS_ATIF.search(look.text) is not None


def no_trajectory(look: Look) -> str | None:
    """What a file beside trajectories is, and the results files of related tools."""
    return harbor_trial.no_trajectory(look)


def read(file: Input) -> Iterator[Item]:
    """Records and rejects of a file: documents with index 0, or lines from 1."""
    trial = harbor_trial.trial_around(file.path)
    for item, is_cut in with_parts(file, "steps"):
        yield from items_of(item, NAME, partial(_records, file=file, trial=trial, is_cut=is_cut))


def _records(value: Any, file: Input, trial: Trial | None, *, is_cut: bool) -> list[EpisodeRecord]:
    if harbor_trial.is_result(value) and "steps" not in value:
        return [record for found in harbor_trial.trials_of(value) for record in _outcomes(found, file)]
    document = checked(value)
    key, place = _called(document, file, trial)
    is_user = file.path.parent.name == "user-agent"
    if is_user:
        place.agent_id = f"user-agent:{document.agent.name}"
    key.rollout_index = free_number(file, key.rollout_index, key.run_id, key.task_id, place.agent_id)
    records = _family(document, value, key, place, file)
    main = records[0]
    if is_user:
        for record in records:
            for step in record.steps:
                step.trainable = False
    elif place.parent is None:
        _outcome(main, document, trial)
        _rollout_tokens(main, document, trial)
    if is_cut:
        main.status, main.extra = "aborted", (main.extra or {}) | {"is_cut": True}
    return records


# ---------------------------------------------------------------- what an episode is called


def _key(document: Document, trial: Trial | None) -> EpisodeRecord:
    """A record with the key of a trial's main trajectory, and nothing else."""
    extra = document.extra or {}
    named = [extra.get(name) for name in ("task_id", "task_name", "instance_id")]
    session = document.session_id or document.trajectory_id
    task = next((str(name) for name in named if isinstance(name, str | int) and str(name).strip()), session)
    ours = as_object(extra.get(OURS))
    index = next((i for said in (ours, extra) if (i := whole(said.get("rollout_index"))) is not None), None)
    if index is None:
        # Sessions are shared, and some tools give each the same name: what a rollout begins with belongs to it.
        first = document.steps[0] if document.steps else None
        begins = [document.session_id, document.trajectory_id, first and first.timestamp, first and first.message]
        index = sibling_number((trial.name if trial is not None else None) or json.dumps(begins))
    return EpisodeRecord(
        task_id=as_text(ours.get("task_id")) or (trial and trial.task) or task or document.agent.name,
        rollout_index=index,
        run_id=as_text(ours.get("run_id")) or (trial.run if trial is not None else None),
        agent_id=document.agent.name,
        steps=[],
    )


def _renamed(key: EpisodeRecord, agent_id: str) -> EpisodeRecord:
    return msgspec.structs.replace(key, agent_id=agent_id)


class _Referrer(msgspec.Struct):
    """A document that refers to a file beside it."""

    path: Path
    document: Document
    relation: str
    step: int | None
    """The decision that the file came out of."""


def _called(document: Document, file: Input, trial: Trial | None) -> tuple[EpisodeRecord, _Place]:
    """The key of a document's trial, and the document's place among those that lie beside it."""
    above: list[_Referrer] = []
    found = _referrer(file.path)
    while found is not None and len(above) < _DEEPEST and found.path not in [file.path, *(r.path for r in above)]:
        above.append(found)
        found = _referrer(found.path)
    if not above:
        is_later = whole((document.agent.extra or {}).get("continuation_index"))
        name = as_text(as_object((document.extra or {}).get(OURS)).get("agent_id")) or document.agent.name
        return _key(document, trial), _Place(name, relation="continuation" if is_later else None)
    key = _key(above[-1].document, trial)
    parent = key if len(above) == 1 else _renamed(key, _file_agent(above[0].path, above[0].document))
    return key, _Place(_file_agent(file.path, document), parent, above[0].step, key, above[0].relation)


def _referrer(path: Path) -> _Referrer | None:
    """The document beside a file that refers to it by its name."""
    try:
        neighbours = _references(path.parent, path.parent.stat().st_mtime_ns).get(path.name, ())
    except OSError:
        return None
    for neighbour in neighbours:
        try:
            document = checked(companion(neighbour)[0])
        except (msgspec.MsgspecError, ValueError, RecursionError):
            continue
        if neighbour.name == path.name:
            continue
        if file_name(document.continued_trajectory_ref) == path.name:
            return _Referrer(neighbour, document, "continuation", max(decisions_in(document.steps) - 1, 0))
        for index, ref in refs(document.steps):
            if file_name(ref.trajectory_path) == path.name:
                return _Referrer(neighbour, document, "subagent", index)
    return None


@lru_cache(maxsize=16)
def _references(folder: Path, changed: int) -> dict[str, list[Path]]:
    """Names of the files that documents of a folder refer to, and those documents. `changed`: when the folder was."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.json"))[:_NEIGHBOURS]:
        with suppress(OSError):
            for ref in set(_REFERENCE.findall(path.read_bytes())):
                found.setdefault(file_name(ref.decode("utf-8", "replace")) or "", []).append(path)
    return found


def _file_agent(path: Path, document: Document) -> str:
    return f"{document.agent.name}:{path.name.split('.json')[0]}"


# ---------------------------------------------------------------- what it holds


def _family(
    document: Document, value: dict[str, Any], key: EpisodeRecord, place: _Place, file: Input
) -> list[EpisodeRecord]:
    """The episode of a document, and those of the sub-agents embedded in it."""
    record = _episode(document, value, key, place, file)
    records = [record]
    starts = {ref.trajectory_id: index for index, ref in reversed(list(refs(document.steps)))}
    names: set[str] = set()
    for number_, inner in enumerate(document.subagent_trajectories or ()):
        name = f"{inner.agent.name}:{inner.trajectory_id or number_}"
        name = f"{name}#{number_}" if name in names else name
        names.add(name)
        below = _Place(
            name if place.parent is None else f"{place.agent_id}/{name}",
            parent=_renamed(key, place.agent_id),
            parent_step=starts.get(inner.trajectory_id) if inner.trajectory_id else None,
            root=place.root or _renamed(key, place.agent_id),
            relation="subagent",
        )
        records += _family(inner, value["subagent_trajectories"][number_], key, below, file)
    return records


def _episode(
    document: Document, value: dict[str, Any], key: EpisodeRecord, place: _Place, file: Input
) -> EpisodeRecord:
    chat, origins = chat_of(document, value)
    lineage = Lineage()
    for index, (step, origin) in enumerate(zip(chat.steps, origins, strict=True)):
        complete(step, document.steps[origin], value["steps"][origin], lineage, index)
    agent, totals = document.agent, document.final_metrics or Totals()
    times = [time for step in document.steps if (time := moment(step.timestamp)) is not None]
    extra = document.extra or {}
    known = ("schema_version", "steps", "agent", "final_metrics", "subagent_trajectories")
    kept = without_ours(rest(value, *known) or {})
    kept["agent"] = rest(value["agent"], "model_name", "tool_definitions")
    sums = ("total_prompt_tokens", "total_completion_tokens", "total_cost_usd")
    if metrics := rest(value.get("final_metrics") or {}, *sums):
        kept["final_metrics"] = metrics
    record = EpisodeRecord(
        task_id=key.task_id,
        rollout_index=key.rollout_index,
        run_id=key.run_id,
        agent_id=place.agent_id,
        policy=agent.model_name,
        policy_version=whole(extra.get("policy_version")),
        steps=chat.steps,
        initial_messages=chat.initial_messages,
        final_observation=chat.final_observation,
        tools=agent.tool_definitions,
        sampling={k: v for k in ("temperature", "top_p", "llm_kwargs") if (v := (agent.extra or {}).get(k))} or None,
        started_at=min(times, default=None),
        ended_at=max(times, default=None),
        prompt_tokens=totals.total_prompt_tokens,
        completion_tokens=totals.total_completion_tokens,
        cost=totals.total_cost_usd,
        source_version=document.schema_version,
        relation=place.relation,
        extra=kept,
    )
    if place.parent is not None and place.root is not None:
        record.parent_episode_id = _id(place.parent, file)
        record.root_episode_id = _id(place.root, file)
        record.parent_step_index = place.parent_step
    elif (ours := as_object(extra.get(OURS))).get("relation") is not None:
        # Our own export wrote it without its parent.
        record.relation, record.parent_step_index = as_text(ours["relation"]), whole(ours.get("parent_step_index"))
        record.parent_episode_id = as_text(ours.get("parent_episode_id"))
        record.root_episode_id = as_text(ours.get("root_episode_id"))
    return record


def _id(key: EpisodeRecord, file: Input) -> str:
    return episode_text_id(msgspec.structs.replace(key, source_format=NAME), file)


# ---------------------------------------------------------------- what the trial adds


def _outcome(record: EpisodeRecord, document: Document, trial: Trial | None) -> None:
    extra = document.extra or {}
    rewards = trial.rewards if trial is not None else {}
    if not rewards and number(extra.get("reward")) is not None:
        rewards = {"reward": extra["reward"]}
    scores = Scores()
    for name, reward in rewards.items():
        scores.add(name, reward)
    record.scores = scores.records
    record.env_return = next((score.value for score in scores.records if score.scorer == "reward"), None)
    if trial is not None:
        trial.tell(record)
        if kept := trial.extra():
            record.extra = (record.extra or {}) | {"trial": kept}


def _rollout_tokens(record: EpisodeRecord, document: Document, trial: Trial | None) -> None:
    """Give the decisions the tokens of the trial's rollout details; what they cannot be matched with is kept."""
    details = trial.rollout_details if trial is not None else []
    if not details:
        return
    said = [step for step in document.steps if step.source == "agent"]
    calls = [
        index for index, step in enumerate(said) if not step.is_copied_context and step.llm_call_count in (None, 1)
    ]
    own = [step.metrics.completion_token_ids for step in said if step.metrics and step.metrics.completion_token_ids]
    is_repetition = bool(own) and own == details[0].get("completion_token_ids")
    hides = any((step.llm_call_count or 0) > 1 for step in said)
    if not is_repetition and not own and not hides:
        is_repetition = attach(record, details[0], calls)
    if left := details[1:] if is_repetition else details:
        record.extra = (record.extra or {}) | {"rollout_details": left}


def _outcomes(trial: Trial, file: Input) -> Iterator[EpisodeRecord]:
    """A trial without a trajectory: its outcome, and what its agents sampled if the tokens are known."""
    agent = trial.result.get("agent_info")
    name = agent.get("name") if isinstance(agent, dict) else None
    document = Document("", Agent(name if isinstance(name, str) else "agent"), [])
    key = _key(document, trial)
    for number_, detail in enumerate(trial.rollout_details or [{}]):
        turns = detail.get("prompt_token_ids")
        steps = [StepRecord(state=None, action="") for _ in turns] if isinstance(turns, list) else []
        record = msgspec.structs.replace(key, steps=steps)
        if steps and not attach(record, detail, list(range(len(steps)))):
            record.steps, record.extra = [], {"rollout_details": [detail]}
        if number_ == 0:
            _outcome(record, document, trial)
        else:
            record.agent_id, record.relation = f"{key.agent_id}:{number_}", "subagent"
            record.parent_episode_id = record.root_episode_id = _id(key, file)
        yield record


FORMAT = Format(
    NAME, "ATIF trajectories (Harbor)", recognise, read, no_trajectory, is_whole=True, run_folder=its_folder
)
