"""Inputs of declared formats, written for tests in the layouts of their tools, with what they hold."""

import json
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from lake.formats.chat.messages import join_text
from lake.records import EpisodeRecord, StepRecord


class DeclaredInput(NamedTuple):
    """One file of a tool."""

    format: str
    file: str
    """Its path, with the folders that matter."""
    text: str
    """Its text; of a database (`.db`) the script that makes it."""
    episodes: list[dict[str, Any]]
    """What `describe` says of its episodes."""
    sibling: tuple[str, str] | None = None
    """Texts: the second in place of the first makes it another rollout of the same task."""
    unknown: tuple[str, str] | None = None
    """Texts: the second in place of the first adds an entry of a type that the tool does not have."""
    cut: int | None = None
    """Characters that are missing at the end of a file that is still written; None: the format has no such files."""
    beside: Mapping[str, str] = MappingProxyType({})
    """Texts of other files, by their paths."""
    keys: Sequence[tuple[str | None, ...]] = ()
    """The run, task, agent, and the parent's task of each episode, where the file has them."""

    def write(self, folder: Path) -> Path:
        """Write the file below a folder."""
        for name, text in {**self.beside, self.file: self.text}.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if name.endswith(".db"):
                with closing(sqlite3.connect(path)) as database:
                    database.executescript(text)
            else:
                path.write_text(text)
        return path


def lines(*entries: Any) -> str:
    """Write values as lines."""
    return "".join(f"{json.dumps(entry)}\n" for entry in entries)


def dump(tables: dict[str, list[dict[str, Any]]]) -> str:
    """Return the script of a database with tables of rows; objects and lists become JSON."""
    with closing(sqlite3.connect(":memory:")) as database:
        for table, rows in tables.items():
            database.execute(f"CREATE TABLE {table} ({', '.join(rows[0])})")
            for row in rows:
                cells = [json.dumps(cell) if isinstance(cell, dict | list) else cell for cell in row.values()]
                database.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(cells))})", cells)
        return "\n".join(database.iterdump())


def describe(record: EpisodeRecord) -> dict[str, Any]:
    """Say what an episode holds, without what is empty."""
    texts = [(message["role"], join_text(message.get("content"), "\n")) for message in record.final_observation or ()]
    facts = {
        "status": record.status,
        "relation": record.relation,
        "error": record.error,
        "return": record.env_return,
        "scores": {score.scorer: score.value for score in record.scores},
        "steps": [_describe_step(step) for step in record.steps],
        "after": texts,
    }
    return {name: fact for name, fact in facts.items() if fact not in (None, [], {})}


def _describe_step(step: StepRecord) -> dict[str, Any]:
    calls = [
        (call["function"]["name"], call["function"]["arguments"], call.get("id")) for call in step.tool_calls or ()
    ]
    facts = {
        "saw": step.state,
        "saw_error": step.state_is_error or None,
        "thought": step.reasoning,
        "said": step.action,
        "calls": calls,
        "model": step.model,
        "tokens": (step.prompt_tokens, step.completion_tokens),
        "finish": step.finish_reason,
        "copied": step.is_copied_context or None,
        "untrained": None if step.trainable or step.is_copied_context else True,
        "history": (step.extra or {}).get("history"),
    }
    return {name: fact for name, fact in facts.items() if fact not in (None, "", [], (None, None))}
