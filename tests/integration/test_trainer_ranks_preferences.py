"""Losses on pairs and labels over two gloo ranks, real processes and whole runs: the result of one device.

Pairs stay on one rank, the reference is sharded like the policy, and z0 of kto is that of all ranks.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: TID253 - a script that does nothing without it
from safetensors.torch import load_file

from lake import Lake
from testkit import rank_tasks
from testkit.examples import mostly_slow
from testkit.lakes import add_credit
from testkit.ranks import on_ranks
from testkit.sampled_lake import play, recorded, save_model, save_near
from trainer.backends.ranks import ALONE

CASES: dict[str, dict[str, Any]] = {
    "dpo": {"loss": "dpo", "options": {"nll_coefficient": 0.2}},
    "steps": {"loss": "dpo", "options": {"pairs": {"kind": "step", "graft": True}}},
    "dmpo": {"loss": "dmpo"},
    "kto": {"loss": "kto"},
}
COUNTED = ("pairs", "desirable", "undesirable", "action_tokens", "tokens")


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> tuple[Lake, Path]:
    """Games of a model, with credit; the folder of the model and of a reference a little off."""
    folder = tmp_path_factory.mktemp("games")
    save_near(folder / "reference", save_model(folder / "model"), 0.02)
    lk = recorded(folder / "lake", play(folder / "model", tasks=4, siblings=6, turns=2))
    add_credit(lk)
    return lk, folder


def metrics(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", mostly_slow(["dpo", "kto", "steps", "dmpo"], "kto"))
def test_two_ranks_train_as_one_device_does(games: tuple[Lake, Path], tmp_path: Path, name: str) -> None:
    lk, folder = games
    fields = CASES[name] | {
        "model": str(folder / "model"),
        "reference": str(folder / "reference"),
        "epochs": 2,
        "episodes_per_step": 6,
        "token_budget": 30,
        "threads": 1,
    }
    rank_tasks.whole_run(ALONE, lk.uri, str(tmp_path / "alone"), fields)
    digests = on_ranks(2, rank_tasks.whole_run, lk.uri, str(tmp_path / "ranks"), fields)
    assert digests[0] == digests[1]
    before = load_file(folder / "model" / "model.safetensors")
    alone, ranks = (load_file(tmp_path / run / "final" / "model.safetensors") for run in ("alone", "ranks"))
    assert max(float((alone[key] - tensor).abs().max()) for key, tensor in before.items()) > 1e-3
    for key, tensor in alone.items():
        torch.testing.assert_close(ranks[key], tensor, atol=1e-5, rtol=0, msg=key)
    first, two = metrics(tmp_path / "alone"), metrics(tmp_path / "ranks")
    assert len(first) == len(two) > 4
    for mine, theirs in zip(first, two, strict=True):
        assert [mine.get(key) for key in COUNTED] == [theirs.get(key) for key in COUNTED]
        assert theirs["loss"] == pytest.approx(mine["loss"], abs=1e-5)
        assert theirs["grad_norm"] == pytest.approx(mine["grad_norm"], rel=1e-3)
    view = "SELECT optimizer_step, episode_id, action_tokens FROM trained_batches JOIN job_runs USING (job_id)"
    rows_of_runs = [lk.sql(f"{view} WHERE run_id = ? ORDER BY ALL", [run]).rows() for run in ("alone", "ranks")]
    assert rows_of_runs[0] == rows_of_runs[1] != []
