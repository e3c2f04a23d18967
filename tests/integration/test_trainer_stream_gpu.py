"""Batches for a GPU lie in page-locked memory and arrive there as they are."""

from pathlib import Path

import pytest
import torch  # noqa: TID253 - a script that does nothing without it

from testkit.training import config, token_lake
from trainer.data.plan import Plan
from trainer.data.selection import select
from trainer.data.stream import Stream
from trainer.losses import Needs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("unit", ["token", "episode"])
def test_batches_are_pinned_and_arrive_as_they_are(tmp_path: Path, unit: str) -> None:
    snapshot = token_lake(tmp_path).snapshot()
    streamed = {}
    for device in ("cpu", "cuda"):
        settings = config(token_budget=40, options={"unit": unit}, device=device)
        plan = Plan(select(snapshot, settings, Needs()), settings)
        with Stream(snapshot, plan, Needs(), settings) as stream:
            streamed[device] = [batch for _, batches in stream.steps() for batch in batches]
    for plain, pinned in zip(streamed["cpu"], streamed["cuda"], strict=True):
        arrived = pinned.to(torch.device("cuda"))
        torch.cuda.synchronize()
        for name in type(plain).__slots__:
            value = getattr(plain, name)
            if isinstance(value, torch.Tensor):
                assert getattr(pinned, name).is_pinned(), name
                assert torch.equal(getattr(arrived, name).cpu(), value), name
