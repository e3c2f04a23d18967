"""Adapters by name: peft's layout, a name that carries the version, and again after a restart."""

import asyncio
import json
from pathlib import Path

import pytest
import torch  # noqa: TID253 - a script that does nothing without it
from safetensors.torch import load_file

from lake.errors import UsageError
from testkit.model_engine import ModelEngine
from testkit.training import config, random_backend, random_batch, random_model
from trainer.backends.base import SingleDevice
from trainer.config import LoRAConfig, OptimizerConfig
from trainer.losses import LOSSES
from trainer.online.demo import build_tokenizer
from trainer.policy.model import build_policy
from trainer.sync.folders import DiskSync, build_adapter_writer, format_adapter_name
from trainer.sync.targets import SyncTargets

pytest.importorskip("peft", reason="needs trajlake[lora]")


def test_adapters_are_pushed_under_a_name_per_version(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    random_model().save_pretrained(folder)
    build_tokenizer(["word"]).save_pretrained(folder)
    settings = config(model=str(folder), lora=LoRAConfig(rank=4, alpha=8.0))
    backend = SingleDevice(build_policy(settings), OptimizerConfig())
    engine = ModelEngine("http://e", folder)
    fleet = SyncTargets([engine])
    sync = DiskSync(
        fleet,
        build_adapter_writer(backend, settings),
        tmp_path / "pushed",
        adapter=lambda n: format_adapter_name("pi", n),
    )

    async def run() -> None:
        for version in (1, 2):
            backend.forward_backward(random_batch([9, 14], version), LOSSES["sft"]())
            backend.optim_step(1e-2)
            await sync.push(version)
            push = await sync.wait()
            assert push is not None
            assert not push.failed
        # Calls under the version before continue: both are there.
        assert engine.adapters == {f"pi-v{n}": tmp_path / "pushed" / f"v{n}" for n in (1, 2)}
        engine.restart()
        await fleet.refresh(engine)
        assert set(engine.adapters) == {"pi-v2"}

    asyncio.run(run())
    pushed_folder = tmp_path / "pushed" / "v2"
    assert json.loads((pushed_folder / "adapter_config.json").read_text())["r"] == 4
    stored = load_file(pushed_folder / "adapter_model.safetensors")
    expected = {f"base_model.model.{n.replace('.default.', '.')}": t for n, t in backend.get_weights().items()}
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in expected.items())


def test_a_policy_without_adapters_is_refused() -> None:
    backend = random_backend()
    with pytest.raises(UsageError, match="trained without LoRA"):
        build_adapter_writer(backend, config(model="none"))
