"""Formats: one file or folder per format, each a reader from a file to records; and sniffing, which tells them apart.

A reader yields `(position, EpisodeRecord)` or a `Reject`, in file order, in bounded memory, and never raises for what
a record contains: a bad record becomes a reject and the rest goes on. `base` is what all of them stand on, `chat` what
chats and calls have in common, `tracing` what traces have.
"""

from dataclasses import replace
from pathlib import Path

from lake.errors import FormatError
from lake.formats import (
    art,
    jsonl,
    messages_chat,
    mini_swe_agent,
    nemo_gym,
    nemo_rl,
    openai_agents,
    prime_rl_tokens,
    query,
    sharegpt,
    swe_agent,
    tau_bench,
    trl_completions,
    verl,
)
from lake.formats.agent_lightning import reader as agent_lightning
from lake.formats.agent_lightning import spans as agent_lightning_spans
from lake.formats.atif import reader as atif
from lake.formats.base.format import Format
from lake.formats.base.look import Look, look
from lake.formats.claude_code import reader as claude_code
from lake.formats.codex import reader as codex
from lake.formats.eval_protocol import reader as eval_protocol
from lake.formats.inspect_logs import reader as inspect_logs
from lake.formats.langfuse import reader as langfuse
from lake.formats.massgen import coordination as massgen_coordination
from lake.formats.massgen import logs as massgen_logs
from lake.formats.massgen import traces as massgen_traces
from lake.formats.openhands import reader as openhands
from lake.formats.otlp import reader as otlp
from lake.formats.tau2 import reader as tau2
from lake.formats.verifiers import results as verifiers_results
from lake.formats.verifiers import traces as verifiers_traces

FORMATS: dict[str, Format] = {
    fmt.name: fmt
    for fmt in (
        tau_bench.FORMAT,
        tau2.FORMAT,
        eval_protocol.FORMAT,
        massgen_traces.FORMAT,
        massgen_logs.FORMAT,
        massgen_coordination.FORMAT,
        inspect_logs.FORMAT,
        atif.FORMAT,
        swe_agent.FORMAT,
        mini_swe_agent.FORMAT,
        openhands.FORMAT,
        claude_code.FORMAT,
        codex.FORMAT,
        query.FORMAT,
        query.FRAMES,
        verifiers_results.FORMAT,
        verifiers_traces.FORMAT,
        agent_lightning_spans.FORMAT,
        agent_lightning.FORMAT,
        trl_completions.FORMAT,
        verl.FORMAT,
        nemo_rl.FORMAT,
        prime_rl_tokens.FORMAT,
        art.FORMAT,
        langfuse.FORMAT,
        openai_agents.FORMAT,
        otlp.FORMAT,
        nemo_gym.FORMAT,
        sharegpt.FORMAT,
        messages_chat.FORMAT,
        jsonl.FORMAT,
    )
}
"""In the order in which they are asked whether a file is theirs: what is most particular first."""
NAMES = tuple(name for name in FORMATS if name not in (query.NAME, query.FRAME))
"""Those of formats of files, which `--format` takes."""


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
    if chosen not in (None, looks_like) and looks_like is not None and not chosen.recognise(seen):
        if name == query.NAME:
            raise FormatError(f"{path} looks like {looks_like.name}; --query takes a file of SQL, leave it out")
        raise FormatError(f"{path} looks like {looks_like.name}, not like {name}; leave --format out")
    if chosen is not None:
        return chosen
    if name is not None:
        known = "; ".join(f"{known} = {FORMATS[known].description}" for known in NAMES)
        raise FormatError(f"there is no format {name!r}; known: {known}")
    if seen.damage is not None:
        raise FormatError(f"{path} is a file of {seen.kind} that is cut or damaged: {seen.damage}; get it whole")
    if seen.kind == "array" and jsonl.recognise(replace(seen, kind="lines")):
        raise FormatError(f"{path} is an array of episodes of our own format; write each of them on a line of its own")
    raise FormatError(
        f"{path} has no known format{_seen(seen)}; say in SQL what its rows are (`trajlake ingest --query FILE.sql`), "
        f"or name one with --format if you are sure; known: {', '.join(NAMES)}"
    )


def _seen(seen: Look) -> str:
    """What there is in a file, in words."""
    keys = list(seen.first) or list(seen.names)
    if not keys:
        return ""
    what = {"parquet": "columns", "zip": "entries", "sqlite": "tables"}.get(seen.kind, "keys")
    return f" (its {what}: {', '.join(map(str, keys[:12]))}{', ...' if len(keys) > 12 else ''})"
