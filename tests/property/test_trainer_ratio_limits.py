"""What readers say of a token's clip is what the loss does: there its gradient is gone, elsewhere it is not."""

from typing import Any

import pytest
import torch  # noqa: TID253 - a script that does nothing without it
from hypothesis import given
from hypothesis import strategies as st

from lake.read.training import ClipFlag, RatioLimits, read_limits
from testkit.loss_rows import random_rows, value_and_gradient
from testkit.training import config

MASK = {"correction": {"method": "icepop", "low": 0.8, "high": 1.2}}
STOPPED = {ClipFlag.MASKED, ClipFlag.ABOVE, ClipFlag.BELOW, ClipFlag.DUAL}


def fates(limits: RatioLimits, ratio_N: Any, unit_ratio_N: Any, advantages_N: Any) -> list[ClipFlag]:
    reported = [ClipFlag.KEPT] * len(ratio_N)
    for fate, where_N in reversed(limits.clip_flags(ratio_N, unit_ratio_N, advantages_N)):
        reported = [
            fate if is_clipped else before for is_clipped, before in zip(where_N.tolist(), reported, strict=True)
        ]
    return reported


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        ("ppo", {"dual_clip": 1.4}),
        ("ppo", MASK),
        *((name, {}) for name in ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "dro", "awr")),
        ("cispo", {"min_ratio": 0.9, "max_ratio": 1.1}),
        ("reinforce", {"correction": {"method": "token_truncate", "high": 1.1}}),
        ("reinforce", {"correction": {"method": "token_mask", "high": 1.1}}),
    ],
    ids=str,
)
@given(seed=st.integers(0, 10_000))
def test_a_token_told_as_stopped_has_no_gradient_and_any_other_has(
    loss: str, options: dict[str, Any], seed: int
) -> None:
    limits = read_limits(config(loss, options).loss.model_dump(mode="json"))
    assert isinstance(limits, RatioLimits)
    rows = random_rows(seed=seed)
    _, gradient_N = value_and_gradient(loss, rows, options)
    assert rows.behaviour_logprobs_N is not None
    assert rows.unit_N is not None
    log_ratio_N = rows.logprobs_N - rows.behaviour_logprobs_N
    units = int(rows.unit_N.max()) + 1
    sizes_U = torch.bincount(rows.unit_N, minlength=units)
    of_unit_U = torch.zeros(units, dtype=torch.float64).index_add(0, rows.unit_N, log_ratio_N) / sizes_U
    unit_ratio_N = (log_ratio_N if limits.unit == "token" else of_unit_U[rows.unit_N]).exp()
    flags = fates(limits, log_ratio_N.exp(), unit_ratio_N, rows.advantages_N)
    assert [fate in STOPPED for fate in flags] == (gradient_N == 0).tolist()


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        ("ppo", "did not own their options"),
        ({"name": "ppo", "correction": {"method": "token_truncate", "decoupled": True}}, "proximal policy"),
        ({"name": "reinforce", "correction": {"method": "sequence_mask"}}, "whole units"),
    ],
    ids=str,
)
def test_what_cannot_be_told_is_not_guessed(loss: Any, why: str) -> None:
    limits_read = read_limits(loss)
    assert isinstance(limits_read, str)
    assert why in limits_read
