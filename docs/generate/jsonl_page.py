"""The page of our JSONL format, from the record types of `lake.records` and the meanings of the tables' columns."""

import json

import msgspec
from msgspec import inspect

from lake.records import EpisodeRecord, ScoreRecord, SpanRecord, StepRecord, TokensRecord
from lake.tables import EPISODES, SPANS, STEPS, TABLES, TOKENS
from lake.tables.columns import Table

# Fields that are no column, and those that people write otherwise than they are stored.
_MEANINGS = {
    "run_id": "The run that produced the rollout; else `--run`, else it is called by the file or its folder.",
    "task_id": "The task, as its source names it; a number is its digits.",
    "state": (
        "The raw observation the policy saw last, without history. null if it is not known: the step then shares its "
        "state with none, and is still trained on."
    ),
    "reward": (
        "Reward for the action, null if none is known. One that is given at the end is the last step's, or, if it "
        "rates the whole episode, `env_return`."
    ),
    "context": (
        "Messages added since the last decision (list of chat messages), its observation among them. Those before the "
        "first decision are `initial_messages`; what step 0 has here follows them."
    ),
    "final_observation": (
        "Messages after the last decision: T decisions have T + 1 observations, and a last one without an action is "
        "this."
    ),
    "steps": "The decisions in order, at least one; see below.",
    "tokens": "Exact tokens around the action, where the engine gave them; see below.",
    "spans": "Raw trace events of the program that ran the agent, if it kept them; see below.",
    "scores": (
        "What scorers said of it, see below. Scores are no part of its content: the same episode with other scores is "
        "present already, and the scores are added."
    ),
    "source_format": "Format it first came from; part of what it is called. Only what was exported from a lake has it.",
    "parent_episode_id": "The episode this one came out of: its 13 characters.",
    "root_episode_id": "Root of the tree of sub-agents and forks: its 13 characters.",
    "context_ids": "Only the tokens added since the prefix.",
    "prefix_step_index": (
        "The earlier step whose end this one extends; the step before unless given, null opens a new sequence."
    ),
}
_SCALARS = {
    inspect.StrType: "string",
    inspect.FloatType: "number",
    inspect.BoolType: "true or false",
    inspect.NoneType: "null",
    inspect.AnyType: "any JSON",
    inspect.DictType: "object",
    inspect.DateTimeType: "RFC 3339 time",
}
_SET_BY_THE_READER = {"source_uri"}
SCORES = TABLES["scores"]
_EXAMPLE = """{"task_id": "find-the-key", "rollout_index": 0, "env_return": 1.0, "steps": [
  {"state": "You are in the hall. Exits: north.", "action": "go north", "reward": 0.0},
  {"state": "You are in the kitchen. You see a key.", "action": "take key", "reward": 1.0}]}"""


def jsonl_page() -> str:
    """Every field of a line."""
    msgspec.json.decode(_EXAMPLE, type=EpisodeRecord)
    intro = f"""# JSONL: one episode a line

Each line of the file is one finished rollout, a JSON object. Siblings (rollouts of one task from the identical start)
share `task_id`, `seed` and `collection_round` and differ in `rollout_index`. A field that is left out is unknown; an
unknown field is an error, except inside `extra`. A useful line, broken here for reading:

```json
{_EXAMPLE}
```

`trajlake ingest FILE --lake URI` reads it, gzip and zstd files too (under any name; a damaged one is read
up to the damage, which is a reject). A line that cannot be taken goes to the table `rejects` with its number, a reason
and its text; the rest is read on. An episode that is present already is counted and skipped; the same key with other
content is a reject, reason `conflict`. Rejects are also an object with a key twice, NaN, a line above 64 MB, and an
episode without steps. If only its outcome is known, write the step
`{{"state": null, "action": "", "trainable": false}}` and the outcome as `env_return`. It then counts in success rates
and among its siblings.

Messages keep their content as it is, a text or a list of parts (images as `image_url` with a data URI); texts above
64 KB move to the table `blobs` and come back where they are read.

Chats (`{{"messages": [...]}}`) and the files of many frameworks are read as they are: see
[bring your trajectories](../guides/bring-your-trajectories.md).
"""
    sections = [
        _section("An episode", EpisodeRecord, EPISODES),
        _section("A step", StepRecord, STEPS),
        _section("Tokens of a step", TokensRecord, TOKENS),
        _section("A span", SpanRecord, SPANS),
        _section("A score", ScoreRecord, SCORES),
    ]
    return "\n".join([intro, *sections])


def _section(title: str, record: type[msgspec.Struct], table: Table) -> str:
    rows = []
    for field in msgspec.structs.fields(record):
        if field.name not in _SET_BY_THE_READER:
            kind = _kind(inspect.type_info(field.type))
            rows.append(f"| `{field.name}` | {kind} | {_default(field)} | {_meaning(field.name, table)} |")
    head = ["| field | value | if left out | meaning |", "| --- | --- | --- | --- |"]
    return "\n".join([f"## {title}\n", *head, *rows, ""])


def _meaning(name: str, table: Table) -> str:
    if name in _MEANINGS:
        return _MEANINGS[name]
    column = table.column(name)
    return column.meaning + (f" One of: {', '.join(f'`{value}`' for value in column.values)}." if column.values else "")


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    if field.default_factory is not msgspec.NODEFAULT:
        return f"`{json.dumps(field.default_factory())}`"
    return "" if field.default in (None, msgspec.UNSET) else f"`{json.dumps(field.default)}`"


def _kind(info: inspect.Type) -> str:
    """A type in words; null is not mentioned: it is what leaving the field out means."""
    match info:
        case inspect.UnionType(types=types):
            words = " or ".join(_kind(each) for each in types if not isinstance(each, inspect.NoneType))
        case inspect.ListType(item_type=item):
            words = f"list of {_kind(item)}"
        case inspect.TupleType(item_types=items):
            words = f"[{', '.join(map(_kind, items))}]"
        case inspect.StructType(cls=cls):
            words = f"{cls.__name__.removesuffix('Record').lower()} (object)"
        case inspect.IntType(ge=low):
            words = "integer from 0" if low == 0 else "integer"
        case _:
            words = _SCALARS[type(info)]
    return words
