"""The policy as the trainer sees it: log-probabilities of chosen tokens in a packed buffer, and LoRA adapters.

The forward pass gets reset positions, no attention mask and use_cache=False: with a mask of ones or a cache
transformers lets packed sequences contaminate each other. The LM head runs only where an action token is predicted, in
chunks that are recomputed in the backward pass, so that logits never exist for the whole buffer. Log-sum-exp and
entropy are float32, and log-probabilities are never above 0. The model stays in eval mode: without dropout its
log-probabilities are those of the engine.

Axes: `_T` tokens of the packed buffer, `_N` its rows that carry loss, `_S` trained steps, `_V` vocabulary, `_D` width.

Activation checkpointing stores only the input of a layer, and computes the layer again in the backward pass. The switch
of transformers works in training mode only, and training mode turns dropout on.

A 16-bit type is used in one of two ways. Without cast weights, as on a CPU, weights and residual stream are float32 and
autocast rounds the operands of each product. With cast weights, as on a GPU, a 16-bit copy of the weights computes, so
that the residual stream and the activations have 16 bits, too. `PackedPolicy.cast_weights` renews the copy once per
optimizer step. Its gradients are added to those of the float32 weights, micro-batch by micro-batch, in float32. The
float32 weights stay the policy's state for the optimizer, checkpoints, digests and engines (Micikevicius et al. 2018,
arXiv 1710.03740).

LoRA: small trained matrices next to frozen weights, by peft; a checkpoint holds only them. Adapters are put into the
model in place, so that it stays the same transformers model. They start without effect (B = 0), from a seed.
"""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch  # noqa: TID253 - a script that does nothing without it
from torch import Tensor  # noqa: TID253
from torch.utils.checkpoint import (  # noqa: TID253
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel  # noqa: TID253
from transformers.modeling_layers import GradientCheckpointingLayer  # noqa: TID253

from lake.errors import ContractError, UsageError
from trainer.config import Dtype, LoRAConfig, TrainConfig, ValueConfig
from trainer.data.batch import PackedBatch
from trainer.policy.attention import NAMES, Kind, Layout, choose_attention
from trainer.policy.kernels import Kernels, choose_kernels, compile_layers, score_head, use_liger
from trainer.policy.model_files import build_empty_model, load_model

ADAPTER = "default"
"""peft's name for the adapters."""
VALUE_HEAD = "value_head"
"""Name of the value head in the model."""


def add_adapters(model: Any, config: LoRAConfig, *, seed: int) -> None:
    """Put adapters into a model and freeze everything else.

    Raises:
        UsageError: peft is not installed, no layer has one of the names, or one is the embedding or the LM head.
    """
    peft = _peft()
    options = _peft_config(peft, config, base=None)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    for name, module in model.named_modules():
        if any(module is end for end in ends) and name.rpartition(".")[2] in config.targets:
            msg = f"{name} cannot have adapters, only layers between embedding and LM head can: take it out of targets"
            raise UsageError(msg)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # GPT-2 stores its matrices transposed, which peft detects.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")
        torch.manual_seed(seed)
        try:
            peft.inject_adapter_in_model(options, model)
        except ValueError as error:
            names = sorted({n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)})
            msg = f"no layer to adapt is named {config.targets}; the model's linear layers are {', '.join(names)}"
            raise UsageError(msg) from error


def merge_adapters(weights: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Return the weights of a model without adapters that computes the same: W + alpha / rank * B A.

    Takes all weights of the adapted model by name as plain tensors. The layers of the model give scale and orientation.
    The result has the names before adapters were added, and new tensors where adapters changed them.
    """
    plain = {name.replace(".base_layer.", "."): t for name, t in weights.items() if ".lora_" not in name}
    for prefix, layer in model.named_modules():
        if f"{prefix}.lora_A.{ADAPTER}.weight" not in weights:
            continue
        down, up = (weights[f"{prefix}.lora_{side}.{ADAPTER}.weight"] for side in "AB")
        change = (up.float() @ down.float()) * layer.scaling[ADAPTER]
        base = weights[f"{prefix}.base_layer.weight"]
        change = change.T if layer.fan_in_fan_out else change
        plain[f"{prefix}.weight"] = (base.float() + change).to(base.dtype)
    return plain


def save_adapters(folder: Path, weights: dict[str, Tensor], config: LoRAConfig, base: str) -> None:
    """Write adapters as a folder that peft and inference engines load; weights by name, as plain tensors."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    named = {f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": t.contiguous() for name, t in weights.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    options = _peft_config(_peft(), config, base=base)
    options.inference_mode = True
    options.save_pretrained(str(folder))


def _peft_config(peft: Any, config: LoRAConfig, base: str | None) -> Any:
    targets = config.targets if isinstance(config.targets, str) else list(config.targets)
    return peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=targets,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )


def _peft() -> Any:
    """Import the package peft; a UsageError where it is not installed."""
    try:
        import peft
    except ImportError as error:
        raise UsageError('LoRA needs the package peft: pip install "trajlake[lora]"') from error
    return peft


def leave_out_value_head(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a language model, by name, without those of its value head."""
    return {name: tensor for name, tensor in weights.items() if not name.startswith(f"{VALUE_HEAD}.")}


def get_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the repeated blocks of a model, in order."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def recompute_layers(model: torch.nn.Module, *, selective: bool) -> None:
    """Change a model so that its blocks are recomputed in the backward pass; values and gradients stay the same.

    With `selective` the operations of `is_kept` are not.

    Raises:
        UsageError: the architecture does not mark its blocks.
    """
    layers = get_layers(model)
    if not layers:
        msg = f"{type(model).__name__} does not support gradient checkpointing; leave gradient_checkpointing out"
        raise UsageError(msg)
    for layer in layers:
        layer.forward = _wrap_forward(layer.forward, selective=selective)


def is_kept(operation: object) -> bool:
    """Whether selective recomputation keeps what one of torch's operations computes: products and attention."""
    name = str(operation)
    return name.startswith(("aten.mm.", "aten.addmm.", "aten.bmm.")) or "attention" in name or "attn" in name


def _choose_policy(context: object, operation: object, *_: object, **__: object) -> CheckpointPolicy:
    del context
    return CheckpointPolicy.MUST_SAVE if is_kept(operation) else CheckpointPolicy.PREFER_RECOMPUTE


def _wrap_forward(forward: Any, *, selective: bool) -> Any:
    """Return a forward function that runs again in the backward pass."""
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _choose_policy)

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, **options, **kwargs)

    return run


HEAD_ELEMENTS = 1 << 25
"""Largest number of logits of one chunk (rows x vocabulary): 128 MiB in float32."""
DTYPES: dict[Dtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class TokenScorer(torch.nn.Module):
    """Body, head and log-sum-exp as one module, around which a sharded model gathers and frees its weights.

    Args:
        model: model that computes.
        autocast: type of the matrix products; None takes that of the weights.
        fused_head: score by `score_head`, where the head is a plain linear layer.
    """

    def __init__(self, model: PreTrainedModel, autocast: torch.dtype | None, *, fused_head: bool = False) -> None:
        super().__init__()
        self.model: Any = model
        self.autocast = autocast
        embedding: Any = model.get_input_embeddings()
        self.vocabulary = int(embedding.num_embeddings)
        self._change_logits = _find_logit_change(model.config)
        self._fused_head = fused_head and self._change_logits is None and type(self._head) is torch.nn.Linear

    @property
    def _head(self) -> Any:
        return self.model.get_output_embeddings()

    def forward(
        self, batch: PackedBatch, entropy: bool, detach: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Compute the result of `PackedPolicy.score`."""
        device = batch.input_ids_T.device
        with torch.autocast(device.type, self.autocast, enabled=self.autocast is not None):
            hidden_TD = self._hidden(batch)
        value_S = None
        if batch.state_S is not None:
            # The head in float32, whatever the type of the hidden states.
            head, hidden_SD = self.model.get_submodule(VALUE_HEAD), hidden_TD[batch.state_S].float()
            hidden_SD = hidden_SD.detach() if detach else hidden_SD
            value_S = (hidden_SD * head.weight.float()).sum(dim=-1) + head.bias.float()
        return *self._score_tokens(batch, hidden_TD[batch.predictor_N], entropy), value_S

    def _score_tokens(self, batch: PackedBatch, hidden_ND: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
        with torch.autocast(batch.input_ids_T.device.type, self.autocast, enabled=self.autocast is not None):
            rows = max(1, HEAD_ELEMENTS // self.vocabulary)
            if self._fused_head:
                logprobs_N, entropy_N = score_head(
                    self._head, hidden_ND, batch.target_N, batch.temperature_N, rows=rows, entropy=entropy
                )
                return logprobs_N, entropy_N if entropy else None
            if len(hidden_ND) <= rows:
                logprobs_N, entropy_N = self._score(hidden_ND, batch.target_N, batch.temperature_N, entropy)
                return logprobs_N, entropy_N if entropy else None
            chunks = []
            for low in range(0, len(hidden_ND), rows):
                cut = slice(low, low + rows)
                temperature_N = None if batch.temperature_N is None else batch.temperature_N[cut]
                arguments = (hidden_ND[cut], batch.target_N[cut], temperature_N, entropy)
                chunks.append(checkpoint(self._score, *arguments, use_reentrant=False, preserve_rng_state=False))
        logprobs_N = torch.cat([chunk[0] for chunk in chunks])
        return logprobs_N, torch.cat([chunk[1] for chunk in chunks]) if entropy else None

    def _hidden(self, batch: PackedBatch) -> Tensor:
        """Compute the last hidden states, [T, D]."""
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
        """Compute log-probabilities and entropies of one chunk; without `entropy` the latter are empty."""
        logits_NV = self._head(hidden_ND).float()
        if self._change_logits is not None:
            logits_NV = self._change_logits(logits_NV)
        if temperature_N is not None:
            logits_NV = logits_NV / temperature_N[:, None]
        lse_N = logits_NV.logsumexp(dim=-1)
        target_logit_N = logits_NV.gather(-1, target_N[:, None]).squeeze(-1)
        logprobs_N = (target_logit_N - lse_N).clamp(max=0.0)
        if not entropy:
            return logprobs_N, logprobs_N.new_empty(0)
        probabilities_NV = (logits_NV - lse_N[:, None]).exp()
        return logprobs_N, lse_N - (probabilities_NV * logits_NV).sum(dim=-1)


def _copy_narrow(model: Any, dtype: torch.dtype) -> Any:
    """Copy a model with 16-bit weights, whose gradients are added to those of the model's weights as they come.

    Buffers, such as the frequencies of rotary embeddings, keep their type.
    """
    copies: dict[int, Any] = {}
    for weight in model.parameters():
        narrow: Any = torch.nn.Parameter(weight.detach().to(dtype, copy=True), requires_grad=weight.requires_grad)
        if weight.requires_grad:
            narrow.register_post_accumulate_grad_hook(_add_gradient_to(weight))
        copies[id(weight)] = narrow
    return copy.deepcopy(model, copies)


def _add_gradient_to(weight: torch.nn.Parameter) -> Callable[[Tensor], None]:
    """Return a hook that moves the gradient of a 16-bit copy to its float32 weight."""

    def add(narrow: Tensor) -> None:
        gradient = narrow.grad
        assert gradient is not None
        if weight.grad is None:
            weight.grad = gradient.to(weight.dtype)
        else:
            weight.grad.add_(gradient)
        narrow.grad = None

    return add


class PackedPolicy:
    """A causal language model that scores tokens.

    Args:
        model: a transformers causal LM that uses the attention interface, on its device, with float32 weights, or with
            those of `dtype`, which then compute. Its attention implementation is replaced: generate with another one.
        dtype: type of matrix products.
        cast: whether a 16-bit copy of the weights computes; None: with a 16-bit type on a GPU.
        kernels: kernels of the layers and of the head.
        device: future device of a model that has no weights yet.

    Raises:
        UsageError: attention or kernels do not run on this device.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        attention: Kind = "auto",
        dtype: Dtype = "float32",
        cast: bool | None = None,
        kernels: Kernels = "auto",
        gradient_checkpointing: bool | Literal["selective"] = False,
        device: str | None = None,
    ) -> None:
        target = model.device if device is None else torch.device(device)
        self.attention = choose_attention(attention, target, DTYPES[dtype])
        self.kernels = choose_kernels(kernels, target)
        self.dtype = dtype
        model.set_attn_implementation(NAMES[self.attention])
        model.train(mode=False)
        self.model: Any = model
        """Model with the float32 weights, which are the policy's state; a frozen one's may have 16 bits."""
        self.value: ValueConfig | None = None
        """Configuration of the value head, if there is one."""
        self._recompute = gradient_checkpointing
        self._is_cast = model.dtype != DTYPES[dtype] and (computes_narrow(dtype, target) if cast is None else cast)
        self.scorer = self._build_scorer()

    def _build_scorer(self) -> TokenScorer:
        """Build the module that computes: the model itself, or a 16-bit copy of it, with its kernels."""
        narrow = None if DTYPES[self.dtype] in (torch.float32, self.model.dtype) else DTYPES[self.dtype]
        module = _copy_narrow(self.model, narrow) if self._is_cast and narrow is not None else self.model
        if self.kernels == "liger":
            use_liger(module)
        selective = self._recompute == "selective"
        if self.kernels == "compile":
            compile_layers(get_layers(module), selective=selective)
        if self._recompute and not (selective and self.kernels == "compile"):
            recompute_layers(module, selective=selective)
        return TokenScorer(module, None if self._is_cast else narrow, fused_head=self.kernels != "eager")

    def add_adapters(self, config: LoRAConfig, *, seed: int) -> None:
        """Put adapters into the model and freeze everything else; errors as of `add_adapters`."""
        add_adapters(self.model, config, seed=seed)
        if self._is_cast:
            self.scorer = self._build_scorer()

    def add_value_head(self, config: ValueConfig) -> None:
        """Put a value head into the model: a linear layer with a bias, which starts at 0."""
        like = self.model.get_output_embeddings().weight
        head = torch.nn.Linear(like.shape[1], 1, device=like.device, dtype=self.model.dtype)
        for parameter in head.parameters():
            torch.nn.init.zeros_(parameter)
        self.model.add_module(VALUE_HEAD, head)
        self.value = config
        if self._is_cast:
            self.scorer = self._build_scorer()

    def compute_with_model(self) -> None:
        """Compute with the float32 weights from now on, without a 16-bit copy: they are sharded, and cast by shards."""
        if self._is_cast:
            self._is_cast = False
            self.scorer = self._build_scorer()

    def cast_weights(self) -> None:
        """Renew the 16-bit copy of the weights, if there is one; every change of the weights calls it."""
        if self._is_cast:
            with torch.no_grad():
                for weight, narrow in zip(self.model.parameters(), self.scorer.model.parameters(), strict=True):
                    if narrow is not weight:
                        narrow.copy_(weight)

    @property
    def vocabulary(self) -> int:
        """Number of token ids that the model can embed."""
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
        """Device of the weights."""
        device: torch.device = self.model.device
        return device

    def logprobs(self, batch: PackedBatch, *, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Compute log-probabilities of the target tokens at their temperatures, and with `entropy` the entropies.

        The batch is on the model's device; both are float32 [N], with gradient.
        """
        return self.score(batch, entropy=entropy)[:2]

    def score(self, batch: PackedBatch, *, entropy: bool = False) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Compute the result of `logprobs`, and the values of the batch's states, float32 [S]; None without states."""
        detach = self.value is not None and self.value.detach
        scored: tuple[Tensor, Tensor | None, Tensor | None] = self.scorer(batch, entropy, detach)
        return scored

    def state(self) -> dict[str, Tensor]:
        """Return all weights by name, tied ones once; not copies."""
        named = self._name_tensors()
        return {name: named[name].detach() for name, first in self.map_tied_names().items() if name == first}

    def map_tied_names(self) -> dict[str, str]:
        """Return for each weight's name the alphabetically first name of the same weight."""
        named = self._name_tensors()
        first: dict[int, str] = {}
        for name in sorted(named):
            first.setdefault(id(named[name]), name)
        return {name: first[id(tensor)] for name, tensor in sorted(named.items())}

    def _name_tensors(self) -> dict[str, Tensor]:
        """Return the stored tensors of the model under all their names."""
        tensors = dict(self.model.named_parameters(remove_duplicate=False)) | dict(self.model.named_buffers())
        return {name: tensors[name] for name in self.model.state_dict()}

    def trained_state(self) -> dict[str, Tensor]:
        """Return the weights of `state` that training changes: all of them, or the adapters."""
        frozen = {name for name, p in self.model.named_parameters(remove_duplicate=False) if not p.requires_grad}
        return {name: tensor for name, tensor in self.state().items() if name not in frozen}


def computes_narrow(dtype: Dtype, device: torch.device) -> bool:
    """Whether 16-bit weights compute: with a 16-bit type on a GPU."""
    return dtype != "float32" and device.type == "cuda"


def load_policy(
    source: str | Path,
    device: str = "cpu",
    config: TrainConfig | None = None,
    *,
    empty: bool = False,
    frozen: bool = False,
) -> PackedPolicy:
    """Load a model with float32 weights, and check that it scores packed sequences as it scores single ones.

    Args:
        source: Hugging Face folder, or a .gguf file.
        config: says how the policy computes; None takes the defaults.
        empty: without weights and unchecked, for a rank that receives them.
        frozen: never trained. Where 16-bit weights compute, there are no float32 ones. The configuration's model is not
            checked again, since the trained policy has been.

    Raises:
        UsageError: no such model or device, not a causal language model, or one that scores packed sequences wrongly.
    """
    check_device(device)
    model = build_empty_model(source) if empty else load_model(source)
    if frozen and config is not None and computes_narrow(config.dtype, torch.device(device)):
        for parameter in model.parameters():  # not buffers: frequencies of rotary embeddings stay exact
            parameter.data = parameter.data.to(DTYPES[config.dtype])
    model = model if empty else model.to(device)
    shared = ("attention", "dtype", "kernels", "gradient_checkpointing")
    options: Any = {} if config is None else {name: getattr(config, name) for name in shared}
    policy = PackedPolicy(model, device=device, **options)
    if not (empty or (frozen and config is not None and str(source) == config.model)):
        check_policy(policy)
    return policy


def build_policy(config: TrainConfig, device: str | None = None, *, empty: bool = False) -> PackedPolicy:
    """Load the policy that a configuration trains, as before the first update, with its adapters.

    Args:
        device: torch device; None takes the configuration's.

    Raises:
        UsageError: as for `load_policy`; or peft is missing.
    """
    policy = load_policy(config.model, device or config.device, config, empty=empty)
    if config.lora is not None:
        policy.add_adapters(config.lora, seed=config.seed)
    if config.value is not None:
        policy.add_value_head(config.value)
    return policy


def _find_logit_change(config: Any) -> Callable[[Tensor], Tensor] | None:
    """Return what an architecture does to logits after its head: Gemma caps them, Cohere and Granite scale them."""
    cap = getattr(config, "final_logit_softcapping", None)
    if cap is not None:
        return lambda logits_NV: cap * torch.tanh(logits_NV / cap)
    factor = getattr(config, "logit_scale", None) or 1.0
    factor /= getattr(config, "logits_scaling", None) or 1.0
    return None if factor == 1.0 else lambda logits_NV: logits_NV * factor


_LENGTHS = (6, 3, 9)
EXACT, NARROW = 1e-4, 0.1
"""Tolerances in nats: of the largest difference in float32, of the mean difference in 16-bit floats."""


def check_policy(policy: "PackedPolicy") -> None:
    """Compare packed log-probabilities with those of the model's forward pass, one sequence at a time.

    Architectures differ in their use of positions, windows, caches and logits. Some (state-space layers, convolutions)
    carry state from one packed sequence into the next in spite of the positions. Three short sequences show it.

    Raises:
        UsageError: the log-probabilities differ, or the model cannot be run packed.
    """
    generator = torch.Generator().manual_seed(0)
    ids_T = torch.randint(0, policy.vocabulary, (sum(_LENGTHS),), generator=generator)
    sequences = [ids.tolist() for ids in torch.split_with_sizes(ids_T, _LENGTHS)]
    batch = pack_sequences(sequences).to(policy.device)
    # Compiled layers run as written: compiling them for so few tokens would take longer than the check.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        packed_N, _ = policy.logprobs(batch)
        expected_N = _score_unpacked(policy, batch)
    difference_N = (packed_N - expected_N).abs()
    exact = policy.dtype == "float32" and policy.model.dtype == torch.float32
    difference, limit = (difference_N.max().item(), EXACT) if exact else (difference_N.mean().item(), NARROW)
    if not difference <= limit:
        raise UsageError(
            f"{type(policy.model).__name__} with {policy.attention} attention scores packed sequences differently from "
            f"single ones: {difference:.3g} nats, at most {limit} will do; choose another attention, or another model"
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
    """Refuse (ContractError) a batch on the CPU with a token id outside the vocabulary."""
    highest = int(batch.input_ids_T.max())
    if highest >= vocabulary:
        raise ContractError(
            f"table `tokens` holds token id {highest}, and the model knows ids below {vocabulary}: the tokens were "
            f"made with another tokenizer; choose the model they came from, or tokens=rendered"
        )


def pack_sequences(ids_Q: Sequence[Sequence[int]]) -> PackedBatch:
    """Pack sequences of at least two token ids; every token but the first carries loss."""
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


def _score_unpacked(policy: "PackedPolicy", batch: PackedBatch) -> Tensor:
    """Compute the same log-probabilities with the forward pass and eager attention of transformers."""
    model = policy.scorer.model
    used = model.config._attn_implementation
    model.set_attn_implementation("eager")
    logprobs = []
    autocast = policy.scorer.autocast
    with torch.autocast(policy.device.type, autocast, enabled=autocast is not None):
        for ids_T in torch.split_with_sizes(batch.input_ids_T, _LENGTHS):
            logits_TV = model(input_ids=ids_T[None], use_cache=False).logits[0].float()
            logprobs.append(logits_TV[:-1].log_softmax(-1).gather(-1, ids_T[1:, None]).squeeze(-1))
    model.set_attn_implementation(used)
    return torch.cat(logprobs)
