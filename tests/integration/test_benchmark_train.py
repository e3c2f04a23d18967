"""The training benchmarks, without their peers: the GPU script on a CPU, and that both sides get the same tokens."""

import importlib
import subprocess
import sys
import venv
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch  # noqa: TID253 - a script that does nothing without it
from safetensors.torch import load_file

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a script of the benchmarks."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


def gpu_train(*arguments: str) -> subprocess.CompletedProcess[str]:
    command: list[str | Path] = [
        sys.executable,
        BENCHMARKS / "gpu_train.py",
        "--device",
        "cpu",
        "--size",
        "tiny",
        "--no-peer",
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def table(output: str) -> list[dict[str, str]]:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in output.splitlines() if line[:1] == "|"]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


# ---------------------------------------------------------------- the GPU script


@pytest.mark.slow
def test_the_gpu_script_measures_on_a_cpu(benchmark: Any) -> None:
    script = benchmark("gpu_train")
    sizes = ("--tokens", "512", "--micro-batches", "1", "--steps", "1")
    done = gpu_train(*sizes, "--loss", "sft", "--peak-tflops", "0.001")
    assert done.returncode == 0, done.stderr
    (row,) = table(done.stdout)
    assert (row["model"], row["trainer"], row["loss"], row["attention"]) == ("tiny", "trajlake", "sft", "sdpa")
    episodes = script.make_episodes(512, 512)
    lengths = episodes.lengths_E
    # One layer: projections of queries and results, of keys and values (2 heads of 32 for queries as for keys), MLP.
    body = 2 * (2 * 64 * 64 + 2 * 64 * 64 + 3 * 64 * 128)
    attention = 6 * 2 * 64 * sum(length**2 for length in lengths)
    per_token = (6 * body * sum(lengths) + attention + 6 * 512 * 64 * episodes.trained) / sum(lengths)
    rate, share = float(row["tokens/s"].replace(",", "")), float(row["MFU"].rstrip("%")) / 100
    assert rate > 0
    assert share == pytest.approx(rate * per_token / 1e9, rel=0.02, abs=0.001)
    assert 0.05 < float(row["peak memory, GiB"]) < 20


def test_the_gpu_script_measures_a_policy_gradient(benchmark: Any) -> None:
    options = Namespace(device="cpu", tokens=512, micro_batches=1, steps=1, recompute=True, memory_limit=0.0)
    figures = benchmark("gpu_train").run_ours(options, "tiny", "dapo")
    assert figures["tokens"] == sum(benchmark("gpu_train").make_episodes(512, 512).lengths_E)
    assert figures["seconds"] > 0
    assert figures["micro"] == 1


@pytest.mark.slow
def test_what_does_not_fit_is_a_line_with_the_size() -> None:
    done = gpu_train(
        "--tokens", "16384", "--micro-batches", "1", "--steps", "1", "--loss", "sft", "--memory-limit", "0.05"
    )
    assert done.returncode == 1
    (row,) = table(done.stdout)
    assert row["attention"] == "out of memory: 16,384 tokens a micro-batch, limit 0.05 GiB"
    assert "Traceback" not in done.stdout + done.stderr
    assert "fewer --tokens" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_script_says_how_to_check_it(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_train.py"])
    with pytest.raises(SystemExit, match=r"no GPU here; --device cpu"):
        benchmark("gpu_train").main()


def test_both_sides_of_the_gpu_script_get_the_same_tokens(benchmark: Any) -> None:
    script = benchmark("gpu_train")
    episodes = script.make_episodes(12_000, 512)
    batches = script.make_batches(episodes, 6_000, pinned=False)
    assert len(batches) > 1
    assert all(batch.boundaries[-1] <= 6_000 for batch in batches)
    assert sum(float(batch.weight_N.sum()) for batch in batches) == pytest.approx(1, rel=1e-4)
    packed = []
    for batch in batches:
        labels_T = torch.full((batch.boundaries[-1],), -100)
        labels_T[batch.predictor_N + 1] = batch.target_N
        for low, high in zip(batch.boundaries[:-1], batch.boundaries[1:], strict=True):
            packed.append((batch.input_ids_T[low:high].tolist(), labels_T[low:high].tolist()))
    rows = [(row["input_ids"], row["labels"]) for row in script.make_rows(episodes, per_turn=False)]
    assert sorted(packed) == sorted(rows)


def test_rows_per_turn_train_each_token_once(benchmark: Any) -> None:
    script = benchmark("gpu_train")
    episodes = script.make_episodes(6_000, 512)
    episode_rows, turns = (script.make_rows(episodes, per_turn=per_turn) for per_turn in (False, True))
    assert len(turns) == script.TURNS * len(episode_rows)
    for number, row in enumerate(episode_rows):
        mine = turns[script.TURNS * number : script.TURNS * (number + 1)]
        assert all(part["input_ids"] == row["input_ids"][: len(part["input_ids"])] for part in mine)
        stacked = np.full((len(mine), len(row["labels"])), -100)
        for at, part in enumerate(mine):
            stacked[at, : len(part["labels"])] = part["labels"]
        assert stacked.max(axis=0).tolist() == row["labels"]
        assert ((stacked != -100).sum(axis=0) <= 1).all()


# ---------------------------------------------------------------- what TRL is compared on


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A small workload, its token files and gradients."""
    folder = tmp_path_factory.mktemp("training_rows")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        rows = importlib.import_module("training_rows")
        workload = rows.Workload(turns=3, context=(2, 5), action=(1, 4), episodes=3, peers=())
        rows.make_model(folder / "model")
        rows.make_lake(folder / "lake", workload, 2)
        return folder, workload, rows.export(folder, workload)


@pytest.mark.parametrize("kind", ["sequence", "turn"])
def test_the_rows_of_a_peer_have_our_gradient(exported: Any, benchmark: Any, kind: str) -> None:
    """The mean over trained tokens, by transformers' own forward pass over one row after the other."""
    from transformers import AutoModelForCausalLM

    folder, workload, line = exported
    rows = benchmark("peer_trl").Rows(folder / f"{kind}.safetensors")
    assert rows.steps == [workload.episodes * (workload.turns if kind == "turn" else 1)] * 2
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    ids_B, trained_B = (rows.split(name, rows.steps[0]) for name in ("ids", "trained"))
    total = sum(int(trained.sum()) for trained in trained_B)
    loss = torch.zeros(())
    for ids, trained in zip(ids_B, trained_B, strict=True):
        logprobs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        loss = loss - logprobs[trained[1:].bool()].sum() / total
    torch.autograd.backward(loss)
    assert loss.item() == pytest.approx(line["losses"]["sft"], rel=1e-5)
    ours = load_file(folder / "ours_sft.safetensors")
    assert ours.keys() == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, ours[name], rtol=1e-4, atol=1e-7)


def test_every_token_of_the_lake_is_in_the_rows(exported: Any, benchmark: Any) -> None:
    import lake

    folder, _, line = exported
    rows = benchmark("peer_trl").Rows(folder / "sequence.safetensors")
    counted = lake.open(folder / "lake").sql("SELECT sum(n_context + n_action), sum(n_action) FROM tokens").row(0)
    assert (sum(rows.lengths), int(rows.tensors["trained"].sum())) == tuple(map(int, counted))
    assert line["tokens"] == sum(rows.lengths)


def test_the_batch_for_the_policy_gradient_marks_the_same_tokens(exported: Any, benchmark: Any) -> None:
    folder, workload, _ = exported
    peer = benchmark("peer_trl")
    rows = peer.Rows(folder / "sequence.safetensors")
    inputs = peer._grpo_inputs(rows)
    assert inputs["prompt_ids"].shape == (workload.episodes, 1)
    for number, (ids, trained) in enumerate(zip(rows.split("ids", 3), rows.split("trained", 3), strict=True)):
        assert inputs["completion_ids"][number, : len(ids) - 1].tolist() == ids[1:].tolist()
        assert inputs["tool_mask"][number, : len(ids) - 1].tolist() == trained[1:].tolist()
        assert inputs["completion_mask"][number].sum() == len(ids) - 1
        carried = inputs["advantages"][number] != 0
        assert carried.tolist() == inputs["tool_mask"][number].bool().tolist()
    assert inputs["num_items_in_batch"] == inputs["tool_mask"].sum()


def test_our_side_trains_every_step(exported: Any, benchmark: Any) -> None:
    folder, workload, line = exported
    figures = benchmark("bench_train").run_ours(folder, workload)
    assert len(figures["wall"]) == len(figures["cpu"]) == 2
    assert min(figures["wall"]) > 0
    assert figures["loss"] == pytest.approx(line["losses"]["sft"], rel=0.1)


# ---------------------------------------------------------------- peers


def test_a_peer_that_is_not_known_is_named(benchmark: Any) -> None:
    peers = benchmark("peers")
    with pytest.raises(peers.PeerError, match=r"no peer is called 'trll'; there are trl, datasets"):
        peers.python_of("trll")


def test_a_peer_is_made_once_for_its_pins(benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peers = benchmark("peers")
    bare = venv.create
    # Without pip, which takes long to put there and finds no index here.
    monkeypatch.setattr(venv, "create", lambda folder, with_pip: bare(folder))
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    monkeypatch.setattr(peers, "PEERS", {"some": ("./no-such-folder",)})
    with pytest.raises(peers.PeerError, match=r"^some could not be installed: .+pip$") as caught:
        peers.python_of("some")
    assert "\n" not in str(caught.value)
    folder = tmp_path / ".peers" / "some"
    assert (folder / "bin" / "python").exists()
    (folder / "installed.txt").write_text("./no-such-folder")
    assert peers.python_of("some") == folder / "bin" / "python"
    monkeypatch.setattr(peers, "PEERS", {"some": ("./another-one",)})
    with pytest.raises(peers.PeerError):
        peers.python_of("some")
