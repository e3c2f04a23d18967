"""Records: an episode as plain typed data, before it becomes rows.

Readers of formats and live recorders both produce `EpisodeRecord`; `lake.write.rows` turns records into table frames.
The field names are the column names, so these classes define the JSONL format (`lake.formats.jsonl`). Decoding checks
types and unknown fields; `check` checks everything else.
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
    """A text; a source may give a number, which becomes its digits."""
_ROUNDING = 1e-3  # engines that round report log-probabilities this far above 0
_FLOAT32_MAX = (2 - 2**-23) * 2.0**127
DEPTH_KEPT = 500
"""Levels of nesting kept free below the interpreter's limit, so that later readers of a record can decode it."""
RAW_LIMIT = 16 << 20
"""Maximum characters of a reject's text."""
_STEP_SETTINGS = ("sampling", "request")
"""Keys of `steps.extra` with the settings of one call, where they differ from the episode's."""
_ENCODER = msgspec.json.Encoder(order="deterministic")
_LARGEST_BUFFER = 16 << 20
_buffers = threading.local()


class TokensRecord(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The exact tokens around one action, as the engine saw and sampled them.

    `context_ids` holds only the tokens after the prefix. The prefix ends with step `prefix_step_index`: by default the
    previous step; null starts a new sequence, for example after the history was cut.
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
    """One decision: the state that the policy saw (None if unknown), its action, and the reward."""

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
    """A raw trace event of the agent's runtime, such as an OpenTelemetry span."""

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
    """A score of an episode or of one step, as its source holds it."""

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
    """Scores that came with it. They are not part of its content hash: later scores leave the episode the same."""
    extra: dict[str, Json] | None = None

    def __post_init__(self) -> None:
        """Convert a name that is a number to text."""
        name: object = self.task_id
        if isinstance(name, int):
            self.task_id = str(self.task_id)


class Reject(msgspec.Struct, kw_only=True):
    """An input record that could not be read, with the reason."""

    position: int
    """Line number from 1 in JSONL; index from 0 of an element of an array, a row, an entry, a document."""
    reason: str
    """malformed (not JSON), invalid (JSON of the wrong shape), unsupported (an unknown version of its format),
    truncated (the source ends inside it), conflict (an episode with this key is present with other content), forgotten
    (an episode with this key was erased), or unmatched (a score of a missing episode or step)."""
    message: str
    raw: str
    episode_id: int | None = None
    """The id of its episode, if it has a key."""
    run_id: str | None = None
    source_uri: str | None = None
    """Its run, file and format, if one job reads several."""
    source_format: str | None = None


class Identity(msgspec.Struct, frozen=True):
    """The ids of an episode and its natural key as text."""

    episode_id: int
    group_id: int
    content_hash: int
    source_id: str


def identify(record: EpisodeRecord, run_id: str) -> Identity:
    """Compute the ids of a record inside a run.

    A group's natural key is (format, run, round, task, seed), without attempt, sibling number and policy version. The
    episode's key adds (rollout, attempt, agent). The content hash omits the record's source, so that a moved file is a
    replay. It omits scores, and fields at their default, so that a field added later changes no hash.
    """
    group, key = _make_keys(record, run_id)
    content = msgspec.structs.replace(record, run_id=run_id, source_uri=None, scores=[])
    # The buffer is reused: new memory costs as much as the hash.
    buffer: bytearray = getattr(_buffers, "canonical", None) or bytearray()
    _ENCODER.encode_into(content, buffer)
    _buffers.canonical = buffer if len(buffer) <= _LARGEST_BUFFER else None
    return Identity(
        episode_id=ids.key_hash("episode", *key),
        group_id=ids.key_hash("group", *group),
        content_hash=ids.bytes_hash(buffer),
        source_id="/".join("-" if field is None else str(field) for field in key),
    )


def make_episode_id(record: EpisodeRecord, run_id: str) -> int:
    """Compute the id of a record inside a run; see `identify`."""
    return ids.key_hash("episode", *_make_keys(record, run_id)[1])


def derive_sibling_index(rollout_index: int, number: int) -> int:
    """Return the rollout index of a further rollout whose source gives it a key that another one has.

    Args:
        rollout_index: the index by its source.
        number: 0 for the first rollout of the key, which keeps the index.
    """
    return rollout_index if number == 0 else ids.key_hash("sibling", rollout_index, number) & (2**31 - 1)


def make_group_id(record: EpisodeRecord, run_id: str) -> int:
    """Compute the id of a record's group inside a run; see `identify`."""
    return ids.key_hash("group", *_make_keys(record, run_id)[0])


def _make_keys(record: EpisodeRecord, run_id: str) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the natural keys of a record's group and of the record."""
    group = (record.source_format, run_id, record.collection_round, record.task_id, record.seed)
    return group, (*group, record.rollout_index, record.attempt, record.agent_id)


def retype(record: EpisodeRecord) -> EpisodeRecord:
    """Return a copy with the types of a decoded record. Raises ValueError: a field is invalid; the message names it."""
    try:
        return msgspec.convert(msgspec.to_builtins(record), EpisodeRecord)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from error


def read_sampling(settings: Any) -> dict[str, Any]:
    """Return the sampling fields of `TokensRecord` from the settings of a request; None for missing ones.

    Engines write `off` as -1 in `top_k`. Clients put parameters that their signature lacks into `extra_body`.
    """

    def to_real(number: Any) -> float | None:
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        return float(number) if is_number and abs(number) <= _FLOAT32_MAX else None

    request = settings if isinstance(settings, dict) else {}
    extra_body = request.get("extra_body")
    merged = {**(extra_body if isinstance(extra_body, dict) else {}), **request}
    top_k = merged.get("top_k")
    return {name: to_real(merged.get(name)) for name in ("temperature", "top_p", "min_p")} | {
        "top_k": 0 if top_k == -1 else top_k if type(top_k) is int and 0 <= top_k < 1 << 31 else None
    }


def fill_sampling(record: EpisodeRecord) -> None:
    """Fill missing sampling fields of tokens from the record's settings.

    A step's settings (`extra.sampling`, `extra.request`) apply to that step, and otherwise those of the episode
    (`sampling`). Fields that tokens already have stay. All formats and recorders use this function: a ratio loss
    refuses tokens of unknown temperature.
    """
    for step in record.steps:
        if (tokens := step.tokens) is None:
            continue
        extra = step.extra or {}
        settings = next((extra[key] for key in _STEP_SETTINGS if isinstance(extra.get(key), dict)), record.sampling)
        for name, setting in read_sampling(settings).items():
            if setting is not None and getattr(tokens, name) is None:
                setattr(tokens, name, setting)


def check_run_name(run: str) -> None:
    """Raise UsageError: the name of a run is blank."""
    if not run.strip():
        raise UsageError("the run's name is empty; give --run NAME")


def printable(text: str) -> str:
    """Escape lone surrogates, which stand for bytes that were not UTF-8, so that a table can hold the text."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def excerpt(text: str) -> str:
    """Return at most 16 MB of a reject's text, printable."""
    return printable(text if len(text) <= RAW_LIMIT else text[:RAW_LIMIT] + " ... [cut at 16 MB]")


def format_record(record: object) -> str:
    """Return an invalid record as text for a person."""
    try:
        return printable(repr(record))
    except Exception as error:  # foreign objects may raise anything
        return f"(cannot be shown: {as_str(error)})"


def as_str(content: object) -> str:
    """Return any object's text, printable; the name of its type if `str` fails."""
    try:
        return printable(str(content))
    except Exception:
        return f"({type(content).__name__})"


def check(record: EpisodeRecord, *, is_plain: bool = False) -> str | None:  # noqa: PLR0911 - a list of independent rules
    """Return the first fault of a decoded record as a sentence; None if it is valid.

    Args:
        is_plain: whether its JSON is known to be UTF-8, with finite numbers, and not nested deeply.
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
        if (text := getattr(record, name)) is not None and not ids.is_text(text):
            return f"`{name}` is {text!r}; valid: an episode id, {ids.TEXT_LENGTH} base32 characters"
    problem = _find_non_finite(
        env_return=record.env_return, final_value_estimate=record.final_value_estimate, cost=record.cost
    )
    if problem := problem or _find_non_utc(started_at=record.started_at, ended_at=record.ended_at):
        return problem
    for index, step in enumerate(record.steps):
        if is_plain and step.started_at is None and step.tokens is None:
            continue
        if problem := _check_step(step, index, record, is_plain=is_plain):
            return f"steps[{index}]: {problem}"
    if problem := _check_spans(record) or _check_scores(record):
        return problem
    return None if is_plain else _find_unstorable(record)


def _check_step(step: StepRecord, index: int, record: EpisodeRecord, *, is_plain: bool) -> str | None:
    problem = None
    if not is_plain:
        problem = _find_non_finite(
            reward=step.reward, value_estimate=step.value_estimate, latency=step.latency, cost=step.cost
        )
    if step.started_at is not None:
        problem = problem or _find_non_utc(started_at=step.started_at)
    if (tokens := step.tokens) is not None:
        problem = problem or _find_non_finite(temperature=tokens.temperature, top_p=tokens.top_p, min_p=tokens.min_p)
        problem = problem or _check_tokens(tokens, index, record)
    return problem


def _check_spans(record: EpisodeRecord) -> str | None:
    keys = set()
    for index, span in enumerate(record.spans):
        if problem := _find_non_utc(started_at=span.started_at, ended_at=span.ended_at):
            return f"spans[{index}]: {problem}"
        if span.step_index is not None and span.step_index >= len(record.steps):
            return f"spans[{index}]: `step_index` is {span.step_index}; valid: 0 to {len(record.steps) - 1}, or null"
        if (key := (span.trace_id, span.span_id)) in keys:
            return f"spans[{index}]: span {span.span_id!r} of trace {span.trace_id!r} is there twice"
        keys.add(key)
    return None


def _check_scores(record: EpisodeRecord) -> str | None:
    keys = set()
    for index, score in enumerate(record.scores):
        path = f"scores[{index}]"
        if not score.scorer.strip() or "@" in score.scorer:
            return f"{path}: `scorer` is {score.scorer!r}; valid: a name that is not blank and has no @"
        if problem := _find_non_finite(value=score.value):
            return f"{path}: {problem}"
        if score.step_index is not None and score.step_index >= len(record.steps):
            return f"{path}: `step_index` is {score.step_index}; valid: 0 to {len(record.steps) - 1}, or null"
        if (key := (score.scorer, score.step_index)) in keys:
            target = "step" if score.step_index is not None else "episode"
            return f"{path}: {score.scorer!r} scores the same {target} twice"
        keys.add(key)
    return None


def _find_unstorable(record: EpisodeRecord) -> str | None:
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


def _find_non_utc(**times: datetime | None) -> str | None:
    for name, time in times.items():
        if time is None or time.tzinfo is None:
            continue
        try:
            time.astimezone(UTC)
        except OverflowError:
            return f"`{name}` is {time}; valid: a time whose year in UTC is 1 to 9999"
    return None


def _find_non_finite(**numbers: float | None) -> str | None:
    for name, number in numbers.items():
        if number is not None and not math.isfinite(number):
            return f"`{name}` is {number}; valid: a finite number, or null if unknown"
    return None


def find_logprob_fault(logprobs: Sequence[float]) -> str | None:
    """Return the first invalid log-probability of a token, with the valid range; None if all are valid."""
    wrong = (f"{v}; valid: at most 0, and finite in float32" for v in logprobs if not -_FLOAT32_MAX <= v <= _ROUNDING)
    return next(wrong, None)


def _check_tokens(tokens: TokensRecord, index: int, record: EpisodeRecord) -> str | None:
    n_action = len(tokens.action_ids)
    for name in ("action_logprobs", "action_mask", "constrained"):
        if (entries := getattr(tokens, name)) is not None and len(entries) != n_action:
            return f"`tokens.{name}` has {len(entries)} entries for {n_action} action ids"
    if (fault := find_logprob_fault(tokens.action_logprobs or ())) is not None:
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
