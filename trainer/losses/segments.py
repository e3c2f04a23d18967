"""Sums over units of a packed buffer: a turn, a training sequence, or all sequences of an episode.

Axes: `_N` trained tokens, `_U` units. Atoms are packed as a whole, so a unit lies in one micro-batch and its sum needs
no communication. Units without a token (all of it masked) count one, so that nothing is divided by zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def unit_sum(value_N: Tensor, unit_N: Tensor, units: int) -> Tensor:
    """Sum of the values of each unit.

    Args:
        value_N: floats [N]; the gradient goes through.
        unit_N: unit of each token, int64 [N].
        units: U.

    Returns:
        Floats [U], in the dtype of `value_N`; 0 for a unit without a token.
    """
    return value_N.new_zeros(units).index_add(0, unit_N, value_N)


def unit_tokens(value_N: Tensor, unit_N: Tensor, units: int) -> Tensor:
    """Tokens of each unit, at least 1: floats [U] in the dtype of `value_N`."""
    return unit_sum(value_N.new_ones(len(unit_N)), unit_N, units).clamp(min=1)


def unit_mean(value_N: Tensor, unit_N: Tensor, units: int) -> Tensor:
    """Mean of the values of each unit: floats [U]; 0 for a unit without a token."""
    return unit_sum(value_N, unit_N, units) / unit_tokens(value_N, unit_N, units)
