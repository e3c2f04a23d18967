"""ATIF 1.8: a folder per episode, in the layout of Harbor's trials.

.. code-block:: text

    <run>/<trial>__<episode>/agent/trajectory.json   the document, with embedded sub-agents; continuations are separate
                                                     files next to it
    <run>/<trial>__<episode>/result.json             task, end, cost and rewards: `reward` is the score of the export;
                                                     the others are the recorded scores of the episode

Exact tokens are in `metrics`. Data without an ATIF field is in `extra.trajlake`, of a document (identity and further
data of the episode) or a step (advantage, reward, ...). Reading uses only the identity from there.

An episode that was read from ATIF gives the same records when it is read again, because the stored data of its document
and its trial's result.json is restored. A document outside a trial gets no result.json; its rewards are in
verifier/reward.json unless the document holds them. A trial without a document has only the result. Each step of a
multi-step trial is a separate trial here.

For an episode of another source, a tool's answer is a result of the step that called the tool. An assistant message
that is not a decision of the episode is a step that is marked as copied. The trial's status is the exception that
Harbor would report, at the episode's end.

`lake.formats.atif` has the specification. Source: the models of harbor 0.25.0.
"""

import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import Any

import msgspec

from lake import ids
from lake.export.target import (
    Choices,
    Exported,
    Losses,
    Row,
    Target,
    is_decision,
    list_final_messages,
    list_new_messages,
    parse_call,
    restore_or_convert,
    to_file_name,
)
from lake.formats.atif import EXPORT_KEY, NAME, get_file_name
from lake.formats.base.fields import parse_number
from lake.formats.chat.messages import join_text
from lake.records import EpisodeRecord, ScoreRecord, StepRecord, TokensRecord

_VERSION = "ATIF-v1.8"
_NAMESPACE = uuid.UUID("0f3b6d1e-5f0b-4a1c-8b43-3f1d2c9e7a55")
_EXCEPTIONS = {"truncated": "AgentTimeoutError", "aborted": "CancelledError", "failed": "RuntimeError"}
_MAX_DEPTH = 16
"""Maximum depth of nested sub-agents; deeper ones are separate trials."""
_IMAGES = {".png": "image/png", ".gif": "image/gif", ".webp": "image/webp", ".jpg": "image/jpeg", ".jpeg": "image/jpeg"}
_TEXT_TYPES = frozenset(("text", "input_text", "output_text"))
_SOURCES = {"system": "system", "developer": "system"}
_ROLES = frozenset(("system", "user"))
_RESULT_KEYS = frozenset(("role", "name", "tool_call_id", "content"))
"""Keys of a message that a result has under other names."""
_STEP_KEYS = frozenset(("role", "content", "tool_calls", "tool_call_extra", "observation"))
"""Keys of a message that a step has under other names."""
_IDENTITY = ("run_id", "task_id", "rollout_index", "agent_id")
_COSTS = ("prompt_tokens", "completion_tokens", "cost")
_WRITTEN_STEP_FIELDS = frozenset(
    ("state", "action", "context", "reasoning", "tool_calls", "is_copied_context", "model", "started_at")
) | frozenset(("prompt_tokens", "completion_tokens", "cost", "tokens"))
_WRITTEN_EPISODE_FIELDS = (
    *("steps", "initial_messages", "final_observation", "tools", "spans", "scores", "sampling", "policy"),
    *(*_COSTS, *_IDENTITY, "source_uri"),
)
_NOT_IN_DOCUMENT = ("agent", "final_metrics", "trial", "rollout_details", "is_cut")
"""Keys of a stored ATIF episode's `extra` that are not copied to its document."""
_REBUILT_KEYS = ("step", "agent_result", "verifier_result", "unreadable")
"""Keys of a stored trial that its result holds in other places."""


def _convert(group: Sequence[Exported], _: Choices, losses: Losses) -> Iterator[Row]:
    for family in _split_families(group):
        yield from restore_or_convert(_build_files, family, losses)


def _build_files(family: Sequence[Exported], losses: Losses) -> list[Row]:
    """Return the files of an episode and its descendants."""
    root, *descendants = family
    children: dict[str, list[Exported]] = defaultdict(list)
    for exported in descendants:
        children[exported.record.parent_episode_id or ""].append(exported)
    return [
        {"path": path, "text": msgspec.json.format(msgspec.json.encode(content), indent=2).decode(), "id": _id(root)}
        for path, content in _Trial(root, children, losses).files()
    ]


def _split_families(group: Sequence[Exported]) -> Iterator[list[Exported]]:
    """Yield each episode without a parent in the group, followed by its descendants."""
    by_id = {_id(exported): exported for exported in group}
    children: dict[str, list[Exported]] = defaultdict(list)
    roots = []
    for exported in group:
        parent = exported.record.parent_episode_id
        if parent in by_id and exported.record.relation in ("subagent", "continuation"):
            children[parent].append(exported)
        else:
            roots.append(exported)
    visited: set[str] = set()
    # Episodes that no root reaches form cycles, or are nested too deeply: the first of them becomes a root.
    for root in (*roots, *group):
        family: list[Exported] = []
        queue = [(root, 0)]
        while queue:
            exported, depth = queue.pop(0)
            if _id(exported) not in visited:
                visited.add(_id(exported))
                family.append(exported)
                queue += [(child, depth + 1) for child in children[_id(exported)] if depth < _MAX_DEPTH]
        if family:
            yield family


class _Trial:
    """The files of an episode and its descendants."""

    def __init__(self, root: Exported, children: dict[str, list[Exported]], losses: Losses) -> None:
        self._root = root
        self._children = children
        self._losses = losses
        record = root.record
        name = _get_trial(record).get("trial_name") if record.source_format == NAME else None
        self.name = f"{to_file_name(name if isinstance(name, str) else record.task_id)}__{_id(root)}"
        self._folder = f"{to_file_name(record.run_id or 'run')}/{self.name}"
        step_name = _as_object(_get_trial(record).get("step")).get("step_name")
        self._step_folder = self._folder
        if isinstance(step_name, str):
            self._step_folder += f"/steps/{to_file_name(step_name)}"

    def files(self) -> Iterator[tuple[str, object]]:
        """Yield the path and content of each file."""
        root, record = self._root, self._root.record
        is_own = record.source_format == NAME
        if is_own and "agent" not in (record.extra or {}):  # read from a result without a document
            siblings = sorted(self._children.get(_id(root), ()), key=lambda e: _parse_position(e.record.agent_id))
            details = [
                history
                for exported in (root, *siblings)
                for history in _build_history(exported.record) or _get_further_histories(exported.record)
            ]
            yield f"{self._folder}/result.json", _build_result(root, self.name, details)
            return
        if is_own or any(map(is_decision, record.steps)):
            is_user = is_own and (record.agent_id or "").startswith("user-agent:")
            queue = [(root, "trajectory")]
            while queue:  # a document, then the separate files that it refers to
                exported, name = queue.pop(0)
                files: list[tuple[Exported, str]] = []
                folder = f"{self._step_folder}/{'user-agent' if is_user else 'agent'}"
                yield f"{folder}/{name}.json", self._build_document(exported, name, files)
                queue += files
            if is_user:
                return
        if (content := _build_result(root, self.name, self._build_rollout_details())) is not None:
            yield f"{self._folder}/result.json", content
            return
        # Without a result, the document may hold the rewards.
        rewards, document_extra = _build_rewards(root), _as_object((record.extra or {}).get("extra"))
        if rewards and rewards != {"reward": parse_number(document_extra.get("reward"))}:
            yield f"{self._step_folder}/verifier/reward.json", rewards

    def _build_rollout_details(self) -> list[Row]:
        """Return chat histories other than the document's, after the document's if readers could confuse them."""
        record = self._root.record
        histories = _get_further_histories(record)
        if _has_tokens_in_trial(record):
            return [*_build_history(record), *histories]
        token_ids = [sampled for step in record.steps if (sampled := _get_sampled_tokens(step))]
        return [{"completion_token_ids": token_ids}, *histories] if token_ids and histories else histories

    def _build_document(self, exported: Exported, name: str, files: list[tuple[Exported, str]]) -> Row:
        """Return a document; append descendants that need a separate file to `files`."""
        record = exported.record
        is_own = record.source_format == NAME
        embedded: list[Exported] = []
        refs: dict[int, list[Row]] = defaultdict(list)
        continuation = paths = None
        for child in self._children.get(_id(exported), ()):
            if is_own:
                paths = _find_referenced_paths(record) if paths is None else paths
                path = _find_separate_file(child, paths)
                if path is None:
                    embedded.append(child)
                else:
                    files.append((child, path))
            elif child.record.relation == "continuation" and continuation is None:
                continuation = f"{name}.cont"
                files.append((child, continuation))
            else:
                embedded.append(child)
                if child.record.parent_step_index is not None:
                    refs[child.record.parent_step_index].append({"trajectory_id": _id(child)})
        document = self._restore_head(exported) if is_own else self._convert_head(exported)
        document["steps"] = (_RestoredSteps if is_own else _ConvertedSteps)(exported, refs, self._losses).steps
        costs = {f"total_{name}": getattr(record, name) for name in _COSTS[:2]} | {"total_cost_usd": record.cost}
        metrics = document.pop("final_metrics", {}) | _drop_nulls(costs)
        if metrics:
            document["final_metrics"] = metrics
        if continuation is not None:
            document["continued_trajectory_ref"] = f"{continuation}.json"
        if embedded:
            ordered = _sort_by_position(embedded) if is_own else embedded
            document["subagent_trajectories"] = [self._build_document(child, name, files) for child in ordered]
        document["extra"] = document.pop("extra")  # last, after the steps
        return document

    def _restore_head(self, exported: Exported) -> Row:
        """Return the fields other than steps of a document that was read from ATIF."""
        record = exported.record
        extra = dict(record.extra or {})
        identity = self._build_identity(exported)
        if exported is self._root and record.parent_episode_id is not None:
            names = ("parent_episode_id", "root_episode_id", "parent_step_index", "relation")
            identity |= _drop_nulls({name: getattr(record, name) for name in names})
        agent = {"name": record.agent_id or "agent"} | _as_object(extra.get("agent"))
        model = {"model_name": record.policy, "tool_definitions": record.tools}
        original = {key: field for key, field in extra.items() if key not in _NOT_IN_DOCUMENT}
        document_extra = _as_object(original.pop("extra", None))
        if extra.get("is_cut"):
            self._losses.add("that the document was cut")
        return (
            {"schema_version": record.source_version or _VERSION}
            | original
            | {"agent": agent | _drop_nulls(model)}
            | {"extra": document_extra | {EXPORT_KEY: identity | self._build_scores(exported)}}
            | {"final_metrics": _as_object(extra.get("final_metrics"))}
        )

    def _convert_head(self, exported: Exported) -> Row:
        """Return the fields other than steps of a document from another source."""
        record = exported.record
        agent = {
            "name": record.agent_id or record.policy or "agent",
            "version": "unknown",
            "model_name": record.policy,
            "tool_definitions": [tool for tool in record.tools or () if isinstance(tool, dict)] or None,
            "extra": record.sampling,
        }
        version = {} if record.policy_version is None else {"policy_version": record.policy_version}
        further = {"record": _encode_further_fields(record, *_WRITTEN_EPISODE_FIELDS)}
        notes = self._build_identity(exported) | further | self._build_scores(exported)
        return {
            "schema_version": _VERSION,
            "session_id": _id(self._root),
            "trajectory_id": _id(exported),
            "agent": _drop_nulls(agent),
            "extra": version | {EXPORT_KEY: notes},
        }

    def _build_identity(self, exported: Exported) -> Row:
        names = {name: getattr(exported.record, name) for name in _IDENTITY}
        return {"id": _id(exported), "group_id": ids.to_text(exported.episode.group_id)} | names

    def _build_scores(self, exported: Exported) -> Row:
        """Return the computed scores, and recorded scores that are not among the trial's rewards."""
        is_root = exported is self._root
        recorded = [score for _, score in exported.source_scores if not is_root or not _is_reward(exported, score)]
        is_own = exported.record.source_format == NAME
        hidden = 0 if is_own else sum((score.scorer, score.step_index) == ("reward", None) for score in recorded)
        self._losses.add("scores called `reward` among a trial's rewards, where it is the return", hidden)
        scores = [
            {"scorer": score.scorer, "step_index": score.step_index, "value": score.value}
            for score in (*recorded, *exported.computed_scores)
        ]
        return {"scores": scores} if scores else {}


class _TokenPrompts:
    """Builds the full prompt of each decision with known tokens."""

    def __init__(self) -> None:
        self._ends: dict[int, list[int]] = {}

    def build(self, index: int, tokens: TokensRecord) -> list[int]:
        """Return all tokens before an action. Call it for the steps in order."""
        prefix = tokens.prefix_step_index
        start = prefix if isinstance(prefix, int) else index - 1 if prefix is not None and index else None
        prompt = [*(self._ends[start] if start is not None else ()), *tokens.context_ids]
        self._ends[index] = [*prompt, *tokens.action_ids]
        return prompt


class _StepWriter:
    """Builds the steps of a document; `refs`: references to sub-agents by the step that started them."""

    def __init__(self, exported: Exported, refs: dict[int, list[Row]], losses: Losses) -> None:
        self.steps: list[Row] = []
        self._losses = losses
        self._prompts = _TokenPrompts()
        record = exported.record
        self._has_tokens = not _has_tokens_in_trial(record)
        for index, (step, since) in enumerate(zip(record.steps, list_new_messages(record), strict=True)):
            self._add_messages(since)
            if step.state is not None or is_decision(step):
                credit = exported.step_credit.get(index)
                notes = {} if credit is None or credit.advantage is None else {"advantage": credit.advantage}
                self._add_step(self._build_decision(index, step, notes))
            for ref in refs.get(index, ()) if self.steps else ():
                self._add_result({"subagent_trajectory_ref": [ref]})
        self._add_messages(list_final_messages(record))

    def _add_messages(self, messages: Sequence[Row]) -> None:
        raise NotImplementedError

    def _build_decision(self, index: int, step: StepRecord, notes: Row) -> Row:
        raise NotImplementedError

    def _add_step(self, step: Row) -> None:
        self.steps.append(_drop_nulls({"step_id": len(self.steps) + 1} | step))

    def _add_result(self, answer: Row) -> None:
        """Add a result to the last step."""
        self.steps[-1].setdefault("observation", {"results": []})["results"].append(answer)

    def _build_metrics(self, index: int, step: StepRecord, original: Row) -> Row | None:
        counts = {
            "prompt_tokens": step.prompt_tokens,
            "completion_tokens": step.completion_tokens,
            "cost_usd": step.cost,
        }
        metrics = original | _drop_nulls(counts)
        if (tokens := step.tokens) is not None and self._has_tokens:
            metrics["prompt_token_ids"] = self._prompts.build(index, tokens)
            metrics["completion_token_ids"] = tokens.action_ids
            if tokens.action_logprobs is not None:
                metrics["logprobs"] = tokens.action_logprobs
        return metrics or None


class _RestoredSteps(_StepWriter):
    """Steps of an episode that was read from ATIF.

    Its messages are what `lake.formats.atif` makes of steps and results, and they are converted back key by key. A user
    message may have been a step or a result that answers no call; reading gives the same for both.
    """

    def _add_messages(self, messages: Sequence[Row]) -> None:
        last_step = self.steps[-1] if self.steps else {}
        call_ids = [call.get("tool_call_id") for call in last_step.get("tool_calls", ())]
        answers = [
            index
            for index, message in enumerate(messages)
            if message["role"] == "tool" and message.get("tool_call_id") in call_ids
        ]
        last_answer = answers[-1] if answers else -1
        for index, message in enumerate(messages):
            last_step = self.steps[-1] if self.steps else {}
            is_result = message["role"] == "tool"
            if message["role"] == "user":  # steps of this document have times, results have none
                is_timed = last_step.get("source") == "agent" and "timestamp" in last_step
                is_result = is_timed and not message.keys() & {"timestamp", "step_id"}
            if self.steps and (index <= last_answer or is_result):
                answer = {key: field for key, field in message.items() if key not in _RESULT_KEYS}
                answer["content"] = message.get("content")
                if message["role"] == "tool":
                    answer = {"source_call_id": message.get("tool_call_id")} | answer
                self._add_result(_drop_nulls(answer))
            else:
                self._add_step(self._build_step(message, message["role"] if message["role"] in _ROLES else "user"))

    def _build_step(self, message: Row, source: str) -> Row:
        step = {"source": source, "message": message.get("content")}
        step |= {key: field for key, field in message.items() if key not in _STEP_KEYS}
        if (calls := message.get("tool_calls")) is not None:
            extras = message.get("tool_call_extra") or {}
            step["tool_calls"] = [_restore_call(call, extras.get(str(index))) for index, call in enumerate(calls)]
        if refs := message.get("observation"):
            step["observation"] = {"results": list(refs)}
        return step

    def _build_decision(self, index: int, step: StepRecord, notes: Row) -> Row:
        extra = dict(step.extra or {})
        metrics = self._build_metrics(index, step, extra.pop("metrics", {}))
        extra.pop("rollout_details", None)  # the trial holds them
        message = {"content": step.action, "tool_calls": step.tool_calls} | extra
        decision = self._build_step(message, "agent")
        decision.setdefault("timestamp", _format_time(step))
        if notes:
            decision["extra"] = decision.get("extra", {}) | {EXPORT_KEY: notes}
        if step.is_copied_context:
            decision["is_copied_context"] = True
        return decision | {"model_name": step.model, "reasoning_content": step.reasoning, "metrics": metrics}


class _ConvertedSteps(_StepWriter):
    """Steps of an episode from another source."""

    def _add_messages(self, messages: Sequence[Row]) -> None:
        for message in messages:
            role, content = message["role"], self._convert_content(message.get("content"))
            if role == "assistant":
                calls = self._convert_calls(message.get("tool_calls"))
                copied = {"reasoning_content": message.get("reasoning_content"), "is_copied_context": True}
                self._add_step({"source": "agent", "message": content, "tool_calls": calls} | copied)
            elif role == "tool" and self.steps and self.steps[-1]["source"] == "agent":
                self._add_result(self._convert_answer(message, content))
            else:
                extra = {} if role in ("system", "user") else {"role": role}
                extra |= {key: message[key] for key in ("tool_call_id", "name") if message.get(key) is not None}
                step = {"source": _SOURCES.get(role, "user"), "message": content}
                self._add_step(step | ({"extra": {EXPORT_KEY: extra}} if extra else {}))

    def _convert_answer(self, message: Row, content: Any) -> Row:
        """Return a tool's answer as the result of the call that it names, or else of the first unanswered call."""
        last_step = self.steps[-1]
        call_ids = [call["tool_call_id"] for call in last_step.get("tool_calls", ())]
        results_so_far = last_step.get("observation", {}).get("results", ())
        answered = {answer.get("source_call_id") for answer in results_so_far}
        named_id = message.get("tool_call_id")
        call_id = named_id if named_id in call_ids else None
        if named_id is None:
            call_id = next((open_id for open_id in call_ids if open_id not in answered), None)
        answer: Row = {"content": content} if call_id is None else {"source_call_id": call_id, "content": content}
        extra = {} if call_id is not None or named_id is None else {"tool_call_id": named_id}
        if message.get("is_error"):
            extra["is_error"] = True
        return answer | ({"extra": {EXPORT_KEY: extra}} if extra else {})

    def _build_decision(self, index: int, step: StepRecord, notes: Row) -> Row:
        extra = dict(step.extra or {})
        content = self._convert_content(extra.pop("content", step.action))
        fields = {name: getattr(step, name) for name in step.__struct_fields__ if name not in _WRITTEN_STEP_FIELDS}
        further = StepRecord(state="", action="", **(fields | {"extra": extra or None}))
        notes = notes | _encode_further_fields(further, "state", "action")
        if step.tokens is not None:
            written = ("context_ids", "action_ids", "action_logprobs", "prefix_step_index")
            token_fields = _encode_further_fields(step.tokens, *written)
            notes |= {"tokens": token_fields} if token_fields else {}
        return {
            "source": "agent",
            "timestamp": _format_time(step),
            "model_name": step.model,
            "message": content,
            "reasoning_content": step.reasoning,
            "tool_calls": self._convert_calls(step.tool_calls),
            "metrics": self._build_metrics(index, step, {}),
            "is_copied_context": step.is_copied_context or None,
            "extra": {EXPORT_KEY: notes} if notes else None,
        }

    def _convert_calls(self, sources: Sequence[Any] | None) -> list[Row] | None:
        calls = []
        for index, source in enumerate(sources or ()):
            call = parse_call(source)
            arguments = call.arguments if isinstance(call.arguments, dict) else {"value": call.arguments}
            call_id = call.id if call.id is not None else f"call-{len(self.steps) + 1}-{index}"
            calls.append({"tool_call_id": call_id, "function_name": call.name or "unknown", "arguments": arguments})
        return calls or None

    def _convert_content(self, content: Any) -> Any:
        """Return content as text, or as text and image blocks if there is an image."""
        if not isinstance(content, list):
            return content or ""
        blocks: list[Row] = []
        for block in content:
            if isinstance(block, str):
                blocks.append({"type": "text", "text": block})
            elif isinstance(block, dict) and (image := _convert_image(block)) is not None:
                blocks.append(image)
            elif isinstance(block, dict) and block.get("type") in _TEXT_TYPES and isinstance(block.get("text"), str):
                blocks.append({"type": "text", "text": block["text"]})
            else:
                self._losses.add("parts that are neither text nor images")
        return blocks if any(block["type"] == "image" for block in blocks) else join_text(blocks, "\n")


def _restore_call(source: Any, extra: Any) -> Row:
    call = parse_call(source)
    function = source.get("function", {}) if isinstance(source, dict) else {}
    has_arguments = "arguments" in function
    arguments = function["arguments"] if has_arguments else None
    name = call.name or ""
    return _drop_nulls({"tool_call_id": call.id, "function_name": name, "arguments": arguments, "extra": extra})


def _convert_image(block: Row) -> Row | None:
    """Return an ATIF image: its type and its URL, which may be a data URL; None if the block is not an image."""
    image, source = block.get("image_url"), block.get("source")
    url = image.get("url") if isinstance(image, dict) else image
    if isinstance(source, dict) and isinstance(source.get("data"), str):
        url = f"data:{source.get('media_type')};base64,{source['data']}"
    if not isinstance(url, str):
        return None
    kind = url[5:].partition(";")[0] if url.startswith("data:") else _IMAGES.get(PurePosixPath(url).suffix.lower())
    return {"type": "image", "source": {"media_type": kind, "path": url}} if kind in _IMAGES.values() else None


def _build_result(exported: Exported, trial_name: str, details: list[Row]) -> Row | None:
    """Return the result.json of an episode's trial; None if it was read without one."""
    record = exported.record
    rewards = _build_rewards(exported)
    costs: Row = {"n_input_tokens": record.prompt_tokens, "n_output_tokens": record.completion_tokens}
    costs = _drop_nulls(costs | {"cost_usd": record.cost, "rollout_details": details or None})
    verifier = {"rewards": rewards} if rewards else None
    times = {"started_at": record.started_at, "finished_at": record.ended_at}
    if record.source_format != NAME:
        exception = None
        if (kind := _EXCEPTIONS.get(record.status)) is not None:
            exception = {
                "exception_type": kind,
                "exception_message": record.error or record.stop_reason or record.status,
                "exception_traceback": "",
                "occurred_at": record.ended_at or datetime.fromtimestamp(0, UTC),
            }
        outcome = {"agent_result": costs, "verifier_result": verifier, "exception_info": exception}
        return _convert_trial(exported, trial_name) | outcome | times
    trial = _get_trial(record)
    original = {key: field for key, field in trial.items() if key not in _REBUILT_KEYS}
    if not original:
        return None
    rebuilt: Row = {"agent_result": _as_object(trial.get("agent_result")) | costs, "verifier_result": verifier}
    task = record.task_id
    if isinstance(step := trial.get("step"), dict):
        task = task.removesuffix(f"/{step.get('step_name')}")
        rebuilt = {"step_results": [step | rebuilt], "verifier_result": trial.get("verifier_result")}
    return {"trial_name": None, "task_name": task, "source": record.environment} | original | rebuilt | times


def _convert_trial(exported: Exported, trial_name: str) -> Row:
    """Return the fields that Harbor requires of a trial, for an episode of another source."""
    record = exported.record
    model = {"name": record.policy, "provider": None} if record.policy is not None else None
    task = {"path": record.task_id}
    return {
        "id": str(uuid.uuid5(_NAMESPACE, _id(exported))),
        "task_name": record.task_id,
        "trial_name": trial_name,
        "trial_uri": f"trajlake:{_id(exported)}",
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


def _build_rewards(exported: Exported) -> Row:
    """Return the score of the export and the recorded scores of the whole episode."""
    rewards: Row = {}
    if exported.record.source_format != NAME and exported.score is not None:
        rewards["reward"] = exported.score
    for _, score in exported.source_scores:
        if _is_reward(exported, score):
            reward = score.value if score.value is not None else (score.metrics or {}).get("value")
            rewards.setdefault(score.scorer, reward)
    return rewards


def _is_reward(exported: Exported, score: ScoreRecord) -> bool:
    """Return whether a recorded score belongs to the trial's rewards, which Harbor requires to be numbers.

    Rewards that were read from a trial are restored with any value. For other sources, `reward` is the score of the
    export.
    """
    is_own = exported.record.source_format == NAME
    return score.step_index is None and (is_own or (score.value is not None and score.scorer != "reward"))


def _build_history(record: EpisodeRecord) -> list[Row]:
    """Return the exact tokens of an episode as one chat history of its trial; an empty list without tokens."""
    prompts, turns = _TokenPrompts(), []
    for index, step in enumerate(record.steps):
        if step.tokens is not None:
            further = _as_object((step.extra or {}).get("rollout_details"))
            turns.append((prompts.build(index, step.tokens), step.tokens, further))
    if not turns:
        return []
    history: Row = {
        "prompt_token_ids": [prompt for prompt, _, _ in turns],
        "completion_token_ids": [tokens.action_ids for _, tokens, _ in turns],
    }
    if all(tokens.action_logprobs is not None for _, tokens, _ in turns):
        history["logprobs"] = [tokens.action_logprobs for _, tokens, _ in turns]
    if names := dict.fromkeys(name for _, _, further in turns for name in further):
        history["extra"] = {name: [further.get(name) for _, _, further in turns] for name in names}
    return [history]


def _has_tokens_in_trial(record: EpisodeRecord) -> bool:
    """Return whether an episode's tokens came from a trial's result with data that only the result can hold."""
    return record.source_format == NAME and any((step.extra or {}).get("rollout_details") for step in record.steps)


def _get_further_histories(record: EpisodeRecord) -> list[Row]:
    """Return the stored chat histories of a trial that are not the document's."""
    histories = (record.extra or {}).get("rollout_details") if record.source_format == NAME else None
    return histories if isinstance(histories, list) else []


def _get_sampled_tokens(step: StepRecord) -> list[int]:
    """Return the sampled tokens of a step, from its tokens or its stored metrics."""
    if step.tokens is not None:
        return step.tokens.action_ids
    sampled = _as_object((step.extra or {}).get("metrics")).get("completion_token_ids")
    return sampled if isinstance(sampled, list) else []


def _find_separate_file(child: Exported, paths: set[str]) -> str | None:
    """Return the name, without ending, of a child's separate file; None if it was embedded."""
    extra = child.record.extra or {}
    name = (child.record.agent_id or "").removeprefix(f"{_as_object(extra.get('agent')).get('name')}:")
    if child.record.relation == "continuation" or (name in paths and name != extra.get("trajectory_id")):
        return to_file_name(name)
    return None


def _find_referenced_paths(record: EpisodeRecord) -> set[str]:
    """Return the names, without endings, of the files that an episode's messages refer to."""
    stack: list[Any] = [record.initial_messages, record.final_observation]
    stack += [node for step in record.steps for node in (step.context, step.extra)]
    paths = set()
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            path = node.get("trajectory_path")
            paths.add((get_file_name(path) or "").split(".json")[0] if isinstance(path, str) else "")
            stack += node.values()
        elif isinstance(node, list):
            stack += node
    return paths


def _sort_by_position(embedded: list[Exported]) -> list[Exported]:
    """Return embedded children with those that are named by their position at that position."""
    by_position = {}
    unnumbered = []
    for child in embedded:
        position = (child.record.agent_id or "").rpartition(":")[2]
        has_id = (child.record.extra or {}).get("trajectory_id") is not None
        is_free = position.isdecimal() and int(position) < len(embedded) and int(position) not in by_position
        if not has_id and is_free:
            by_position[int(position)] = child
        else:
            unnumbered.append(child)
    return [by_position.get(position) or unnumbered.pop(0) for position in range(len(embedded))]


def _parse_position(agent_id: str | None) -> int:
    position = (agent_id or "").rpartition(":")[2]
    return int(position) if position.isdecimal() and len(position) < 9 else 0


def _encode_further_fields(record: Any, *written: str) -> Row:
    """Return the fields of a record that have other values than their defaults, without those written elsewhere."""
    return {key: field for key, field in msgspec.to_builtins(record).items() if key not in written}


def _get_trial(record: EpisodeRecord) -> Row:
    return _as_object((record.extra or {}).get("trial"))


def _as_object(node: Any) -> Row:
    return node if isinstance(node, dict) else {}


def _drop_nulls(row: Row) -> Row:
    return {key: field for key, field in row.items() if field is not None}


def _format_time(step: StepRecord) -> str | None:
    return None if step.started_at is None else step.started_at.isoformat().replace("+00:00", "Z")


def _id(exported: Exported) -> str:
    return ids.to_text(exported.episode.episode_id)


TARGET = Target(
    "atif",
    "ATIF trajectories in folders as Harbor writes them; its own come out as they went in",
    "tree",
    _convert,
    fact_kinds=frozenset(("tokens", "advantages")),
)
