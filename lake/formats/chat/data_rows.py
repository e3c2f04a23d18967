"""The chats that a row of training data holds, in whichever form: messages, a prompt and its answer, a pair of answers.

Sources: OpenAI's fine-tuning guide; TRL 1.16, dataset formats; LLaMA-Factory 0.9.5, data/README and v1/utils/types, and
its first data sets; ms-swift 3, custom data sets; the hh-rlhf data set, which writes texts of "\\n\\nHuman: ..." and
"\\n\\nAssistant: ...".
"""

import re
from itertools import takewhile
from typing import Any

import msgspec

from lake.formats.base.rows import ShapeError
from lake.formats.chat.chat_messages import answered, chat_messages
from lake.formats.chat.messages import Conversation, Message, text_of

CHATS = ("messages", "conversations", "conversation")
PAIRS = (
    ("chosen_messages", "rejected_messages"),
    ("chosen", "rejected"),
    ("chosen_response", "rejected_response"),
)
ANSWERS = ("completion", "response", "output")
SIDES = ("chosen", "rejected")
_NAMES = (
    *(("preferred_output", "chosen"), ("non_preferred_output", "rejected"), ("contents", "messages")),
    *(("system_prompt", "system"), ("systemInstruction", "system"), ("system_instruction", "system")),
    ("context", "input"),
    *(("query", "prompt"), ("question", "prompt")),
)
"""What some call a column -> what it is called here."""
_TURN = re.compile(r"\n\n(Human|Assistant): ?")
_ROLES = {"Human": "user", "Assistant": "assistant"}


class Chats(msgspec.Struct):
    """What a row holds."""

    chats: list[Conversation]
    """One, or what was chosen and what was rejected."""
    known: list[str]
    """The row's keys that they tell."""


def spelled(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose columns have the names that `chats_of` knows, and whose chats stand in no object of their own."""
    found = dict(row)
    if "preferred_output" in found and "input" in found:
        found["prompt"] = found.pop("input")
    if is_chat(found.get("trajectory")):
        found["messages"] = found.pop("trajectory")
    is_asked = any(found.get(key) is not None for key in ("prompt", "instruction", *CHATS))
    for key, name in _NAMES:
        is_meant = not is_asked if name == "prompt" else name != "input" or "instruction" in found
        if is_meant and found.get(key) is not None and found.get(name) is None:
            found[name] = found.pop(key)
    for key in ("prompt", *SIDES):
        if isinstance(value := found.get(key), dict) and isinstance(value.get("messages"), list):
            more = {name: item for name, item in value.items() if name != "messages"}
            prefix = "" if key == "prompt" else f"{key}_"
            found = {f"{prefix}{name}": item for name, item in more.items()} | found | {key: value["messages"]}
    both = found.get("output")
    if isinstance(both, list) and len(both) == 2 and all(isinstance(side, str) for side in both):
        found["chosen"], found["rejected"] = found.pop("output")  # the better answer stands first
    for key in ("rejected_messages", "rejected_response"):
        if isinstance(found.get(key), str | list) and not any(chosen in found for chosen, _ in PAIRS):
            _answer_again(found, key)
    return found


def _answer_again(row: dict[str, Any], key: str) -> None:
    """Make a pair of a row that answers, and says under a key what should not be answered."""
    chat, other = row.get("messages"), row[key]
    if isinstance(chat, list) and chat:
        whole = [*chat[:-1], {"role": "assistant", "content": other}] if isinstance(other, str) else other
        row["chosen"], row["rejected"] = row.pop("messages"), whole
    elif row.get("response") is not None:
        row["chosen"], row["rejected"] = row.pop("response"), other
    else:
        return
    del row[key]


def is_chat(value: Any) -> bool:
    """Whether a value looks like messages, one message, or JSON text of a list of them."""
    if isinstance(value, str):
        return value.lstrip().startswith("[{") and '"role"' in value
    first = value[0] if isinstance(value, list) and value else value
    return isinstance(first, dict) and isinstance(first.get("role"), str)


def chats_of(row: dict[str, Any]) -> Chats:
    """The chats of a row.

    Raises:
        ShapeError, msgspec.ValidationError: a message of the wrong shape; a row that is of none of the forms.
    """
    pair = next((pair for pair in PAIRS if row.get(pair[0]) is not None and row.get(pair[1]) is not None), None)
    order = ("prompt", *CHATS, "instruction") if pair else (*CHATS, "prompt", "instruction")
    asked = next((key for key in order if row.get(key) is not None), None)
    prompt, known = ([], []) if asked is None else _prompt(row, asked)
    if pair is not None:
        return _pair(row, pair, prompt, known)
    if asked in CHATS:
        if isinstance(told := row.get("prompt"), str) and _begins(prompt, [{"role": "user", "content": told}]):
            known.append("prompt")
        return Chats([answered(prompt, place=asked)], known)
    answer = next((key for key in ANSWERS if row.get(key) is not None), None)
    if asked is None or answer is None:
        raise ShapeError("it has neither `messages`, nor a `prompt` and its `completion`, nor `chosen` and `rejected`")
    messages = prompt + _answer(row, answer)
    return Chats([answered(messages, len(prompt), place=answer)], [*known, answer])


def _prompt(row: dict[str, Any], asked: str) -> tuple[list[Message], list[str]]:
    """What comes before an answer, and the keys that say it."""
    known = [asked]
    before: list[Message] = []
    if (system := _instructions(row.get("system"))) is not None:
        known.append("system")
        before += [{"role": "system", "content": system}] if system else []
    if asked not in CHATS and isinstance(row.get("history"), list):
        known.append("history")
        for question, answer in msgspec.convert(row["history"], list[tuple[str, str]]):
            before += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    if asked == "instruction":
        texts = [row["instruction"]]
        if isinstance(more := row.get("input"), str):
            known.append("input")
            texts += [more] if more else []
        return before + chat_messages({"role": "user", "content": msgspec.convert("\n".join(texts), str)}, asked), known
    if asked == "prompt" and isinstance(row["prompt"], str):
        return [*before, {"role": "user", "content": row["prompt"]}], known
    chat = chat_messages(row[asked], asked)
    if len(before) == 1 and chat and _role(chat[0]) == "system":
        if text_of(chat[0].get("content")) != before[0]["content"]:
            known.remove("system")
        return chat, known  # the chat has its own
    return before + chat, known


def _instructions(value: Any) -> str | None:
    """The text of a system prompt: a text, parts of one, or an object that has them."""
    parts = value.get("parts") if isinstance(value, dict) else value
    if isinstance(parts, list) and not all(isinstance(part, dict | str) for part in parts):
        return None
    return text_of(parts, "\n") if isinstance(parts, str | list) else None


def _answer(row: dict[str, Any], key: str) -> list[Message]:
    value = row[key]
    return [{"role": "assistant", "content": value}] if isinstance(value, str) else chat_messages(value, key)


def _pair(row: dict[str, Any], pair: tuple[str, str], prompt: list[Message], known: list[str]) -> Chats:
    texts = [row[key] for key in pair if isinstance(row[key], str)]
    is_hh = not prompt and len(texts) == 2 and all(text.startswith("\n\nHuman:") and _turns(text) for text in texts)
    sides = [_turns(text) for text in texts] if is_hh else [_answer(row, key) for key in pair]
    if not all(side and _role(side[0]) != "assistant" for side in sides):
        sides = [prompt + side for side in sides]
    elif not (prompt and all(_begins(side, prompt) for side in sides)):
        known = []
    known = [
        *known,
        *pair,
        *(key for key in CHATS if row.get(key) is not None and row[key] in (row[pair[0]], row[pair[1]])),
    ]
    start = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(*sides, strict=False)))
    for key, side in zip(pair, sides, strict=True):
        places = [place for place, message in enumerate(side) if _role(message) == "assistant"]
        if not places:
            raise ShapeError(f"`{key}` holds nothing that an assistant said; valid: a text, or messages")
        start = min(start, places[-1])
    return Chats([answered(side, start, place=key) for key, side in zip(pair, sides, strict=True)], known)


def _turns(text: str) -> list[Message]:
    """The turns of a text of hh-rlhf; none if the last one is not the assistant's."""
    _, *pieces = _TURN.split(text)
    turns = list(zip(pieces[::2], pieces[1::2], strict=True))
    is_answered = bool(turns) and turns[-1][0] == "Assistant"
    return [{"role": _ROLES[name], "content": said} for name, said in turns] if is_answered else []


def _begins(chat: list[Message], prompt: list[Message]) -> bool:
    """Whether a chat begins with a prompt: message by message, or with its text as the user's first one."""
    if chat[: len(prompt)] == prompt:
        return True
    first = next((message for message in chat if _role(message) == "user"), None)
    return first is not None and len(prompt) == 1 and text_of(first.get("content")) == text_of(prompt[0].get("content"))


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None
