"""What files of chats look like: rows that say something, however they spell it, and those that only ask.

See `lake.formats.messages_chat`.
"""

from typing import Any

from lake.formats.base.look import Look
from lake.formats.chat.data_rows import ANSWERS, CHATS, PAIRS, is_chat, spelled

SCORES = ("reward", "score", "rating", "label", "kto_tag", "resolved", "rewards", "scores")
"""Columns that score what was said."""
_DOCUMENT = frozenset(("text", "id", "url", "source", "timestamp", "meta", "metadata"))
"""Keys of texts that models are pre-trained on."""
_SEVERAL = ("outputs", "responses", "completions", "generations")
"""Columns that answer a prompt in forms that are not read."""
_OTHERS = frozenset(
    # Keys of rows of other formats that have messages or prompts too.
    (
        *("steps", "traj", "trajectory", "trajectory_format", "simulations", "samples", "events"),
        *("spans", "trace", "trace_id", "rollout", "rollout_id", "rollout_status", "input_metadata", "env_index"),
        *("evaluation_result", "execution_metadata", "eval_metadata", "generation_ms", "total_ms", "transcripts"),
        *("responses_create_params", "group_index", "sessionId", "kwargs"),
    )
)


def recognise(look: Look) -> bool:
    """Whether rows have chat messages, or a prompt and what answers it, and no mark of another format."""
    return any(map(_is_ours, rows_of(look))) and not (look.kind == "parquet" and "step" in look.names)


def no_trajectory(look: Look) -> str | None:
    """What a database of Inspect Scout is, texts without roles, and prompts that nobody has answered yet."""
    if look.kind == "parquet" and {"transcript_id", "messages"}.issubset(look.names):
        return "it is a database of Inspect Scout; ingest the logs that it was made from, or an export as `jsonl`"
    rows = rows_of(look)
    if rows and all("text" in row and row.keys() <= _DOCUMENT for row in rows):
        return "its rows are texts without roles (for pre-training); ingest chats, or what agents did"
    # A lone document may be cut before its answer.
    if (rows[1:] or look.kind in ("lines", "parquet")) and rows and all(map(_is_question, rows)):
        return "its rows are prompts without answers (for training by reinforcement); ingest the rollouts made of them"
    return None


def rows_of(look: Look) -> list[dict[str, Any]]:
    """The first rows of a file; of Parquet one that is made up of the types of its columns."""
    if look.kind != "parquet":
        return look.objects
    import pyarrow.parquet as pq

    try:
        return [{field.name: _example(field) for field in pq.read_schema(look.path)}]
    except (OSError, ValueError):
        return []


def _example(field: Any) -> Any:
    """A value of a field of Arrow's."""
    import pyarrow as pa

    kind = field.type
    if pa.types.is_struct(kind):
        return {inner.name: _example(inner) for inner in kind}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [_example(kind.value_field)]
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return '[{"role"' if field.name in CHATS else ""
    return 0


def _is_ours(value: dict[str, Any]) -> bool:
    row = spelled(value)
    return _is_row(row) and not row.keys() & _OTHERS and not isinstance(row.get("response"), dict)


def _is_row(value: dict[str, Any]) -> bool:
    if "role" in value and value.keys() >= {"content"} and all(inner is None for inner in value.values()):
        return any(key in value for key in (*CHATS, *PAIRS[0]))  # of a damaged document, only the keys are known
    if any(is_chat(value.get(key)) for key in CHATS):
        return True
    for pair in PAIRS:
        first, second = (value.get(key) for key in pair)
        if first is not None and type(first) is type(second) and (isinstance(first, str) or is_chat(first)):
            return True
    asked = [prompt for key in ("prompt", "instruction") if (prompt := value.get(key)) is not None]
    answers = [value.get(key) for key in ANSWERS]
    return all(any(isinstance(one, str) or is_chat(one) for one in said) for said in (asked, answers))


def _is_question(value: dict[str, Any]) -> bool:
    """Whether a row asks, and nobody answers."""
    prompt = value.get("prompt")
    if value.keys() & {"reward_model", "extra_info"} and (isinstance(prompt, str) or is_chat(prompt)):
        return not value.keys() & {*ANSWERS, *_SEVERAL}
    chat = value.get("messages")
    if not isinstance(chat, list) or not _is_ours(value) or value.keys() & {*ANSWERS, *SCORES}:
        return False
    roles = [message.get("role") if isinstance(message, dict) else None for message in chat]
    return all(role in ("system", "developer", "user") for role in roles) and "chosen" not in spelled(value)
