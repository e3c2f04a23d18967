"""A transformers model in this process as a policy, batched over many rollouts.

Recorded tokens are the sampled ones, end token included. Log-probabilities are those of the sampling distribution
(temperature applied, float32 log-softmax, no truncation or masking), so that a trainer can recompute it.

If a JSON schema constrains the answers, tokens that its grammar forbids are masked before the temperature.
Log-probabilities are then of the allowed tokens, and all tokens are marked `constrained`, as with engines. The library
llguidance provides the grammar, as in vLLM and SGLang. A schema that it cannot enforce completely is refused before
anything is played.

Rollouts advance in lock-step on a shared key-value cache. Each call feeds only new tokens, as one left-padded chunk;
ended rows are removed. The cache has holes where shorter chunks were padded. The attention mask covers them and
positions count real tokens only, so every row equals a plain forward pass over its tokens.

`LockStepClient` adapts a `Policy` to the protocol of policy clients. Conversations that start together are a cohort:
one session of the policy. Its next decisions are taken in a thread, once all open conversations of the cohort have
asked. Conversations that open during a cohort form the next one, in the order of their keys. The last bits of a
session's logits depend on its rows, so the same rollouts must meet in the same cohorts to repeat. An engine avoids
waiting for the slowest rollout.

Axes: B rows of a batch, R rows that still run, V the model's vocabulary, E rollouts of a session.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, Field

from lake.errors import ContractError, MissingExtraError, UsageError
from lake.records import TokensRecord
from pipelines.collect.players import ReplayError
from pipelines.collect.policies import Decision, Message, Policy, PolicyCard, Session, Turn
from pipelines.collect.policies.rendering import ContextRenderer

if TYPE_CHECKING:
    import torch
    from llguidance import LLExecutor, LLMatcher
    from llguidance._lib import JsonCompileOptions
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_WHOLE: "JsonCompileOptions" = {"lenient": False, "coerce_one_of": False}
"""Options of the library: `x-guidance` in a schema may not ignore or approximate keywords."""


def compile_grammar(schema: dict[str, Any], name: str) -> str:
    """Compile a JSON schema to a grammar of llguidance.

    Args:
        schema: the schema.
        name: name of the schema in messages, such as `player.answer_schema`.

    Raises:
        MissingExtraError: llguidance is not installed.
        UsageError: a keyword cannot be enforced, or no value satisfies the schema.
    """
    try:
        import llguidance  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            f"{name}: a model in this process is held to a schema by the package llguidance: "
            'pip install "trajlake[schema]"'
        ) from error
    fault = _find_fault(schema)
    if fault:
        pointer = _find_pointer(schema, lambda candidate: not _find_fault(candidate)) or "more than one keyword"
        raise UsageError(
            f"{name}: a model in this process cannot be held to it because of {pointer}: {fault}; valid: a schema that "
            "some value satisfies, of keywords that llguidance implements. Leave out the others, and check answers by "
            "the scorer format_validity"
        )
    return _compile(schema)


def _compile(schema: Any) -> str:
    """Convert a schema to a grammar, without validation."""
    from llguidance import LLMatcher

    grammar: str = LLMatcher.grammar_from_json_schema(schema, overrides=_WHOLE)
    return grammar


def _find_fault(schema: Any) -> str:
    """Return the library's objection to a schema in one line; empty if it has none."""
    from llguidance import LLMatcher

    is_error, messages = LLMatcher.validate_grammar_with_warnings(_compile(schema))
    fault = " ".join(" ".join(messages).split()) if is_error else ""
    return fault.partition(". Enable ")[0]  # drop the hint at options that _WHOLE disables


def _find_pointer(part: Any, is_sound: Callable[[Any], bool]) -> str:
    """Return the JSON pointer from `part` to the innermost entry that breaks the schema; empty if no single one does.

    The library names at most a keyword, without its position. `is_sound` tests the schema with another value for
    `part`.
    """
    for key in _order_suspects(part):
        if is_sound(_without(part, key)):
            inner = _find_pointer(part[key], lambda value, key=key: is_sound(_with(part, key, value)))  # type: ignore[misc]
            return f"/{str(key).replace('~', '~0').replace('/', '~1')}{inner}"
    return ""


def _order_suspects(part: Any) -> list[Any]:
    """Return the keys of an object or a list, most suspicious first."""
    if not isinstance(part, dict | list):
        return []
    keys = part if isinstance(part, dict) else range(len(part))
    # Entries with faults inside come first. `type` comes last: without it nearly every schema compiles.
    return sorted(keys, key=lambda key: (not (isinstance(part[key], dict) and _find_fault(part[key])), key == "type"))


def _without(part: Any, key: Any) -> Any:
    """Return an object without an entry, or a list with an entry replaced by the schema that allows everything."""
    return _with(part, key, {}) if isinstance(part, list) else {k: v for k, v in part.items() if k != key}


def _with(part: Any, key: Any, value: Any) -> Any:
    """Return an object or a list with another value at `key`."""
    copy = part.copy()
    copy[key] = value
    return copy


class AnswerGrammar:
    """A JSON schema over the tokens of a model.

    Args:
        schema: the schema.
        tokenizer: tokenizer of the model; its end token ends an answer.
        vocabulary: width of the model's logits, at least the tokenizer's.

    Raises:
        MissingExtraError: llguidance is not installed.
        UsageError: llguidance does not support the schema or the tokenizer.
    """

    def __init__(self, schema: dict[str, Any], tokenizer: "PreTrainedTokenizerBase", vocabulary: int) -> None:
        grammar = compile_grammar(schema, "answer_schema")
        from llguidance import LLExecutor, LLMatcher
        from llguidance.hf import from_tokenizer

        try:
            fast: Any = tokenizer
            tokens = from_tokenizer(fast, n_vocab=vocabulary, eos_token=tokenizer.eos_token_id)
        except ValueError as error:
            raise UsageError(
                f"the tokenizer in {tokenizer.name_or_path or 'memory'} cannot be held to a schema: {error}; valid: a "
                "tokenizer.json whose tokens are bytes, as those of BPE and SentencePiece models are"
            ) from error
        self._vocabulary = vocabulary
        self._start = LLMatcher(tokens, grammar)
        self._executor = LLExecutor()

    def answers(self, rows: int) -> "ConstrainedAnswers":
        """Start one answer per row of a batch."""
        return ConstrainedAnswers([self._start.deep_copy() for _ in range(rows)], self._executor, self._vocabulary)


class ConstrainedAnswers:
    """Independent answers that grow token by token."""

    def __init__(self, matcher_B: "list[LLMatcher]", executor: "LLExecutor", vocabulary: int) -> None:
        self._matcher_B = matcher_B
        self._executor = executor
        self._vocabulary = vocabulary

    def allowed(self, rows: Sequence[int]) -> "torch.Tensor":
        """Return bool `_RV`: tokens that may come next in these rows; for a complete answer only the end token.

        Raises:
            UsageError: the grammar became too large for the library's limits.
        """
        import torch
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

        bits_RW = allocate_token_bitmask(len(rows), self._vocabulary)
        matchers = [(self._matcher_B[row], at) for at, row in enumerate(rows)]
        fill_next_token_bitmask_par(self._executor, matchers, bits_RW)
        for row in rows:
            self._check(row)
        flags_RV = np.unpackbits(bits_RW.view(np.uint8), axis=1, count=self._vocabulary, bitorder="little")
        return torch.from_numpy(flags_RV).bool()

    def extend(self, row: int, token: int) -> None:
        """Append a sampled token to an answer. Raises UsageError: the grammar forbids it, or became too large."""
        self._matcher_B[row].consume_token(token)
        self._check(row)

    def _check(self, row: int) -> None:
        """Raise UsageError if a matcher failed. It would then allow the end token, like a complete answer."""
        matcher = self._matcher_B[row]
        if matcher.is_error():
            reason = next(iter(matcher.get_error().splitlines()), "")
            raise UsageError(
                f"answer_schema: llguidance gave up in the middle of an answer ({matcher.stop_reason()}: {reason}); "
                "valid: a simpler schema, above all shorter patterns and fewer alternatives"
            )


class CachedBatch:
    """The cache of `rows` sequences that grow together."""

    def __init__(self, model: "PreTrainedModel", rows: int) -> None:
        import torch
        from transformers import DynamicCache

        self._model = model
        self._rows = list(range(rows))
        self._cache = DynamicCache(config=model.config)
        self._mask_BT = torch.zeros((rows, 0), dtype=torch.long, device=model.device)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        if list(rows) == self._rows:
            return
        import torch

        index_of = {row: index for index, row in enumerate(self._rows)}
        index_B = torch.tensor([index_of[row] for row in rows], device=self._model.device)
        if self._mask_BT.shape[1]:
            self._cache.batch_select_indices(index_B)
        self._mask_BT = self._mask_BT[index_B]
        self._rows = list(rows)

    def extend(self, chunk_B: Sequence[Sequence[int]]) -> "torch.Tensor":
        """Append tokens to every row; return the logits `_BV` after its last token (undefined for an empty chunk)."""
        import torch

        width = max(map(len, chunk_B))
        # Masks are built from lengths, since the padding id is also a real token.
        padded = [[0] * (width - len(chunk)) + list(chunk) for chunk in chunk_B]
        fresh = [[0] * (width - len(chunk)) + [1] * len(chunk) for chunk in chunk_B]
        fresh_BT = torch.tensor(fresh, device=self._model.device)
        before_B = self._mask_BT.sum(1, keepdim=True)
        self._mask_BT = torch.cat([self._mask_BT, fresh_BT], dim=1)
        output = self._model(
            input_ids=torch.tensor(padded, device=self._model.device),
            attention_mask=self._mask_BT,
            position_ids=(before_B + fresh_BT.cumsum(1) - 1).clamp(min=0),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits_BV: torch.Tensor = output.logits[:, -1]
        return logits_BV


class SamplingConfig(BaseModel, frozen=True, extra="forbid"):
    """How actions are sampled. Top-p and top-k are missing: truncation would bias the trainer's ratios."""

    temperature: float = Field(default=1.0, gt=0)
    """Divides the logits."""
    max_action_tokens: int = Field(default=8, ge=1)
    """Maximum tokens of an action, end token included."""

    def record(self) -> dict[str, Any]:
        """Return the parameters as `tokens` and `episodes.sampling` store them."""
        return {"temperature": self.temperature, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


class TransformersPolicy:
    """A causal language model as a policy.

    The model is in eval mode; its weights may change between sessions, never within one. The tokenizer needs a chat
    template. `name` is stored as `episodes.policy`, and `version` (the number of weight updates so far) with every
    step. `answer_schema` is a JSON schema for every answer.

    Raises:
        MissingExtraError: there is a schema, and llguidance is not installed.
        UsageError: the schema cannot be enforced.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase",
        *,
        name: str,
        version: int,
        sampling: SamplingConfig | None = None,
        answer_schema: dict[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.name = name
        self.version = version
        self.sampling = sampling or SamplingConfig()
        self.renderer = ContextRenderer(tokenizer)
        self.grammar: AnswerGrammar | None = None
        if answer_schema is not None:
            vocabulary: int = model.get_output_embeddings().weight.shape[0]  # type: ignore[no-untyped-call]
            self.grammar = AnswerGrammar(answer_schema, tokenizer, vocabulary)

    @property
    def card(self) -> PolicyCard:
        """Name, version, sampling and identity of the encoding."""
        return PolicyCard(
            name=self.name,
            version=self.version,
            sampling=self.sampling.record() | {"max_action_tokens": self.sampling.max_action_tokens},
            tokenizer=self.renderer.identity,
            chat_template=str(self.tokenizer.chat_template),
        )

    def start(self, seeds_E: Sequence[int]) -> Session:
        """Start one conversation per seed, all in one cache."""
        return _LocalSession(self, seeds_E)


class _LocalSession:
    """The conversations of one session: random streams, tokens not yet in the cache, and the cache."""

    def __init__(self, policy: TransformersPolicy, seeds_E: Sequence[int]) -> None:
        import transformers

        self._policy = policy
        self._end: int = policy.tokenizer.eos_token_id
        self._engine = f"transformers {transformers.__version__}"
        self._dtype = str(policy.model.dtype).removeprefix("torch.")
        self._rng_E = [np.random.default_rng(seed) for seed in seeds_E]
        self._unfed_E: list[list[int]] = [[] for _ in seeds_E]
        # End token that a cut action lacks: the next context begins with it.
        self._missing_end_E: list[list[int]] = [[] for _ in seeds_E]
        self._batch = CachedBatch(policy.model, len(seeds_E))

    def act(self, turns: Sequence[Turn]) -> list[Decision]:
        """See `Session.act`."""
        self._batch.keep([turn.rollout for turn in turns])
        render = self._policy.renderer.context
        context_B = [self._missing_end_E[turn.rollout] + render(turn.messages, turn.is_first) for turn in turns]
        actions_B, logprobs_B, unfed_B = self._generate(
            [self._unfed_E[turn.rollout] + context for turn, context in zip(turns, context_B, strict=True)],
            [self._rng_E[turn.rollout] for turn in turns],
        )
        decisions = []
        for row, turn in enumerate(turns):
            is_cut = actions_B[row][-1] != self._end
            self._unfed_E[turn.rollout] = unfed_B[row]
            self._missing_end_E[turn.rollout] = [self._end] if is_cut else []
            decisions.append(self._decision(context_B[row], actions_B[row], logprobs_B[row], is_cut))
        return decisions

    def _generate(
        self, chunk_B: list[list[int]], rng_B: list[np.random.Generator]
    ) -> tuple[list[list[int]], list[list[float]], list[list[int]]]:
        """Sample one action per row; return ids, log-probabilities, and ids that are not in the cache yet."""
        import torch

        actions_B: list[list[int]] = [[] for _ in chunk_B]
        logprobs_B: list[list[float]] = [[] for _ in chunk_B]
        running = list(range(len(chunk_B)))
        grammar = self._policy.grammar
        answers = None if grammar is None else grammar.answers(len(chunk_B))
        for _ in range(self._policy.sampling.max_action_tokens):
            with torch.inference_mode():
                logits_RV = self._batch.extend(chunk_B)[running].float()
                if answers is not None:
                    logits_RV.masked_fill_(~answers.allowed(running).to(logits_RV.device), -torch.inf)
                logprobs_RV = (logits_RV / self._policy.sampling.temperature).log_softmax(-1)
                tokens_R = sample(logprobs_RV, np.array([rng_B[row].random() for row in running]))
                chosen_R = logprobs_RV.gather(1, tokens_R[:, None])[:, 0].clamp(max=0.0)
            chunk_B = [[] for _ in chunk_B]
            for row, token, logprob in zip(running, tokens_R.tolist(), chosen_R.tolist(), strict=True):
                actions_B[row].append(token)
                logprobs_B[row].append(logprob)
                chunk_B[row] = [token]
                if answers is not None:
                    answers.extend(row, token)
            running = [row for row in running if actions_B[row][-1] != self._end]
            if not running:
                break
        return actions_B, logprobs_B, chunk_B

    def _decision(self, context: list[int], action: list[int], logprobs: list[float], is_cut: bool) -> Decision:
        policy = self._policy
        return Decision(
            action=str(policy.tokenizer.decode(action if is_cut else action[:-1])),
            finish_reason="length" if is_cut else "stop",
            tokens=TokensRecord(
                context_ids=context,
                action_ids=action,
                action_logprobs=logprobs,
                constrained=None if policy.grammar is None else [True] * len(action),
                logprobs_mode="processed",
                engine=self._engine,
                dtype=self._dtype,
                policy_version=policy.version,
                **policy.sampling.record(),
            ),
        )


def sample(logprobs_RV: "torch.Tensor", uniform_R: np.ndarray[Any, np.dtype[np.float64]]) -> "torch.Tensor":
    """Sample by inverse CDF in float64: one uniform number in [0, 1) decides one token, independent of the batch.

    Takes normalised log-probabilities in nats; returns int64 token ids, one per row.
    """
    import torch

    cumulative_RV = logprobs_RV.double().exp().cumsum(-1)
    threshold_R = torch.from_numpy(uniform_R) * cumulative_RV[:, -1].cpu()
    tokens_R = torch.searchsorted(cumulative_RV, threshold_R[:, None].to(cumulative_RV.device), right=True)[:, 0]
    return tokens_R.clamp(max=logprobs_RV.shape[1] - 1)


_GATHERING_SECONDS = 0.02
"""Seconds without a new conversation after which a cohort starts."""


class LockStepClient:
    """Adapts a `Policy` (a model in this process, a script) to `PolicyClient`."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.renderer = policy.renderer if isinstance(policy, TransformersPolicy) else None
        self._decisions = 0
        self._waiting: list[LockStepConversation] = []
        self._cohort: list[LockStepConversation] = []
        self._session: Session | None = None
        self._acting: asyncio.Task[None] | None = None
        self._begin: asyncio.TimerHandle | None = None
        self.is_filling: Callable[[int], bool] = lambda _: False
        """Whether more conversations than the given number are about to open; a cohort waits for them."""

    @property
    def card(self) -> PolicyCard:
        """The policy's card."""
        return self._policy.card

    @property
    def counts(self) -> dict[str, int]:
        """Number of decisions."""
        return {"decisions": self._decisions}

    def open(self, seed: int, *, key: str, tools: Sequence[dict[str, Any]] | None = None) -> "LockStepConversation":
        """See `PolicyClient.open`. Raises UsageError: there are tools."""
        if tools:
            msg = f"{key}: a policy in this process supports no tools; serve it: `trajlake serve MODEL`, --engine URL"
            raise UsageError(msg)
        conversation = LockStepConversation(self, seed, key)
        self._waiting.append(conversation)
        self._gather()
        return conversation

    async def close(self) -> None:
        """Wait for the decisions in progress."""
        if self._acting is not None:
            await asyncio.wait([self._acting])

    def advance(self) -> None:
        """Decide, if all conversations of the cohort have asked."""
        if self._acting is not None:
            return
        self._cohort = [each for each in self._cohort if not each.is_closed]
        if not self._cohort and self._begin is None:
            self._next_cohort()
        if self._cohort and all(each.question is not None for each in self._cohort):
            assert self._session is not None
            self._acting = asyncio.create_task(self._act(self._session, list(self._cohort)))
            self._acting.add_done_callback(self._finish_act)

    def _gather(self) -> None:
        """Check again shortly."""
        if self._begin is not None:
            self._begin.cancel()
        self._begin = asyncio.get_running_loop().call_later(_GATHERING_SECONDS, self._end_gathering)

    def _end_gathering(self) -> None:
        self._begin = None
        self.advance()

    def _next_cohort(self) -> None:
        self._waiting = [each for each in self._waiting if not each.is_closed]
        if not self._waiting:
            return
        if self.is_filling(len(self._waiting)):
            self._gather()
            return
        if all(each.question is not None for each in self._waiting):
            cohort, self._waiting = sorted(self._waiting, key=lambda each: each.key), []
            for index, each in enumerate(cohort):
                each.index = index
            try:
                self._session = self._policy.start([each.seed for each in cohort])
            except Exception as error:
                # A timer may have started the cohort, where a raised error would be lost.
                _fail_cohort(cohort, error)
                return
            self._cohort = cohort

    async def _act(self, session: Session, cohort: "list[LockStepConversation]") -> None:
        turns = [each.build_turn() for each in cohort]
        try:
            decisions = _check_decisions(await asyncio.to_thread(session.act, turns), len(turns), self.card)
        except Exception as error:
            _fail_cohort(cohort, error)
            return
        self._decisions += len(decisions)
        for each, decision in zip(cohort, decisions, strict=True):
            each.answer(decision)

    def _finish_act(self, _: "asyncio.Task[None]") -> None:
        self._acting = None
        self.advance()


def _check_decisions(decisions: Any, count: int, card: PolicyCard) -> list[Decision]:
    """Return the decisions. Raises ContractError: they are not a list with one decision per turn.

    A conversation without an answer would wait for ever.
    """
    if isinstance(decisions, Sequence) and len(decisions) == count:
        return list(decisions)
    received = f"{len(decisions)} decisions" if isinstance(decisions, Sequence) else type(decisions).__name__
    raise ContractError(
        f"policy {card.name!r} was asked for {count} decisions and returned {received}; valid: a list with a "
        "`Decision` for each turn, in their order"
    )


def _fail_cohort(cohort: "Sequence[LockStepConversation]", error: Exception) -> None:
    """Fail all conversations of a cohort."""
    for each in cohort:
        each.answer(error)


class LockStepConversation:
    """One rollout's conversation; see `Conversation`."""

    def __init__(self, client: LockStepClient, seed: int, key: str) -> None:
        self.seed, self.key = seed, key
        self.index = 0
        self.is_closed = False
        self.question: tuple[list[Message], tuple[str, ...]] | None = None
        self._client = client
        self._answer: asyncio.Future[Decision] | None = None
        self._is_first = True

    async def decide(self, messages: Sequence[Message], *, admissible: Sequence[str] = ()) -> Decision:
        """See `Conversation.decide`. Raises the policy's error, for all conversations of the cohort."""
        self._answer = asyncio.get_running_loop().create_future()
        self.question = list(messages), tuple(admissible)
        self._client.advance()
        return await self._answer

    def resume(self, turns: Sequence[tuple[Sequence[Message], Decision]]) -> None:
        """Refuse: a session starts at the beginning. Raises ReplayError."""
        if turns:
            raise ReplayError("a policy in this process cannot resume in the middle of a rollout")

    def close(self) -> None:
        """See `Conversation.close`; the cohort continues without it."""
        self.is_closed = True
        self._client.advance()

    def build_turn(self) -> Turn:
        """Build the turn of its question."""
        assert self.question is not None
        messages, admissible = self.question
        return Turn(self.index, messages, is_first=self._is_first, admissible=admissible)

    def answer(self, answer: Decision | Exception) -> None:
        """Deliver the answer, unless the conversation was cancelled."""
        self.question, self._is_first = None, False
        assert self._answer is not None
        if self._answer.done():
            return
        if isinstance(answer, Exception):
            self._answer.set_exception(answer)
        else:
            self._answer.set_result(answer)
