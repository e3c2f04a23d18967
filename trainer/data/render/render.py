"""Text-only trajectories as token rows: the model's chat template, applied turn by turn.

An engine would have seen the prompt and sampled the action, so the two are tokenised apart and never as one text: the
ids are append-only by construction. Whether the template keeps what it rendered before is checked at every turn. Where
it does not (reasoning stripped from earlier turns, say), the turn opens a sequence of its own. An action is its text
and its end token; whatever the template writes after that belongs to the next context. Where a limit cut an action off,
its end token was not sampled and carries no loss. Agents that take turns in an episode have a conversation each, and
so has a call that was recorded with a history of its own: it is shown what it was shown then, not what was said before.

The rows (`render_missing` writes them) are of provenance `rendered`: likelihood losses may learn from them,
ratio losses may not, because no policy sampled these ids.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jinja2
import msgspec
import polars as pl

from lake import ids
from lake.errors import DataRefusedError
from lake.lake import Lake
from lake.read.conversations import predecessors
from lake.read.parquet import collected
from lake.read.query import Limits, Session
from lake.read.snapshot import Snapshot
from lake.read.visibility import DataFile
from lake.storage.objects import Objects
from lake.tables import TOKENS
from lake.write.rows import inlined
from trainer.data.render import chat
from trainer.data.render.chat import (
    STEP_DOCUMENTS,
    Message,
    Rendering,
    Turn,
    UnrenderableError,
    is_python,
    is_written,
    loses_reasoning,
    texts_of,
    turns_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lake.read.kept import Kept

RENDERING = 4
"""Version of what this module makes of a text: raise it with any change of that, so that rows which an older version
left in a lake are not trained on. 2: agents apart, cut actions without an end token, no silent tool calls. 3: parts of
text joined, no content that is no text. 4: a call goes on from what it was recorded to go on from."""


@dataclass(frozen=True, slots=True)
class Span:
    """What one turn adds, as text."""

    step_index: int
    """Which."""
    extends: int | None
    """The step at whose end it goes on; None opens a sequence."""
    context: str
    """Text between the end of that step and the action."""
    action: str
    """The action with its end token."""
    end_sampled: bool = True
    """The policy sampled the end token."""


@dataclass(frozen=True, slots=True)
class _Conversation:
    """What was shown and said up to an action."""

    messages: list[Message] = field(default_factory=list)
    emitted: str | None = None
    """Its text up to the end of its last action."""
    last: int | None = None
    """Step of that action."""


class Renderer:
    """The chat template of a fast tokenizer, applied to episodes; a DataRefusedError where it has none."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        if not tokenizer.chat_template:
            msg = f"the tokenizer of {tokenizer.name_or_path} has no chat template; text-only episodes need one"
            raise DataRefusedError(msg)
        self._tokenizer = tokenizer
        self._end = str(tokenizer.eos_token or "")
        self._special = tuple(token for token in tokenizer.all_special_tokens if token)
        self._lead = next((token for token in self._special if not _swallows_space(tokenizer, token)), "")

    @property
    def encoding_id(self) -> int:
        """Identity of the rows: tokenizer, template and provenance."""
        return rendered_encoding(self._tokenizer)

    def spans(self, turns: list[Turn], tools: list[Any] | None) -> list[Span]:
        """The text each turn adds; an UnrenderableError with one of the reasons in `UNRENDERABLE`."""
        if any(token in text for text in texts_of(turns) for token in self._special):
            raise UnrenderableError("special_token_text")
        spans: list[Span] = []
        ends: dict[int | None, _Conversation] = {None: _Conversation()}
        before = predecessors((turn.step_index, turn.agent, turn.origin) for turn in turns)
        for turn, goes_on_from in zip(turns, before, strict=True):
            span, end = self._span(turn, ends[goes_on_from], tools if turn.tools is None else turn.tools)
            spans.append(span)
            ends[turn.step_index] = end
        return spans

    def _span(self, turn: Turn, conversation: _Conversation, tools: list[Any] | None) -> tuple[Span, _Conversation]:
        """What a turn adds to a conversation, and how that stands then."""
        shown = [*conversation.messages, *turn.added]
        prompt = self._text(shown, tools, prompt=True)
        said = [*shown, turn.action]
        whole = self._text(said, tools, prompt=False)
        if not whole.startswith(prompt):
            raise UnrenderableError("template_rewrites_prompt")
        action = self._until_end(whole[len(prompt) :])
        if not all(is_written(call, action) for call in _calls(turn.action)):
            raise UnrenderableError("template_drops_tool_calls", f"step {turn.step_index}")
        if any(is_python(call, whole) for message in (*turn.added, turn.action) for call in _calls(message)):
            raise UnrenderableError("template_writes_python", f"step {turn.step_index}")
        emitted, extends = conversation.emitted, conversation.last
        if emitted is None or not prompt.startswith(emitted):
            emitted, extends = "", None
        end_sampled = not (turn.is_cut and action.endswith(self._special))
        span = Span(turn.step_index, extends, prompt[len(emitted) :], action, end_sampled)
        return span, _Conversation(said, prompt + action, turn.step_index)

    def rows(self, episode_id: int, spans: list[Span], common: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Rows of `tokens` for one episode."""
        encoded = self._encoded(spans)
        ends: dict[int | None, int] = {None: 0}
        for number, span in enumerate(spans):
            context_ids, action_ids = encoded[2 * number], encoded[2 * number + 1]
            length = ends[span.extends]
            sampled = [True] * len(action_ids)
            if sampled and not span.end_sampled:
                sampled[-1] = False
            yield {
                "episode_id": episode_id,
                "step_index": span.step_index,
                "n_context": len(context_ids),
                "n_action": len(action_ids),
                "n_trained": sum(sampled),
                "prefix_step_index": span.extends,
                "prefix_length": length,
                "context_ids": context_ids,
                "action_ids": action_ids,
                "action_mask": sampled,
                **common,
            }
            ends[span.step_index] = length + len(context_ids) + len(action_ids)

    def _text(self, messages: list[Message], tools: list[Any] | None, *, prompt: bool) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=prompt, tokenize=False)
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise UnrenderableError("template_error") from error

    def _encoded(self, spans: list[Span]) -> list[list[int]]:
        """The ids of each span's context and action, one after the other.

        Some tokenizers put a space before every text (Metaspace): what goes on inside a conversation is encoded behind
        a marker, which is taken off again, so that it gets none.
        """
        texts = [text for span in spans for text in (span.context, span.action)]
        inside = [at % 2 == 1 or spans[at // 2].extends is not None for at in range(len(texts))]
        lead = self._ids([self._lead])[0] if self._lead else []
        found = self._ids([self._lead * led + text for led, text in zip(inside, texts, strict=True)])
        return [whole[len(lead) * led :] for led, whole in zip(inside, found, strict=True)]

    def _ids(self, texts: list[str]) -> list[list[int]]:
        found: list[list[int]] = self._tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        return found

    def _until_end(self, text: str) -> str:
        """The action and its end token, without what the template writes after it.

        A template may end turns by another marker than the tokenizer's end token (Gemma's <end_of_turn>).
        """
        at = text.rfind(self._end) if self._end else -1
        if at >= 0:
            return text[: at + len(self._end)]
        marked = text.rstrip()
        return marked if marked.endswith(self._special) else text


def _calls(message: Message) -> list[Any]:
    """The tool calls of a message."""
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else []


def _swallows_space(tokenizer: "PreTrainedTokenizerBase", token: str) -> bool:
    """Whether a marker takes the white space behind it along."""
    return not any(str(added) == token and not added.rstrip for added in tokenizer.added_tokens_decoder.values())


def tokenizer_hash(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Identity of a fast tokenizer: the hash of its full definition, as 13 characters."""
    return ids.to_text(ids.text_hash(tokenizer.backend_tokenizer.to_str()))


def rendered_encoding(tokenizer: "PreTrainedTokenizerBase") -> int:
    """encoding_id of rows that this version of the module makes with a tokenizer."""
    template = ids.to_text(ids.text_hash(str(tokenizer.chat_template)))
    return ids.key_hash("rendered", tokenizer_hash(tokenizer), template, str(RENDERING))


def engine_encoding(tokenizer: "PreTrainedTokenizerBase") -> int:
    """encoding_id of engine rows that name this tokenizer and template."""
    return ids.key_hash("engine", tokenizer_hash(tokenizer), str(tokenizer.chat_template))


EPISODES_A_WRITE = 2048
"""Episodes rendered and written at a time."""
_EPISODE_COLUMNS = ("episode_id", "run_id", "task_id", "rollout_index", "initial_messages", "tools")
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
    "agent_id",
    "finish_reason",
    "extra",
)


def render_missing(
    lk: Lake, snapshot: Snapshot, renderer: Renderer, episode_ids: pl.Series, parameters: dict[str, Any]
) -> Rendering:
    """Render the episodes (int64 [E]) that have no rows in the renderer's encoding yet, as a `render` job."""
    missing = unrendered(snapshot, renderer, episode_ids)
    done = Rendering(Counter({"rendered": 0, "present": len(episode_ids) - len(missing)}))
    if missing.is_empty():
        return done
    with lk.job(
        kind="render",
        parameters=parameters,
        code=[chat, sys.modules[__name__]],
        snapshot=snapshot,
    ) as job:
        for low in range(0, len(missing), EPISODES_A_WRITE):
            frame = _render(snapshot, renderer, missing[low : low + EPISODES_A_WRITE], done)
            job.write("tokens", frame)
            job.counts["rows_out"] = job.counts.get("rows_out", 0) + frame.height
        job.counts |= {f"episodes_{name}": number for name, number in done.counts.items()}
    return done


def render_to_scratch(
    scratch: Lake, snapshot: Snapshot, renderer: Renderer, episode_ids: pl.Series
) -> tuple[Snapshot, Rendering]:
    """As `render_missing`, but into another, empty lake, so that the rows can be counted and are then forgotten.

    The snapshot has the scratch lake's token rows in place of its own, unless all of them are there already.
    """
    if unrendered(snapshot, renderer, episode_ids).is_empty():
        return snapshot, Rendering(Counter({"rendered": 0, "present": len(episode_ids)}))
    empty = SnapshotWithTokens(snapshot, scratch.snapshot())
    done = render_missing(scratch, empty, renderer, episode_ids, {})
    return SnapshotWithTokens(snapshot, scratch.snapshot()), done


class SnapshotWithTokens(Snapshot):
    """A snapshot whose token rows are those of another lake."""

    def __init__(self, snapshot: Snapshot, tokens: Snapshot) -> None:
        self._snapshot, self._tokens = snapshot, tokens
        self.versions, self.root = snapshot.versions, snapshot.root

    @property
    def objects(self) -> Objects:
        """Where the files of token rows lie: whoever reads others asks for a scan."""
        return self._tokens.objects

    def files(self, name: str) -> list[DataFile]:
        """See `Snapshot.files`."""
        return self._of(name).files(name)

    def scan_all(self, name: str) -> pl.LazyFrame:
        """See `Snapshot.scan_all`."""
        return self._of(name).scan_all(name)

    @cached_property
    def retracted(self) -> pl.Series:
        """See `Snapshot.retracted`."""
        return self._snapshot.retracted

    def session(
        self, limits: Limits | None = None, *, retracted_too: bool = False, kept: "Kept | None" = None
    ) -> Session:
        """Queries see the token rows of the snapshot itself."""
        return self._snapshot.session(limits, retracted_too=retracted_too, kept=kept)

    def _of(self, name: str) -> Snapshot:
        return self._tokens if name == "tokens" else self._snapshot


def unrendered(snapshot: Snapshot, renderer: Renderer, episode_ids: pl.Series) -> pl.Series:
    """Those of some episodes that have no rows in the renderer's encoding, int64, sorted."""
    rows = snapshot.scan("tokens").filter(pl.col("encoding_id") == renderer.encoding_id)
    present = collected(rows.select(pl.col("episode_id").unique()))["episode_id"]
    return episode_ids.filter(~episode_ids.is_in(present.implode())).sort()


def _named(episode: dict[str, Any], place: str) -> str:
    """An episode by its names, and a place in it."""
    name = f"run {episode['run_id']}, task {episode['task_id']}, rollout {episode['rollout_index']}"
    return f"{name}, {place}" if place else name


def _render(snapshot: Snapshot, renderer: Renderer, chunk: pl.Series, done: Rendering) -> pl.DataFrame:
    """Token rows of some episodes; what becomes of each is added to `done`."""
    mine = pl.col("episode_id").is_in(chunk.implode())
    heads = collected(snapshot.scan("episodes").filter(mine).select(_EPISODE_COLUMNS))
    heads = inlined(snapshot, heads, ("initial_messages", "tools"))
    head_of = {row["episode_id"]: row for row in heads.iter_rows(named=True)}
    steps = inlined(snapshot, collected(snapshot.scan("steps").filter(mine).select(_STEP_COLUMNS)), STEP_DOCUMENTS)
    steps = steps.sort("run_id", "group_id", *_STEP_COLUMNS[:2])
    rows: list[dict[str, Any]] = []
    for part in steps.partition_by("episode_id", maintain_order=True):
        episode_id = part["episode_id"][0]
        head = head_of[episode_id]
        common = {"group_id": part["group_id"][0], "run_id": part["run_id"][0]}
        tools = msgspec.json.decode(head["tools"]) if head["tools"] else None
        try:
            turns = turns_of(head["initial_messages"], part.to_dicts())
            spans = renderer.spans(turns, tools)
        except UnrenderableError as error:
            done.counts[error.reason] += 1
            done.examples.setdefault(error.reason, _named(head, error.place))
            continue
        done.counts["rendered"] += 1
        if any(loses_reasoning(turn, span.action) for turn, span in zip(turns, spans, strict=True)):
            done.counts["without_reasoning"] += 1
        rows += renderer.rows(episode_id, spans, common)
    if not rows:
        return pl.DataFrame()
    schema = {name: dtype for name, dtype in TOKENS.polars().items() if name in rows[0]}
    fixed = {"encoding_id": renderer.encoding_id, "provenance": "rendered", "has_logprobs": False}
    return pl.DataFrame(rows, schema=schema, orient="row").with_columns(pl.lit(v).alias(k) for k, v in fixed.items())
