"""Langfuse: traces as its interface, its API and its exports to a bucket write them.

.. code-block:: text

    {trace, observations: [...]}   a trace as the interface downloads it; trace.observations repeats the observations
                                   without what they hold
    {id, name, ..., observations: [...], scores: [...]}   a trace of the API
    {id, traceId, type, ...}       observations by themselves, in any order (also in snake case, with trace_name, ...)

each as one document, an array, lines, or {data: [...]}. `lake.formats.langfuse.observation` is about observations.

* A trace is an episode, its GENERATIONs in order of their start are the decisions (`lake.formats.tracing.tree`).
* Siblings are the traces of a dataset's item in an experiment (`dataset_item_id`), which is then the run. They are
  numbered by their ids, because each may be in a file of its own. Any other trace is a task of its own: those of a
  session are the turns of one conversation; it is in `extra`. The name of the trace is the environment.
* Scores: NUMERIC and BOOLEAN as numbers; CATEGORICAL only where its configuration gives the category a number (without
  one the value is always 0), the category is in the metrics. With an observationId they are of its step.
* There is no version: what a trace calls its version is its application's.

Source: files of the interface; Langfuse's reference of the API and of the fields of exports; its SDK 5.0.4.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lake.formats.base.documents import with_parts
from lake.formats.base.fields import moment, sibling_number
from lake.formats.base.format import Format, its_folder
from lake.formats.base.json_array import Element, written
from lake.formats.base.look import Look, look
from lake.formats.base.rows import Item, ShapeError, items_of, values
from lake.formats.base.source import Input
from lake.formats.langfuse.observation import EXPECTED, ITEM, RUN, TYPES, fill
from lake.formats.tracing.attributes import first, name_in
from lake.formats.tracing.episodes import episodes, nanoseconds
from lake.formats.tracing.payloads import decoded
from lake.formats.tracing.shapes import is_empty
from lake.formats.tracing.tree import Score, Span, Trace, traces
from lake.records import EpisodeRecord, Reject, excerpt

NAME = "langfuse"
_OBSERVED = ("parentObservationId", "parent_observation_id", "usageDetails", "usage_details", "completionStartTime")
_OF_TRACES = ("projectId", "project_id", "htmlPath", "bookmarked", "sessionId", "session_id", "userId", "scores")
_PLACED = frozenset(
    (
        "id",
        "traceId",
        "trace_id",
        "parentObservationId",
        "parent_observation_id",
        "type",
        "name",
        "startTime",
        "endTime",
    )
) | {"start_time", "end_time", "trace_name", "latency"}
"""Keys of an observation that have a place, and its latency, which is in milliseconds in some files."""
_OF_SCORES = frozenset(("name", "value", "comment", "stringValue", "string_value", "longStringValue", "observationId"))


def recognise(look: Look) -> bool:
    """Whether a file holds traces with observations, or observations of a trace."""
    return any(_is_trace(value) or _is_observation(value) for value in _inner(look))


def no_trajectory(look: Look) -> str | None:
    """What a table of traces or of scores is."""
    found = _inner(look)
    if not found or any(_is_trace(value) or _is_observation(value) for value in found):
        return None
    value = found[0]
    dated = "timestamp" in value and ("projectId" in value or "project_id" in value or "htmlPath" in value)
    if dated and ("dataType" in value or "data_type" in value):
        return "it is a table of scores of Langfuse; ingest the traces or the observations that they judge"
    if dated and ("bookmarked" in value or "session_id" in value or "sessionId" in value):
        return "it is a table of traces of Langfuse without observations; export the observations, or whole traces"
    return None


def read(file: Input) -> Iterator[Item]:
    """Records and rejects of a file."""
    if any(_is_observation(value) for value in _inner(look(file.path))):
        for found in traces(_observations(values(file))):
            if isinstance(found, Reject):
                yield found
            else:
                yield from _items(found[1], file, _of_rows)
        return
    for item, is_part in with_parts(file, "observations", "data"):
        page = item.value.get("data") if isinstance(item, Element) and isinstance(item.value, dict) else None
        if isinstance(page, list) and isinstance(item, Element):
            for index, value in enumerate(page):
                yield from _items(Element(index, value, item.problem, source=None), file, _as_it_is)
        else:
            yield from _items(item, file, _as_it_is, {"truncated": True} if is_part else {})


def _items(
    item: Element | Reject, file: Input, shaped: Callable[[Any], Any], extra: dict[str, Any] | None = None
) -> Iterator[Item]:
    """The episodes of one trace, and rejects of those of its observations that are none."""
    lost: list[Reject] = []

    def convert(value: Any) -> list[EpisodeRecord]:
        return _of_trace(shaped(value), file, item.index if isinstance(item, Element) else 0, lost, extra or {})

    taken = list(items_of(item, NAME, convert))
    yield from taken
    yield from lost if any(isinstance(one, tuple) for one in taken) else ()


def _as_it_is(value: Any) -> Any:
    return value


def _inner(look: Look) -> list[dict[str, Any]]:
    """The first objects that may be traces or observations."""
    data = look.first.get("data")
    return [value for value in data if isinstance(value, dict)] if isinstance(data, list) else look.objects


def _is_trace(value: dict[str, Any]) -> bool:
    if "observations" not in value:
        return False
    trace = value.get("trace")
    if isinstance(trace, dict):
        return "id" in trace and ("timestamp" in trace or "projectId" in trace)
    if isinstance(value["observations"], list) and "trace" not in value:
        own = [row for row in value["observations"] if isinstance(row, dict)]
        return "id" in value and (any(key in value for key in _OF_TRACES) or any(map(_is_observation, own)))
    # Of a damaged file only the keys are known.
    return value["observations"] is None and all(key in value for key in ("id", "observations", "traceId", "startTime"))


def _is_observation(value: dict[str, Any]) -> bool:
    has_ids = ("traceId" in value and "startTime" in value) or ("trace_id" in value and "start_time" in value)
    kind = value.get("type")
    return has_ids and isinstance(kind, str) and kind in TYPES and any(key in value for key in _OBSERVED)


def _observations(items: Iterable[Element | Reject]) -> Iterator[tuple[str, int, Any] | Reject]:
    """Observations by the trace that they name."""
    for item in items:
        if isinstance(item, Reject):
            yield item
            continue
        data = item.value.get("data") if isinstance(item.value, dict) else None
        for row in data if isinstance(data, list) else [item.value]:
            problem = item.problem
            trace = first(row, "traceId", "trace_id") if isinstance(row, dict) else None
            if problem is None and not (isinstance(trace, str) and trace):
                kind = type(row).__name__
                problem = f"`traceId` is {trace!r} in {kind}; valid: an observation with the id of its trace"
            if problem is not None:
                yield Reject(position=item.index, reason="invalid", message=excerpt(problem), raw=item.raw)
            else:
                yield str(trace), item.index, row


def _of_rows(rows: list[Any]) -> dict[str, Any]:
    """Observations of one trace as a trace: what they repeat of it is all that is known."""
    names = {"name": ("traceName", "trace_name"), "sessionId": ("session_id",), "userId": ("user_id",)}
    names |= {"id": ("traceId", "trace_id"), "tags": (), "release": ()}
    about: dict[str, Any] = {}
    for key, others in names.items():
        keys = others if key in ("id", "name") else (key, *others)
        about[key] = next((found for row in rows if (found := first(row, *keys)) is not None), None)
    return {"trace": about, "observations": rows}


def _of_trace(value: Any, file: Input, position: int, lost: list[Reject], extra: dict[str, Any]) -> list[EpisodeRecord]:
    """One trace as episodes; what is no observation goes to `lost`.

    Raises:
        ShapeError: it is no trace, or one without calls.
    """
    if not isinstance(value, dict):
        raise ShapeError(f"Expected `object`, got `{type(value).__name__}`; valid: a trace with its observations")
    given = value.get("trace", value)
    if not isinstance(given, dict):
        raise ShapeError(f"`trace` is {type(given).__name__}; valid: an object")
    listed = value.get("observations")
    found = listed or given.get("observations", listed)
    if not isinstance(found, list):
        raise ShapeError(f"`observations` is {type(found).__name__}; valid: a list of observations")
    if found and all(isinstance(row, str) for row in found):
        raise ShapeError("`observations` holds only ids; export the trace with its observations")
    rows = []
    for index, row in enumerate(found):
        if isinstance(row, dict) and isinstance(row.get("id"), str) and row["id"]:
            rows.append(row)
        else:
            own = row.get("id") if isinstance(row, dict) else type(row).__name__
            message = f"`observations[{index}].id` is {own!r}; valid: an observation with a text as its id"
            lost.append(
                Reject(position=position, reason="invalid", message=excerpt(message), raw=excerpt(written(row)))
            )
    trace_id = first(given, "id") or next((first(row, "traceId", "trace_id") for row in rows), None)
    if not isinstance(trace_id, str) or not trace_id.strip():
        raise ShapeError(f"`trace.id` is {trace_id!r}; valid: a text")
    item, run, expected = _experiment(given, rows)
    trace = Trace(
        id=trace_id,
        spans=[_span(row) for row in rows],
        task_id=item or trace_id,
        rollout_index=sibling_number(trace_id) if item else 0,
        attempt=file.next_index(NAME, trace_id),
        run_id=run if item else None,
        environment=name_in(given, "name"),
        ground_truth=decoded(expected),
        extra=extra | {"trace": _about(given, rows)} | ({"lost_observations": len(lost)} if lost else {}),
    )
    _judge(trace, [*_dicts(given.get("scores")), *(_dicts(value.get("scores")) if given is not value else ())])
    return episodes(trace, file, NAME)


def _judge(trace: Trace, scores: list[dict[str, Any]]) -> None:
    """Give each score to its observation, or to the trace."""
    by_id = {span.id: span for span in trace.spans}
    unique = {id(score) if score.get("id") is None else str(score["id"]): score for score in scores}
    for score in unique.values():
        at = by_id.get(str(first(score, "observationId", "observation_id")))
        (trace.scores if at is None else at.scores).append(_score(score))


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _about(trace: dict[str, Any], rows: list[Any]) -> dict[str, Any]:
    """What a trace says of itself; without an input or output that its outermost observation has too."""
    roots = [
        row for row in rows if isinstance(row, dict) and not first(row, "parentObservationId", "parent_observation_id")
    ]
    found = {k: v for k, v in trace.items() if k not in ("id", "observations", "scores") and not is_empty(k, v)}
    for key in ("input", "output"):
        if key in found and any(decoded(found[key]) == decoded(row.get(key)) for row in roots):
            del found[key]
    return found


def _experiment(trace: dict[str, Any], rows: list[Any]) -> tuple[str | None, str | None, Any]:
    """The item of a dataset that a trace is about, the experiment, and what was expected."""
    for holder in (trace, *rows):
        metadata = decoded(holder.get("metadata"))
        if not isinstance(metadata, dict):
            continue
        inner = decoded(metadata.get("attributes"))
        said = metadata | (inner if isinstance(inner, dict) else {})
        if item := name_in(said, *ITEM):
            return item, name_in(said, *RUN), first(said, *EXPECTED)
    return None, None, None


def _span(row: dict[str, Any]) -> Span:
    parent = first(row, "parentObservationId", "parent_observation_id")
    level = row.get("level")
    span = Span(
        id=row["id"],
        parent=parent if isinstance(parent, str) and parent else None,
        name=str(row.get("name") or ""),
        start=nanoseconds(moment(first(row, "startTime", "start_time"))),
        end=nanoseconds(moment(first(row, "endTime", "end_time"))),
        error=str(first(row, "statusMessage", "status_message") or "error") if level == "ERROR" else None,
        attributes={key: value for key, value in row.items() if key not in _PLACED and not is_empty(key, value)},
    )
    fill(span, str(row.get("type") or "SPAN"), row)
    return span


def _score(score: dict[str, Any]) -> Score:
    kind = first(score, "dataType", "data_type")
    label = first(score, "stringValue", "string_value")
    value = score.get("value")
    if kind in ("CATEGORICAL", "TEXT", "CORRECTION") and (
        kind != "CATEGORICAL" or not first(score, "configId", "config_id")
    ):
        value = None
    more = {key: value for key, value in score.items() if key not in _OF_SCORES and not is_empty(key, value)}
    long = name_in(score, "longStringValue", "long_string_value")
    return Score(
        scorer=str(score.get("name") or "score"),
        value=value,
        reason=score.get("comment"),
        metrics=more | {key: said for key, said in (("label", label), ("text", long)) if said},
    )


FORMAT = Format(
    NAME, "Langfuse traces with observations", recognise, read, no_trajectory, is_whole=True, run_folder=its_folder
)
