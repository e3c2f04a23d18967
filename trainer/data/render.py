"""Text-only trajectories as token rows: the model's chat template, applied turn by turn.

An engine would have seen the prompt and sampled the action, so the two are tokenised apart and never as one text: the
ids are append-only by construction. Whether the template keeps what it rendered before is checked at every turn. Where
it does not (reasoning stripped from earlier turns, say), the turn opens a sequence of its own. An action is its text
and its end token; whatever the template writes after that belongs to the next context.

The rows are job output of provenance `rendered`: likelihood losses may learn from them, ratio losses may not, because
no policy sampled these ids.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import jinja2
import msgspec
import polars as pl

from lake import ids
from lake.blobs import inlined
from lake.errors import DataRefusedError
from lake.lake import Lake
from lake.snapshot import Snapshot
from lake.tables import TOKENS
from trainer.data.chat import STEP_DOCUMENTS, Message, Turn, texts_of, turns_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EPISODES_A_WRITE = 2048
"""Episodes rendered and written at a time."""
_STEP_COLUMNS = (
    "episode_id",
    "step_index",
    "group_id",
    "run_id",
    "context",
    "state",
    "state_role",
    "action",
    "reasoning",
    "tool_calls",
)


class UnrenderableError(Exception):
    """An episode that the template cannot render; its text is the reason code."""


@dataclass(frozen=True, slots=True)
class Span:
    """What one turn adds, as text."""

    step_index: int
    """Which."""
    opens: bool
    """It opens a sequence."""
    context: str
    """Text between the end of the sequence so far and the action."""
    action: str
    """The action with its end token."""


class Renderer:
    """A tokenizer's chat template, applied to episodes.

    Args:
        tokenizer: a fast tokenizer with a chat template.

    Raises:
        DataRefusedError: it has no chat template.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        if not tokenizer.chat_template:
            msg = f"the tokenizer of {tokenizer.name_or_path} has no chat template; text-only episodes need one"
            raise DataRefusedError(msg)
        self._tokenizer = tokenizer
        self._end = str(tokenizer.eos_token or "")
        self._special = tuple(token for token in tokenizer.all_special_tokens if token)

    @property
    def encoding_id(self) -> int:
        """Identity of the rows: tokenizer, template and provenance."""
        return rendered_encoding(self._tokenizer)

    def spans(self, turns: list[Turn], tools: list[Any] | None) -> list[Span]:
        """The text each turn adds.

        Raises:
            UnrenderableError: special_token_text, template_error or template_rewrites_prompt.
        """
        if any(token in text for text in texts_of(turns) for token in self._special):
            raise UnrenderableError("special_token_text")
        messages: list[Message] = []
        spans: list[Span] = []
        emitted: str | None = None
        for turn in turns:
            messages += turn.added
            prompt = self._text(messages, tools, prompt=True)
            messages.append(turn.action)
            whole = self._text(messages, tools, prompt=False)
            if not whole.startswith(prompt):
                raise UnrenderableError("template_rewrites_prompt")
            action = self._until_end(whole[len(prompt) :])
            opens = emitted is None or not prompt.startswith(emitted)
            context = prompt if opens else prompt[len(emitted or "") :]
            spans.append(Span(turn.step_index, opens, context, action))
            emitted = prompt + action
        return spans

    def rows(self, episode_id: int, spans: list[Span], common: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Rows of `tokens` for one episode."""
        texts = [text for span in spans for text in (span.context, span.action)]
        encoded = self._tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        end, previous = 0, None
        for number, span in enumerate(spans):
            context_ids, action_ids = encoded[2 * number], encoded[2 * number + 1]
            length = 0 if span.opens else end
            yield {
                "episode_id": episode_id,
                "step_index": span.step_index,
                "n_context": len(context_ids),
                "n_action": len(action_ids),
                "n_trained": len(action_ids),
                "prefix_step_index": None if span.opens else previous,
                "prefix_length": length,
                "context_ids": context_ids,
                "action_ids": action_ids,
                "action_mask": [True] * len(action_ids),
                **common,
            }
            end, previous = length + len(context_ids) + len(action_ids), span.step_index

    def _text(self, messages: list[Message], tools: list[Any] | None, *, prompt: bool) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=prompt, tokenize=False)
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise UnrenderableError("template_error") from error

    def _until_end(self, text: str) -> str:
        """The action and its end token, without what the template writes after it."""
        at = text.rfind(self._end) if self._end else -1
        return text if at < 0 else text[: at + len(self._end)]


def tokenizer_hash(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Identity of a fast tokenizer: the hash of its full definition, as 13 characters."""
    return ids.to_text(ids.text_hash(tokenizer.backend_tokenizer.to_str()))


def rendered_encoding(tokenizer: "PreTrainedTokenizerBase") -> int:
    """encoding_id of rows that this module makes with a tokenizer."""
    return ids.key_hash("rendered", tokenizer_hash(tokenizer), ids.to_text(ids.text_hash(str(tokenizer.chat_template))))


def engine_encoding(tokenizer: "PreTrainedTokenizerBase") -> int:
    """encoding_id of engine rows that name this tokenizer and template."""
    return ids.key_hash("engine", tokenizer_hash(tokenizer), str(tokenizer.chat_template))


def render_missing(
    lk: Lake, snapshot: Snapshot, renderer: Renderer, episode_ids: pl.Series, parameters: dict[str, Any]
) -> dict[str, int]:
    """Render the episodes that have no rows in the renderer's encoding yet, as a `render` job.

    Args:
        lk: where rows go.
        snapshot: where episodes come from.
        renderer: the template.
        episode_ids: int64 [E].
        parameters: for the job's row.

    Returns:
        Episodes by outcome: rendered, present, and a count per reason of `UnrenderableError`.
    """
    done = snapshot.scan("tokens").filter(pl.col("encoding_id") == renderer.encoding_id)
    present = done.select(pl.col("episode_id").unique()).collect()["episode_id"]
    missing = episode_ids.filter(~episode_ids.is_in(present.implode())).sort()
    counts = Counter({"rendered": 0, "present": len(episode_ids) - len(missing)})
    if missing.is_empty():
        return dict(counts)
    with lk.job(
        kind="render",
        parameters=parameters,
        code=[import_module(__name__), import_module("trainer.data.chat")],
        snapshot=snapshot,
    ) as job:
        for low in range(0, len(missing), EPISODES_A_WRITE):
            frame = _render(snapshot, renderer, missing[low : low + EPISODES_A_WRITE], counts)
            job.write("tokens", frame)
            job.counts["rows_out"] = job.counts.get("rows_out", 0) + frame.height
        job.counts |= {f"episodes_{name}": number for name, number in counts.items()}
    return dict(counts)


def _render(snapshot: Snapshot, renderer: Renderer, chunk: pl.Series, counts: Counter[str]) -> pl.DataFrame:
    """Token rows of some episodes."""
    mine = pl.col("episode_id").is_in(chunk.implode())
    heads = snapshot.scan("episodes").filter(mine).select("episode_id", "initial_messages", "tools").collect()
    heads = inlined(snapshot, heads, ("initial_messages", "tools"))
    head_of = {row["episode_id"]: row for row in heads.iter_rows(named=True)}
    steps = inlined(snapshot, snapshot.scan("steps").filter(mine).select(_STEP_COLUMNS).collect(), STEP_DOCUMENTS)
    steps = steps.sort("run_id", "group_id", *_STEP_COLUMNS[:2])
    rows: list[dict[str, Any]] = []
    for part in steps.partition_by("episode_id", maintain_order=True):
        episode_id = part["episode_id"][0]
        head = head_of[episode_id]
        common = {"group_id": part["group_id"][0], "run_id": part["run_id"][0]}
        tools = msgspec.json.decode(head["tools"]) if head["tools"] else None
        try:
            spans = renderer.spans(turns_of(head["initial_messages"], part.to_dicts()), tools)
        except UnrenderableError as error:
            counts[str(error)] += 1
            continue
        counts["rendered"] += 1
        rows += renderer.rows(episode_id, spans, common)
    if not rows:
        return pl.DataFrame()
    schema = {name: dtype for name, dtype in TOKENS.polars().items() if name in rows[0]}
    fixed = {"encoding_id": renderer.encoding_id, "provenance": "rendered", "has_logprobs": False}
    return pl.DataFrame(rows, schema=schema, orient="row").with_columns(pl.lit(v).alias(k) for k, v in fixed.items())
