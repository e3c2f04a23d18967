"""The policy as the trainer sees it: log-probabilities of chosen tokens in a packed buffer.

Three things that go wrong silently elsewhere are settled here. The forward pass gets reset positions, no attention mask
and use_cache=False: with a mask of ones or a cache transformers lets packed sequences contaminate each other. The LM
head runs only where an action token is predicted, in chunks that are recomputed in the backward pass, so that logits
never exist for the whole buffer. Log-sum-exp and entropy are float32, and log-probabilities are never above 0. The
model stays in eval mode: without dropout its log-probabilities are those of the engine.

Axes: `_T` tokens of the packed buffer, `_N` its rows that carry loss, `_V` vocabulary, `_D` width of the model.
"""

from pathlib import Path
from typing import Any

import torch  # noqa: TID253 - loaded by commands only when they train
from torch import Tensor  # noqa: TID253
from torch.utils.checkpoint import checkpoint  # noqa: TID253
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel  # noqa: TID253

from lake.errors import UsageError
from trainer.attention import NAME, packed_attention
from trainer.batch import PackedBatch

AttentionInterface.register(NAME, packed_attention)

HEAD_ELEMENTS = 1 << 25
"""Logits of one chunk (rows x vocabulary): 128 MiB in float32."""
_HEAD_ALTERATIONS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Settings by which some architectures change the logits after the head."""


class Policy:
    """A causal language model of which log-probabilities are asked.

    Args:
        model: any transformers causal LM that uses the attention interface. Its attention implementation is replaced:
            generate with another instance.

    Raises:
        UsageError: the architecture changes logits after its head.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        altered = [n for n in _HEAD_ALTERATIONS if getattr(model.config, n, None) not in (None, 1, 1.0)]
        if altered:
            msg = f"{type(model).__name__} changes its logits after the head ({', '.join(altered)}): not supported"
            raise UsageError(msg)
        model.set_attn_implementation(NAME)
        model.train(mode=False)
        self.model: Any = model
        self._body: Any = model.base_model
        self._head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]

    @property
    def vocabulary(self) -> int:
        """Number of token ids the model can embed."""
        return int(self.model.get_input_embeddings().num_embeddings)

    @property
    def num_parameters(self) -> int:
        """Number of parameters, tied ones once."""
        return sum(p.numel() for p in self.model.parameters())

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = self.model.device
        return device

    def logprobs(self, batch: PackedBatch, *, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of the target tokens under the temperature-scaled distribution.

        Args:
            batch: the packed buffer.
            entropy: also return the entropy of the distribution.

        Returns:
            logprobs_N and entropy_N (None unless asked for), float32, with gradient.
        """
        hidden_TD = self._hidden(batch)
        hidden_ND = hidden_TD[batch.predictor_N]
        rows = max(1, HEAD_ELEMENTS // self.vocabulary)
        if len(hidden_ND) <= rows:
            logprobs_N, entropy_N = self._score(hidden_ND, batch.target_N, batch.temperature_N, entropy)
            return logprobs_N, entropy_N if entropy else None
        parts = []
        for low in range(0, len(hidden_ND), rows):
            cut = slice(low, low + rows)
            temperature_N = None if batch.temperature_N is None else batch.temperature_N[cut]
            arguments = (hidden_ND[cut], batch.target_N[cut], temperature_N, entropy)
            parts.append(checkpoint(self._score, *arguments, use_reentrant=False))
        logprobs_N = torch.cat([part[0] for part in parts])
        return logprobs_N, torch.cat([part[1] for part in parts]) if entropy else None

    def _hidden(self, batch: PackedBatch) -> Tensor:
        """Last hidden states, [T, D]."""
        output = self._body(
            input_ids=batch.input_ids_T[None].long(),
            position_ids=batch.position_ids_T[None].long(),
            attention_mask=None,
            use_cache=False,
            boundaries=batch.boundaries,
        )
        hidden_TD: Tensor = output.last_hidden_state[0]
        return hidden_TD

    def _score(
        self, hidden_ND: Tensor, target_N: Tensor, temperature_N: Tensor | None, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies (empty unless asked for) of one chunk."""
        logits_NV = self._head(hidden_ND).float()
        if temperature_N is not None:
            logits_NV = logits_NV / temperature_N[:, None]
        lse_N = logits_NV.logsumexp(dim=-1)
        chosen_N = logits_NV.gather(-1, target_N[:, None]).squeeze(-1)
        logprobs_N = (chosen_N - lse_N).clamp(max=0.0)
        if not entropy:
            return logprobs_N, logprobs_N.new_empty(0)
        probabilities_NV = (logits_NV - lse_N[:, None]).exp()
        return logprobs_N, lse_N - (probabilities_NV * logits_NV).sum(dim=-1)


def load_policy(folder: str | Path, device: str = "cpu") -> Policy:
    """Load a model folder in float32.

    Raises:
        UsageError: no such folder, or no causal language model in it.
    """
    path = Path(folder)
    if not (path / "config.json").is_file():
        msg = f"{path} holds no model (no config.json); name a Hugging Face folder, or make one: trajlake init-model"
        raise UsageError(msg)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError) as error:
        msg = f"{path} cannot be loaded as a causal language model: {error}"
        raise UsageError(msg) from error
    return Policy(model.to(device))
