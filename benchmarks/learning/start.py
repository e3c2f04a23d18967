"""The weights that every arm of a seed starts from: fresh ones of that seed, which cloned the noisy script."""

import hashlib
import os
import shutil
from pathlib import Path

import lake
from benchmarks.learning.play import TRACES, record_traces
from benchmarks.learning.settings import Environment, Regime
from benchmarks.learning.worlds import list_words
from trainer.config import TrainConfig
from trainer.losses.sft import SFT
from trainer.online.demo import TinyPolicyConfig, save_policy
from trainer.runs.offline import make_deterministic, train

_OF_START = ("layers", "heads", "traces", "noise", "clone_epochs", "clone_rate")
"""Fields of the regime that start weights depend on."""


def start_weights(out: Path, environment: Environment, regime: Regime, seed: int) -> Path:
    """Return the folder of a seed's start weights; they are made if they are not there."""
    document = regime.model_dump_json(include=set(_OF_START))
    digest = hashlib.sha256(document.encode()).hexdigest()[:8]
    folder = out / "starts" / f"{environment.name}-{seed}-{digest}"
    if folder.exists():
        return folder / "run" / "final"
    # Two runs of a seed may make them at the same time; equal settings give equal weights.
    partial = folder.with_name(f"{folder.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    lk = lake.open(partial / "lake", create=True)
    record_traces(lk, environment, regime, seed)
    shape = TinyPolicyConfig(
        num_layers=regime.layers, num_heads=regime.heads, intermediate_size=192, max_positions=4096
    )
    save_policy(partial / "fresh", list_words(environment.name), shape, seed)
    config = TrainConfig(
        model=str(partial / "fresh"),
        loss=SFT(),
        where=f"run_id = '{TRACES}'",
        epochs=regime.clone_epochs,
        learning_rate=regime.clone_rate,
        episodes_per_step=16,
        seed=seed,
        checkpoint_every=1_000_000,
        threads=1,
    )
    make_deterministic(config)
    train(lk, config, partial / "run", run_id=f"start-{seed}")
    shutil.rmtree(partial / "lake")
    try:
        partial.rename(folder)
    except OSError:
        shutil.rmtree(partial)
    return folder / "run" / "final"
