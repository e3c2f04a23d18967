"""The policy as the trainer sees it: log-probabilities of chosen tokens in a packed buffer.

Three things that go wrong silently elsewhere are settled here. The forward pass gets reset positions, no attention mask
and use_cache=False: with a mask of ones or a cache transformers lets packed sequences contaminate each other. The LM
head runs only where an action token is predicted, in chunks that are recomputed in the backward pass, so that logits
never exist for the whole buffer. Log-sum-exp and entropy are float32, and log-probabilities are never above 0. The
model stays in eval mode: without dropout its log-probabilities are those of the engine.

Axes: `_T` tokens of the packed buffer, `_N` its rows that carry loss, `_V` vocabulary, `_D` width of the model.

Activation checkpointing keeps the input of a layer alone, and computes the layer again in the backward pass.
transformers' own switch works in training mode only, and training mode brings dropout back.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch  # noqa: TID253 - loaded by commands only when they train
from torch import Tensor  # noqa: TID253
from torch.utils.checkpoint import checkpoint  # noqa: TID253
from transformers import PreTrainedModel  # noqa: TID253
from transformers.modeling_layers import GradientCheckpointingLayer  # noqa: TID253

from lake.errors import ContractError, UsageError
from trainer.config import Dtype, TrainConfig
from trainer.data.stream.batch import PackedBatch
from trainer.policy.attention import NAMES, Kind, Layout, choose_attention
from trainer.policy.lora import add_adapters
from trainer.policy.model_files import empty_model, load_model


def layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The repeated blocks of a model, in order."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def recompute_layers(model: torch.nn.Module) -> None:
    """Change a model so that its blocks are recomputed in the backward pass; values and gradients stay the same.

    A UsageError where the architecture does not say what its blocks are.
    """
    layers = layers_of(model)
    if not layers:
        msg = f"{type(model).__name__} does not support gradient checkpointing; leave gradient_checkpointing out"
        raise UsageError(msg)
    for layer in layers:
        layer.forward = _recomputed(layer.forward)


def _recomputed(forward: Any) -> Any:
    """A forward function that is run again in the backward pass."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run


HEAD_ELEMENTS = 1 << 25
"""Logits of one chunk (rows x vocabulary): 128 MiB in float32."""
DTYPES: dict[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Scorer(torch.nn.Module):
    """Body, head and log-sum-exp as one module, so that a sharded model gathers and frees its weights around it.

    `autocast` is the type of the matrix products, None that of the weights.
    """

    def __init__(self, model: PreTrainedModel, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.model: Any = model
        self.autocast = autocast
        embedding: Any = model.get_input_embeddings()
        self.vocabulary = int(embedding.num_embeddings)
        self._alteration = _alteration(model.config)

    def forward(self, batch: PackedBatch, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """See `Policy.logprobs`."""
        device = batch.input_ids_T.device
        with torch.autocast(device.type, self.autocast, enabled=self.autocast is not None):
            hidden_ND = self._hidden(batch)[batch.predictor_N]
            rows = max(1, HEAD_ELEMENTS // self.vocabulary)
            if len(hidden_ND) <= rows:
                logprobs_N, entropy_N = self._score(hidden_ND, batch.target_N, batch.temperature_N, entropy)
                return logprobs_N, entropy_N if entropy else None
            parts = []
            for low in range(0, len(hidden_ND), rows):
                cut = slice(low, low + rows)
                temperature_N = None if batch.temperature_N is None else batch.temperature_N[cut]
                arguments = (hidden_ND[cut], batch.target_N[cut], temperature_N, entropy)
                parts.append(checkpoint(self._score, *arguments, use_reentrant=False, preserve_rng_state=False))
        logprobs_N = torch.cat([part[0] for part in parts])
        return logprobs_N, torch.cat([part[1] for part in parts]) if entropy else None

    def _hidden(self, batch: PackedBatch) -> Tensor:
        """Last hidden states, [T, D]."""
        output = self.model.base_model(
            input_ids=batch.input_ids_T[None].long(),
            position_ids=batch.position_ids_T[None].long(),
            attention_mask=None,
            use_cache=False,
            layout=Layout(batch.boundaries, batch.input_ids_T.device),
        )
        hidden_TD: Tensor = output.last_hidden_state[0]
        return hidden_TD

    def _score(
        self, hidden_ND: Tensor, target_N: Tensor, temperature_N: Tensor | None, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies (empty unless asked for) of one chunk."""
        logits_NV = self.model.get_output_embeddings()(hidden_ND).float()
        if self._alteration is not None:
            logits_NV = self._alteration(logits_NV)
        if temperature_N is not None:
            logits_NV = logits_NV / temperature_N[:, None]
        lse_N = logits_NV.logsumexp(dim=-1)
        chosen_N = logits_NV.gather(-1, target_N[:, None]).squeeze(-1)
        logprobs_N = (chosen_N - lse_N).clamp(max=0.0)
        if not entropy:
            return logprobs_N, logprobs_N.new_empty(0)
        probabilities_NV = (logits_NV - lse_N[:, None]).exp()
        return logprobs_N, lse_N - (probabilities_NV * logits_NV).sum(dim=-1)


class Policy:
    """A causal language model of which log-probabilities are asked.

    Args:
        model: any transformers causal LM that uses the attention interface, on its device. Its attention
            implementation is replaced: generate with another instance.
        dtype: of matrix products; with bfloat16 the weights stay what they are, and are cast for each product.
        device: where it will be, if it has no weights yet.

    Raises:
        UsageError: the attention does not run on this device.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        attention: Kind = "auto",
        dtype: Dtype = "float32",
        gradient_checkpointing: bool = False,
        device: str | None = None,
    ) -> None:
        place = model.device if device is None else torch.device(device)
        self.attention = choose_attention(attention, place, DTYPES[dtype])
        self.dtype = dtype
        model.set_attn_implementation(NAMES[self.attention])
        model.train(mode=False)
        if gradient_checkpointing:
            recompute_layers(model)
        self.model: Any = model
        self.scorer = Scorer(model, None if dtype == "float32" else DTYPES[dtype])

    @property
    def vocabulary(self) -> int:
        """Number of token ids the model can embed."""
        return self.scorer.vocabulary

    @property
    def num_parameters(self) -> int:
        """Number of parameters, tied ones once."""
        return sum(p.numel() for p in self.model.parameters())

    @property
    def num_trained(self) -> int:
        """Number of parameters that training changes."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = self.model.device
        return device

    def logprobs(self, batch: PackedBatch, *, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of the target tokens under the temperature-scaled distribution, and entropies if asked for.

        The batch is on the model's device; both are float32 [N], with gradient.
        """
        result: tuple[Tensor, Tensor | None] = self.scorer(batch, entropy)
        return result

    def state(self) -> dict[str, Tensor]:
        """Every weight by name, tied ones once; not copies."""
        named = self._named()
        return {name: named[name].detach() for name, first in self.tied_names().items() if name == first}

    def tied_names(self) -> dict[str, str]:
        """Of each weight's name the first, in order of the alphabet, under which the same weight is known."""
        named = self._named()
        first: dict[int, str] = {}
        for name in sorted(named):
            first.setdefault(id(named[name]), name)
        return {name: first[id(tensor)] for name, tensor in sorted(named.items())}

    def _named(self) -> dict[str, Tensor]:
        """What the model stores, by every name."""
        every = dict(self.model.named_parameters(remove_duplicate=False)) | dict(self.model.named_buffers())
        return {name: every[name] for name in self.model.state_dict()}

    def trained_state(self) -> dict[str, Tensor]:
        """The part of `state` that training changes: all of it, or the adapters."""
        frozen = {name for name, p in self.model.named_parameters(remove_duplicate=False) if not p.requires_grad}
        return {name: tensor for name, tensor in self.state().items() if name not in frozen}


def load_policy(
    source: str | Path,
    device: str = "cpu",
    *,
    attention: Kind = "auto",
    dtype: Dtype = "float32",
    gradient_checkpointing: bool = False,
    empty: bool = False,
) -> Policy:
    """Load a model with float32 weights, and check that it scores packed sequences as it scores single ones.

    Args:
        source: Hugging Face folder, or a .gguf file.
        empty: without weights, and unchecked: another rank has them.

    Raises:
        UsageError: no such model or device, no causal language model, or one that packed training does not serve.
    """
    check_device(device)
    model = empty_model(source) if empty else load_model(source).to(device)
    policy = Policy(
        model, attention=attention, dtype=dtype, gradient_checkpointing=gradient_checkpointing, device=device
    )
    if not empty:
        check_policy(policy)
    return policy


def policy_of(config: TrainConfig, device: str | None = None, *, empty: bool = False) -> Policy:
    """The policy that a configuration trains, as it is before the first update, adapters included.

    Args:
        device: torch device, in place of the configuration's.

    Raises:
        UsageError: see `load_policy`; or peft is missing.
    """
    policy = load_policy(
        config.model,
        device or config.device,
        attention=config.attention,
        dtype=config.dtype,
        gradient_checkpointing=config.gradient_checkpointing,
        empty=empty,
    )
    if config.lora is not None:
        add_adapters(policy.model, config.lora, seed=config.seed)
    return policy


def _alteration(config: Any) -> Callable[[Tensor], Tensor] | None:
    """What an architecture does to logits after its head: Gemma caps them, Cohere and Granite scale them."""
    cap = getattr(config, "final_logit_softcapping", None)
    if cap is not None:
        return lambda logits_NV: cap * torch.tanh(logits_NV / cap)
    factor = getattr(config, "logit_scale", None) or 1.0
    factor /= getattr(config, "logits_scaling", None) or 1.0
    return None if factor == 1.0 else lambda logits_NV: logits_NV * factor


_LENGTHS = (6, 3, 9)
EXACT, NARROW = 1e-4, 0.1
"""Tolerances in nats: of the largest difference in float32, of the mean difference in 16-bit floats."""


def check_policy(policy: "Policy") -> None:
    """Compare packed log-probabilities with those of transformers' own forward pass, one sequence at a time.

    Architectures differ in what they do with positions, windows, caches and logits; some (state-space layers,
    convolutions) carry state from one packed sequence into the next whatever the positions say. Three short sequences
    show it: a UsageError where they differ, or the model cannot be run packed.
    """
    batch = _small_batch(policy.vocabulary).to(policy.device)
    with torch.no_grad():
        packed_N, _ = policy.logprobs(batch)
        expected_N = _own_logprobs(policy, batch)
    difference_N = (packed_N - expected_N).abs()
    exact = policy.dtype == "float32" and policy.model.dtype == torch.float32
    found, limit = (difference_N.max().item(), EXACT) if exact else (difference_N.mean().item(), NARROW)
    if not found <= limit:
        raise UsageError(
            f"{type(policy.model).__name__} with {policy.attention} attention scores packed sequences differently from "
            f"single ones: {found:.3g} nats, at most {limit} will do; choose another attention, or another model"
        )


def check_device(device: str) -> None:
    """Refuse (UsageError) a device that torch cannot use."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0][:60]
        msg = f"device {device!r} cannot be used ({reason}); valid are cpu and, with a GPU and its PyTorch, cuda"
        raise UsageError(msg) from error


def check_vocabulary(batch: PackedBatch, vocabulary: int) -> None:
    """Refuse (ContractError) a batch on the CPU with a token for which the model has no embedding."""
    highest = int(batch.input_ids_T.max())
    if highest >= vocabulary:
        raise ContractError(
            f"table `tokens` holds token id {highest}, and the model knows ids below {vocabulary}: the tokens were "
            f"made with another tokenizer; choose the model they came from, or --tokens rendered"
        )


def whole_sequences(ids_Q: Sequence[Sequence[int]]) -> PackedBatch:
    """Sequences of at least two token ids, packed, of which every token but the first carries loss."""
    lengths = [len(ids) for ids in ids_Q]
    ids_T = torch.tensor([token for ids in ids_Q for token in ids])
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    target_at = torch.nonzero(positions_T > 0).squeeze(-1)
    return PackedBatch(
        input_ids_T=ids_T,
        position_ids_T=positions_T,
        boundaries=[0, *torch.tensor(lengths).cumsum(0).tolist()],
        predictor_N=target_at - 1,
        target_N=ids_T[target_at],
        weight_N=torch.ones(len(target_at)),
    )


def _small_batch(vocabulary: int) -> PackedBatch:
    """Three short random sequences."""
    generator = torch.Generator().manual_seed(0)
    ids_T = torch.randint(0, vocabulary, (sum(_LENGTHS),), generator=generator)
    return whole_sequences([part.tolist() for part in torch.split_with_sizes(ids_T, _LENGTHS)])


def _own_logprobs(policy: "Policy", batch: PackedBatch) -> Tensor:
    """The same log-probabilities by the model's own forward pass and attention."""
    model, used = policy.model, policy.model.config._attn_implementation
    model.set_attn_implementation("eager")
    parts = []
    autocast = policy.scorer.autocast
    with torch.autocast(policy.device.type, autocast, enabled=autocast is not None):
        for ids_T in torch.split_with_sizes(batch.input_ids_T, _LENGTHS):
            logits_TV = model(input_ids=ids_T[None], use_cache=False).logits[0].float()
            parts.append(logits_TV[:-1].log_softmax(-1).gather(-1, ids_T[1:, None]).squeeze(-1))
    model.set_attn_implementation(used)
    return torch.cat(parts)
