"""Inspect logs (inspect_ai): `.eval` archives, their samples whole or in chunks, and `.json` documents.

.. code-block:: text

    .json           {version, status, eval, plan, results, stats, error, samples[], reductions[]}
    .eval           header.json (the same without samples), _journal/start.json ({version, eval, plan}),
                    samples/ID_epoch_N.json, summaries.json, reductions.json; deflate, from 0.3.208 on zstd
    in chunks       samples/ID_epoch_N/sample.json (with message_refs), metadata.json,
                    {messages,events,attachments}/START.json (calls, skeleton.json, events/*.json are not needed)
    eval            eval_id, run_id, task, task_id, model, model_generate_config, config{epochs}, dataset, packages
    sample          id, epoch, input, target, messages[], output, scores{}, events[], events_data, attachments{},
                    metadata, store, model_usage, error{}, error_retries[], limit{}, started_at, uuid
    early           `score` for scores (version 1), `transcript{events, content}` for events and attachments

Versions 1 (0.3.8), 2, and 3 (development) of `version` are read. Source: inspect_ai 0.3.8, 0.3.100 and 0.3.285, and
what they, 0.3.25, 0.3.43, 0.3.75, 0.3.150, 0.3.210 and 0.3.245 write.

A sample of an epoch is an episode: task_id is the sample's id, rollout_index is epoch - 1, attempt how often it was
tried again. The run is the eval, called task-model-BEGINNING of its eval_id; early logs (0.3.75 still) have no such id,
and take the beginnings of task_id and run_id. Nothing of the header that changes while an eval runs is part of an
episode: a sample of a log that is still written is the same one later.

A decision is an assistant's message of the sample's messages that a model wrote (see `messages`); events add what they
know of its call, and spans (`events`). Ids of messages stand in `extra`,
because siblings that start alike have different ones. Scores: C is 1, P 0.5, I and N 0, booleans and numbers are what
they are, anything else has no value; each key of an object is `scorer.key`; NaN is unscored. `env_return` is the score
of the sample where its eval has one scorer; where it has several, nobody says which one counts.
"""

from collections.abc import Iterator
from typing import Any

from lake.formats.base.fields import as_object, as_text
from lake.formats.base.format import Format
from lake.formats.base.json_array import Element, Member
from lake.formats.base.json_faults import Rewriter
from lake.formats.base.look import Look
from lake.formats.base.rows import Item, ShapeError, UnsupportedError, items_of, members
from lake.formats.base.source import Input
from lake.formats.base.zip_entries import listed
from lake.formats.inspect_logs.archive import HEADERS, Archive, is_sample
from lake.formats.inspect_logs.samples import Header, to_record
from lake.records import Reject, shown

NAME = "inspect"
_NEWEST = 3
_TAKEN_OUT = "ingest the .eval file that it was taken out of"


def recognise(look: Look) -> bool:
    """Whether a file is an archive or a document of a log."""
    if look.kind == "zip":
        return HEADERS[1] in look.names or any(map(is_sample, look.names))
    return look.kind in ("object", "lines") and look.has("version", "status", "eval") and _is_spec(look.first)


def _is_spec(value: dict[str, Any]) -> bool:
    """Whether `eval` describes an eval; all keys stand side by side where a document is damaged early."""
    found = value if value["eval"] is None else as_object(value["eval"])
    return "task" in found and bool({"run_id", "created", "model", "dataset"} & found.keys())


def no_trajectory(look: Look) -> str | None:
    """What files of the tool hold no sample."""
    if look.kind == "array":
        if look.has("id", "epoch", "input", "target") and not look.has("messages"):
            return f"it lists summaries of the samples of an Inspect log; {_TAKEN_OUT}"
        if look.has("scorer", "samples") and isinstance(look.first.get("samples"), list):
            return f"it lists reduced scores of an Inspect log; {_TAKEN_OUT}"
    elif look.kind == "zip":
        if recognise(look) and not any(map(is_sample, look.names)) and listed(look.path)[1] is None:
            return _without_samples("")
    elif look.has("version", "eval", "plan") and not look.has("status") and _is_spec(look.first):
        return f"it is the beginning of an Inspect log, without samples; {_TAKEN_OUT}"
    elif recognise(look) and isinstance(look.first["eval"], dict) and _has_no_sample(look):
        return _without_samples(f" (its status: {look.first['status']})")
    return None


def _without_samples(status: str) -> str:
    return (
        f"it is an Inspect log without samples{status}: its eval ended before the first one or was told not to log "
        "them, or this is the header alone; ingest the .eval file with its samples"
    )


def _has_no_sample(look: Look) -> bool:
    """Whether a document is whole and has no sample; nothing is read from its first one on."""
    items = members(Input(look.path, ""), "samples")
    return all(isinstance(item, Member) and (item.key != "samples" or item.value is None) for item in items)


def read(file: Input) -> Iterator[Item]:
    """Records and rejects of a file: of samples by their place from 0."""
    with file.path.open("rb") as source:
        if source.read(2) == b"PK":
            yield from _of_archive(Archive(file, source))
            return
    yield from _of_document(file)


def _of_document(file: Input) -> Iterator[Item]:
    found: dict[str, Any] = {}
    header: Header | None = None
    for item in members(file, "samples"):
        if isinstance(item, Member):
            found[item.key] = item.value
            if item.key == "samples" and item.value is not None:
                kind = type(item.value).__name__
                yield Reject(position=0, reason="invalid", message=f"`samples` is {kind}; valid: a list", raw=kind)
            continue
        if isinstance(item, Reject):
            yield item
            continue
        try:
            header = header or _header(found)
        except (UnsupportedError, ShapeError) as error:
            yield _refused(error, found)
            return
        yield from _items(item, header)


def _of_archive(archive: Archive) -> Iterator[Item]:
    try:
        header = _header(archive.header())
    except (UnsupportedError, ShapeError) as error:
        yield _refused(error, {})
        return
    for name, item in archive.samples():
        for made in _items(item, header):
            if isinstance(made, Reject):
                made.message = f"{name}: {made.message}"
            yield made


def _items(item: Element | Reject, header: Header) -> Iterator[Item]:
    return items_of(item, NAME, lambda value: [to_record(value, header)])


def _header(found: dict[str, Any]) -> Header:
    """What a log says of its eval. Raises UnsupportedError, ShapeError."""
    version = found.get("version")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise ShapeError(f"`version` is {version!r}; valid: 1 to {_NEWEST}, before the samples")
    if version > _NEWEST:
        raise UnsupportedError(f"the log is of version {version}; known: 1 to {_NEWEST}")
    if not isinstance(found.get("eval"), dict):
        kind = type(found.get("eval")).__name__
        raise ShapeError(f"`eval` is {kind}; valid: an object that describes the eval, before the samples")
    scorer = as_object(as_object(found.get("results")).get("scorer")).get("name")
    header = Header(version, found["eval"], as_object(found.get("plan")), as_text(scorer))
    is_plain, _ = Rewriter().compared(b"", header)
    if not is_plain:
        raise ShapeError("`eval` or `plan` cannot be stored as UTF-8 JSON: half a surrogate pair, or too deep nesting")
    return header


def _refused(error: ValueError, found: dict[str, Any]) -> Reject:
    reason = "unsupported" if isinstance(error, UnsupportedError) else "invalid"
    raw = {key: found[key] for key in ("version", "status", "eval") if key in found}
    return Reject(position=0, reason=reason, message=str(error), raw=shown(raw))


FORMAT = Format(NAME, "Inspect logs (.eval, .json)", recognise, read, no_trajectory)
