"""Renders text-only episodes as token rows: the model's chat template, applied turn by turn.

An engine would have received the prompt and sampled the action, so the two are tokenised separately and never as one
text. The ids are therefore append-only by construction. Each turn checks whether the template keeps what it rendered
before. If it does not (for example, it strips reasoning from earlier turns), the turn opens a separate sequence. An
action is its text and its end token; text that the template writes after that belongs to the next context. If a limit
cut an action off, its end token was not sampled and carries no loss. Agents that take turns in an episode have separate
conversations. So has a call that was recorded with another history: its prompt is rendered from that history.

Stored messages are what their source wrote. Templates need three changes: tool-call arguments as objects, not as JSON
text; text where a source has null; and text where it has a list of parts, which many templates would write as a Python
list. Parts of text are joined by newlines, as vLLM joins them for such templates. Parts of any other kind cannot be
trained on here and are refused. If a source recorded no messages, its states become the user's messages.

The rows (`render_missing` writes them) have provenance `rendered`. Likelihood losses may learn from them. Ratio losses
may not, because no policy sampled these ids.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jinja2
import msgspec
import polars as pl

from lake import ids
from lake.errors import DataRefusedError
from lake.formats.base.fields import as_object
from lake.formats.chat.messages import decode_arguments
from lake.lake import Lake
from lake.progress import track
from lake.read.episodes import CONTINUES, PromptOrigin, find_predecessors
from lake.read.parquet import DataFile, collect_rows
from lake.read.query import QueryLimits, QuerySession
from lake.read.snapshot import Snapshot
from lake.storage.objects import Objects
from lake.tables import TOKENS
from lake.write.rows import inline_blobs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lake.read.column_cache import ColumnCache

Message = dict[str, Any]
CUT = ("length", "max_tokens")
"""Values of `steps.finish_reason` of an action that a limit cut off: its end was never sampled."""
STEP_DOCUMENTS = ("context", "tool_calls", "extra")
"""Columns of `steps` that `read_turns` reads as JSON; references to blobs in them have to be inlined first."""
_TEXTS = ("content", "reasoning_content")
"""Fields of a message that templates write as text."""
_TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of a text part: in chat completions and messages, and in OpenAI's responses."""


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One decision of an episode."""

    step_index: int
    added: list[Message]
    """Messages since the previous decision."""
    action: Message
    agent: str | None = None
    """Agent that decides; agents that take turns in one episode have a conversation each."""
    is_cut: bool = False
    """Whether a limit ended the action."""
    origin: PromptOrigin = CONTINUES
    """Source of its prompt; if it opens a conversation, `added` is the whole prompt."""
    tools: list[Any] | None = None
    """Tools that the call offered, if they differ from the episode's."""


def read_turns(initial_messages: str | None, steps: Sequence[Mapping[str, Any]]) -> list[ChatTurn]:
    """Return the turns of an episode, one per step.

    Args:
        initial_messages: `episodes.initial_messages`, JSON.
        steps: rows of `steps` in order: step_index, context, state, state_role, action, reasoning, tool_calls;
            optionally agent_id, finish_reason and extra.

    Raises:
        UnrenderableError: content that is not text; names its position.
    """
    turns = []
    for position, row in enumerate(steps):
        step = row["step_index"]
        added = _read_messages(row["context"], f"step {step}, message {{}} of its context")
        if position == 0:
            added = _read_messages(initial_messages, "message {} of initial_messages") + added
        if not added and row["state"]:
            added = [{"role": row["state_role"] or "user", "content": row["state"]}]
        action: Message = {"role": "assistant", "content": row["action"]}
        if row["reasoning"]:
            action["reasoning_content"] = row["reasoning"]
        if row["tool_calls"]:
            action["tool_calls"] = msgspec.json.decode(row["tool_calls"])
        action = _tidy_message(action, f"step {step}, its action")
        is_cut = row.get("finish_reason") in CUT
        notes = as_object(msgspec.json.decode(row.get("extra") or "{}"))
        tools = notes["tools"] if isinstance(notes.get("tools"), list) else None
        turns.append(ChatTurn(step, added, action, row.get("agent_id"), is_cut, PromptOrigin.of(notes), tools))
    return turns


def collect_texts(turns: list[ChatTurn]) -> list[str]:
    """Return every string in the messages of some turns, at any depth."""
    texts: list[str] = []
    for turn in turns:
        _collect_strings([*turn.added, turn.action], texts)
    return texts


def _read_messages(messages: str | None, position: str) -> list[Message]:
    """Read messages from JSON; `position` is a template with {} for a message's number."""
    decoded = msgspec.json.decode(messages or "[]")
    return [_tidy_message(message, position.format(number)) for number, message in enumerate(decoded)]


def _tidy_message(message: Message, position: str) -> Message:
    tidy = {key: value for key, value in message.items() if value is not None}
    tidy.setdefault("content", "")
    tidy |= {key: _join_text(tidy[key], f"{position} ({tidy.get('role')})") for key in _TEXTS if key in tidy}
    calls = tidy.get("tool_calls")
    if isinstance(calls, list):
        tidy["tool_calls"] = [decode_arguments(call) for call in calls]
    return tidy


def _join_text(content: Any, position: str) -> str:
    """Return content as text; raise UnrenderableError if it is, or has, something else."""
    texts: list[str] = []
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) and part.get("type") in _TEXT_PARTS else part
        if not isinstance(text, str):
            fault = f"a value of type {type(part).__name__}"
            if isinstance(part, dict) and isinstance(part.get("type"), str):
                fault = f"a part of type {part['type']!r}"
            raise UnrenderableError("content_not_text", f"{position}: {fault}")
        texts.append(text)
    return "\n".join(texts)


def _collect_strings(value: Any, strings: list[str]) -> None:
    if isinstance(value, str):
        strings.append(value)
    elif isinstance(value, dict):
        for key, inner in value.items():
            strings.append(str(key))
            _collect_strings(inner, strings)
    elif isinstance(value, list):
        for inner in value:
            _collect_strings(inner, strings)


UNRENDERABLE = {
    "special_token_text": "a text contains a special token of the tokenizer",
    "template_error": "the chat template fails on it",
    "template_rewrites_prompt": "the chat template writes the prompt differently once it has been answered",
    "template_drops_tool_calls": (
        "the chat template omits the tool calls of the action, so the model would learn to omit them: put a template "
        "that writes them into the model's folder, as chat_template.jinja"
    ),
    "template_writes_python": (
        "the chat template writes the arguments of tool calls as Python, not as JSON: put a template that writes them "
        "with tojson into the model's folder, as chat_template.jinja"
    ),
    "content_not_text": (
        "a message has content other than text, such as an image, which cannot be trained on: exclude such episodes "
        "with --where, or ingest them with text instead"
    ),
}
"""Why an episode is not rendered, by the reason code that a render job counts."""
_FATAL = ("template_drops_tool_calls", "template_writes_python", "content_not_text")
"""Reasons for which a run is refused even if other episodes are rendered."""


class UnrenderableError(Exception):
    """An episode that the template cannot render."""

    def __init__(self, reason: str, position: str = "") -> None:
        super().__init__(f"{reason} ({position})" if position else reason)
        self.reason = reason
        self.position = position


@dataclass(slots=True)
class Rendering:
    """Outcomes of rendering some episodes."""

    counts: Counter[str]
    """Episodes by outcome: rendered, present, and a count per reason of `UNRENDERABLE`. without_reasoning counts
    rendered episodes whose reasoning the template omits."""
    examples: dict[str, str] = field(default_factory=dict)
    """For each reason the first episode, by its names, and the position in it."""

    def describe(self) -> str:
        """Describe the number of episodes by outcome."""
        return "rendered: " + ", ".join(f"{number} {name}" for name, number in self.counts.items())


def is_written(call: Any, text: str) -> bool:
    """Return whether a text contains a tool call, judged by its name and the names of its arguments."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return True
    arguments = function.get("arguments")
    names = [function.get("name"), *(arguments if isinstance(arguments, dict) else ())]
    return all(name in text for name in names if isinstance(name, str) and name.isascii() and name.isidentifier())


def is_python(call: Any, text: str) -> bool:
    """Return whether a text writes the arguments (an object) of a tool call, or one of them, as Python, not as JSON."""
    function = call.get("function", call) if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(arguments, dict):
        return False
    nested = [value for value in (arguments, *arguments.values()) if isinstance(value, dict | list)]
    return any(str(value) in text and json.dumps(value, ensure_ascii=False) not in text for value in nested)


def loses_reasoning(turn: ChatTurn, action: str) -> bool:
    """Return whether the action omits the reasoning of its decision, which is then not learned."""
    return str(turn.action.get("reasoning_content", "")).strip() not in action


def refuse_unrendered(done: Rendering) -> None:
    """Refuse to train on some episodes if the template cannot write others.

    Raises:
        DataRefusedError: nothing was rendered, the template omits tool calls or writes Python, or a message has content
            that is not text.
    """
    counts = done.counts
    usable = counts["rendered"] + counts["present"]
    if usable and not any(counts.get(reason) for reason in _FATAL):
        return
    reasons = "; ".join(
        f"{counts[code]} {code}, for example {done.examples[code]} ({why})"
        for code, why in UNRENDERABLE.items()
        if counts.get(code)
    )
    if reasons:
        raise DataRefusedError(f"{usable} episodes are rendered, others cannot be: {reasons}")


RENDERING = 4
"""Version of this module's output. Raise it with any change of the output, so that runs ignore rows of an older
version. 2: separate agents, cut actions without an end token, no omitted tool calls. 3: text parts joined, no other
content. 4: a call continues from its recorded history."""


@dataclass(frozen=True, slots=True)
class TurnText:
    """The text that one turn adds."""

    step_index: int
    extends: int | None
    """The step that it continues; None opens a sequence."""
    context: str
    """Text between the end of that step and the action."""
    action: str
    """The action with its end token."""
    end_sampled: bool = True
    """Whether the policy sampled the end token."""


@dataclass(frozen=True, slots=True)
class _Conversation:
    """Messages of a conversation up to an action."""

    messages: list[Message] = field(default_factory=list)
    emitted: str | None = None
    """Its text up to the end of its last action."""
    last: int | None = None
    """Step of that action."""


class Renderer:
    """Applies the chat template of a fast tokenizer to episodes.

    Raises:
        DataRefusedError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        if not tokenizer.chat_template:
            msg = f"the tokenizer of {tokenizer.name_or_path} has no chat template; text-only episodes need one"
            raise DataRefusedError(msg)
        self._tokenizer = tokenizer
        self._end = str(tokenizer.eos_token or "")
        self._special = tuple(token for token in tokenizer.all_special_tokens if token)
        # The first special token that keeps the white space behind it.
        keeps_space = {str(token) for token in tokenizer.added_tokens_decoder.values() if not token.rstrip}
        self._lead = next((token for token in self._special if token in keeps_space), "")

    @property
    def encoding_id(self) -> int:
        """Hash of tokenizer, template and provenance."""
        return compute_rendered_encoding(self._tokenizer)

    def render_turns(self, turns: list[ChatTurn], tools: list[Any] | None) -> list[TurnText]:
        """Return the text each turn adds; raise UnrenderableError with one of the reasons in `UNRENDERABLE`."""
        if any(token in text for text in collect_texts(turns) for token in self._special):
            raise UnrenderableError("special_token_text")
        turn_texts: list[TurnText] = []
        ends: dict[int | None, _Conversation] = {None: _Conversation()}
        before = find_predecessors((turn.step_index, turn.agent, turn.origin) for turn in turns)
        for turn, predecessor in zip(turns, before, strict=True):
            turn_text, end = self._render_turn(turn, ends[predecessor], tools if turn.tools is None else turn.tools)
            turn_texts.append(turn_text)
            ends[turn.step_index] = end
        return turn_texts

    def encode_prompt(self, turns: list[ChatTurn], tools: list[Any] | None) -> list[int]:
        """Return the token ids of the prompt of the last turn: its conversation, tokenised as one text.

        Raises:
            UnrenderableError: the template fails on it.
        """
        before = find_predecessors((turn.step_index, turn.agent, turn.origin) for turn in turns)
        turn_of = {turn.step_index: (turn, step) for turn, step in zip(turns, before, strict=True)}
        messages, previous = turns[-1].added, before[-1]
        while previous is not None:
            turn, previous = turn_of[previous]
            messages = [*turn.added, turn.action, *messages]
        return self._tokenize([self._apply_template(messages, tools, prompt=True)])[0]

    def _render_turn(
        self, turn: ChatTurn, conversation: _Conversation, tools: list[Any] | None
    ) -> tuple[TurnText, _Conversation]:
        """Return the text that a turn adds to a conversation, and the conversation after it."""
        messages = [*conversation.messages, *turn.added]
        prompt = self._apply_template(messages, tools, prompt=True)
        messages.append(turn.action)
        transcript = self._apply_template(messages, tools, prompt=False)
        if not transcript.startswith(prompt):
            raise UnrenderableError("template_rewrites_prompt")
        action = self._cut_after_end(transcript[len(prompt) :])
        if not all(is_written(call, action) for call in _get_calls(turn.action)):
            raise UnrenderableError("template_drops_tool_calls", f"step {turn.step_index}")
        if any(is_python(call, transcript) for message in (*turn.added, turn.action) for call in _get_calls(message)):
            raise UnrenderableError("template_writes_python", f"step {turn.step_index}")
        emitted, extends = conversation.emitted, conversation.last
        if emitted is None or not prompt.startswith(emitted):
            emitted, extends = "", None
        end_sampled = not (turn.is_cut and action.endswith(self._special))
        turn_text = TurnText(turn.step_index, extends, prompt[len(emitted) :], action, end_sampled)
        return turn_text, _Conversation(messages, prompt + action, turn.step_index)

    def build_rows(
        self, episode_id: int, turn_texts: list[TurnText], common: Mapping[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """Yield rows of `tokens` for one episode."""
        encoded = self._encode(turn_texts)
        ends: dict[int | None, int] = {None: 0}
        for number, turn_text in enumerate(turn_texts):
            context_ids, action_ids = encoded[2 * number], encoded[2 * number + 1]
            length = ends[turn_text.extends]
            sampled = [True] * len(action_ids)
            if sampled and not turn_text.end_sampled:
                sampled[-1] = False
            yield {
                "episode_id": episode_id,
                "step_index": turn_text.step_index,
                "n_context": len(context_ids),
                "n_action": len(action_ids),
                "n_trained": sum(sampled),
                "prefix_step_index": turn_text.extends,
                "prefix_length": length,
                "context_ids": context_ids,
                "action_ids": action_ids,
                "action_mask": sampled,
                **common,
            }
            ends[turn_text.step_index] = length + len(context_ids) + len(action_ids)

    def _apply_template(self, messages: list[Message], tools: list[Any] | None, *, prompt: bool) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=prompt, tokenize=False)
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise UnrenderableError("template_error") from error

    def _encode(self, turn_texts: list[TurnText]) -> list[list[int]]:
        """Return the ids of each turn's context and action, alternating.

        Some tokenizers put a space before every text (Metaspace). A text inside a conversation is encoded behind a
        marker, and the marker's ids are removed, so that it gets no space.
        """
        texts = [text for turn_text in turn_texts for text in (turn_text.context, turn_text.action)]
        inside = [at % 2 == 1 or turn_texts[at // 2].extends is not None for at in range(len(texts))]
        lead = self._tokenize([self._lead])[0] if self._lead else []
        encoded = self._tokenize([self._lead * led + text for led, text in zip(inside, texts, strict=True)])
        return [token_ids[len(lead) * led :] for led, token_ids in zip(inside, encoded, strict=True)]

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        token_ids: list[list[int]] = self._tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        return token_ids

    def _cut_after_end(self, text: str) -> str:
        """Return the action and its end token, without what the template writes after it.

        A template may end turns by another marker than the tokenizer's end token (Gemma's <end_of_turn>).
        """
        at = text.rfind(self._end) if self._end else -1
        if at >= 0:
            return text[: at + len(self._end)]
        marked = text.rstrip()
        return marked if marked.endswith(self._special) else text


def _get_calls(message: Message) -> list[Any]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else []


def hash_tokenizer(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Hash a fast tokenizer's full definition to 13 characters."""
    return ids.to_text(ids.text_hash(tokenizer.backend_tokenizer.to_str()))


def compute_rendered_encoding(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return the encoding_id of rows that this version of the module makes with a tokenizer."""
    template = ids.to_text(ids.text_hash(str(tokenizer.chat_template)))
    return ids.key_hash("rendered", hash_tokenizer(tokenizer), template, str(RENDERING))


def compute_engine_encoding(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return the encoding_id of engine rows that name this tokenizer and template."""
    return ids.hash_engine_encoding(hash_tokenizer(tokenizer), str(tokenizer.chat_template))


EPISODES_A_WRITE = 2048
"""Number of episodes rendered and written at a time."""
_EPISODE_COLUMNS = (
    *("episode_id", "run_id", "task_id", "rollout_index"),
    *("initial_messages", "final_observation", "tools"),
)
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
    missing = find_unrendered(snapshot, renderer, episode_ids)
    done = Rendering(Counter({"rendered": 0, "present": len(episode_ids) - len(missing)}))
    if missing.is_empty():
        return done
    with (
        lk.job(kind="render", parameters=parameters, code=[sys.modules[__name__]], snapshot=snapshot) as job,
        track("tokenise", len(missing), "episodes") as stage,
    ):
        for low in range(0, len(missing), EPISODES_A_WRITE):
            stage.update(low)
            frame = _render_episodes(snapshot, renderer, missing[low : low + EPISODES_A_WRITE], done)
            job.write("tokens", frame)
            job.counts["rows_out"] = job.counts.get("rows_out", 0) + frame.height
        stage.update(len(missing))
        job.counts |= {f"episodes_{name}": number for name, number in done.counts.items()}
    return done


def render_to_scratch(
    scratch: Lake, snapshot: Snapshot, renderer: Renderer, episode_ids: pl.Series
) -> tuple[Snapshot, Rendering]:
    """Render missing episodes into another, empty lake, so that the rows can be counted and then dropped.

    The snapshot has the scratch lake's token rows in place of the original ones, unless no episode is missing.
    """
    if find_unrendered(snapshot, renderer, episode_ids).is_empty():
        return snapshot, Rendering(Counter({"rendered": 0, "present": len(episode_ids)}))
    empty = SnapshotWithTokens(snapshot, scratch.snapshot())
    done = render_missing(scratch, empty, renderer, episode_ids, {})
    return SnapshotWithTokens(snapshot, scratch.snapshot()), done


class SnapshotWithTokens(Snapshot):
    """A snapshot with the token rows of another lake."""

    def __init__(self, snapshot: Snapshot, tokens: Snapshot) -> None:
        self._snapshot, self._tokens = snapshot, tokens
        self.versions, self.root = snapshot.versions, snapshot.root

    @property
    def objects(self) -> Objects:
        """Storage of the token files; other tables are read through scans."""
        return self._tokens.objects

    def files(self, name: str) -> list[DataFile]:
        """See `Snapshot.files`."""
        return (self._tokens if name == "tokens" else self._snapshot).files(name)

    def scan_all(self, name: str) -> pl.LazyFrame:
        """See `Snapshot.scan_all`."""
        return (self._tokens if name == "tokens" else self._snapshot).scan_all(name)

    @cached_property
    def retracted(self) -> pl.Series:
        """See `Snapshot.retracted`."""
        return self._snapshot.retracted

    def session(
        self, limits: QueryLimits | None = None, *, retracted_too: bool = False, cache: "ColumnCache | None" = None
    ) -> QuerySession:
        """Open a session whose queries read the original token rows."""
        return self._snapshot.session(limits, retracted_too=retracted_too, cache=cache)


def find_unrendered(snapshot: Snapshot, renderer: Renderer, episode_ids: pl.Series) -> pl.Series:
    """Return the episodes that have no rows in the renderer's encoding, int64, sorted."""
    rows = snapshot.scan("tokens").filter(pl.col("encoding_id") == renderer.encoding_id)
    present = collect_rows(rows.select(pl.col("episode_id").unique()))["episode_id"]
    return episode_ids.filter(~episode_ids.is_in(present.implode())).sort()


def _read_episodes(
    snapshot: Snapshot, chunk: pl.Series
) -> Iterator[tuple[dict[str, Any], pl.DataFrame, list[Any] | None]]:
    """Yield the row, the steps and the tools of each of some episodes."""
    mine = pl.col("episode_id").is_in(chunk.implode())
    heads = collect_rows(snapshot.scan("episodes").filter(mine).select(_EPISODE_COLUMNS))
    heads = inline_blobs(snapshot, heads, ("initial_messages", "final_observation", "tools"))
    head_of = {row["episode_id"]: row for row in heads.iter_rows(named=True)}
    stored = collect_rows(snapshot.scan("steps").filter(mine).select(_STEP_COLUMNS))
    steps = inline_blobs(snapshot, stored, STEP_DOCUMENTS)
    steps = steps.sort("run_id", "group_id", *_STEP_COLUMNS[:2])
    for episode in steps.partition_by("episode_id", maintain_order=True):
        head = head_of[episode["episode_id"][0]]
        yield head, episode, msgspec.json.decode(head["tools"]) if head["tools"] else None


def render_final_prompts(snapshot: Snapshot, renderer: Renderer, episode_ids: pl.Series) -> dict[int, list[int]]:
    """Return the token ids of the prompt that followed the last action of each episode (int64 [E]).

    Episodes without a final observation, or that cannot be rendered, are left out.
    """
    prompts = {}
    for head, episode, tools in _read_episodes(snapshot, episode_ids):
        if not head["final_observation"]:
            continue
        try:
            turns = read_turns(head["initial_messages"], episode.to_dicts())
            added = _read_messages(head["final_observation"], "message {} of final_observation")
            final = ChatTurn(turns[-1].step_index + 1, added, {}, turns[-1].agent, tools=turns[-1].tools)
            prompts[head["episode_id"]] = renderer.encode_prompt([*turns, final], tools)
        except UnrenderableError:
            continue
    return prompts


def _render_episodes(snapshot: Snapshot, renderer: Renderer, chunk: pl.Series, done: Rendering) -> pl.DataFrame:
    """Return token rows of some episodes; count the outcomes in `done`."""
    rows: list[dict[str, Any]] = []
    for head, episode, tools in _read_episodes(snapshot, chunk):
        episode_id = head["episode_id"]
        common = {"group_id": episode["group_id"][0], "run_id": episode["run_id"][0]}
        try:
            turns = read_turns(head["initial_messages"], episode.to_dicts())
            turn_texts = renderer.render_turns(turns, tools)
        except UnrenderableError as error:
            done.counts[error.reason] += 1
            name = f"run {head['run_id']}, task {head['task_id']}, rollout {head['rollout_index']}"
            done.examples.setdefault(error.reason, f"{name}, {error.position}" if error.position else name)
            continue
        done.counts["rendered"] += 1
        if any(loses_reasoning(turn, turn_text.action) for turn, turn_text in zip(turns, turn_texts, strict=True)):
            done.counts["without_reasoning"] += 1
        rows += renderer.build_rows(episode_id, turn_texts, common)
    if not rows:
        return pl.DataFrame()
    schema = {name: dtype for name, dtype in TOKENS.polars().items() if name in rows[0]}
    fixed = {"encoding_id": renderer.encoding_id, "provenance": "rendered", "has_logprobs": False}
    return pl.DataFrame(rows, schema=schema, orient="row").with_columns(pl.lit(v).alias(k) for k, v in fixed.items())
