"""Formats: one file per format, each a reader from a file to records; and sniffing, which tells them apart.

A reader yields `(position, EpisodeRecord)` or a `Reject`, in file order, in bounded memory, and never raises for what
a record contains: a bad record becomes a reject and the rest goes on.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lake.errors import FormatError
from lake.formats import (
    agent_lightning,
    agent_lightning_spans,
    art,
    atif,
    claude_code,
    codex,
    eval_protocol,
    inspect_logs,
    jsonl,
    langfuse,
    massgen_coordination,
    massgen_logs,
    massgen_traces,
    messages_chat,
    mini_swe_agent,
    nemo_gym,
    nemo_rl,
    openai_agents,
    openhands,
    otlp,
    prime_rl_tokens,
    query,
    sharegpt,
    swe_agent,
    tau2,
    tau_bench,
    trl_completions,
    verifiers_results,
    verifiers_traces,
    verl,
)
from lake.formats.look import Look, look
from lake.formats.rows import Item
from lake.formats.source import Input, Meter, stem


class Reader(Protocol):
    """From a file to its records and rejects, in order."""

    def __call__(self, file: Input) -> Iterator[Item]:
        """Read a file; its meter is moved on as it is read."""


def _holds_none(look: Look) -> str | None:
    """Every file of the format holds trajectories."""


@dataclass(frozen=True, slots=True)
class Format:
    """One format."""

    name: str
    description: str
    recognise: Callable[[Look], bool]
    """Whether a file looks like this format."""
    reader: Reader
    no_trajectory: Callable[[Look], str | None] = _holds_none
    """What a file of the same tool is that holds no trajectory, as a sentence; None if it may hold some."""
    by_line: bool = False
    """Each line of a file is complete by itself: a file that grows is read on from where its last line ended."""
    is_whole: bool = False
    """A file is one episode, or few whose records stand anywhere in it: if it grows, it is read again from its start,
    and what has grown replaces what it was."""

    def read(self, path: Path, meter: Meter | None = None, run_id: str | None = None) -> Iterator[Item]:
        """Records and rejects of a file."""
        return self.reader(Input(path, stem(path) if run_id is None else run_id, meter or Meter()))


FORMATS: dict[str, Format] = {
    fmt.name: fmt
    for fmt in (
        Format("tau_bench", "tau-bench historical trajectories (a JSON array)", tau_bench.recognise, tau_bench.read),
        Format("tau2", "tau2-bench results and simulations", tau2.recognise, tau2.read, tau2.no_trajectory),
        Format(
            "eval_protocol",
            "eval-protocol rows, its log and its playback files",
            eval_protocol.recognise,
            eval_protocol.read,
            is_whole=True,
        ),
        Format(
            "massgen_traces",
            "MassGen RL traces",
            massgen_traces.recognise,
            massgen_traces.read,
            massgen_traces.no_trajectory,
            is_whole=True,
        ),
        Format(
            "massgen_logs",
            "MassGen session logs (coordination_events.json)",
            massgen_logs.recognise,
            massgen_logs.read,
            massgen_logs.no_trajectory,
            is_whole=True,
        ),
        Format(
            "massgen_coordination",
            "MassGen coordination logs of 2025",
            massgen_coordination.recognise,
            massgen_coordination.read,
            is_whole=True,
        ),
        Format(
            "inspect",
            "Inspect logs (.eval, .json)",
            inspect_logs.recognise,
            inspect_logs.read,
            inspect_logs.no_trajectory,
        ),
        Format("atif", "ATIF trajectories (Harbor)", atif.recognise, atif.read, atif.no_trajectory, is_whole=True),
        Format("swe_agent", "SWE-agent trajectories (.traj)", swe_agent.recognise, swe_agent.read, is_whole=True),
        Format(
            "mini_swe_agent",
            "mini-swe-agent trajectories (.traj.json)",
            mini_swe_agent.recognise,
            mini_swe_agent.read,
            is_whole=True,
        ),
        Format(
            "openhands",
            "OpenHands events, outputs and completion logs",
            openhands.recognise,
            openhands.read,
            openhands.no_trajectory,
            is_whole=True,
        ),
        Format(
            "claude_code",
            "Claude Code sessions (.jsonl)",
            claude_code.recognise,
            claude_code.read,
            claude_code.no_trajectory,
            is_whole=True,
        ),
        Format(
            "codex",
            "Codex CLI rollouts (rollout-*.jsonl)",
            codex.recognise,
            codex.read,
            codex.no_trajectory,
            is_whole=True,
        ),
        Format(query.NAME, "rows of a SELECT (--query)", query.recognise, query.read),
        Format(query.FRAME, "rows of a frame (lake.ingest_frame)", query.recognise, query.read_frame),
        Format(
            "verifiers_results",
            "verifiers evaluation results before 0.3 (results.jsonl)",
            verifiers_results.recognise,
            verifiers_results.read,
            verifiers_results.no_trajectory,
            by_line=True,
        ),
        Format(
            "verifiers_traces",
            "verifiers and prime-rl traces (traces.jsonl)",
            verifiers_traces.recognise,
            verifiers_traces.read,
            verifiers_traces.no_trajectory,
            by_line=True,
        ),
        Format(
            "agent_lightning_spans",
            "agent-lightning 0.x spans",
            agent_lightning_spans.recognise,
            agent_lightning_spans.read,
            is_whole=True,
        ),
        Format(
            "agent_lightning",
            "agent-lightning 1.0 archives and events",
            agent_lightning.recognise,
            agent_lightning.read,
            agent_lightning.no_trajectory,
            is_whole=True,
        ),
        Format("trl_completions", "TRL completion logs (Parquet)", trl_completions.recognise, trl_completions.read),
        Format("verl", "verl rollout data ({step}.jsonl)", verl.recognise, verl.read, by_line=True),
        Format("nemo_rl", "NeMo RL train_data_step and val_data_step logs", nemo_rl.recognise, nemo_rl.read),
        Format(
            "prime_rl_tokens",
            "prime-rl token exports (step_N/rank_R.jsonl)",
            prime_rl_tokens.recognise,
            prime_rl_tokens.read,
            by_line=True,
        ),
        Format("art", "ART trajectory groups (Parquet)", art.recognise, art.read),
        Format(
            "langfuse",
            "Langfuse traces with observations",
            langfuse.recognise,
            langfuse.read,
            langfuse.no_trajectory,
            is_whole=True,
        ),
        Format(
            "openai_agents",
            "OpenAI Agents SDK traces",
            openai_agents.recognise,
            openai_agents.read,
            openai_agents.no_trajectory,
            is_whole=True,
        ),
        Format(
            "otlp",
            "OpenTelemetry traces (OTLP JSON; GenAI, OpenInference)",
            otlp.recognise,
            otlp.read,
            otlp.no_trajectory,
            is_whole=True,
        ),
        Format(
            "nemo_gym", "NeMo Gym rollouts", nemo_gym.recognise, nemo_gym.read, nemo_gym.no_trajectory, by_line=True
        ),
        Format("sharegpt", "ShareGPT conversations (from, value)", sharegpt.recognise, sharegpt.read),
        Format(
            "messages", "chat messages, prompts and answers, preferences", messages_chat.recognise, messages_chat.read
        ),
        Format(
            "jsonl",
            "one episode a line; docs/reference/jsonl.md",
            jsonl.recognise,
            jsonl.read,
            jsonl.no_trajectory,
            by_line=True,
        ),
    )
}
"""In the order in which they are asked whether a file is theirs: what is most particular first."""


def choose(path: Path, name: str | None = None) -> Format:
    """The format of a name, or of what a file looks like.

    Raises:
        FormatError: no such one; a file that cannot be read, that holds no trajectory, or that looks like none.
    """
    seen = look(path)
    for fmt in FORMATS.values():
        if (what := fmt.no_trajectory(seen)) is not None:
            raise FormatError(f"{path} holds no trajectory: {what}")
    looks_like = next((fmt for fmt in FORMATS.values() if fmt.recognise(seen)), None)
    chosen = looks_like if name is None else FORMATS.get(name)
    if chosen is not None and looks_like is not None and not chosen.recognise(seen):
        raise FormatError(f"{path} looks like {looks_like.name}, not like {name}; leave --format out")
    if chosen is not None:
        return chosen
    if name is not None:
        known = "; ".join(f"{fmt.name} = {fmt.description}" for fmt in FORMATS.values())
        raise FormatError(f"there is no format {name!r}; known: {known}")
    names = ", ".join(FORMATS)
    raise FormatError(
        f"{path} has no known format{_seen(seen)}; known: {names}. Name one with --format if you are sure, or say in "
        "SQL what its rows are: `trajlake ingest --query FILE.sql`"
    )


def _seen(seen: Look) -> str:
    """What there is in a file, in words."""
    keys = list(seen.first) or list(seen.names)
    if not keys:
        return ""
    what = {"parquet": "columns", "zip": "entries", "sqlite": "tables"}.get(seen.kind, "keys")
    return f" (its {what}: {', '.join(map(str, keys[:12]))}{', ...' if len(keys) > 12 else ''})"
