"""A policy over an engine: exact sampled tokens, in conversations that only grow.

A conversation keeps the token ids that the engine saw. Sampled tokens stay as they were; only the text that the chat
template adds after them is tokenised. Each turn renders the complete conversation as text, with each answer word for
word. While that text starts with the engine's text, the sequence continues. If the template rewrites earlier turns (it
may drop reasoning), the engine gets the rewritten text as a new sequence. So the prompt always matches the template,
and every difference is counted as drift.

Drift: the engine's tokens differ from those that the template gives for the stored messages. Training uses the sampled
tokens, but a reader who renders the messages again gets others. There are three kinds:

* `retokenised`: equal text, but the tokenizer splits it differently than the model did. The sampled tokens stay.
* `unrendered`: the template drops text that the engine saw (reasoning of earlier turns, white space).
* `rewritten`: the template writes earlier turns differently.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from msgspec import UNSET, UnsetType

from lake import ids
from lake.errors import DataRefusedError, UsageError
from lake.records import TokensRecord
from pipelines.collect.engines import EngineCard, EngineGoneError, Generation, Request, Sampling
from pipelines.collect.policies import Decision, Message, PolicyCard
from pipelines.collect.policies.rendering import ContextRenderer, for_template, parse_answer_text, resolve_tool_format
from pipelines.collect.settings import ToolFormat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DriftKind = Literal["retokenised", "unrendered", "rewritten"]
KINDS: tuple[DriftKind, ...] = ("retokenised", "unrendered", "rewritten")


@dataclass(frozen=True, slots=True)
class Drift:
    """One difference."""

    kind: DriftKind
    first: int
    """Index of the first differing token in the engine's sequence."""
    tokens: int
    """Number of the engine's tokens between the first and the last difference; 0: the template only adds text. All
    tokens from the first one, if the template does not separate new messages from earlier ones."""


@dataclass(slots=True)
class DriftCounts:
    """Amount of drift over all conversations."""

    decisions: int = 0
    drifted: int = 0
    """Decisions with any drift."""
    by_kind: Counter[DriftKind] = field(default_factory=Counter)
    """Decisions by kind."""
    tokens: Counter[DriftKind] = field(default_factory=Counter)
    """Differing tokens, by kind."""

    def add(self, drifts: Sequence[Drift]) -> None:
        """Count a decision."""
        self.decisions += 1
        self.drifted += bool(drifts)
        for drift in drifts:
            self.by_kind[drift.kind] += 1
            self.tokens[drift.kind] += drift.tokens

    def record(self) -> dict[str, int]:
        """Return the counts by name; missing kinds are 0."""
        counts = {"decisions": self.decisions, "drifted": self.drifted}
        for kind in KINDS:
            counts |= {kind: self.by_kind[kind], f"{kind}_tokens": self.tokens[kind]}
        return counts


def build_drift_record(drifts: Sequence[Drift]) -> dict[str, Any]:
    """Build `steps.extra.drift` of one decision: its differences by kind."""
    return {drift.kind: {"first": drift.first, "tokens": drift.tokens} for drift in drifts}


def compute_drift(
    kind: DriftKind, engine_ids: Sequence[int], rendered: Sequence[int], *, offset: int = 0
) -> Drift | None:
    """Return the difference between the engine's and the rendered token ids; None if they are equal.

    Args:
        kind: kind of the difference.
        engine_ids: token ids in the engine's sequence.
        rendered: token ids of the rendered text.
        offset: index of the first of them in the engine's sequence.
    """
    if list(engine_ids) == list(rendered):
        return None
    shorter = min(len(engine_ids), len(rendered))
    first = next((at for at in range(shorter) if engine_ids[at] != rendered[at]), shorter)
    last = next((at for at in range(shorter - first) if engine_ids[-1 - at] != rendered[-1 - at]), shorter - first)
    return Drift(kind, offset + first, len(engine_ids) - first - last)


def is_left_out(engine_text: str, rendered: str) -> bool:
    """Return whether the rendered text equals the engine's text with parts left out."""
    characters = iter(engine_text)
    return all(character in characters for character in rendered)


_FRUITLESS = 8
"""Maximum answers in a row that an engine broke off without a token."""


class Sampler(Protocol):
    """The part of an engine, or of a pool, that this policy needs."""

    async def describe(self) -> EngineCard:
        """Return its card. Raises EngineError."""

    async def generate(self, request: Request) -> list[Generation]:
        """Sample. Raises EngineError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePolicyOptions:
    """How an engine's answers are sampled and parsed."""

    sampling: Sampling = field(default_factory=Sampling)
    schema: dict[str, Any] | None = None
    """JSON schema for every answer."""
    adapter: str | None = None
    """LoRA adapter to use."""
    tool_format: ToolFormat = "auto"
    """Format of the model's tool calls."""


class EnginePolicy:
    """A model behind an engine, as a policy client.

    Args:
        engine: samples; its owner closes it.
        tokenizer: tokenizer of the engine's model, with its chat template. An answer ends with the template's marker,
            the tokenizer's end token, or one of the tokens in the folder's generation_config.json.
        name: name of the policy, stored with every episode.
        options: sampling and parsing.
    """

    def __init__(
        self,
        engine: Sampler,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        name: str,
        options: EnginePolicyOptions | None = None,
    ) -> None:
        self.engine = engine
        self.name = name
        self.options = options or EnginePolicyOptions()
        self.renderer = ContextRenderer(tokenizer)
        self.drift = DriftCounts()
        self.vocabulary = 1 + max(tokenizer.get_vocab().values())
        end_tokens = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        self.end_ids = frozenset({self.renderer.end_id, *end_tokens, *_read_end_tokens(str(tokenizer.name_or_path))})

    @property
    def card(self) -> PolicyCard:
        """Name, sampling and identity of the encoding; every decision carries its version."""
        sampling = self.options.sampling
        return PolicyCard(
            name=self.name,
            sampling=sampling.model_dump(exclude={"max_tokens"}) | {"max_action_tokens": sampling.max_tokens},
            tokenizer=self.renderer.identity,
            chat_template=str(self.renderer.tokenizer.chat_template),
        )

    @property
    def counts(self) -> dict[str, int]:
        """Decisions, and drifted ones by kind."""
        return self.drift.record()

    def check(self, sampled: Sequence[int]) -> None:
        """Raise UsageError if the tokenizer lacks a token: it belongs to another model than the engine's."""
        if sampled and max(sampled) >= self.vocabulary:
            raise UsageError(
                f"the engine sampled token {max(sampled)}, and the tokenizer in "
                f"{self.renderer.tokenizer.name_or_path} has none beyond {self.vocabulary - 1}: it belongs to another "
                "model; pass that of the engine's model (--model, or player.tokenizer)"
            )

    def open(self, seed: int, *, key: str, tools: Sequence[dict[str, Any]] | None = None) -> "EngineConversation":
        """See `PolicyClient.open`. Raises UsageError: there are tools, and the format of tool calls is unknown."""
        return EngineConversation(self, seed, key, tools)

    async def close(self) -> None:
        """Do nothing: the owner closes the engine."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    """The next prompt for the engine."""

    messages: list[Message]
    """New messages, as templates take them."""
    ids: list[int]
    """Token ids of the complete prompt."""
    context: list[int]
    """Token ids that are new in it."""
    prefix: UnsetType | None
    """None: it does not continue the previous step."""
    text: str
    drift: Drift | None


class EngineConversation:
    """One rollout's conversation; see `Conversation`."""

    def __init__(self, policy: EnginePolicy, seed: int, key: str, tools: Sequence[dict[str, Any]] | None) -> None:
        self._policy, self._seed, self._key, self._tools = policy, seed, key, tools
        renderer = policy.renderer
        template = str(renderer.tokenizer.chat_template)
        self._format: ToolFormat = resolve_tool_format(policy.options.tool_format, template) if tools else "none"
        self._raw_messages: list[Message] = []
        self._parsed_messages: list[Message] = []
        self._ids: list[int] = []
        self._glue: list[int] = []
        self._text = ""
        self._turns = 0

    async def decide(self, messages: Sequence[Message], *, admissible: Sequence[str] = ()) -> Decision:
        """See `Conversation.decide`. It may be called again with the same messages after an error.

        Raises:
            EngineError: the engine failed.
            ContextFullError: the prompt leaves no room for an answer.
            DataRefusedError: the chat template cannot write the messages.
        """
        prompt = self._prompt(messages)
        sampled = await self._sample(prompt)
        decision = self._decision(prompt, sampled, await self._policy.engine.describe())
        self._append_turn(prompt, decision, sampled.ids)
        return decision

    def resume(self, turns: Sequence[tuple[Sequence[Message], Decision]]) -> None:
        """See `Conversation.resume`. Turns without tokens are rendered, and a new sequence starts after them."""
        for messages, decision in turns:
            tokens = decision.tokens
            prompt = self._prompt(messages)
            if tokens is not None:
                starts = tokens.prefix_step_index is None or not self._ids
                prompt_ids = list(tokens.context_ids) if starts else [*self._ids, *tokens.context_ids]
                prompt = replace(prompt, ids=prompt_ids)
            self._append_turn(prompt, decision, None if tokens is None else list(tokens.action_ids))

    def close(self) -> None:
        """Do nothing: a conversation holds no resources."""

    def _prompt(self, messages: Sequence[Message]) -> _Prompt:
        """Build the next prompt; it continues the engine's sequence if the template allows."""
        renderer = self._policy.renderer
        new = [for_template(message) for message in messages]
        try:
            text = renderer.text([*self._raw_messages, *new], self._tools)
        except DataRefusedError:  # some templates accept a tool's answer only after parsed calls
            text = renderer.text([*self._parsed_messages, *new], self._tools)
        if not self._ids:
            prompt_ids = renderer.encode(text, is_inside=False)
            return _Prompt(new, prompt_ids, prompt_ids, None if self._turns else UNSET, text, None)
        if text.startswith(self._text):
            context = [*self._glue, *renderer.encode(text[len(self._text) :], is_inside=True)]
            return _Prompt(new, [*self._ids, *context], context, UNSET, text, None)
        prompt_ids = renderer.encode(text, is_inside=False)
        return _Prompt(new, prompt_ids, prompt_ids, None, text, self._compute_rewriting(new, text, prompt_ids))

    def _compute_rewriting(self, messages: Sequence[Message], text: str, prompt_ids: list[int]) -> Drift | None:
        """Return how a prompt differs from a continuation of the engine's sequence."""
        renderer = self._policy.renderer
        try:
            added = renderer.context(messages, is_first=False)
        except DataRefusedError:
            added = []
        engine_ids = [*self._ids, *self._glue, *added]
        is_less = is_left_out(self._text + renderer.decode(added), text)
        return compute_drift("unrendered" if is_less else "rewritten", engine_ids, prompt_ids)

    async def _sample(self, prompt: _Prompt) -> Generation:
        """Sample one answer; resume it if the engine broke it off (pause, new weights)."""
        options = self._policy.options
        most = options.sampling.max_tokens
        answer = Generation(ids=[], logprobs=[], finish_reason="abort")
        fruitless = 0
        while answer.finish_reason == "abort":
            request = Request(
                prompt_ids=[*prompt.ids, *answer.ids],
                sampling=options.sampling.model_copy(update={"max_tokens": most - len(answer.ids)}),
                seed=ids.key_hash("decision", self._seed, self._turns, len(answer.ids)),
                stop_ids=sorted(self._policy.end_ids),
                schema=options.schema,
                adapter=options.adapter,
                key=self._key,
            )
            (part,) = await self._policy.engine.generate(request)
            self._policy.check(part.ids)
            is_abort = part.finish_reason == "abort"
            fruitless = fruitless + 1 if is_abort and not part.ids else 0
            if fruitless == _FRUITLESS:
                raise EngineGoneError(f"{self._key}: {_FRUITLESS} answers in a row broke off before their first token")
            if is_abort and options.schema is not None:
                continue  # a grammar cannot resume in the middle of an answer
            answer = _join_generations(answer, part)
            if is_abort and len(answer.ids) >= most:
                answer = replace(answer, finish_reason="length")
        return answer

    def _decision(self, prompt: _Prompt, sampled: Generation, card: EngineCard) -> Decision:
        policy, sampling = self._policy, self._policy.options.sampling
        text, opening = self._content(sampled.ids), policy.renderer.opening
        parsed = parse_answer_text(text, self._format, is_thinking=opening.rstrip().endswith("<think>"))
        drifts = [
            drift
            for drift in (prompt.drift, self._compute_retokenisation(prompt, sampled.ids, text))
            if drift is not None
        ]
        policy.drift.add(drifts)
        extra: dict[str, Any] = {"drift": build_drift_record(drifts)} if drifts else {}
        if parsed.fault is not None:
            extra["tool_call_fault"] = parsed.fault
        calls = [{"id": f"call_{self._turns}_{at}", **call} for at, call in enumerate(parsed.tool_calls)]
        version = sampled.versions[0][0] if sampled.versions else None
        spans = [
            (weights_version, first, last)
            for weights_version, first, last in sampled.versions
            if weights_version is not None
        ]
        return Decision(
            action=parsed.text,
            finish_reason=sampled.finish_reason,
            reasoning=parsed.reasoning,
            tool_calls=calls or None,
            model=policy.options.adapter,
            policy_version=version,
            prompt_tokens=len(prompt.ids),
            completion_tokens=len(sampled.ids),
            is_action_valid=False if parsed.fault is not None else None,
            extra=extra or None,
            tokens=TokensRecord(
                context_ids=prompt.context,
                action_ids=sampled.ids,
                action_logprobs=sampled.logprobs,
                constrained=sampled.constrained,
                prefix_step_index=prompt.prefix,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                logprobs_mode=card.logprobs_mode,
                engine=card.engine,
                dtype=card.dtype,
                policy_version=version,
                version_spans=spans if len(sampled.versions) > 1 else None,
            ),
        )

    def _compute_retokenisation(self, prompt: _Prompt, action: list[int], text: str) -> Drift | None:
        """Return the drift if the tokenizer splits the answer, with the opening before it, differently."""
        renderer = self._policy.renderer
        opening = renderer.encode(renderer.opening, is_inside=True)
        end, glue = self._end_of(action)
        rendered = renderer.encode(renderer.opening + text + end, is_inside=True)
        return compute_drift("retokenised", [*opening, *action, *glue], rendered, offset=len(prompt.ids) - len(opening))

    def _append_turn(self, prompt: _Prompt, decision: Decision, action: list[int] | None) -> None:
        """Append a turn; without `action` (unknown tokens) the next prompt starts a new sequence."""
        content = str(decision.action) if action is None else self._content(action)
        self._raw_messages += [*prompt.messages, {"role": "assistant", "content": content}]
        reasoning = {"reasoning_content": decision.reasoning} if decision.reasoning else {}
        self._parsed_messages += [*prompt.messages, for_template(decision.message | reasoning)]
        self._turns += 1
        if action is None:
            self._raw_messages[-1] = self._parsed_messages[-1]
            self._ids, self._glue, self._text = [], [], ""
            return
        end, self._glue = self._end_of(action)
        self._ids = [*prompt.ids, *action]
        self._text = prompt.text + content + end

    def _content(self, action: list[int]) -> str:
        """Return the answer word for word, without its end marker."""
        return self._policy.renderer.decode(action[:-1] if self._has_ended(action) else action)

    def _has_ended(self, action: list[int]) -> bool:
        return bool(action) and action[-1] in self._policy.end_ids

    def _end_of(self, action: list[int]) -> tuple[str, list[int]]:
        """Return the text after an answer, and the tokens to add if it was cut off."""
        renderer = self._policy.renderer
        if self._has_ended(action):
            return renderer.decode(action[-1:]), []
        return renderer.end, [renderer.end_id]


def _join_generations(answer: Generation, part: Generation) -> Generation:
    """Join an answer and its continuation after a break."""
    before = len(answer.ids)
    versions = list(answer.versions)
    for version, first, last in part.versions:
        if versions and versions[-1][0] == version:
            versions[-1] = (version, versions[-1][1], before + last)
        else:
            versions.append((version, before + first, before + last))
    marked = [*(answer.constrained or [False] * before), *(part.constrained or [False] * len(part.ids))]
    return Generation(
        ids=[*answer.ids, *part.ids],
        logprobs=[*answer.logprobs, *part.logprobs],
        finish_reason=part.finish_reason,
        versions=versions,
        constrained=None if answer.constrained is None and part.constrained is None else marked,
    )


def _read_end_tokens(folder: str) -> list[int]:
    """Return the end tokens of a model's generation_config.json, which engines are started not to read."""
    file = Path(folder, "generation_config.json")
    ends = json.loads(file.read_text("utf-8")).get("eos_token_id") if folder and file.is_file() else None
    return [int(end) for end in (ends if isinstance(ends, list) else [ends]) if end is not None]
