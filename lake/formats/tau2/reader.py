"""tau2-bench results: simulations of customer service, in each of the layouts that the tool and its users write.

One document {timestamp, info, tasks, simulations}; a folder of `results.json` (the same without simulations, with a
`simulation_index`) and `simulations/<id>.json`; a bare list of simulations, or one a line; and the summaries that
people submit, {domain, agent, model, simulations}. Either file of a folder finds the other: `results.json` gives all of
its simulations, a simulation takes its task and settings from `results.json`; both call the run by the folder's name.
Where only the index is left, it gives the outcomes.

A simulation is an episode: task_id is its task, `trial` the sibling number; its seed differs between trials, so it is
no part of the group. A decision is an assistant message. The first one of a file is none if it has neither usage nor
raw data nor calls: the harness greets before any model runs. Nor are those of the task's own `message_history`. Users
call tools too (`requestor: user`): those calls and their results stay in the context, and are no part of a state,
because the agent never sees them. Voice runs have `ticks` and no messages: see `lake.formats.tau2.chat`.

`env_return` is `reward_info.reward`. Scores: each entry of `reward_breakdown` under its name, `db_check`, and for the
lists of checks (action_checks, env_assertions, nl_assertions, communicate_checks) the share that was met, with the
checks as metrics. Keys and passwords in settings are left out.

Source: src/tau2/data_model of the tau2-bench repository (Sierra, MIT), the files of its leaderboard, 2025 to 2026.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from lake.formats.base.fields import Scores, as_object, as_text, moment, sibling_number, whole
from lake.formats.base.format import Format
from lake.formats.base.json_array import Element, Member
from lake.formats.base.look import Look, look_or_other
from lake.formats.base.rows import Item, converted, document, items_of, members, rest, values
from lake.formats.base.secrets import without_secrets
from lake.formats.base.source import Input, stem
from lake.formats.tau2.chat import chat_of, messages_of, spans_of
from lake.records import EpisodeRecord, Reject, ScoreRecord, StepRecord

NAME = "tau2"
_ENDED = frozenset(("user_stop", "agent_stop"))
_LIMITS = frozenset(("max_steps", "timeout", "too_many_errors", "context_window_exceeded"))
_CHECKS = {
    "action_checks": "action_match",
    "env_assertions": "met",
    "nl_assertions": "met",
    "communicate_checks": "met",
}
"""Lists of checks, and the key that says whether one was met."""
_BODIES = ("messages", "ticks", "reward_info")


class _Reward(msgspec.Struct):
    """What has to be of its type in `reward_info`."""

    reward: float | None = None
    db_check: dict[str, Any] | None = None
    reward_breakdown: dict[str, Any] | None = None


class _Simulation(msgspec.Struct):
    """What has to be of its type in a simulation."""

    task_id: int | str
    trial: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    termination_reason: str | None = None
    reward_info: _Reward | None = None
    messages: list[Any] | None = None
    ticks: list[Any] | None = None
    agent_cost: float | None = None


class _Run(msgspec.Struct):
    """What is known of the run that simulations belong to."""

    run_id: str | None = None
    info: dict[str, Any] = {}
    tasks: dict[str, dict[str, Any]] = {}
    index: list[Any] = []
    note: str | None = None
    """What is wrong with the file that should say it."""

    def learn(self, member: Member) -> None:
        """Take in a member of the results document."""
        key, value = member.key, member.value
        try:
            value = value if key in ("tasks", "simulations") else without_secrets(value)
        except RecursionError:
            self.note = f"`{key}` is nested too deeply"
            return
        if key == "info" and isinstance(value, dict):
            self.info |= value
        elif key == "tasks" and isinstance(value, list):
            self.tasks = {str(task["id"]): task for task in value if isinstance(task, dict) and "id" in task}
        elif key == "simulation_index":
            self.index = value if isinstance(value, list) else []
        elif key != "simulations" and value is not None:
            self.info[key] = value


def recognise(look: Look) -> bool:
    """Whether a file holds simulations, or is the index of a folder of them."""
    if look.kind not in ("object", "lines", "array"):
        return False
    info, inner = look.first.get("info"), look.first.get("simulations")
    is_results = isinstance(info, dict) and {"agent_info", "environment_info"} <= info.keys()
    is_damaged = look.has("simulations", "task_id", "termination_reason")  # all keys, wherever they stood
    found = [value for value in inner if isinstance(value, dict)] if isinstance(inner, list) else look.objects
    return is_results or is_damaged or any(map(_is_simulation, found))


def _is_simulation(value: dict[str, Any]) -> bool:
    is_one = all(key in value for key in ("id", "task_id", "termination_reason")) and "simulations" not in value
    return is_one and any(key in value for key in _BODIES)


def no_trajectory(look: Look) -> str | None:
    """What files of the tool hold no simulation."""
    if look.kind == "array" and look.has("id", "user_scenario", "evaluation_criteria"):
        return "it lists the tasks of a tau2 domain; ingest the results of a run"
    if look.has("contact_info", "results", "model_name"):
        return "it is the metadata of a tau2 submission; ingest its trajectory files"
    return None


def read(file: Input) -> Iterator[Item]:
    """Records and rejects of a file: of an array, or of a folder in the order of its index, by place from 0."""
    seen = look_or_other(file.path)
    if seen.kind not in ("object", "lines") or _is_simulation(seen.first):
        is_part = seen.kind != "array" and file.path.parent.name == "simulations"
        run = _beside(file) if is_part else _Run()
        yield from converted(values(file), NAME, lambda value: [to_record(value, file, run)])
        return
    run = _Run()
    before = list(seen.first)[: list(seen.first).index("simulations")] if "simulations" in seen.first else ["tasks"]
    if "tasks" not in before:  # what simulations need may stand behind them
        run = _context(Input(file.path, file.run_id))
    is_empty = True
    for item in members(file, "simulations"):
        if isinstance(item, Member):
            run.learn(item)
        else:
            is_empty = False
            yield from items_of(item, NAME, lambda value: [to_record(value, file, run)])
    if is_empty:
        run.run_id = _folder_name(file, file.path.parent)
        yield from _of_folder(file, run)


def _of_folder(file: Input, run: _Run) -> Iterator[Item]:
    """The simulations of a folder in the order of the index, then those that it does not list.

    Of those that the index alone knows there is the outcome, unless a file holds the same trial.
    """
    listed = {str(entry["id"]): entry for entry in run.index if isinstance(entry, dict) and "id" in entry}
    found = {path.stem: path for path in sorted(file.path.parent.glob("simulations/*.json"))}
    trials = set()
    names = dict.fromkeys([*(name for name in listed if name in found), *found, *listed])
    for position, name in enumerate(names):
        place = f"simulations/{name}.json"
        if name in found:
            item = document(Input(found[name], file.run_id, file.meter))
        else:
            entry = listed[name]
            if (str(entry.get("task_id")), str(entry.get("trial"))) in trials:
                continue
            outcome = {key: value for key, value in entry.items() if key != "reward"}
            outcome |= {"reward_info": {"reward": entry.get("reward")}, "missing": place}
            item = Element(0, outcome, None, False, str(entry))
        for made in items_of(item, NAME, lambda value: [to_record(value, file, run)]):
            if isinstance(made, Reject):
                made.position, made.message = position, f"{place}: {made.message}"
                yield made
            else:
                trials.add((made[1].task_id, str(made[1].rollout_index)))
                yield position, made[1]


def _beside(file: Input) -> _Run:
    """What the results document beside the folder of a simulation says."""
    path = file.path.parent.parent / "results.json"
    run = _context(Input(path, file.run_id)) if path.is_file() else _Run(note="results.json is missing")
    run.run_id = _folder_name(file, path.parent)
    return run


def _context(file: Input) -> _Run:
    """What a results document says beside its simulations."""
    run = _Run()
    for item in members(file, "simulations"):
        if isinstance(item, Member):
            run.learn(item)
        elif isinstance(item, Reject):
            run.note = f"{file.path.name}: {item.message}"
    return run


def _folder_name(file: Input, folder: Path) -> str | None:
    """The folder's name is the run's, unless somebody named it otherwise: so the files of a folder agree."""
    return folder.resolve().name or None if file.run_id == stem(file.path) else None


def to_record(value: Any, file: Input, run: _Run) -> EpisodeRecord:
    """One simulation as an episode.

    Raises:
        msgspec.ValidationError: wrong keys or types.
        ShapeError: a message that has no role, or whose content is no text.
    """
    row = msgspec.convert(value, _Simulation)
    task_id = str(row.task_id)
    task = run.tasks.get(task_id, {})
    agent, environment = as_object(run.info.get("agent_info")), as_object(run.info.get("environment_info"))
    history = as_object(task.get("initial_state")).get("message_history")
    chat = chat_of(messages_of(row.ticks) if row.ticks else row.messages or [], history)
    model = as_text(agent.get("llm")) or as_text(run.info.get("model")) or as_text(agent.get("implementation"))
    domain = as_text(environment.get("domain_name")) or as_text(run.info.get("domain"))
    tools = environment.get("tool_defs")
    reason = None if row.termination_reason is None else row.termination_reason.rpartition(".")[2].lower()
    reward = row.reward_info or _Reward()
    about = {
        "reward_info": rest(as_object(value.get("reward_info")), "reward", "reward_breakdown", "db_check", *_CHECKS),
        "task": rest(task, "id", "evaluation_criteria"),
        "run": rest(run.info, "git_commit"),
        "companion": run.note,
    }
    known = (*_Simulation.__struct_fields__, "start_time", "end_time")
    extra = (rest(value, *known) or {}) | {key: item for key, item in about.items() if item is not None}
    for step in chat.steps:
        _complete(step, model)
    return EpisodeRecord(
        task_id=task_id,
        run_id=run.run_id,
        rollout_index=_sibling(file, task_id, row.trial, str(value.get("id"))),
        expected_group_size=whole(run.info.get("num_trials")),
        environment=NAME if domain is None else f"{NAME}_{domain}",
        policy=model,
        sampling=as_object(agent.get("llm_args")) or None,
        tools=[*tools.values()] if isinstance(tools, dict) else tools if isinstance(tools, list) else None,
        status=_status(reason),
        terminated=True if reason in _ENDED else False if reason in _LIMITS else None,
        stop_reason=reason,
        error=as_text(as_object(value.get("info")).get("error")),
        env_return=reward.reward,
        scores=_scores(reward, as_object(value.get("reward_info"))),
        ground_truth=task.get("evaluation_criteria"),
        started_at=moment(value.get("start_time")),
        ended_at=moment(value.get("end_time")),
        cost=row.agent_cost,
        source_version=as_text(run.info.get("git_commit")),
        initial_messages=chat.initial_messages,
        final_observation=chat.final_observation,
        steps=chat.steps,
        spans=spans_of(str(value.get("id", task_id)), row.ticks or [], chat.steps),
        extra=extra or None,
    )


def _sibling(file: Input, task_id: str, trial: int | None, name: str) -> int:
    """The trial; a second simulation of a trial, where files were put together, has a number made of its id."""
    if trial is None:
        return file.next_index(task_id)
    again = file.next_index(task_id, trial)
    return sibling_number(f"{name}/{again}") if again else trial


def _status(reason: str | None) -> str:
    if reason is None or reason in _ENDED:
        return "completed"
    return "truncated" if reason in _LIMITS else "failed" if "error" in reason else "completed"


def _complete(step: StepRecord, model: str | None) -> None:
    """Give what a message says of its call a place of its own."""
    said = step.extra or {}
    usage = as_object(said.get("usage"))
    step.model = said.pop("model", None) or model
    step.finish_reason = said.pop("finish_reason", None)
    step.prompt_tokens, step.completion_tokens = (
        whole(usage.get("prompt_tokens")),
        whole(usage.get("completion_tokens")),
    )
    if usage.keys() <= {"prompt_tokens", "completion_tokens"}:
        said.pop("usage", None)
    for key, column in (("cost", "cost"), ("generation_time_seconds", "latency")):
        if isinstance(said.get(key), int | float) and not isinstance(said[key], bool):
            setattr(step, column, float(said.pop(key)))
    step.extra = said or None


def _scores(reward: _Reward, given: dict[str, Any]) -> list[ScoreRecord]:
    scores = Scores()
    for name, value in (reward.reward_breakdown or {}).items():
        scores.add(name, value)
    if reward.db_check is not None:
        scores.add("db_check", reward.db_check.get("db_reward"), metrics=rest(reward.db_check, "db_reward"))
    for name, key in _CHECKS.items():
        checks = given.get(name)
        if isinstance(checks, list) and checks:
            met = [check.get(key) is True for check in checks if isinstance(check, dict)]
            scores.add(name, sum(met) / len(checks), metrics={"checks": checks})
    return scores.records


FORMAT = Format(NAME, "tau2-bench results and simulations", recognise, read, no_trajectory)
