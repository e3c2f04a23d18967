"""Peak memory of the log-probabilities and their gradient at a vocabulary of 151,936, against naive logits.

    python benchmarks/bench_loss_memory.py [--tokens 2048] [--share 0.25] [--repeat 3]

    naive     logits of every position in float32, log_softmax, gather; what a plain training step does
    actions   the LM head at action tokens only, one piece
    trainer   the same in chunks that are recomputed in the backward pass: `trainer.policy.model.PackedPolicy`
    floor     the trainer with one trained token: what the gradient of the weights and the body take anyhow

The model is one layer of Qwen2.5-0.5B's width with its vocabulary, so that the head is what counts; weights and their
gradient are there before the measurement begins. Each measurement is a process of its own; the kinds alternate. Prints
a Markdown table for docs/lab-log.md.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1])]

VOCABULARY, WIDTH = 151_936, 896
KINDS = ("naive", "actions", "trainer", "floor")


def build() -> Any:
    """The model, with a gradient in place."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    shape = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=512,
        num_hidden_layers=1,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(shape).eval()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def measure(kind: str, tokens: int, share: float) -> dict[str, float]:
    """Peak bytes above the model's, seconds, and the gradient's norm, of one forward and backward pass."""
    import torch

    from trainer.data.batch import PackedBatch
    from trainer.policy import model as trainer_model
    from trainer.policy.model import PackedPolicy

    torch.set_num_threads(1)
    policy = PackedPolicy(build())
    ids_T = torch.randint(0, VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(1))
    target_at = torch.arange(1, tokens)[:: max(1, round(1 / share))]
    if kind == "floor":
        target_at = target_at[:1]
    batch = PackedBatch(
        input_ids_T=ids_T,
        position_ids_T=torch.arange(tokens),
        boundaries=[0, tokens],
        predictor_N=target_at - 1,
        target_N=ids_T[target_at],
        weight_N=torch.ones(len(target_at)),
    )
    if kind in ("naive", "actions"):
        trainer_model.HEAD_ELEMENTS = tokens * VOCABULARY
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    began = time.perf_counter()
    if kind == "naive":
        logits_TV = policy.model.get_output_embeddings()(policy.scorer._hidden(batch)).float()
        logprobs_N = logits_TV.log_softmax(-1)[batch.predictor_N, batch.target_N]
    else:
        logprobs_N, _ = policy.logprobs(batch)
    logprobs_N.mean().backward()
    seconds = time.perf_counter() - began
    peak = 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    norm = torch.cat([p.grad.flatten() for p in policy.model.parameters()]).norm().item()
    return {"bytes": peak - resident, "seconds": seconds, "norm": norm}


def main() -> None:
    """Run every kind in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--share", type=float, default=0.25, help="share of tokens that carry loss")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.kind:
        print(json.dumps(measure(options.kind, options.tokens, options.share)))
        return
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    shape = ["--tokens", str(options.tokens), "--share", str(options.share)]
    for _ in range(options.repeat):
        for kind in KINDS:
            command = [sys.executable, __file__, "--kind", kind, *shape]
            found[kind].append(
                json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
            )
    peaks = {kind: statistics.median(run["bytes"] for run in runs) for kind, runs in found.items()}
    print(f"{options.tokens:,} tokens, {options.share:.0%} of them with loss, vocabulary {VOCABULARY:,}, float32")
    print("\n| head | peak above the model | share of naive | seconds | gradient norm |\n|---|---|---|---|---|")
    for kind, runs in found.items():
        share, seconds = peaks[kind] / peaks["naive"], statistics.median(run["seconds"] for run in runs)
        print(f"| {kind} | {peaks[kind] / 2**20:,.0f} MiB | {share:.2f} | {seconds:.2f} | {runs[0]['norm']:.6f} |")


if __name__ == "__main__":
    main()
