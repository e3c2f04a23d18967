"""TRL's side of bench_train.py: a process of its own, in TRL's environment, which knows nothing of this project.

    .peers/trl/bin/python benchmarks/peer_trl.py sft --model DIR --tokens FILE [--layout padded --rows 8] ...
    .peers/trl/bin/python benchmarks/peer_trl.py grpo --model DIR --tokens FILE --gradients FILE

Tokens come as safetensors: `ids` and `trained` (1: the token carries loss) of all rows end to end, `lengths` of the
rows, `steps` (rows of each optimizer step), for grpo also `advantages` and `logprobs` by token. SFTTrainer trains on
them in the order of the file and the times of its optimizer steps are printed as JSON; GRPOTrainer's loss is asked
once. The gradient of the first optimizer step can be written out. float32 on the CPU, one intra-op thread.
"""

import argparse
import json
import resource
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch  # noqa: TID253 - a script that does nothing without it
from safetensors.torch import load_file, save_file

LAYOUTS = ("padded", "padding_free", "packed")
"""padded: a batch of rows, padded to the longest. padding_free: rows flattened into one, without padding. packed: TRL's
best-fit packing of the whole data set, one packed row a batch."""


class Rows:
    """The rows of a token file.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.tensors = load_file(path)
        self.lengths: list[int] = self.tensors["lengths"].tolist()
        self.steps: list[int] = self.tensors["steps"].tolist()

    def split(self, name: str, count: int | None = None) -> list[torch.Tensor]:
        """One tensor for each row, or for each of the first ones."""
        lengths = self.lengths[:count]
        return list(torch.split_with_sizes(self.tensors[name][: sum(lengths)], lengths))

    def examples(self) -> Iterator[dict[str, list[int]]]:
        """As SFTTrainer takes them."""
        for ids, trained in zip(self.split("ids"), self.split("trained"), strict=True):
            yield {"input_ids": ids.tolist(), "labels": torch.where(trained.bool(), ids, -100).tolist()}


def load(folder: str) -> tuple[Any, Any]:
    """The model, in float32, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Settings of every trainer of TRL's here: the fastest that the CPU allows, nothing written, nothing reported."""
    return {
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "learning_rate": options.learning_rate,
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.95,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "logging_steps": 10**6,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
    }


def clock(options: argparse.Namespace) -> Any:
    """A callback that takes the times of optimizer steps, and the gradient of the first one if it is wanted."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.wall: list[float] = []
            self.cpu: list[float] = []

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self._note()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self._note()

        def on_pre_optimizer_step(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
            if options.gradients and len(self.wall) == 1:
                write_gradients(model, options.gradients)

        def _note(self) -> None:
            self.wall.append(time.perf_counter())
            self.cpu.append(time.process_time())

    return Clock()


def write_gradients(model: Any, path: Path) -> None:
    """Gradients by parameter."""
    found = {name: p.grad.contiguous() for name, p in model.named_parameters() if p.grad is not None}
    save_file({name: tensor.clone() for name, tensor in found.items()}, path)


def sft(options: argparse.Namespace) -> dict[str, Any]:
    """Train; seconds of each optimizer step."""
    from datasets import Dataset  # type: ignore[import-not-found]
    from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found]

    rows = Rows(options.tokens)
    model, tokenizer = load(options.model)
    step = rows.steps[0]
    common = settings(options)
    if options.gradients:
        # Else the callback would see the gradient clipped.
        common |= {"max_grad_norm": 0.0, "logging_steps": 1}
    if options.layout == "packed":
        data = {"packing": True, "max_length": options.max_length, "per_device_train_batch_size": 1}
        accumulated = max(1, round(sum(rows.lengths) / len(rows.steps) / options.max_length))
    else:
        data = {"max_length": None, "padding_free": options.layout == "padding_free"}
        data |= {"per_device_train_batch_size": min(options.rows, step)}
        data |= {"dataset_kwargs": {"skip_prepare_dataset": True}}
        accumulated = -(-step // options.rows)
    watch = clock(options)
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            output_dir=folder,
            gradient_accumulation_steps=accumulated,
            num_train_epochs=1,
            max_steps=len(rows.steps) if options.layout != "packed" else -1,
            **common,
            **data,
        )
        trainer = SFTTrainer(
            model=model,
            args=config,
            train_dataset=Dataset.from_list(list(rows.examples())),
            processing_class=tokenizer,
            callbacks=[watch],
        )
        optimizer = config.optim
        done = trainer.train()
    return {
        "wall": np.diff(watch.wall).tolist(),
        "cpu": np.diff(watch.cpu).tolist(),
        "loss": trainer.state.log_history[0].get("loss", done.training_loss),
        "optimizer": str(optimizer),
        "rows": len(trainer.train_dataset),
    }


def grpo(options: argparse.Namespace) -> dict[str, Any]:
    """The loss and its gradient on the rows of the first optimizer step, advantages and old log-probabilities given."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    rows = Rows(options.tokens)
    model, tokenizer = load(options.model)
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            loss_type="dapo",
            epsilon=0.2,
            epsilon_high=0.28,
            beta=0.0,
            per_device_train_batch_size=2,
            num_generations=2,
            **(settings(options) | {"train_sampling_strategy": "random"}),
        )
        trainer = GRPOTrainer(
            model=model,
            args=config,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            train_dataset=Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}]),
            processing_class=tokenizer,
        )
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
        loss = trainer.compute_loss(trainer.model, _grpo_inputs(rows))
        loss.backward()
    write_gradients(trainer.model, options.gradients)
    return {"loss": loss.item()}


def _grpo_inputs(rows: Rows) -> dict[str, torch.Tensor]:
    """One row per sequence, right-padded: its first token is the prompt, the rest is completion with a tool mask."""
    count = rows.steps[0]
    pad = torch.nn.utils.rnn.pad_sequence

    def padded(name: str) -> torch.Tensor:
        return pad([part[1:] for part in rows.split(name, count)], batch_first=True)

    present = pad([torch.ones(length - 1, dtype=torch.long) for length in rows.lengths[:count]], batch_first=True)
    trained = padded("trained").long()
    return {
        "prompt_ids": torch.stack([ids[:1] for ids in rows.split("ids", count)]),
        "prompt_mask": torch.ones(count, 1, dtype=torch.long),
        "completion_ids": padded("ids"),
        "completion_mask": present,
        "tool_mask": trained,
        "advantages": padded("advantages"),
        "old_per_token_logps": padded("logprobs"),
        "num_items_in_batch": trained.sum().float(),
    }


def main() -> None:
    """Print what was measured as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=("sft", "grpo"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--gradients", type=Path, help="where the gradient of the first optimizer step goes")
    parser.add_argument("--layout", choices=LAYOUTS, default="padded")
    parser.add_argument("--rows", type=int, default=8, help="rows of a batch")
    parser.add_argument("--max-length", type=int, default=2048, help="tokens of a packed row")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = {"sft": sft, "grpo": grpo}[options.task](options)
    print(json.dumps(found | {"peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6}))


if __name__ == "__main__":
    main()
