"""Candidates: system prompts by their content, with where they come from."""

import unicodedata
from pathlib import Path
from typing import Literal

import msgspec

from lake import ids
from lake.errors import UsageError
from lake.records import printable
from pipelines.collect.environments.system_prompt import prompt_text


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A system prompt."""

    text: str
    """Empty: the policy is given no system prompt."""
    made: Literal["first", "given", "reflection"]
    """Who wrote it: the user, as what is to be improved or beside it; or the reflecting model."""
    round: int = 0
    """Of the search, in which it came up."""
    parent: str | None = None
    """Id of the candidate that it was made from."""
    critique: str | None = None
    """What the reflecting model says is wrong with the parent."""
    episode: str | None = None
    """Id of the episode in which the reflecting model wrote it."""

    @property
    def id(self) -> str:
        """Hash of the text: equal prompts are one candidate."""
        return ids.to_text(ids.text_hash(self.text))


def given_text(value: str, option: str) -> str:
    """The prompt that an option names: a file, or the prompt itself.

    Raises:
        UsageError: the file cannot be read or says nothing, or one word that names no file.
    """
    if value.strip() == "":
        return ""
    if "\n" not in value and len(value) < 1024 and Path(value).is_file():
        return fit(prompt_text(value), f"{option} {value}")
    if len(value.split()) == 1:
        raise UsageError(
            f"{option} {printable(value)}: there is no such file; give a file, or a prompt of several words"
        )
    return fit(value.strip(), option)


def fit(text: str, where: str) -> str:
    """A text that can be a prompt. Raises UsageError: it holds control characters."""
    if (fault := unfit(text)) is not None:
        raise UsageError(f"{where} {fault}; a prompt is plain text")
    return text


def unfit(text: str) -> str | None:
    """Why a text can be no prompt: it holds control characters, which steer terminals, or half a character."""
    for char in text:
        if char not in "\n\t" and unicodedata.category(char) in ("Cc", "Cs"):
            return f"holds the control character U+{ord(char):04X}"
    return None
