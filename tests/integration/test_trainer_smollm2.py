"""A real pretrained model on real trajectories: SFT on what succeeded, then AWR on GiGPO advantages, from the shell.

SmolLM2-135M-Instruct and the tau-bench airline rollouts of gpt-4o, at most 32 episodes of at most 2,048 tokens a stage.
No task is in two of the three sets. `pytest -m slow -rP tests/integration/test_trainer_smollm2.py` prints the figures
that docs/lab-log.md quotes.
"""

import json
import math
import tomllib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch  # noqa: TID253 - a script that does nothing without it
from click.testing import CliRunner, Result

import lake
from lake.cli import trajlake
from lake.errors import DataRefusedError
from testkit.shared import shared_data
from testkit.smollm2 import smollm2_file
from trainer.config import TrainConfig
from trainer.data.preparation import prepare
from trainer.monitor import negative_log_likelihood
from trainer.policy.model_files import load_tokenizer
from trainer.policy.tiny_model import CHAT_TEMPLATE
from trainer.runs.factories import make_backend
from trainer.train_settings import read_stages

pytestmark = pytest.mark.slow

IMITATED = "env_return >= 1 AND task_id IN ('12', '18', '20', '35', '36', '38', '42', '48')"
"""Solved in all four trials."""
LIVE = "task_id IN ('1', '7', '15', '16', '31', '39', '43', '46')"
"""Solved in some of them."""
HELD_OUT = "task_id IN ('24', '49')"
"""Solved in all of them, seen in neither stage."""
RUN = f"""
[trainer]
model = "{{model}}"
dtype = "bfloat16"
max_length = 2048
token_budget = 2048
threads = 2
episodes_per_step = 4
keep_last = 1
seed = 1

[trainer.validation]
where = "{HELD_OUT}"
every = 100

[[trainer.stages]]
name = "sft"
loss = "sft"
where = "{IMITATED}"
learning_rate = 1e-4

[[trainer.stages]]
name = "rl"
loss = "awr"
where = "{LIVE}"
learning_rate = 2e-5
"""


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Two torch threads are for this model only."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(*words: str) -> Result:
    result = CliRunner().invoke(trajlake, [*words])
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lake with GiGPO advantages, the model as a folder whose template writes tool calls, and the configuration."""
    episodes = shared_data("tau_bench", "gpt-4o-airline.json")
    weights = smollm2_file()
    folder = tmp_path_factory.mktemp("smollm2")
    run("ingest", str(episodes), "--lake", str(folder / "lake"))
    run("credit", "gigpo", "--lake", str(folder / "lake"))
    run("convert-model", str(weights), "--out", str(folder / "model"))
    (folder / "model" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "run.toml").write_text(RUN.format(model=folder / "model"))
    return folder


def first_stage(folder: Path) -> TrainConfig:
    return read_stages(tomllib.loads((folder / "run.toml").read_text())["trainer"])[0].config


def metrics(stage: Path, name: str) -> list[float]:
    rows: list[dict[str, Any]] = [json.loads(line) for line in (stage / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if name in row]


def held_out_nll(folder: Path) -> float:
    """What `validation_nll` would be before the first update."""
    config = first_stage(folder)
    prepared = prepare(lake.open(folder / "lake"), config, load_tokenizer(config.model))
    assert prepared.validation is not None
    return negative_log_likelihood(make_backend(config), prepared.snapshot, prepared.validation, config)


def test_a_template_that_leaves_tool_calls_out_is_refused(model_folder: Path) -> None:
    """SmolLM2's own: most actions that call a tool would have become a bare end token, and silence be learned."""
    with pytest.raises(DataRefusedError, match=r"template_drops_tool_calls .*chat_template\.jinja"):
        prepare(lake.open(model_folder / "lake"), first_stage(model_folder), load_tokenizer(smollm2_file()))


def test_it_learns_from_successes_and_then_from_advantages(model_folder: Path) -> None:
    before = held_out_nll(model_folder)
    run(
        "train",
        "--lake",
        str(model_folder / "lake"),
        "--config",
        str(model_folder / "run.toml"),
        "--out",
        str(model_folder / "run"),
    )
    loss, after = {}, {}
    for stage in ("sft", "rl"):
        of = partial(metrics, model_folder / "run" / stage)
        loss[stage], after[stage] = of("loss"), of("validation_nll")[-1]
        print(stage, [round(value, 3) for value in loss[stage]], sum(of("tokens")), sum(of("action_tokens")), "tokens")
        print(sum(of("seconds")), "s; held-out NLL", before, "->", after[stage])
    assert fmean(loss["sft"][-2:]) < 0.9 * fmean(loss["sft"][:2])
    assert after["sft"] < 0.9 * before
    assert all(map(math.isfinite, loss["rl"]))
    assert after["rl"] < before, "learning from advantages does not undo what was imitated"
    assert all(0 < share <= 1 for share in metrics(model_folder / "run" / "rl", "weight_ess"))
    assert_within_limits(model_folder / "lake")


def assert_within_limits(folder: Path) -> None:
    """What was trained on, as the lake has it: 32 episodes of 8 tasks a stage, none of them longer than the limit."""
    trained = "trained_batches AS b JOIN job_runs AS j USING (job_id) JOIN episodes AS e USING (episode_id)"
    query = (
        f"SELECT j.run_id, count(DISTINCT episode_id), count(DISTINCT e.task_id) FROM {trained} GROUP BY 1 ORDER BY 1"
    )
    assert lake.open(folder).sql(query).rows() == [("run/rl", 32, 8), ("run/sft", 32, 8)]
    rows = "trained_batches AS b JOIN tokens AS t ON t.episode_id = b.episode_id AND t.step_index <= b.last_step"
    assert lake.open(folder).sql(f"SELECT max(prefix_length + n_context + n_action) FROM {rows}").item() <= 2048
