"""A policy that runs a transformers model in this process, many rollouts at a time.

What is recorded is what was sampled: exact ids, the end token included, and log-probabilities of the very distribution
sampled from (temperature applied, float32 log-softmax, no truncation and no masking, so that a trainer recomputes the
same distribution).

Rollouts advance in lock-step on a shared key-value cache: each call feeds only new tokens, as one left-padded chunk;
rows that have ended are cut out. The cache has holes where shorter chunks were padded: the attention mask covers them
and positions count real tokens only, so every row sees the sequence that a plain forward pass over its tokens sees.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, Field

from lake.records import TokensRecord
from pipelines.collect.policies import Decision, PolicyCard, Session, Turn
from pipelines.collect.policies.rendering import ContextRenderer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


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
        """Go on with these rows only, in this order."""
        if list(rows) == self._rows:
            return
        import torch

        place = {row: index for index, row in enumerate(self._rows)}
        index_B = torch.tensor([place[row] for row in rows], device=self._model.device)
        if self._mask_BT.shape[1]:
            self._cache.batch_select_indices(index_B)
        self._mask_BT = self._mask_BT[index_B]
        self._rows = list(rows)

    def extend(self, chunk_B: Sequence[Sequence[int]]) -> "torch.Tensor":
        """Append tokens to every row; the logits `_BV` after its last token mean nothing where its chunk is empty."""
        import torch

        width = max(map(len, chunk_B))
        # Masks come from lengths: the padding id is a real token's and means nothing here.
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
    """How actions are sampled. There is no top-p or top-k: truncation would bias the ratios of the trainer."""

    temperature: float = Field(default=1.0, gt=0)
    """Divides the logits."""
    max_action_tokens: int = Field(default=8, ge=1)
    """Tokens after which an action is cut off, its end token included."""

    def record(self) -> dict[str, Any]:
        """The parameters as `tokens` and `episodes.sampling` store them."""
        return {"temperature": self.temperature, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


class TransformersPolicy:
    """A causal language model as a policy.

    The model is in eval mode; its weights may change between sessions, never inside one. The tokenizer has a chat
    template. `name` is stored as `episodes.policy`, `version` (the number of weight updates so far) with every step.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase",
        *,
        name: str,
        version: int,
        sampling: SamplingConfig | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.name = name
        self.version = version
        self.sampling = sampling or SamplingConfig()
        self.renderer = ContextRenderer(tokenizer)

    @property
    def card(self) -> PolicyCard:
        """Name, version, sampling and the identity of the encoding."""
        return PolicyCard(
            name=self.name,
            version=self.version,
            sampling=self.sampling.record() | {"max_action_tokens": self.sampling.max_action_tokens},
            tokenizer=self.renderer.identity,
            chat_template=str(self.tokenizer.chat_template),
        )

    def start(self, seeds_E: Sequence[int]) -> Session:
        """One conversation per seed, all in one cache."""
        return _Conversations(self, seeds_E)


class _Conversations:
    """The conversations of one session: random streams, what is not yet in the cache, and the cache."""

    def __init__(self, policy: TransformersPolicy, seeds_E: Sequence[int]) -> None:
        import transformers

        self._policy = policy
        self._end: int = policy.tokenizer.eos_token_id
        self._engine = f"transformers {transformers.__version__}"
        self._rng_E = [np.random.default_rng(seed) for seed in seeds_E]
        self._unfed_E: list[list[int]] = [[] for _ in seeds_E]
        self._glue_E: list[list[int]] = [[] for _ in seeds_E]
        self._batch = CachedBatch(policy.model, len(seeds_E))

    def act(self, turns: Sequence[Turn]) -> list[Decision]:
        """See `Session.act`."""
        self._batch.keep([turn.rollout for turn in turns])
        render = self._policy.renderer.context
        context_B = [self._glue_E[turn.rollout] + render(turn.messages, turn.is_first) for turn in turns]
        actions_B, logprobs_B, unfed_B = self._generate(
            [self._unfed_E[turn.rollout] + context for turn, context in zip(turns, context_B, strict=True)],
            [self._rng_E[turn.rollout] for turn in turns],
        )
        decisions = []
        for row, turn in enumerate(turns):
            is_cut = actions_B[row][-1] != self._end
            self._unfed_E[turn.rollout] = unfed_B[row]
            self._glue_E[turn.rollout] = [self._end] if is_cut else []  # the template ends a cut action all the same
            decisions.append(self._decision(context_B[row], actions_B[row], logprobs_B[row], is_cut))
        return decisions

    def _generate(
        self, chunk_B: list[list[int]], rng_B: list[np.random.Generator]
    ) -> tuple[list[list[int]], list[list[float]], list[list[int]]]:
        """Sample one action per row: its ids, their log-probabilities, and the ids that are not in the cache yet."""
        import torch

        actions_B: list[list[int]] = [[] for _ in chunk_B]
        logprobs_B: list[list[float]] = [[] for _ in chunk_B]
        running = list(range(len(chunk_B)))
        for _ in range(self._policy.sampling.max_action_tokens):
            with torch.inference_mode():
                logits_RV = self._batch.extend(chunk_B)[running]
                logprobs_RV = (logits_RV.float() / self._policy.sampling.temperature).log_softmax(-1)
                tokens_R = sample(logprobs_RV, np.array([rng_B[row].random() for row in running]))
                chosen_R = logprobs_RV.gather(1, tokens_R[:, None])[:, 0].clamp(max=0.0)
            chunk_B = [[] for _ in chunk_B]
            for row, token, logprob in zip(running, tokens_R.tolist(), chosen_R.tolist(), strict=True):
                actions_B[row].append(token)
                logprobs_B[row].append(logprob)
                chunk_B[row] = [token]
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
                logprobs_mode="processed",
                engine=self._engine,
                dtype=str(policy.model.dtype).removeprefix("torch."),
                policy_version=policy.version,
                **policy.sampling.record(),
            ),
        )


def sample(logprobs_RV: "torch.Tensor", uniform_R: np.ndarray[Any, np.dtype[np.float64]]) -> "torch.Tensor":
    """Inverse-CDF sampling in float64: one uniform number in [0, 1) decides one token, whatever else is in the batch.

    Takes normalised log-probabilities in nats; gives int64 token ids, one per row.
    """
    import torch

    cumulative_RV = logprobs_RV.double().exp().cumsum(-1)
    threshold_R = torch.from_numpy(uniform_R) * cumulative_RV[:, -1].cpu()
    tokens_R = torch.searchsorted(cumulative_RV, threshold_R[:, None].to(cumulative_RV.device), right=True)[:, 0]
    return tokens_R.clamp(max=logprobs_RV.shape[1] - 1)
