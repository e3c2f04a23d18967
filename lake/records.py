"""Records: an episode as plain typed data, before it is rows.

Readers of formats and live recorders both produce `EpisodeRecord`; `lake.write.rows` turns records into table frames.
The field names are the column names, so the documented JSONL format (`lake.formats.jsonl`) is this module and nothing
else. Decoding checks types and unknown fields; `check` holds what types cannot say.
"""

import math
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from lake import ids
from lake.errors import UsageError
from lake.tables import RELATIONS, STATUSES

Json = Any
"""A JSON value (None, bool, number, string, list, dict)."""
Index = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""A count or an index that fits int32."""
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""An integer that fits int64."""
if TYPE_CHECKING:
    Name = str
else:
    Name = str | Int64
    """A text; a source may spell it as a number, which becomes its digits."""
_ROUNDING = 1e-3  # engines that round report log-probabilities this far above 0
_FLOAT32_MAX = (2 - 2**-23) * 2.0**127
DEPTH_KEPT = 500
"""Levels of nesting kept free below the interpreter's limit, so that whatever reads a record later can."""
RAW_LIMIT = 16 << 20
"""Characters that are kept of the text of a reject."""
_STEP_SETTINGS = ("sampling", "request")
"""Keys of `steps.extra` under which readers and recorders keep settings of a call that are not the episode's."""
_ENCODER = msgspec.json.Encoder(order="deterministic")
_LARGEST_BUFFER = 16 << 20
_buffers = threading.local()


class TokensRecord(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The exact tokens around one action, as the engine saw and sampled them.

    `context_ids` holds only the tokens added since the prefix: the end of step `prefix_step_index` (the step before,
    unless given; null opens a new sequence, for example after the history was cut).
    """

    context_ids: list[Index]
    action_ids: list[Index]
    action_logprobs: list[float] | None = None
    action_mask: list[bool] | None = None
    constrained: list[bool] | None = None
    prefix_step_index: Index | UnsetType | None = UNSET
    temperature: float | None = None
    top_p: float | None = None
    top_k: Index | None = None
    min_p: float | None = None
    logprobs_mode: str | None = None
    engine: str | None = None
    dtype: str | None = None
    policy_version: Int64 | None = None
    version_spans: list[tuple[Int64, Index, Index]] | None = None


class StepRecord(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One decision: the state the policy saw (None if that is not known), what it did, what came back as reward."""

    state: str | None
    action: str
    context: list[dict[str, Json]] = []
    reward: float | None = None
    state_role: str | None = None
    state_is_error: bool | None = None
    reasoning: str | None = None
    tool_calls: list[Json] | None = None
    is_action_valid: bool | None = None
    is_active: bool = True
    trainable: bool = True
    is_copied_context: bool = False
    agent_id: str | None = None
    model: str | None = None
    policy_version: Int64 | None = None
    value_estimate: float | None = None
    finish_reason: str | None = None
    started_at: datetime | None = None
    latency: float | None = None
    prompt_tokens: Int64 | None = None
    completion_tokens: Int64 | None = None
    cost: float | None = None
    tokens: TokensRecord | None = None
    extra: dict[str, Json] | None = None


class SpanRecord(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A raw trace event of whatever ran the agent: an OpenTelemetry span, say."""

    trace_id: str
    span_id: str
    kind: str
    name: str
    parent_span_id: str | None = None
    step_index: Index | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    error: str | None = None
    attributes: dict[str, Json] | None = None


class ScoreRecord(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a scorer said, as the source of an episode tells it: of the whole episode, or of one step."""

    scorer: str
    value: float | None
    step_index: Index | None = None
    reason: str | None = None
    error: str | None = None
    metrics: dict[str, Json] | None = None


class EpisodeRecord(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One finished rollout."""

    task_id: Name
    steps: list[StepRecord]
    run_id: str | None = None
    rollout_index: Index = 0
    attempt: Index = 0
    agent_id: str | None = None
    collection_round: Index | None = None
    environment: str | None = None
    split: str | None = None
    policy: str | None = None
    policy_version: Int64 | None = None
    status: str = "completed"
    terminated: bool | None = None
    stop_reason: str | None = None
    env_return: float | None = None
    seed: Int64 | None = None
    expected_group_size: Index | None = None
    parent_episode_id: str | None = None
    parent_step_index: Index | None = None
    root_episode_id: str | None = None
    relation: str | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    prompt_tokens: Int64 | None = None
    completion_tokens: Int64 | None = None
    cost: float | None = None
    error: str | None = None
    ground_truth: Json = None
    tools: list[Json] | None = None
    initial_messages: list[dict[str, Json]] | None = None
    final_observation: list[dict[str, Json]] | None = None
    final_value_estimate: float | None = None
    sampling: dict[str, Json] | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    source_format: str = "jsonl"
    source_version: str | None = None
    source_uri: str | None = None
    spans: list[SpanRecord] = []
    scores: list[ScoreRecord] = []
    """Judgements that came with it; no part of its content: one that is scored later is the same episode."""
    extra: dict[str, Json] | None = None

    def __post_init__(self) -> None:
        """A name that a source spelled as a number becomes text."""
        given: object = self.task_id
        if isinstance(given, int):
            self.task_id = str(self.task_id)


class Reject(msgspec.Struct, kw_only=True):
    """An input record that could not be taken, and why."""

    position: int
    """Line number from 1 in JSONL; index from 0 of an element of an array, a row, an entry, a document."""
    reason: str
    """malformed (not JSON), invalid (JSON of the wrong shape), unsupported (a version of its format that is not known),
    truncated (the source ends inside it), conflict (an episode of this key is present with other content), forgotten
    (an episode of this key was erased), or unmatched (a score of an episode or step that is not there)."""
    message: str
    raw: str
    episode_id: int | None = None
    """The episode it would have been, where it has a key."""
    run_id: str | None = None
    source_uri: str | None = None
    """The run it belongs to, the file it stands in, and its format, where one job reads several."""
    source_format: str | None = None


class Identity(msgspec.Struct, frozen=True):
    """What an episode is called: its ids and its human natural key."""

    episode_id: int
    group_id: int
    content_hash: int
    source_id: str


def identify(record: EpisodeRecord, run_id: str) -> Identity:
    """Ids of a record inside a run.

    A group's natural key is (format, run, round, task, seed): never attempt, sibling number or policy version. The
    episode's adds (rollout, attempt, agent). The content hash leaves out where the record was read from, so that a
    moved file is a replay, what scorers said of it, and fields at their default, so that a field added later changes
    no hash.
    """
    group, key = _keys(record, run_id)
    content = msgspec.structs.replace(record, run_id=run_id, source_uri=None, scores=[])
    # The buffer is used again: fresh memory costs as much as the hash.
    buffer: bytearray = getattr(_buffers, "canonical", None) or bytearray()
    _ENCODER.encode_into(content, buffer)
    _buffers.canonical = buffer if len(buffer) <= _LARGEST_BUFFER else None
    return Identity(
        episode_id=ids.key_hash("episode", *key),
        group_id=ids.key_hash("group", *group),
        content_hash=ids.bytes_hash(buffer),
        source_id="/".join("-" if part is None else str(part) for part in key),
    )


def episode_id(record: EpisodeRecord, run_id: str) -> int:
    """The id that a record has inside a run; `identify` says what it is made of."""
    return ids.key_hash("episode", *_keys(record, run_id)[1])


def _keys(record: EpisodeRecord, run_id: str) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The natural keys of its group and of itself."""
    group = (record.source_format, run_id, record.collection_round, record.task_id, record.seed)
    return group, (*group, record.rollout_index, record.attempt, record.agent_id)


def retyped(record: EpisodeRecord) -> EpisodeRecord:
    """A copy with the types that decoding from a file would give. Raises ValueError: names a field that is wrong."""
    try:
        return msgspec.convert(msgspec.to_builtins(record), EpisodeRecord)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from error


def sampling_of(settings: Any) -> dict[str, Any]:
    """Return the fields of `TokensRecord` that the settings of a request tell, None for those that they do not.

    Engines spell `off` as -1 in `top_k`. `extra_body` is where clients put what their own signature lacks.
    """
    given = settings if isinstance(settings, dict) else {}
    more = given.get("extra_body")
    said = {**(more if isinstance(more, dict) else {}), **given}
    top_k = said.get("top_k")
    return {name: _real(said.get(name)) for name in ("temperature", "top_p", "min_p")} | {
        "top_k": 0 if top_k == -1 else top_k if type(top_k) is int and 0 <= top_k < 1 << 31 else None
    }


def _real(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= _FLOAT32_MAX else None


def tell_sampling(record: EpisodeRecord) -> None:
    """Write to tokens how they were sampled, where only the record says it.

    A step's own settings (`extra.sampling`, `extra.request`) hold for it alone; else those of the episode hold
    (`sampling`). What tokens say themselves stays. This is the only place where a source's settings reach tokens that
    do not have them, for every format and recorder: a ratio loss refuses tokens of unknown temperature.
    """
    for step in record.steps:
        if (tokens := step.tokens) is None:
            continue
        extra = step.extra or {}
        own = next((extra[key] for key in _STEP_SETTINGS if isinstance(extra.get(key), dict)), record.sampling)
        for name, value in sampling_of(own).items():
            if value is not None and getattr(tokens, name) is None:
                setattr(tokens, name, value)


def check_run_name(run: str) -> None:
    """Raise UsageError: the name of a run is blank."""
    if not run.strip():
        raise UsageError("the run's name is empty; give --run NAME")


def printable(text: str) -> str:
    """Text that a table can hold: lone surrogates, also those that stand for bytes that were not UTF-8, as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def excerpt(text: str) -> str:
    """Text of a reject: printable, and no more than 16 MB of it."""
    return printable(text if len(text) <= RAW_LIMIT else text[:RAW_LIMIT] + " ... [cut at 16 MB]")


def shown(record: object) -> str:
    """A record that cannot be taken, as text for a person."""
    try:
        return printable(repr(record))
    except Exception as error:  # objects of somebody else may raise anything
        return f"(cannot be shown: {as_str(error)})"


def as_str(value: object) -> str:
    """Any object's text, printable; the name of its type if its text cannot be had."""
    try:
        return printable(str(value))
    except Exception:
        return f"({type(value).__name__})"


def check(record: EpisodeRecord, *, is_plain: bool = False) -> str | None:  # noqa: PLR0911 - a list of independent rules
    """What is wrong with a record that decoded, as a sentence; None if nothing is.

    `is_plain`: its JSON is known to be UTF-8 throughout, of finite numbers and not nested deeply.
    """
    if not record.steps:
        return (
            "an episode needs at least one step: credit and training are about decisions. If only its outcome is "
            'known, write one step that is not trained on, `{"state": null, "action": "", "trainable": false}`, and '
            "the outcome as `env_return`: it then counts in success rates and among its siblings"
        )
    if not record.task_id.strip():
        return f"`task_id` is {record.task_id!r}; valid: a name that is not blank"
    if record.status not in STATUSES:
        return f"`status` is {record.status!r}; valid: {', '.join(STATUSES)}"
    if record.relation is not None and record.relation not in RELATIONS:
        return f"`relation` is {record.relation!r}; valid: {', '.join(RELATIONS)}"
    for name in ("parent_episode_id", "root_episode_id"):
        if (value := getattr(record, name)) is not None and not ids.is_text(value):
            return f"`{name}` is {value!r}; valid: an episode id, {ids.TEXT_LENGTH} base32 characters"
    problem = _not_finite(
        env_return=record.env_return, final_value_estimate=record.final_value_estimate, cost=record.cost
    )
    if problem := problem or _not_utc(started_at=record.started_at, ended_at=record.ended_at):
        return problem
    for index, step in enumerate(record.steps):
        if is_plain and step.started_at is None and step.tokens is None:
            continue
        if problem := _check_step(step, index, record, is_plain=is_plain):
            return f"steps[{index}]: {problem}"
    if problem := _check_spans(record) or _check_scores(record):
        return problem
    return None if is_plain else _not_storable(record)


def _check_step(step: StepRecord, index: int, record: EpisodeRecord, *, is_plain: bool) -> str | None:
    problem = None
    if not is_plain:
        problem = _not_finite(
            reward=step.reward, value_estimate=step.value_estimate, latency=step.latency, cost=step.cost
        )
    if step.started_at is not None:
        problem = problem or _not_utc(started_at=step.started_at)
    if (tokens := step.tokens) is not None:
        problem = problem or _not_finite(temperature=tokens.temperature, top_p=tokens.top_p, min_p=tokens.min_p)
        problem = problem or _check_tokens(tokens, index, record)
    return problem


def _check_spans(record: EpisodeRecord) -> str | None:
    seen = set()
    for index, span in enumerate(record.spans):
        if problem := _not_utc(started_at=span.started_at, ended_at=span.ended_at):
            return f"spans[{index}]: {problem}"
        if span.step_index is not None and span.step_index >= len(record.steps):
            return f"spans[{index}]: `step_index` is {span.step_index}; valid: 0 to {len(record.steps) - 1}, or null"
        if (key := (span.trace_id, span.span_id)) in seen:
            return f"spans[{index}]: span {span.span_id!r} of trace {span.trace_id!r} is there twice"
        seen.add(key)
    return None


def _check_scores(record: EpisodeRecord) -> str | None:
    seen = set()
    for index, score in enumerate(record.scores):
        place = f"scores[{index}]"
        if not score.scorer.strip() or "@" in score.scorer:
            return f"{place}: `scorer` is {score.scorer!r}; valid: a name that is not blank and has no @"
        if problem := _not_finite(value=score.value):
            return f"{place}: {problem}"
        if score.step_index is not None and score.step_index >= len(record.steps):
            return f"{place}: `step_index` is {score.step_index}; valid: 0 to {len(record.steps) - 1}, or null"
        if (key := (score.scorer, score.step_index)) in seen:
            return f"{place}: {score.scorer!r} scores the same {'episode' if key[1] is None else 'step'} twice"
        seen.add(key)
    return None


def _not_storable(record: EpisodeRecord) -> str | None:
    nested: Json = record
    for _ in range(DEPTH_KEPT):
        nested = [nested]
    try:
        msgspec.json.encode(nested)
    except (UnicodeEncodeError, TypeError, ValueError, OverflowError) as error:
        return f"it cannot be stored as UTF-8 JSON: {error}"
    except RecursionError:
        return "it cannot be stored as JSON: it is nested too deeply"
    return None


def _not_utc(**times: datetime | None) -> str | None:
    for name, time in times.items():
        if time is None or time.tzinfo is None:
            continue
        try:
            time.astimezone(UTC)
        except OverflowError:
            return f"`{name}` is {time}; valid: a time whose year in UTC is 1 to 9999"
    return None


def _not_finite(**values: float | None) -> str | None:
    for name, value in values.items():
        if value is not None and not math.isfinite(value):
            return f"`{name}` is {value}; valid: a finite number, or null if unknown"
    return None


def logprob_fault(values: Sequence[float]) -> str | None:
    """Return the first value that is no log-probability of a token, and what is valid; None if all are."""
    wrong = (f"{v}; valid: at most 0, and finite in float32" for v in values if not -_FLOAT32_MAX <= v <= _ROUNDING)
    return next(wrong, None)


def _check_tokens(tokens: TokensRecord, index: int, record: EpisodeRecord) -> str | None:
    n_action = len(tokens.action_ids)
    for name in ("action_logprobs", "action_mask", "constrained"):
        if (value := getattr(tokens, name)) is not None and len(value) != n_action:
            return f"`tokens.{name}` has {len(value)} entries for {n_action} action ids"
    if (fault := logprob_fault(tokens.action_logprobs or ())) is not None:
        return f"`tokens.action_logprobs` holds {fault}"
    if tokens.logprobs_mode not in (None, "processed", "raw"):
        return f"`tokens.logprobs_mode` is {tokens.logprobs_mode!r}; valid: processed, raw, null"
    prefix = tokens.prefix_step_index
    if isinstance(prefix, int) and not 0 <= prefix < index:
        valid = f"an earlier step (0 to {index - 1}), or null" if index else "null for the first step"
        return f"`tokens.prefix_step_index` is {prefix}; valid: {valid}"
    extended = index - 1 if prefix is UNSET else prefix
    if isinstance(extended, int) and extended >= 0 and record.steps[extended].tokens is None:
        return f"its tokens extend step {extended}, which has none; set `tokens.prefix_step_index` to null"
    return None
