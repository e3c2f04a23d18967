"""Rows for losses, without a model: random log-probabilities in turns, episodes and pairs, in float64.

Axes: `_N` tokens, `_U` units, `_B` micro-batches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch  # noqa: TID253 - a script that does nothing without it
from torch import Tensor  # noqa: TID253

from testkit.training import config
from trainer.losses import LossResult, LossRows

FIELDS_N = (
    "logprobs_N",
    "weight_N",
    "advantages_N",
    "behaviour_logprobs_N",
    "entropy_N",
    "reference_logprobs_N",
    "proximal_logprobs_N",
    "step_index_N",
    "staleness_N",
)


def random_rows(
    units: int = 4, *, seed: int = 0, drift: float = 0.3, most_turns: int = 3, even: bool = True
) -> LossRows:
    """Units of one to `most_turns` turns of one to four tokens.

    Args:
        units: U; units 2 p and 2 p + 1 are pair p, chosen and rejected in random order.
        seed: of everything.
        drift: standard deviation of the log-ratios to behaviour, reference and proximal policy.
        most_turns: turns of a unit at most.
        even: one advantage per unit; otherwise one per turn.
    """
    draw = torch.Generator().manual_seed(seed)

    def normal(size: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(size, generator=draw, dtype=torch.float64)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=draw))

    unit, step, advantage = [], [], []
    for number in range(units):
        turn, of_unit = integer(0, 2), float(normal(1))
        for _ in range(integer(1, most_turns)):
            of_turn = of_unit if even else float(normal(1))
            tokens = integer(1, 4)
            unit += [number] * tokens
            step += [turn] * tokens
            advantage += [of_turn] * tokens
            turn += integer(1, 2)
    size = len(unit)
    logprobs_N = -3 * torch.rand(size, generator=draw, dtype=torch.float64)
    chosen_first = torch.rand((units + 1) // 2, generator=draw) < 0.5
    return LossRows(
        logprobs_N=logprobs_N,
        weight_N=torch.rand(size, generator=draw, dtype=torch.float64) + 0.1,
        advantages_N=torch.tensor(advantage, dtype=torch.float64),
        behaviour_logprobs_N=logprobs_N + normal(size, drift),
        entropy_N=torch.rand(size, generator=draw, dtype=torch.float64),
        reference_logprobs_N=logprobs_N + normal(size, drift),
        proximal_logprobs_N=logprobs_N + normal(size, drift),
        unit_N=torch.tensor(unit),
        weight_U=torch.full((units,), 1 / max(1, units), dtype=torch.float64),
        step_index_N=torch.tensor(step, dtype=torch.int32),
        staleness_N=torch.randint(0, 20, (size,), generator=draw).double(),
        pair_U=torch.arange(units) // 2,
        sign_U=torch.tensor([1.0 if bool(chosen_first[u // 2]) == (u % 2 == 0) else -1.0 for u in range(units)]),
    )


def units_of(rows: LossRows, chosen_U: Sequence[int]) -> LossRows:
    """Some units as a separate micro-batch, numbered anew; `weight_U` and `weight_N` stay what the plan gave."""
    assert rows.unit_N is not None
    assert rows.pair_U is not None
    number = {unit: position for position, unit in enumerate(chosen_U)}
    order = [n for unit in chosen_U for n in torch.nonzero(rows.unit_N == unit).flatten().tolist()]
    pairs = sorted({int(rows.pair_U[unit]) for unit in chosen_U})
    values: dict[str, Any] = {name: getattr(rows, name)[order] for name in FIELDS_N if getattr(rows, name) is not None}
    values["unit_N"] = torch.tensor([number[int(rows.unit_N[n])] for n in order], dtype=torch.int64)
    values["weight_U"] = required_(rows.weight_U)[list(chosen_U)]
    values["sign_U"] = required_(rows.sign_U)[list(chosen_U)]
    values["pair_U"] = torch.tensor([pairs.index(int(rows.pair_U[unit])) for unit in chosen_U], dtype=torch.int64)
    return replace(rows, **values)


def required_(tensor: Tensor | None) -> Tensor:
    """A field that `random_rows` fills."""
    assert tensor is not None
    return tensor


def evaluate(name: str, rows: LossRows, options: Mapping[str, Any] | None = None) -> LossResult:
    """A loss under options, with its statistics made from the rows themselves."""
    loss = config(name, options).loss
    sums = loss.prepare([replace(rows, logprobs_N=rows.logprobs_N.detach())])
    rows = replace(rows, statistics={key: float(value) for key, value in sums.items()})
    return loss.compute(rows)


def value_and_gradient(name: str, rows: LossRows, options: Mapping[str, Any] | None = None) -> tuple[float, Tensor]:
    """Total and its gradient by the log-probabilities, [N]."""
    logprobs_N = rows.logprobs_N.detach().clone().requires_grad_()
    total = evaluate(name, replace(rows, logprobs_N=logprobs_N), options).total
    (gradient_N,) = torch.autograd.grad(total, logprobs_N)
    return total.item(), gradient_N
