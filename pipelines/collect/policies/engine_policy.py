"""A policy over an engine: the exact tokens that were sampled, in conversations that only grow.

A conversation keeps the token ids that the engine saw. What was sampled stays as it was; of the next prompt only what
the chat template writes behind it is tokenised. At every turn the whole conversation is rendered as text, with each
answer word for word: as long as that begins with what the engine saw, the sequence goes on. Where the template writes
earlier turns otherwise (reasoning left out, say), the engine is shown just that, as a sequence of its own. So the text
of a prompt is always the template's, and no difference goes unnoticed (`drift.py`).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import UNSET, UnsetType

from lake import ids
from lake.errors import DataRefusedError, UsageError
from lake.records import TokensRecord
from pipelines.collect.engines import (
    EngineCard,
    EngineGoneError,
    Generation,
    Request,
    Sampling,
)
from pipelines.collect.policies import Decision, Message, PolicyCard
from pipelines.collect.policies.drift import Drift, DriftCounts, between, is_left_out, record_of
from pipelines.collect.policies.rendering import ContextRenderer, for_template
from pipelines.collect.policies.tool_calls import ToolFormat, format_of, take_apart

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FRUITLESS = 8
"""Answers in a row that an engine broke off without a token."""


class Sampler(Protocol):
    """What this policy needs of an engine, or of several behind one client."""

    async def describe(self) -> EngineCard:
        """What it is. Raises EngineError."""
        ...

    async def generate(self, request: Request) -> list[Generation]:
        """Sample. Raises EngineError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeakerOptions:
    """How an engine's answers are sampled and read."""

    sampling: Sampling = field(default_factory=Sampling)
    schema: dict[str, Any] | None = None
    """JSON schema that every answer is held to."""
    adapter: str | None = None
    """LoRA adapter to speak with."""
    tool_format: ToolFormat = "auto"
    """How the model writes tool calls."""


class EnginePolicy:
    """A model behind an engine, as a speaker.

    Args:
        engine: samples; closing it is left to whoever made it.
        tokenizer: of the model that the engine serves, with its chat template. What ends an answer is the template's
            marker, the tokenizer's end token, and what the generation_config.json in its folder names.
        name: of the policy, stored with every episode.
        options: sampling and reading.
    """

    def __init__(
        self,
        engine: Sampler,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        name: str,
        options: SpeakerOptions | None = None,
    ) -> None:
        self.engine = engine
        self.name = name
        self.options = options or SpeakerOptions()
        self.renderer = ContextRenderer(tokenizer)
        self.drift = DriftCounts()
        self.vocabulary = 1 + max(tokenizer.get_vocab().values())
        own = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        self.end_ids = frozenset({self.renderer.end_id, *own, *_ends_named_in(str(tokenizer.name_or_path))})

    @property
    def card(self) -> PolicyCard:
        """Name, sampling and the identity of the encoding; every decision says its own version."""
        sampling = self.options.sampling
        return PolicyCard(
            name=self.name,
            sampling=sampling.model_dump(exclude={"max_tokens"}) | {"max_action_tokens": sampling.max_tokens},
            tokenizer=self.renderer.identity,
            chat_template=str(self.renderer.tokenizer.chat_template),
        )

    @property
    def counts(self) -> dict[str, int]:
        """Decisions, and how many of them drifted, by kind."""
        return self.drift.record()

    def check(self, sampled: Sequence[int]) -> None:
        """Raise UsageError: the tokenizer does not have a token, so it is not that of the engine's model."""
        if sampled and max(sampled) >= self.vocabulary:
            raise UsageError(
                f"the engine sampled token {max(sampled)}, and the tokenizer in "
                f"{self.renderer.tokenizer.name_or_path} has none beyond {self.vocabulary - 1}: it is that of another "
                "model; give the one that the engine serves (--model, --tokenizer)"
            )

    def open(self, seed: int, *, key: str, tools: Sequence[dict[str, Any]] | None = None) -> "EngineConversation":
        """See `Speaker.open`. Raises UsageError: there are tools, and nothing says how the model calls them."""
        return EngineConversation(self, seed, key, tools)

    async def close(self) -> None:
        """Nothing of its own is open."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    """What the engine is shown next."""

    messages: list[Message]
    """The new ones, as templates take them."""
    ids: list[int]
    """All of it."""
    context: list[int]
    """What is new of it."""
    prefix: UnsetType | None
    """None: it does not go on from the step before."""
    text: str
    drift: Drift | None


class EngineConversation:
    """One rollout's conversation; see `Conversation`."""

    def __init__(self, policy: EnginePolicy, seed: int, key: str, tools: Sequence[dict[str, Any]] | None) -> None:
        self._policy, self._seed, self._key, self._tools = policy, seed, key, tools
        renderer = policy.renderer
        template = str(renderer.tokenizer.chat_template)
        self._format: ToolFormat = format_of(policy.options.tool_format, template) if tools else "none"
        self._said: list[Message] = []
        self._spelled: list[Message] = []
        self._ids: list[int] = []
        self._glue: list[int] = []
        self._text = ""
        self._turns = 0

    async def decide(self, messages: Sequence[Message], *, admissible: Sequence[str] = ()) -> Decision:
        """See `Conversation.decide`. After an error it may be asked the same again.

        Raises:
            EngineError: the engine failed.
            ContextFullError: the prompt leaves no room for an answer.
            DataRefusedError: the chat template cannot write the messages.
        """
        prompt = self._prompt(messages)
        sampled = await self._sample(prompt)
        decision = self._decision(prompt, sampled, await self._policy.engine.describe())
        self._go_on(prompt, decision, sampled.ids)
        return decision

    def resume(self, turns: Sequence[tuple[Sequence[Message], Decision]]) -> None:
        """See `Conversation.resume`. What was not kept as tokens is rendered: a sequence of its own goes on from it."""
        for messages, decision in turns:
            tokens = decision.tokens
            prompt = self._prompt(messages)
            if tokens is not None:
                starts = tokens.prefix_step_index is None or not self._ids
                whole = list(tokens.context_ids) if starts else [*self._ids, *tokens.context_ids]
                prompt = replace(prompt, ids=whole)
            self._go_on(prompt, decision, None if tokens is None else list(tokens.action_ids))

    def close(self) -> None:
        """Nothing is held for it."""

    def _prompt(self, messages: Sequence[Message]) -> _Prompt:
        """The next prompt, as a continuation of what the engine saw if the template writes it as one."""
        renderer = self._policy.renderer
        new = [for_template(message) for message in messages]
        try:
            text = renderer.text([*self._said, *new], self._tools)
        except DataRefusedError:  # some templates want calls apart from the text before they take a tool's answer
            text = renderer.text([*self._spelled, *new], self._tools)
        if not self._ids:
            whole = renderer.encode(text, is_inside=False)
            return _Prompt(new, whole, whole, None if self._turns else UNSET, text, None)
        if text.startswith(self._text):
            context = [*self._glue, *renderer.encode(text[len(self._text) :], is_inside=True)]
            return _Prompt(new, [*self._ids, *context], context, UNSET, text, None)
        whole = renderer.encode(text, is_inside=False)
        return _Prompt(new, whole, whole, None, text, self._rewriting(new, text, whole))

    def _rewriting(self, messages: Sequence[Message], text: str, whole: list[int]) -> Drift | None:
        """How a prompt differs from the one that would go on from what the engine saw."""
        renderer = self._policy.renderer
        try:
            added = renderer.context(messages, is_first=False)
        except DataRefusedError:
            added = []
        seen = [*self._ids, *self._glue, *added]
        is_less = is_left_out(self._text + renderer.decode(added), text)
        return between("unrendered" if is_less else "rewritten", seen, whole)

    async def _sample(self, prompt: _Prompt) -> Generation:
        """One answer. What the engine broke off (a pause, other weights) goes on from there."""
        options = self._policy.options
        most = options.sampling.max_tokens
        whole = Generation(ids=[], logprobs=[], finish_reason="abort")
        fruitless = 0
        while whole.finish_reason == "abort":
            request = Request(
                prompt_ids=[*prompt.ids, *whole.ids],
                sampling=options.sampling.model_copy(update={"max_tokens": most - len(whole.ids)}),
                seed=ids.key_hash("decision", self._seed, self._turns, len(whole.ids)),
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
                continue  # a grammar cannot go on in the middle
            whole = _joined(whole, part)
            if is_abort and len(whole.ids) >= most:
                whole = replace(whole, finish_reason="length")
        return whole

    def _decision(self, prompt: _Prompt, sampled: Generation, card: EngineCard) -> Decision:
        policy, sampling = self._policy, self._policy.options.sampling
        said, opening = self._content(sampled.ids), policy.renderer.opening
        taken = take_apart(said, self._format, is_thinking=opening.rstrip().endswith("<think>"))
        drifts = [drift for drift in (prompt.drift, self._retokenised(prompt, sampled.ids, said)) if drift is not None]
        policy.drift.add(drifts)
        extra: dict[str, Any] = {"drift": record_of(drifts)} if drifts else {}
        if taken.fault is not None:
            extra["tool_call_fault"] = taken.fault
        calls = [{"id": f"call_{self._turns}_{at}", **call} for at, call in enumerate(taken.tool_calls)]
        version = sampled.versions[0][0] if sampled.versions else None
        spans = [(known, first, last) for known, first, last in sampled.versions if known is not None]
        return Decision(
            action=taken.text,
            finish_reason=sampled.finish_reason,
            reasoning=taken.reasoning,
            tool_calls=calls or None,
            model=policy.options.adapter,
            policy_version=version,
            prompt_tokens=len(prompt.ids),
            completion_tokens=len(sampled.ids),
            is_action_valid=False if taken.fault is not None else None,
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

    def _retokenised(self, prompt: _Prompt, action: list[int], said: str) -> Drift | None:
        """Whether the tokenizer would split the answer as the model did, together with the opening before it."""
        renderer = self._policy.renderer
        opening = renderer.encode(renderer.opening, is_inside=True)
        end, glue = self._end_of(action)
        rendered = renderer.encode(renderer.opening + said + end, is_inside=True)
        return between("retokenised", [*opening, *action, *glue], rendered, offset=len(prompt.ids) - len(opening))

    def _go_on(self, prompt: _Prompt, decision: Decision, action: list[int] | None) -> None:
        """Take a turn in; without `action` (its tokens are not known) the next prompt is whole."""
        said = str(decision.action) if action is None else self._content(action)
        self._said += [*prompt.messages, {"role": "assistant", "content": said}]
        reasoning = {"reasoning_content": decision.reasoning} if decision.reasoning else {}
        self._spelled += [*prompt.messages, for_template(decision.message | reasoning)]
        self._turns += 1
        if action is None:
            self._said[-1] = self._spelled[-1]
            self._ids, self._glue, self._text = [], [], ""
            return
        end, self._glue = self._end_of(action)
        self._ids = [*prompt.ids, *action]
        self._text = prompt.text + said + end

    def _content(self, action: list[int]) -> str:
        """Word for word what was said, without the marker of its end."""
        return self._policy.renderer.decode(action[:-1] if self._has_ended(action) else action)

    def _has_ended(self, action: list[int]) -> bool:
        return bool(action) and action[-1] in self._policy.end_ids

    def _end_of(self, action: list[int]) -> tuple[str, list[int]]:
        """The text behind an answer, and what has to be put there because it was cut off."""
        renderer = self._policy.renderer
        if self._has_ended(action):
            return renderer.decode(action[-1:]), []
        return renderer.end, [renderer.end_id]


def _joined(whole: Generation, part: Generation) -> Generation:
    """An answer, and what was sampled after it was broken off."""
    before = len(whole.ids)
    versions = list(whole.versions)
    for version, first, last in part.versions:
        if versions and versions[-1][0] == version:
            versions[-1] = (version, versions[-1][1], before + last)
        else:
            versions.append((version, before + first, before + last))
    marked = [*(whole.constrained or [False] * before), *(part.constrained or [False] * len(part.ids))]
    return Generation(
        ids=[*whole.ids, *part.ids],
        logprobs=[*whole.logprobs, *part.logprobs],
        finish_reason=part.finish_reason,
        versions=versions,
        constrained=None if whole.constrained is None and part.constrained is None else marked,
    )


def _ends_named_in(folder: str) -> list[int]:
    """Tokens that end an answer by a model's generation_config.json, which engines are told not to read."""
    file = Path(folder, "generation_config.json")
    ends = json.loads(file.read_text("utf-8")).get("eos_token_id") if folder and file.is_file() else None
    return [int(end) for end in (ends if isinstance(ends, list) else [ends]) if end is not None]
