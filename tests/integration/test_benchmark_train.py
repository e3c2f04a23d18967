"""The training benchmarks, without their peers: that both sides get the same tokens."""

import importlib
import venv
from pathlib import Path
from types import ModuleType
from typing import Any

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
