"""The chats that a row of training data holds, in whichever form: messages, a prompt and its answer, a pair of answers.

Sources: OpenAI's fine-tuning guide; TRL 1.16, dataset formats; LLaMA-Factory 0.9.5, data/README and v1/utils/types; the
hh-rlhf data set, whose texts are "\\n\\nHuman: ...\\n\\nAssistant: ...".
"""

import re
from itertools import takewhile
from typing import Any

import msgspec

from lake.formats.base.rows import ShapeError
from lake.formats.chat.chat_messages import answered, chat_messages
from lake.formats.chat.messages import Conversation, Message, text_of

CHATS = ("messages", "conversations", "conversation")
PAIRS = (("chosen_messages", "rejected_messages"), ("chosen", "rejected"))
ANSWERS = ("completion", "response")
SIDES = ("chosen", "rejected")
_TURN = re.compile(r"\n\n(Human|Assistant): ?")
_ROLES = {"Human": "user", "Assistant": "assistant"}


class Chats(msgspec.Struct):
    """What a row holds."""

    chats: list[Conversation]
    """One, or what was chosen and what was rejected."""
    known: list[str]
    """The row's keys that they tell."""


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
    answer = "output" if asked == "instruction" else next((key for key in ANSWERS if key in row), None)
    if asked is None or answer is None or row.get(answer) is None:
        raise ShapeError("it has neither `messages`, nor a `prompt` and its `completion`, nor `chosen` and `rejected`")
    messages = prompt + _answer(row, answer)
    return Chats([answered(messages, len(prompt), place=answer)], [*known, answer])


def _prompt(row: dict[str, Any], asked: str) -> tuple[list[Message], list[str]]:
    """What comes before an answer, and the keys that say it."""
    known = [asked]
    before: list[Message] = []
    if isinstance(system := row.get("system"), str):
        known.append("system")
        before += [{"role": "system", "content": system}] if system else []
    if asked == "instruction":
        if row.get("history") is not None:
            known.append("history")
            for question, answer in msgspec.convert(row["history"], list[tuple[str, str]]):
                before += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        texts = [row["instruction"]]
        if isinstance(more := row.get("input"), str):
            known.append("input")
            texts += [more] if more else []
        return before + chat_messages({"role": "user", "content": msgspec.convert("\n".join(texts), str)}, asked), known
    if asked == "prompt" and isinstance(row["prompt"], str):
        return [*before, {"role": "user", "content": row["prompt"]}], known
    return before + chat_messages(row[asked], asked), known


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
