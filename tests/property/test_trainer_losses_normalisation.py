"""How an optimizer step is cut into micro-batches and spread over ranks does not change its gradient.

A linear model gives log-probabilities (lp = X theta), so that tokens share parameters; the plan's weights are those of
each aggregation mode. Gradients and statistics simply add up: over micro-batches, then over ranks.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch  # noqa: TID253 - a script that does nothing without it
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor  # noqa: TID253

from testkit.examples import examples
from testkit.loss_rows import random_rows, required_, units_of
from testkit.training import config
from trainer.losses import LOSSES, Loss, LossRows
from trainer.losses.base import Aggregation, Atom, Unit, Weighting

FEW = settings(max_examples=examples(50))

FEATURES = 3
SETTINGS: dict[str, dict[str, object]] = {
    **{name: {} for name in LOSSES},
    "reinforce": {"correction": {"method": "sequence_truncate", "normalise": True}},
    "ppo": {"correction": {"method": "icepop", "decoupled": True, "normalise": True}, "kl": {"coefficient": 0.1}},
    "gspo": {"clip_low": 0.2, "clip_high": 0.2, "correction": {"method": "geometric_mask", "low": 0.8, "high": 1.3}},
    "cispo": {"correction": {"method": "sequence_mask"}, "entropy_coefficient": 0.1},
    "dpo": {"nll_coefficient": 0.5, "label_smoothing": 0.1},
}
"""Options that make every loss look beyond the single token, where it can."""


def by_episodes(name: str) -> Loss:
    """A loss under its options above, averaged over episodes where there is a choice."""
    options = LOSSES[name].model_fields
    return config(name, {**({"unit": "episode"} if "unit" in options else {}), **SETTINGS[name]}).loss


def step_rows(pairs: int, seed: int, aggregation: Aggregation) -> tuple[LossRows, Tensor]:
    """The rows of a whole optimizer step with the plan's weights, and the features X [N, F] behind them."""
    rows = random_rows(2 * pairs, seed=seed)
    unit_N = required_(rows.unit_N)
    tokens_U = np.bincount(unit_N.numpy(), minlength=2 * pairs)
    weighting = Weighting(aggregation, Unit.EPISODE, Atom.EPISODE, constant=64.0)
    weights_U = weighting.weights(tokens_U, tokens=len(unit_N), units=2 * pairs)
    draw = torch.Generator().manual_seed(seed)
    features_NF = torch.randn(len(unit_N), FEATURES, generator=draw, dtype=torch.float64)
    return replace(rows, weight_N=torch.from_numpy(weights_U)[unit_N]), features_NF


def micro_batches(
    rows: LossRows, features_NF: Tensor, groups: Sequence[Sequence[int]]
) -> list[tuple[LossRows, Tensor]]:
    """Pairs as micro-batches; the features follow their tokens, by their place in the step."""
    place_N = torch.arange(len(rows.logprobs_N), dtype=torch.float64)
    marked = replace(rows, staleness_N=place_N)
    batches = [units_of(marked, [unit for pair in group for unit in (2 * pair, 2 * pair + 1)]) for group in groups]
    return [(part, features_NF[required_(part.staleness_N).long()]) for part in batches]


def gradient(ranks: Sequence[Sequence[tuple[LossRows, Tensor]]], loss: Loss) -> Tensor:
    """What an optimizer step over these ranks' micro-batches accumulates."""
    theta_F = torch.full((FEATURES,), 0.2, dtype=torch.float64, requires_grad=True)
    sums: defaultdict[str, float] = defaultdict(float)
    for batches in ranks:
        # The first pass of each rank; a rank without a micro-batch adds nothing.
        rows_B = [replace(rows, logprobs_N=(x_NF @ theta_F).detach()) for rows, x_NF in batches]
        for name, value in loss.prepare(rows_B).items():
            sums[name] += float(value)
    assert set(sums) == set(loss.needs.statistics)
    for batches in ranks:
        for rows, features_NF in batches:
            shifted = replace(rows, logprobs_N=features_NF @ theta_F, statistics=sums)
            loss.compute(shifted).total.backward()  # type: ignore[no-untyped-call]
    assert theta_F.grad is not None
    return theta_F.grad


@FEW
@given(
    st.integers(1, 5),
    st.integers(0, 2**20),
    st.sampled_from(list(Aggregation)),
    st.lists(st.integers(0, 3), min_size=5, max_size=5),
    st.integers(1, 4),
)
@pytest.mark.parametrize("name", SETTINGS)
def test_any_cut_over_any_ranks_gives_the_same_gradient(
    name: str, pairs: int, seed: int, aggregation: Aggregation, batch_of: list[int], world_size: int
) -> None:
    loss = by_episodes(name)
    rows, features_NF = step_rows(pairs, seed, aggregation)
    undivided = gradient([micro_batches(rows, features_NF, [range(pairs)])], loss)
    groups = [[pair for pair in range(pairs) if batch_of[pair] == number] for number in range(4)]
    batches = micro_batches(rows, features_NF, [group for group in groups if group])
    ranks = [batches[rank::world_size] for rank in range(world_size)]
    torch.testing.assert_close(gradient(ranks, loss), undivided, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_micro_batch_without_tokens_adds_nothing(name: str) -> None:
    loss = by_episodes(name)
    rows, features_NF = step_rows(2, 3, Aggregation.TOKEN_MEAN)
    full = micro_batches(rows, features_NF, [[0, 1]])
    empty = micro_batches(rows, features_NF, [[]])
    assert len(empty[0][0].logprobs_N) == 0
    torch.testing.assert_close(gradient([full + empty], loss), gradient([full], loss))


@pytest.mark.parametrize("name", ["gspo", "reinforce", "dpo", "kto", "dmpo"])
def test_a_unit_whose_tokens_are_all_masked_is_guarded(name: str) -> None:
    """Units without a row: a mean over no tokens must be 0 and finite, not NaN."""
    loss = by_episodes(name)
    rows, features_NF = step_rows(2, 4, Aggregation.TOKEN_MEAN)
    keep_N = required_(rows.unit_N) != 1
    ((part, x_NF),) = micro_batches(rows, features_NF, [[0, 1]])
    names = [n for n in vars_of(part) if n.endswith("_N")]
    masked = replace(part, **{n: vars_of(part)[n][keep_N] for n in names})
    assert gradient([[(masked, x_NF[keep_N])]], loss).isfinite().all()


def vars_of(rows: LossRows) -> dict[str, Tensor]:
    """The tensors of rows by field."""
    return {n: getattr(rows, n) for n in rows.__dataclass_fields__ if isinstance(getattr(rows, n), Tensor)}
