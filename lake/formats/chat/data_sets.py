"""Chats in rows of training data: messages, a prompt and its answer, or a pair of answers, under many column names.

Sources: OpenAI's fine-tuning guide; TRL 1.16, dataset formats; LLaMA-Factory 0.9.5, data/README and v1/utils/types, and
its first data sets; ms-swift 3, custom data sets; the hh-rlhf data set, which writes texts of "\\n\\nHuman: ..." and
"\\n\\nAssistant: ...".

`normalise_messages` brings messages into the form of `lake.formats.chat.messages`. It knows other names of roles
(`ROLES`); `function_call` and `tool_call` hold calls as JSON (a second one in a row belongs to the same decision). It
also knows text under `value` or `text`; `tool_calls` as JSON text, or without `function`; the older `function_call`;
`reasoning` or `thinking` next to the content; LLaMA-Factory's parts {type: text | reasoning | tool_call, value}; and
the parts that `lake.formats.tracing.payloads` knows, those of Gemini among them.

A row that `lake.export` wrote names its episode if it has all of `EPISODE_NAMES`. Its return is a column of the format,
and each score a column of its name. Scores whose names or values do not fit a column are in `SCORES_COLUMN`, an object
(in a table, JSON text of one). The format's column of a score holds the score that the export counted: the return,
unless `REWARD_OF` names a scorer.
"""

import re
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import msgspec

from lake import ids
from lake.formats.base.fields import ScoreList, as_object, as_text, parse_count, parse_number
from lake.formats.base.format import FileHead
from lake.formats.base.json_array import Rewriter
from lake.formats.base.rows import ShapeError
from lake.formats.base.source import Input
from lake.formats.chat.messages import ChatDecisions, Message, is_assistant, join_text, make_tool_call, parse_chat
from lake.formats.tracing.payloads import is_part, join_parts, report_unknown_keys, to_messages
from lake.records import EpisodeRecord

_decode = msgspec.json.Decoder().decode

# ---------------------------------------------------------------- messages

_PLAIN_KEYS = frozenset(("role", "content", "name", "tool_call_id"))
_TEXTS = ("text", "input_text", "output_text")
_PLAIN_ROLES = ("user", "assistant", "tool", "system", "developer")
_CALL_ROLES = frozenset(("function_call", "tool_call"))
_ASSISTANTS = ("gpt", "chatgpt", "bing", "bard", "model", "bot", "ai", "chatbot", *sorted(_CALL_ROLES))
ROLES = {
    **{role: role for role in _PLAIN_ROLES},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(_ASSISTANTS, "assistant"),
    **dict.fromkeys(("observation", "function_response", "function", "tool_response", "ipython"), "tool"),
}
"""Lower-case names of roles -> the role."""
_TEXT_KEYS = ("value", "text", "system_prompt")
"""Keys for the text of a message without `content`."""
RAW = "_raw"
"""Only key of arguments that are not a JSON object, in data sets that require one; its value is their text."""


def normalise_messages(raw_messages: Any, location: str, file: Input | None = None) -> list[Message]:
    """Normalise a list of messages, JSON text of one, or one message; `location` names them in error messages.

    The report of `file` names their unknown keys. Raises ShapeError: another value; see also `report_unknown_keys`.
    """
    entries = decode_json_text(raw_messages) if isinstance(raw_messages, str) else raw_messages
    if isinstance(entries, dict):
        entries = [entries]
    if not isinstance(entries, list):
        kind = type(raw_messages).__name__
        raise ShapeError(f"`{location}` is {kind}; valid: a list of messages, or JSON text of one")
    messages: list[Message] = []
    for index, entry in enumerate(entries):
        is_plain = (
            type(entry) is dict
            and entry.keys() <= _PLAIN_KEYS
            and type(entry.get("content")) is str
            and entry.get("role") in _PLAIN_ROLES  # every other name may mean one of these
            and None not in entry.values()
        )
        if is_plain:
            messages.append(entry)
            continue
        if file is not None:
            report_unknown_keys(file, entry)
        normalised = _normalise_message(entry, f"{location}[{index}]")
        # ms-swift writes the second call of a decision as a separate message.
        is_call = isinstance(entry, dict) and entry.get("role") == "tool_call" and "tool_calls" in normalised[0]
        if is_call and messages and isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant":
            calls = [*messages[-1].get("tool_calls", ()), *normalised[0]["tool_calls"]]
            messages[-1] = messages[-1] | {"tool_calls": calls}
        else:
            messages += normalised
    return messages


def decode_json_text(text: str) -> Any:
    """Decode JSON text; None if it is not JSON, or cannot be stored as part of a record."""
    try:
        encoded = text.encode()
        decoded = _decode(encoded)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return decoded if Rewriter().compare(encoded, decoded)[0] else None


def parse_answers_from(
    messages: Sequence[Message], start: int = 0, *, location: str, is_decision: Callable[[Message], bool] = is_assistant
) -> ChatDecisions:
    """Parse a chat whose decisions begin at message `start`; earlier answers are history, and observed."""
    chat = parse_chat(messages, is_decision=is_decision, location=location)
    history = sum(index < start for index in chat.message_indices) if start else 0
    if history == len(chat.steps) > 0:
        chat = ChatDecisions(initial_messages=list(messages))
    elif history:
        chat.steps, chat.message_indices = chat.steps[history:], chat.message_indices[history:]
        chat.initial_messages = list(messages[: chat.message_indices[0]])
        chat.steps[0].context = []
    return chat


def _normalise_message(entry: Any, location: str) -> list[Message]:
    """Normalise a message; it becomes several if it holds results of tools."""
    if not isinstance(entry, dict) or not isinstance(entry.get("role"), str):
        return [entry]  # the later check of all messages reports its fault
    message = _rename_message_keys(entry)
    if isinstance(message.get("parts"), list) and "content" not in message:
        return to_messages(message, message["role"])
    for key in ("reasoning", "thinking"):
        if isinstance(message.get(key), str) and "reasoning_content" not in message:
            message["reasoning_content"] = message.pop(key)
    calls = message.pop("tool_calls", None)
    if isinstance(calls, str):
        calls = decode_json_text(calls) if calls.strip() else []
        if not isinstance(calls, list):
            raise ShapeError(f"`{location}.tool_calls` is a text that is no JSON list; valid: a list of tool calls")
    if not calls and isinstance(message.get("function_call"), dict):
        calls = [message.pop("function_call")]
    if calls:
        message["tool_calls"] = [_normalise_call(call) for call in calls] if isinstance(calls, list) else calls
    content = message.get("content")
    if not isinstance(content, list):
        return [message]
    if any(isinstance(part, dict) and "value" in part for part in content):
        content = [typed for part in content for typed in _normalise_part(part)]
        message["content"] = join_parts(content)
    if any(is_part(part) and part.get("type") not in _TEXTS for part in content):
        return to_messages(message | {"content": content}, message["role"])
    return [message]


def _rename_message_keys(entry: dict[str, Any]) -> Message:
    """Return a message whose role, text and calls are under the usual keys, without nulls."""
    message = {key: field for key, field in entry.items() if field is not None}
    role = message["role"].lower()
    message["role"] = ROLES.get(role, message["role"])
    text_key = next((key for key in _TEXT_KEYS if isinstance(message.get(key), str)), None)
    if "content" not in message and text_key:
        message["content"] = message.pop(text_key)
    if role in _CALL_ROLES and (calls := _decode_calls(message.get("content"))):
        message |= {"content": None, "tool_calls": calls}
    return message


def _decode_calls(text: Any) -> list[Any]:
    """Return the calls in JSON text; empty for anything else, which is the agent's text then."""
    decoded = decode_json_text(text) if isinstance(text, str) else text
    calls = decoded if isinstance(decoded, list) else [decoded]
    return calls if all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls) else []


def _normalise_call(call: Any) -> Any:
    if isinstance(call, dict) and isinstance(call.get("name"), str) and "function" not in call:
        extra = {key: field for key, field in call.items() if key not in ("name", "arguments", "id", "type")}
        call_id = call["id"] if isinstance(call.get("id"), str) else None
        call = make_tool_call(call["name"], call.get("arguments"), call_id) | extra
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if isinstance(arguments, str) and RAW in arguments[:16]:
        arguments = decode_json_text(arguments)
    text = arguments.get(RAW) if isinstance(arguments, dict) and len(arguments) == 1 else None
    if isinstance(function, dict) and isinstance(text, str):
        return call | {"function": function | {"arguments": text}}
    return call


def _normalise_part(part: Any) -> list[Any]:
    """Return a part of LLaMA-Factory in the form of other APIs; several if it holds several calls."""
    kind, text = (part.get("type"), part.get("value")) if isinstance(part, dict) else (None, None)
    calls = [{"type": kind} | call for call in _decode_calls(text)] if kind == "tool_call" else []
    if calls or not isinstance(text, str) or kind not in ("text", "reasoning", "tool_call"):
        return calls or [part]
    return [{"type": "text" if kind == "tool_call" else kind, "text": text}]


# ---------------------------------------------------------------- rows

CHATS = ("messages", "conversations", "conversation")
PAIRS = (("chosen_messages", "rejected_messages"), ("chosen", "rejected"), ("chosen_response", "rejected_response"))
ANSWERS = ("completion", "response", "output")
SIDES = ("chosen", "rejected")
_COLUMN_NAMES = (
    *(("preferred_output", "chosen"), ("non_preferred_output", "rejected"), ("contents", "messages")),
    *(("system_prompt", "system"), ("systemInstruction", "system"), ("system_instruction", "system")),
    ("context", "input"),
    *(("query", "prompt"), ("question", "prompt")),
)
"""Name of a column in some data sets -> its name here."""
_TURN = re.compile(r"\n\n(Human|Assistant): ?")
_TURN_ROLES = {"Human": "user", "Assistant": "assistant"}


class RowChats(msgspec.Struct):
    """The chats of a row."""

    chats: list[ChatDecisions]
    """One chat, or the chosen and the rejected one."""
    columns: list[str]
    """Columns of the row that the chats contain."""


def normalise_columns(source_row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the column names of `parse_row_chats`, and with chats that are not nested in an object."""
    row = dict(source_row)
    if "preferred_output" in row and "input" in row:
        row["prompt"] = row.pop("input")
    if is_chat(row.get("trajectory")):
        row["messages"] = row.pop("trajectory")
    has_prompt = any(row.get(key) is not None for key in ("prompt", "instruction", *CHATS))
    for key, name in _COLUMN_NAMES:
        is_meant = not has_prompt if name == "prompt" else name != "input" or "instruction" in row
        if is_meant and row.get(key) is not None and row.get(name) is None:
            row[name] = row.pop(key)
    for key in ("prompt", *SIDES):
        if isinstance(nested := row.get(key), dict) and isinstance(nested.get("messages"), list):
            prefix = "" if key == "prompt" else f"{key}_"
            siblings = {f"{prefix}{name}": field for name, field in nested.items() if name != "messages"}
            row = siblings | row | {key: nested["messages"]}
    outputs = row.get("output")
    if isinstance(outputs, list) and len(outputs) == 2 and all(isinstance(side, str) for side in outputs):
        row["chosen"], row["rejected"] = row.pop("output")  # the better answer is the first
    for key in ("rejected_messages", "rejected_response"):
        if isinstance(rejected := row.get(key), str | list) and not any(key_pair[0] in row for key_pair in PAIRS):
            chat = row.get("messages")
            if isinstance(chat, list) and chat:
                is_text = isinstance(rejected, str)
                row["rejected"] = [*chat[:-1], {"role": "assistant", "content": rejected}] if is_text else rejected
                row["chosen"] = row.pop("messages")
                del row[key]
            elif row.get("response") is not None:
                row["chosen"], row["rejected"] = row.pop("response"), rejected
                del row[key]
    return row


def is_chat(field: Any) -> bool:
    """Return whether a field looks like messages, one message, or JSON text of a list of them."""
    if isinstance(field, str):
        return field.lstrip().startswith("[{") and '"role"' in field
    first = field[0] if isinstance(field, list) and field else field
    return isinstance(first, dict) and isinstance(first.get("role"), str)


def parse_row_chats(row: dict[str, Any], file: Input) -> RowChats:
    """Parse the chats of a row. Raises ShapeError, msgspec.ValidationError: it has no known form."""
    pair = next((pair for pair in PAIRS if row.get(pair[0]) is not None and row.get(pair[1]) is not None), None)
    order = ("prompt", *CHATS, "instruction") if pair else (*CHATS, "prompt", "instruction")
    prompt_key = next((key for key in order if row.get(key) is not None), None)
    prompt, columns = ([], []) if prompt_key is None else _parse_prompt(row, prompt_key, file)
    if pair is not None:
        return _parse_pair(row, pair, prompt, columns, file)
    if prompt_key in CHATS:
        text = row.get("prompt")
        if isinstance(text, str) and _begins_with(prompt, [{"role": "user", "content": text}]):
            columns.append("prompt")
        return RowChats([parse_answers_from(prompt, location=prompt_key)], columns)
    answer_key = next((key for key in ANSWERS if row.get(key) is not None), None)
    if prompt_key is None or answer_key is None:
        raise ShapeError("it has neither `messages`, nor a `prompt` and its `completion`, nor `chosen` and `rejected`")
    messages = prompt + _parse_answer(row, answer_key, file)
    return RowChats([parse_answers_from(messages, len(prompt), location=answer_key)], [*columns, answer_key])


def _parse_prompt(row: dict[str, Any], prompt_key: str, file: Input) -> tuple[list[Message], list[str]]:
    """Return the messages before an answer, and their columns."""
    columns = [prompt_key]
    before: list[Message] = []
    system = row.get("system")  # a text, system_parts of one, or an object that has them
    system_parts = system.get("parts") if isinstance(system, dict) else system
    if isinstance(system_parts, str) or (
        isinstance(system_parts, list) and all(isinstance(part, dict | str) for part in system_parts)
    ):
        columns.append("system")
        text = join_text(system_parts, "\n")
        before += [{"role": "system", "content": text}] if text else []
    if prompt_key not in CHATS and isinstance(row.get("history"), list):
        columns.append("history")
        for question, answer in msgspec.convert(row["history"], list[tuple[str, str]]):
            before += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    if prompt_key == "instruction":
        texts = [row["instruction"]]
        if isinstance(added_input := row.get("input"), str):
            columns.append("input")
            texts += [added_input] if added_input else []
        message = {"role": "user", "content": msgspec.convert("\n".join(texts), str)}
        return before + normalise_messages(message, prompt_key, file), columns
    if prompt_key == "prompt" and isinstance(row["prompt"], str):
        return [*before, {"role": "user", "content": row["prompt"]}], columns
    chat = normalise_messages(row[prompt_key], prompt_key, file)
    if len(before) == 1 and chat and _get_role(chat[0]) == "system":  # the chat has a system prompt too
        if join_text(chat[0].get("content")) != before[0]["content"]:
            columns.remove("system")
        before = []
    return before + chat, columns


def _parse_answer(row: dict[str, Any], key: str, file: Input) -> list[Message]:
    answer = row[key]
    is_text = isinstance(answer, str)
    return [{"role": "assistant", "content": answer}] if is_text else normalise_messages(answer, key, file)


def _parse_pair(
    row: dict[str, Any], pair: tuple[str, str], prompt: list[Message], columns: list[str], file: Input
) -> RowChats:
    texts = [row[key] for key in pair if isinstance(row[key], str)]
    is_hh = not prompt and len(texts) == 2 and all(t.startswith("\n\nHuman:") and _split_turns(t) for t in texts)
    sides = [_split_turns(text) for text in texts] if is_hh else [_parse_answer(row, key, file) for key in pair]
    if not all(side and _get_role(side[0]) != "assistant" for side in sides):
        sides = [prompt + side for side in sides]
    elif not (prompt and all(_begins_with(side, prompt) for side in sides)):
        columns = []
    copies = [key for key in CHATS if row.get(key) is not None and row[key] in (row[pair[0]], row[pair[1]])]
    start = sum(1 for _ in takewhile(lambda messages: messages[0] == messages[1], zip(*sides, strict=False)))
    for key, side in zip(pair, sides, strict=True):
        indices = [index for index, message in enumerate(side) if _get_role(message) == "assistant"]
        if not indices:
            raise ShapeError(f"`{key}` holds nothing that an assistant said; valid: a text, or messages")
        start = min(start, indices[-1])
    chats = [parse_answers_from(side, start, location=key) for key, side in zip(pair, sides, strict=True)]
    return RowChats(chats, [*columns, *pair, *copies])


def _split_turns(text: str) -> list[Message]:
    """Return the turns of a text of hh-rlhf; empty if the last one is not the assistant's."""
    _, *pieces = _TURN.split(text)
    turns = list(zip(pieces[::2], pieces[1::2], strict=True))
    is_answered = bool(turns) and turns[-1][0] == "Assistant"
    return [{"role": _TURN_ROLES[name], "content": turn} for name, turn in turns] if is_answered else []


def _begins_with(chat: list[Message], prompt: list[Message]) -> bool:
    """Return whether a chat begins with a prompt: message by message, or with its text as the first user message."""
    if chat[: len(prompt)] == prompt:
        return True
    first = next((message for message in chat if _get_role(message) == "user"), None)
    is_text = first is not None and len(prompt) == 1
    return is_text and join_text(as_object(first).get("content")) == join_text(prompt[0].get("content"))


def _get_role(message: Any) -> Any:
    return as_object(message).get("role")


# ---------------------------------------------------------------- recognising files of chats

FLAG_COLUMNS = frozenset(("label", "target", "success", "is_success", "correct", "is_correct", "passed"))
"""Columns that score an answer if they hold a flag; else they are texts and counts of the task."""
SCORE_COLUMNS = ("reward", "score", "rating", "kto_tag", "resolved", "rewards", "scores", *sorted(FLAG_COLUMNS))
"""Columns that score an answer."""
_DOCUMENT_KEYS = frozenset(("text", "id", "url", "source", "timestamp", "meta", "metadata"))
"""Keys of texts for pre-training."""
_UNREAD_ANSWERS = ("outputs", "responses", "completions", "generations")
"""Columns with answers in unsupported forms."""
_OTHER_FORMATS = frozenset(
    # Keys of rows of other formats that have messages or prompts too.
    (
        *("steps", "traj", "trajectory", "trajectory_format", "simulations", "samples", "events"),
        *("spans", "trace", "trace_id", "rollout", "rollout_id", "rollout_status", "input_metadata", "env_index"),
        *("evaluation_result", "execution_metadata", "eval_metadata", "generation_ms", "total_ms", "transcripts"),
        *("responses_create_params", "group_index", "sessionId", "kwargs"),
    )
)


def recognise(head: FileHead) -> bool:
    """Return whether rows have chat messages, or a prompt and its answer, and no mark of another format."""
    return any(map(_is_chat_row, read_head_rows(head))) and not (head.kind == "parquet" and "step" in head.names)


def no_trajectory(head: FileHead) -> str | None:
    """Describe a database of Inspect Scout, texts without roles, and prompts without answers."""
    if head.kind == "parquet" and {"transcript_id", "messages"}.issubset(head.names):
        return "it is a database of Inspect Scout; ingest the logs that it was made from, or an export as `jsonl`"
    rows = read_head_rows(head)
    if rows and all("text" in row and row.keys() <= _DOCUMENT_KEYS for row in rows):
        return "its rows are texts without roles (for pre-training); ingest chats, or what agents did"
    # A lone document may be cut before its answer.
    if (rows[1:] or head.kind in ("lines", "parquet")) and rows and all(map(_is_question, rows)):
        return "its rows are prompts without answers (for training by reinforcement); ingest the rollouts made of them"
    return None


def read_head_rows(head: FileHead) -> list[dict[str, Any]]:
    """Return the first rows of a file; for Parquet, one example row with values of the columns' types."""
    if head.kind != "parquet":
        return head.objects
    import pyarrow as pa
    import pyarrow.parquet as pq

    def make_example(field: Any) -> Any:
        kind = field.type
        if pa.types.is_struct(kind):
            return {inner.name: make_example(inner) for inner in kind}
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            return [make_example(kind.value_field)]
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            return '[{"role"' if field.name in CHATS else ""
        return 0

    try:
        return [{field.name: make_example(field) for field in pq.read_schema(head.path)}]
    except (OSError, ValueError):
        return []


def _is_chat_row(source_row: dict[str, Any]) -> bool:
    row = normalise_columns(source_row)
    return _has_chat(row) and not row.keys() & _OTHER_FORMATS and not isinstance(row.get("response"), dict)


def _has_chat(row: dict[str, Any]) -> bool:
    if "role" in row and row.keys() >= {"content"} and all(field is None for field in row.values()):
        return any(key in row for key in (*CHATS, *PAIRS[0]))  # of a damaged document, only the keys are known
    if any(is_chat(row.get(key)) for key in CHATS):
        return True
    for pair in PAIRS:
        preferred, rejected = (row.get(key) for key in pair)
        if type(preferred) is type(rejected) and (isinstance(preferred, str) or is_chat(preferred)):
            return True
    prompts, answers = ([row.get(key) for key in keys] for keys in (("prompt", "instruction"), ANSWERS))
    return all(any(isinstance(field, str) or is_chat(field) for field in fields) for fields in (prompts, answers))


def _is_question(row: dict[str, Any]) -> bool:
    """Return whether a row has a prompt without an answer."""
    prompt = row.get("prompt")
    if row.keys() & {"reward_model", "extra_info"} and (isinstance(prompt, str) or is_chat(prompt)):
        return not row.keys() & {*ANSWERS, *_UNREAD_ANSWERS}
    chat = row.get("messages")
    if not isinstance(chat, list) or not _is_chat_row(row) or row.keys() & {*ANSWERS, *SCORE_COLUMNS}:
        return False
    return all(_get_role(m) in ("system", "developer", "user") for m in chat) and "chosen" not in normalise_columns(row)


# ---------------------------------------------------------------- rows that lake.export wrote

EPISODE_NAMES = ("id", "run_id", "task_id", "rollout_index")
_OPTIONAL_NAMES = ("collection_round", "attempt", "seed", "agent_id")
EPISODE_COLUMNS = (*EPISODE_NAMES, *_OPTIONAL_NAMES)
"""Columns that identify an episode; a row has those of the optional ones that differ from the default."""
_EMPTY_RECORD = EpisodeRecord(task_id="", steps=[])
SCORES_COLUMN = "scores"
REWARD_OF, ENV_RETURN = "reward_of", "env_return"
OUTCOME_COLUMNS = (REWARD_OF, ENV_RETURN)
"""Columns of a row whose reward is a scorer's: the scorer, and the return."""


def has_episode_names(row: dict[str, Any]) -> bool:
    """Return whether a row identifies its episode and lake."""
    episode_id, *names, rollout_index = (row.get(name) for name in EPISODE_NAMES)
    is_id = isinstance(episode_id, str) and ids.is_text(episode_id)
    return is_id and None not in map(as_text, names) and parse_count(rollout_index) is not None


def build_episode_names(record: EpisodeRecord, episode_id: str) -> dict[str, Any]:
    """Return the columns of a row that identify its episode."""
    pairs = ((name, getattr(record, name)) for name in _OPTIONAL_NAMES)
    optional = {name: field for name, field in pairs if field != getattr(_EMPTY_RECORD, name)}
    return {"id": episode_id} | {name: getattr(record, name) for name in EPISODE_NAMES[1:]} | optional


def apply_episode_names(record: EpisodeRecord, row: dict[str, Any]) -> None:
    """Name a record after its row, for which `has_episode_names` is true."""
    record.run_id, record.task_id, record.rollout_index = (row[name] for name in EPISODE_NAMES[1:])
    for name in ("collection_round", "attempt"):
        if (number := parse_count(row.get(name))) is not None:
            setattr(record, name, number)
    if type(seed := row.get("seed")) is int:
        record.seed = seed
    record.agent_id = as_text(row.get("agent_id"))


def get_return(row: dict[str, Any], column: str) -> Any:
    """Return the return of an exported row: its column of the score, unless that belongs to a scorer."""
    return row.get(column if row.get(REWARD_OF) is None else ENV_RETURN)


def list_outcome_columns(row: dict[str, Any]) -> list[str]:
    """List the columns of `OUTCOME_COLUMNS` that an export added; without `REWARD_OF` they belong to the source."""
    is_of_scorer = row.get(REWARD_OF) is not None
    return [key for key in OUTCOME_COLUMNS if is_of_scorer or row.get(key) is None]


def pop_scores(row: dict[str, Any], scores: ScoreList) -> None:
    """Add the scores of `SCORES_COLUMN`, and remove it from the row if it is an object of numbers."""
    column = row.get(SCORES_COLUMN)
    numbers = decode_json_text(column) if isinstance(column, str) else column
    if isinstance(numbers, dict) and all(
        number is None or parse_number(number) is not None for number in numbers.values()
    ):
        del row[SCORES_COLUMN]
        for name, number in numbers.items():
            scores.add(name, number)
