"""One episode to read: everything known about it in one structure, and that structure as text for a terminal.

What a model or an environment wrote is hostile text: no control character of it reaches the terminal.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from lake import ids
from lake.errors import UsageError
from lake.formats.base.unseen import not_text
from lake.judgements.credit import covering, current_series, find_credit, outdated
from lake.read.parquet import collected
from lake.read.snapshot import Snapshot
from lake.read.text_table import counted
from lake.write.rows import inlined

Row = dict[str, Any]
_CUT_CHARACTERS = 600
_CUT_LINES = 12
_EPISODE = """
    SELECT episode_id, group_id, run_id, task_id, rollout_index, attempt, environment, split, policy, policy_version,
           status, stop_reason, error, env_return, num_steps, prompt_tokens, completion_tokens, seed, started_at,
           ended_at, relation, parent_episode_id, source_format, source_id, initial_messages, final_observation
    FROM episodes WHERE episode_id = $episode
"""
_NAMES = "run_id, task_id, rollout_index, collection_round, attempt, agent_id, episode_id"
_OPTIONS = {"run_id": "--run", "task_id": "--task", "rollout_index": "--rollout"}
_LISTED = 5
_COUNTED = 1 << 20
"""No source counts its rollouts this far: larger numbers are hashes or random, of 31 bits."""
_STEPS = """
    SELECT step_index, state_role, state, reasoning, action, tool_calls, reward, is_action_valid, is_active, trainable,
           is_copied_context, state_is_error, policy_version, value_estimate, finish_reason, context
    FROM steps WHERE episode_id = $episode ORDER BY step_index
"""
_ADVANTAGES = """
    SELECT step_index, job_id, return_to_go, a_episode, a_step, advantage, group_size, anchor_key, anchor_size,
           anchor_episodes, flags
    FROM {rows} WHERE episode_id = $episode
"""
_SAMPLED = """
    SELECT step_index,
           list_sum(list_transform(list_zip(action_logprobs, action_mask), lambda t: CASE WHEN t[2] THEN t[1] END))
               AS logprob,
           n_trained, temperature, context_ids, action_ids, action_logprobs, action_mask
    FROM tokens WHERE episode_id = $episode AND provenance = 'engine'
"""
_OF_TOKENS = ("context_ids", "action_ids", "action_logprobs", "action_mask")
_SCORES = """
    SELECT step_index, scorer, value, reason, error FROM current_scores WHERE episode_id = $episode
    ORDER BY step_index NULLS FIRST, scorer
"""
_ANNOTATIONS = """
    SELECT step_index, author, label, value, text FROM latest_annotations WHERE episode_id = $episode
    ORDER BY step_index NULLS FIRST, label, author
"""


def find(lake: Snapshot, wanted: str) -> int:
    """The episode of an id or its beginning. Raises UsageError: no such episode, several, or a retracted one."""
    text = wanted.strip().lower()
    rest = ids.TEXT_LENGTH - len(text)
    low, high = text + "0" * rest, text + ids.ALPHABET[-1] * rest
    if not text or not ids.is_text(low):
        msg = f"{wanted!r} is no episode id (nor its beginning): {ids.TEXT_LENGTH} characters of {ids.ALPHABET}"
        raise UsageError(msg)
    between = {"low": ids.from_text(low), "high": ids.from_text(high)}
    where = "WHERE episode_id BETWEEN $low AND $high ORDER BY episode_id LIMIT 6"
    found = lake.sql(f"SELECT episode_id FROM episodes {where}", between)["episode_id"].to_list()
    if len(found) > 1:
        several = ", ".join(map(ids.to_text, found[:_LISTED])) + (", ..." if len(found) > _LISTED else "")
        raise UsageError(f"{wanted!r} begins several episodes ({several}); write more of it")
    if found:
        return int(found[0])
    _refuse_hidden(lake, where, between)
    raise UsageError(
        f"no episode begins with {wanted!r}; --task and --rollout name one too, and "
        "`trajlake sql 'SELECT episode_id, task_id, rollout_index FROM episodes'` lists them"
    )


def _refuse_hidden(lake: Snapshot, where: str, parameters: dict[str, int]) -> None:
    """Raise UsageError if what is looked for is an episode that readers no longer see, with the reason."""
    hidden = lake.sql(f"SELECT episode_id, kind, superseded_by, reason FROM current_retractions {where}", parameters)
    if hidden.height:
        row = hidden.row(0, named=True)
        instead = f"; {ids.to_text(row['superseded_by'])} took its place" if row["superseded_by"] is not None else ""
        why = f" ({printable(row['reason'])})" if row["reason"] else ""
        shown = ids.to_text(row["episode_id"])
        again = f", and `trajlake restore {shown}` shows it again" if row["kind"] == "retracted" else ""
        msg = f"episode {shown} is {row['kind']}{why}{instead}; an older snapshot may still show it (--as-of){again}"
        raise UsageError(msg)


def find_named(lake: Snapshot, *, task: str | None, rollout: int | None, run: str | None) -> int:
    """The episode of a task, run and number; None is any. Raises UsageError: no such episode, or several."""
    asked = {"task_id": task, "rollout_index": rollout, "run_id": run}
    given = {name: value for name, value in asked.items() if value is not None}
    where = " AND ".join(f"{name} = ${name}" for name in given)
    spelled = ", ".join(f"{name.partition('_')[0]} {value}" for name, value in given.items())
    found = lake.sql(f"SELECT {_NAMES} FROM episodes WHERE {where} ORDER BY ALL", given).to_dicts()
    if not found and rollout is not None:
        found = _at_place(lake, rollout, {name: value for name, value in given.items() if name != "rollout_index"})
    if len(found) == 1:
        return int(found[0]["episode_id"])
    if found:
        differ = [name for name in _OPTIONS if len({row[name] for row in found}) > 1]
        advice = f"add {' and '.join(_OPTIONS[name] for name in differ)}" if differ else "name one by its id"
        rest = ", ..." if len(found) > _LISTED else ""
        listed = ", ".join(
            f"{ids.to_text(row['episode_id'])} run {row['run_id']} task {row['task_id']} rollout {row['rollout_index']}"
            + ("" if row["collection_round"] is None else f" round {row['collection_round']}")
            for row in found[:_LISTED]
        )
        raise UsageError(f"{spelled} means {len(found)} episodes ({printable(listed)}{rest}); {advice}")
    rows = lake.scan_all("episodes").filter(pl.col(name) == value for name, value in given.items())
    for episode_id in collected(rows.select("episode_id"))["episode_id"]:
        _refuse_hidden(lake, "WHERE episode_id = $episode", {"episode": episode_id})
    some = printable(_valid(lake, task))
    raise UsageError(f"there is no episode of {spelled}{some}; `trajlake sql 'FROM episodes'` lists them")


def _at_place(lake: Snapshot, place: int, given: Row) -> list[Row]:
    """The episodes at a place among their siblings, from 0 in the order of their beginnings.

    Only of groups whose sources have no numbers: theirs are hashes of names, or random, which nobody can type. Where a
    source counts, a number that is not there was left out or retracted, and its place is another episode's.
    """
    where = " AND ".join(["true", *(f"{name} = ${name}" for name in given)])
    ranked = f"""
        SELECT *, max(rollout_index) OVER (PARTITION BY group_id) AS largest,
               dense_rank() OVER (PARTITION BY group_id ORDER BY began NULLS LAST, rollout_index) - 1 AS place
        FROM (SELECT *, min(started_at) OVER (PARTITION BY group_id, rollout_index) AS began
              FROM episodes WHERE {where})
    """
    query = f"SELECT {_NAMES} FROM ({ranked}) WHERE place = $place AND largest >= $most ORDER BY ALL"
    return lake.sql(query, given | {"place": place, "most": _COUNTED}).to_dicts()


def _valid(lake: Snapshot, task: str | None) -> str:
    """The rollouts of a task, or the tasks if it is none."""
    if task is None:
        return ""
    of_task = "SELECT DISTINCT rollout_index FROM episodes WHERE task_id = $task ORDER BY 1"
    found, noun = lake.sql(of_task, {"task": task}), f"rollouts of task {task}"
    if found.is_empty():
        found, noun = lake.sql("SELECT DISTINCT task_id FROM episodes ORDER BY 1"), "tasks"
    some = found.to_series().head(_LISTED)
    return f"; {noun} are {', '.join(map(str, some))}{', ...' if len(found) > _LISTED else ''}"


def gather(
    lake: Snapshot, episode_id: int, wanted: str | None = None, *, advantages: bool = True, tokens: bool = False
) -> Row:
    """Everything known about an episode.

    Args:
        wanted: whose advantages are shown, as `lake.judgements.credit.find_credit` takes it; None: the current credit.
        advantages: whether the credit of each step is looked for.
        tokens: whether the ids and log-probabilities of each token are told as well.

    Returns:
        episode (its row), credit (series_id, estimator, title, job_id: whose rows these are, None if the series does
        not cover the episode, outdated: what changed since it was computed, others: the other series that
        cover the episode; None if there is no credit at all), scores
        and annotations of the episode, and steps: a list of rows with the step, its return_to_go, a_episode, a_step,
        advantage, flags (NULL without credit), logprob (the sum over its n_trained tokens), scores, annotations and
        not_text (the types of the parts of what it saw that are no text, such as image_url).

    Raises:
        UsageError: no such credit.
    """
    asked = {"episode": episode_id}
    episode = inlined(lake, lake.sql(_EPISODE, asked), ("initial_messages", "final_observation")).row(0, named=True)
    credit, credited = _credited(lake, episode_id, wanted) if advantages else (None, {})
    sampled = {row.pop("step_index"): row for row in lake.sql(_SAMPLED, asked).to_dicts()}
    scores, annotations = lake.sql(_SCORES, asked).to_dicts(), lake.sql(_ANNOTATIONS, asked).to_dicts()
    unknown: Row = dict.fromkeys(("return_to_go", "a_episode", "a_step", "advantage", "flags"))
    not_sampled: Row = dict.fromkeys(("logprob", "n_trained", "temperature", *_OF_TOKENS))
    left_out = () if tokens else _OF_TOKENS
    rows = inlined(lake, lake.sql(_STEPS, asked), ("tool_calls", "context")).to_dicts()
    steps = [
        {name: value for name, value in step.items() if name != "context"}
        | {k: v for k, v in (sampled.get(step["step_index"]) or not_sampled).items() if k not in left_out}
        | (credited.get(step["step_index"]) or (unknown if advantages else {"flags": None}))
        | {"scores": _of(scores, step["step_index"]), "annotations": _of(annotations, step["step_index"])}
        | {"not_text": not_text(_parsed(step["context"]))}
        for step in rows
    ]
    if steps:
        steps[0]["not_text"] = not_text(_parsed(episode["initial_messages"])) + steps[0]["not_text"]
    return {
        "episode": episode,
        "credit": credit,
        "scores": _of(scores, None),
        "annotations": _of(annotations, None),
        "steps": steps,
    }


def _credited(lake: Snapshot, episode_id: int, wanted: str | None) -> tuple[Row | None, dict[int, Row]]:
    """Whose advantages are shown, and the episode's rows of them by step."""
    others = covering(lake, episode_id=episode_id)
    if wanted is None and current_series(lake) is None:
        return None, {}
    chosen = find_credit(lake, wanted)
    rows = lake.sql(_ADVANTAGES.format(rows=chosen.rows), {"episode": episode_id}).to_dicts()
    described = {
        "series_id": chosen.series_id,
        "estimator": chosen.estimator,
        "title": chosen.title,
        "job_id": rows[0]["job_id"] if rows else None,
        "outdated": outdated(lake, chosen, episode_id=episode_id) if rows else None,
        "others": [other.credit.listed for other in others if other.credit.series_id != chosen.series_id],
    }
    return described, {row.pop("step_index"): {k: v for k, v in row.items() if k != "job_id"} for row in rows}


def _of(rows: list[Row], step_index: int | None) -> list[Row]:
    return [{k: v for k, v in row.items() if k != "step_index"} for row in rows if row["step_index"] == step_index]


# ---------------------------------------------------------------- saved in a file


class SavedStep(msgspec.Struct):
    """A step of a saved episode: what of it is printed, and of which type it is."""

    step_index: int
    reward: float | None = None
    state: str | None = None
    state_role: str | None = None
    reasoning: str | None = None
    action: str | None = None
    tool_calls: str | None = None
    value_estimate: float | None = None
    logprob: float | None = None
    n_trained: int | None = None
    return_to_go: float | None = None
    a_episode: float | None = None
    a_step: float | None = None
    advantage: float | None = None
    flags: str | None = None
    is_action_valid: bool | None = None
    state_is_error: bool | None = None
    is_active: bool = True
    trainable: bool = True
    is_copied_context: bool = False
    scores: list["SavedScore"] = []
    annotations: list["SavedNote"] = []
    not_text: list[str] = []


class SavedScore(msgspec.Struct):
    """What a scorer said."""

    scorer: str
    value: float | None = None
    reason: str | None = None
    error: str | None = None


class SavedNote(msgspec.Struct):
    """What a person said."""

    author: str
    label: str
    value: float | None = None
    text: str | None = None


class SavedHead(msgspec.Struct):
    """The row of a saved episode."""

    episode_id: str
    group_id: str
    run_id: str | None = None
    task_id: str | None = None
    rollout_index: int | None = None
    attempt: int = 0
    status: str = "unknown"
    stop_reason: str | None = None
    error: str | None = None
    env_return: float | None = None
    num_steps: int = 0
    final_observation: str | None = None


class SavedCredit(msgspec.Struct):
    """Whose advantages a saved episode has."""

    title: str
    job_id: str | None = None
    outdated: str | None = None
    others: list[str] = []


class SavedEpisode(msgspec.Struct):
    """A line of `trajlake show --format jsonl`."""

    episode: SavedHead
    steps: list[SavedStep]
    credit: SavedCredit | None = None
    scores: list[SavedScore] = []
    annotations: list[SavedNote] = []


_SAVED = msgspec.json.Decoder(SavedEpisode)


def read_saved(path: Path) -> Iterator[Row]:
    """The episodes of a file that `trajlake show` wrote, as `gather` gives them; one line each, or one document.

    Raises:
        UsageError: the file cannot be read, or holds something else.
    """
    try:
        with path.open("rb") as file:
            for count, line in enumerate(file, start=1):
                if line.strip():
                    # A document of `--format json` goes on over many lines.
                    is_document = count == 1 and line.strip() == b"{"
                    yield _gathered(line + file.read() if is_document else line, path, count)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error}") from error


def _gathered(text: bytes, path: Path, count: int) -> Row:
    try:
        found: Row = msgspec.to_builtins(_SAVED.decode(text))
        for name in ("episode_id", "group_id"):
            found["episode"][name] = ids.from_text(found["episode"][name])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{path}, line {count} is no episode of `trajlake show --format jsonl`: {printable(str(error))}. Other "
            f"files of episodes are read into a lake first: `trajlake ingest {path}`"
        ) from error
    return found


# ---------------------------------------------------------------- as text


def lines(gathered: Row, *, full: bool = False) -> Iterator[tuple[str, str]]:
    """An episode as (style, line): styles of rich, lines without control characters."""
    episode = gathered["episode"]
    yield "bold", _head(episode)
    if episode["error"]:
        yield from _block("error", episode["error"], full=full)
    if (credit := gathered["credit"]) is not None:
        covers = "" if credit["job_id"] is not None else ", which does not cover this episode"
        others = credit["others"]
        rest = f"; {len(others) - _LISTED} more" if len(others) > _LISTED else ""
        more = f"; others (--credit): {'; '.join(others[:_LISTED])}{rest}" if others else ""
        yield "dim", _one_line(f"credit: {credit['title']}{covers}{more}")
        if credit["outdated"]:
            yield "yellow", _one_line(credit["outdated"])
    yield from _judgements(gathered)
    for step in gathered["steps"]:
        yield "", ""
        yield "bold cyan", _step_head(step, is_credited=credit is not None)
        role = f"state ({step['state_role']})" if step["state_role"] else "state"
        yield from _block(role, step["state"], full=full)
        for kind in step["not_text"]:
            yield "dim", _one_line(f"    [{kind}]")
        yield from _block("reasoning", step["reasoning"], full=full, style="italic")
        yield from _block("action", step["action"], full=full, style="green")
        for call in tool_calls(step["tool_calls"]):
            yield from _block("tool call", call, full=full, style="green")
        yield from _judgements(step)
    last = [message for message in _parsed(episode["final_observation"]) if isinstance(message, dict)]
    if last:
        yield "", ""
        yield "bold cyan", "after the last step"
    for message in last:
        yield from _block(f"{message.get('role') or 'message'}", _text(message.get("content")), full=full)


def printable(text: str) -> str:
    """A text with every character that could steer a terminal replaced; line ends stay."""
    plain = text.replace("\r\n", "\n").replace("\t", "    ")
    return "".join(c if c == "\n" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in plain)


def one_line(text: str, most: int = 300) -> str:
    """A text for a line of a terminal: each run of blanks and line ends is a blank; cut after `most` characters."""
    line = " ".join(printable(text).split())
    return line if len(line) <= most else f"{line[:most]} ... [{len(line)} characters]"


def tool_calls(text: str | None) -> list[str]:
    """Tool calls as `name(arguments)`; what has no such form, as it is."""
    shown = []
    for call in _parsed(text):
        inner = call.get("function", call) if isinstance(call, dict) else call
        if isinstance(inner, dict) and isinstance(inner.get("name"), str):
            shown.append(f"{inner['name']}({_text(inner.get('arguments'))})")
        else:
            shown.append(_text(call))
    return shown


def _head(episode: Row) -> str:
    parts = [
        f"episode {ids.to_text(episode['episode_id'])}",
        f"run {episode['run_id']}",
        f"task {episode['task_id']}",
        f"group {ids.to_text(episode['group_id'])}",
        f"rollout {episode['rollout_index']}" + (f" (attempt {episode['attempt']})" if episode["attempt"] else ""),
        episode["status"] + (f" ({episode['stop_reason']})" if episode["stop_reason"] else ""),
        f"return {number(episode['env_return'])}",
        counted(episode["num_steps"], "step"),
    ]
    return _one_line("   ".join(parts))


def _step_head(step: Row, *, is_credited: bool) -> str:
    parts = [f"step {step['step_index']}", f"reward {number(step['reward'])}"]
    if is_credited:
        parts += [
            f"return-to-go {number(step['return_to_go'])}",
            f"A_E {number(step['a_episode'])}",
            f"A_S {number(step['a_step'])}",
            f"A {number(step['advantage'])}",
        ]
    if step["value_estimate"] is not None:
        parts.append(f"value {number(step['value_estimate'])}")
    if step["logprob"] is not None:
        parts.append(f"log-probability {number(step['logprob'])} of {counted(step['n_trained'] or 0, 'token')}")
    flags = [flag for flag in (step["flags"] or "").split(",") if flag]
    marks = {
        "invalid action": step["is_action_valid"] is False,
        "error state": bool(step["state_is_error"]),
        "not active": not step["is_active"],
        "not trainable": not step["trainable"],
        "copied context": step["is_copied_context"],
    }
    flags += [name for name, holds in marks.items() if holds]
    return _one_line("   ".join([*parts, f"[{', '.join(flags)}]"] if flags else parts))


def _judgements(gathered: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for score in gathered["scores"]:
        why = score["error"] or score["reason"]
        text = f"score {score['scorer']}: {number(score['value'])}" + (f" ({why})" if why else "")
        yield "yellow", _one_line(text)
    for note in gathered["annotations"]:
        said = [number(note["value"])] if note["value"] is not None else []
        said += [note["text"]] if note["text"] else []
        yield "magenta", _one_line(f"{note['label']} by {note['author']}: {', '.join(said)}")


def number(value: float | None) -> str:
    """A number for a person; unknown is a dash, never 0."""
    return "-" if value is None else f"{value:.6g}"


def _one_line(text: str) -> str:
    return printable(text).replace("\n", " ")


def _block(label: str, text: str | None, *, full: bool, style: str = "") -> Iterator[tuple[str, str]]:
    if not text:
        return
    shown = printable(text)
    cut = shown if full else "\n".join(shown[:_CUT_CHARACTERS].splitlines()[:_CUT_LINES])
    rest = len(shown) - len(cut)
    yield "dim", f"  {_one_line(label)}:"
    for line in cut.splitlines():
        yield style, f"    {line}"
    if rest > 0:
        yield "dim", f"    ... {rest:,} more characters (--full)"


def _parsed(text: str | None) -> list[Any]:
    """A JSON list; one value as a list of it; what is no JSON, as text."""
    if not text:
        return []
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return [text]
    return found if isinstance(found, list) else [found]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
