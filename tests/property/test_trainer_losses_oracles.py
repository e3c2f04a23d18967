"""Every loss against its definition, written out slowly with gradients by hand, on random rows in float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch  # noqa: TID253 - a script that does nothing without it
from hypothesis import given, settings
from hypothesis import strategies as st

from testkit import loss_oracles as slow
from testkit.examples import examples, mostly_slow_cases
from testkit.loss_rows import random_rows, required_, value_and_gradient
from testkit.preference_oracles import slow_kto, slow_pairs
from trainer.losses import LossRows

FEW = settings(max_examples=examples(50))
ROWS = st.builds(
    random_rows,
    st.integers(1, 5),
    seed=st.integers(0, 2**20),
    drift=st.sampled_from([0.0, 0.05, 0.5, 3.0, 15.0]),
    even=st.booleans(),
)
PAIRED = st.builds(
    random_rows, st.sampled_from([2, 4, 6]), seed=st.integers(0, 2**20), drift=st.sampled_from([0.0, 0.3, 2.0])
)
CLIPS = st.tuples(st.floats(0.01, 0.9), st.floats(0.01, 2.0))
POSITIVE = st.floats(0.05, 5.0)


def assert_same(actual: tuple[float, Any], expected: tuple[float, list[float]]) -> None:
    assert actual[0] == pytest.approx(expected[0], rel=1e-9, abs=1e-9)
    torch.testing.assert_close(actual[1], torch.tensor(expected[1], dtype=torch.float64), rtol=1e-9, atol=1e-9)


@FEW
@given(ROWS)
def test_sft(rows: LossRows) -> None:
    tokens = slow.tokens_of(rows)
    assert_same(value_and_gradient("sft", rows), slow.added_up(tokens, [(-t["lp"], -1.0) for t in tokens]))


@FEW
@given(ROWS, POSITIVE, st.floats(0.5, 50))
@pytest.mark.parametrize("name", ["awr", "bc_exp"])
def test_exponentially_weighted_likelihoods(name: str, rows: LossRows, beta: float, limit: float) -> None:
    tokens = slow.tokens_of(rows)
    expected = slow.added_up(tokens, slow.likelihood_terms(tokens, beta, limit))
    assert_same(value_and_gradient(name, rows, {"beta": beta, "max_weight": limit}), expected)


@FEW
@given(ROWS, CLIPS, st.none() | st.floats(1.01, 5.0))
@pytest.mark.parametrize("name", ["ppo", "grpo", "dr_grpo", "dapo"])
def test_the_clipped_surrogate(name: str, rows: LossRows, clips: tuple[float, float], dual: float | None) -> None:
    low, high = clips
    tokens = slow.tokens_of(rows)
    actual = value_and_gradient(name, rows, {"clip_low": low, "clip_high": high, "dual_clip": dual})
    assert_same(actual, slow.added_up(tokens, slow.ppo_terms(tokens, low, high, dual)))


@FEW
@given(ROWS, CLIPS)
def test_gspo(rows: LossRows, clips: tuple[float, float]) -> None:
    low, high = clips
    tokens = slow.tokens_of(rows)
    actual = value_and_gradient("gspo", rows, {"clip_low": low, "clip_high": high})
    assert_same(actual, slow.added_up(tokens, slow.gspo_terms(tokens, low, high)))


@FEW
@given(ROWS, st.floats(0, 1), st.floats(1, 8))
def test_cispo(rows: LossRows, low: float, high: float) -> None:
    tokens = slow.tokens_of(rows)
    actual = value_and_gradient("cispo", rows, {"min_ratio": low, "max_ratio": high})
    assert_same(actual, slow.added_up(tokens, slow.cispo_terms(tokens, low, high)))


@FEW
@given(ROWS, POSITIVE)
def test_dro(rows: LossRows, beta: float) -> None:
    tokens = slow.tokens_of(rows)
    assert_same(value_and_gradient("dro", rows, {"beta": beta}), slow.added_up(tokens, slow.dro_terms(tokens, beta)))


LIMITS = {
    "token_truncate": (0.0, 1.3),
    "token_mask": (0.0, 1.3),
    "icepop": (0.8, 1.2),
    "sequence_truncate": (0.0, 1.5),
    "sequence_mask": (0.0, 1.5),
    "geometric_mask": (0.9, 1.1),
}


def correction(method: str, **fields: Any) -> dict[str, Any]:
    """Options of a method with limits that half of the rows exceed."""
    low, high = LIMITS[method]
    limits = {"low": low, "high": high} if low else {"high": high}
    return {"method": method, **limits, **fields}


@FEW
@given(ROWS)
@pytest.mark.parametrize("method", LIMITS)
def test_reinforce_with_each_correction(method: str, rows: LossRows) -> None:
    tokens = slow.tokens_of(rows)
    weights = [weight for weight, _ in slow.correction_weights(tokens, method, *LIMITS[method], "lp")]
    expected = slow.added_up(tokens, slow.scaled(slow.reinforce_terms(tokens), weights))
    assert_same(value_and_gradient("reinforce", rows, {"correction": correction(method)}), expected)


@FEW
@given(ROWS)
@pytest.mark.parametrize("method", [name for name in LIMITS if name != "geometric_mask"])
def test_a_normalised_correction_has_mean_one_over_what_is_kept(method: str, rows: LossRows) -> None:
    tokens = slow.tokens_of(rows)
    weights = slow.correction_weights(tokens, method, *LIMITS[method], "lp")
    total = sum(t["w"] for t, (_, keep) in zip(tokens, weights, strict=True) if keep)
    mass = sum(t["w"] * weight for t, (weight, _) in zip(tokens, weights, strict=True))
    mean = mass / total if total else 1.0
    terms = slow.scaled(slow.reinforce_terms(tokens), [weight / mean for weight, _ in weights])
    actual = value_and_gradient("reinforce", rows, {"correction": correction(method, normalise=True)})
    assert_same(actual, slow.added_up(tokens, terms))


@FEW
@given(ROWS)
@pytest.mark.parametrize("method", LIMITS)
def test_decoupled_ratios_are_to_the_proximal_policy_and_weights_from_behaviour_to_it(
    method: str, rows: LossRows
) -> None:
    tokens = slow.tokens_of(rows)
    weights = [weight for weight, _ in slow.correction_weights(tokens, method, *LIMITS[method], "prox")]
    options = {"correction": correction(method, decoupled=True)}
    ppo = slow.scaled(slow.ppo_terms(tokens, 0.2, 0.28, 3.0, "prox"), weights)
    assert_same(value_and_gradient("ppo", rows, options), slow.added_up(tokens, ppo))
    gspo = slow.scaled(slow.gspo_terms(tokens, 3e-4, 4e-4, "prox"), weights)
    assert_same(value_and_gradient("gspo", rows, options), slow.added_up(tokens, gspo))
    cispo = slow.scaled(slow.cispo_terms(tokens, 0.0, 5.0, "prox"), weights)
    assert_same(value_and_gradient("cispo", rows, options), slow.added_up(tokens, cispo))


@FEW
@given(ROWS)
@pytest.mark.parametrize("method", [name for name in LIMITS if not name.endswith("truncate")])
def test_without_decoupling_a_ratio_loss_takes_only_the_mask(method: str, rows: LossRows) -> None:
    tokens = slow.tokens_of(rows)
    is_kept = [float(keep) for _, keep in slow.correction_weights(tokens, method, *LIMITS[method], "lp")]
    expected = slow.added_up(tokens, slow.scaled(slow.ppo_terms(tokens, 0.2, 0.28, 3.0), is_kept))
    assert_same(value_and_gradient("ppo", rows, {"correction": correction(method)}), expected)


PULLS = [(e, w) for e in ("k1", "k2", "k3", "k3_straight") for w in (True, False) if w or e != "k1"]
PULLED = [(name, *pull) for name in ("ppo", "reinforce", "dro") for pull in PULLS]


@FEW
@given(ROWS, st.floats(0.01, 2.0))
@pytest.mark.parametrize(
    ("name", "estimator", "weighted"),
    mostly_slow_cases(PULLED, *PULLED[: len(PULLS)], ("reinforce", "k3", True), ("dro", "k2", False)),
)
def test_the_pull_to_the_reference(name: str, estimator: str, weighted: bool, rows: LossRows, beta: float) -> None:
    options = {"kl": {"coefficient": beta, "estimator": estimator, "ratio_weighted": weighted}}
    with_pull, without = value_and_gradient(name, rows, options), value_and_gradient(name, rows)
    tokens = slow.tokens_of(rows)
    terms = slow.scaled(slow.kl_terms(tokens, estimator, weighted=weighted), [beta] * len(tokens))
    value, gradient = slow.added_up(tokens, terms)
    assert with_pull[0] - without[0] == pytest.approx(value, rel=1e-9, abs=1e-6 * abs(without[0]) + 1e-9)
    torch.testing.assert_close(
        with_pull[1], without[1] + torch.tensor(gradient, dtype=torch.float64), rtol=1e-9, atol=1e-9
    )


@FEW
@given(ROWS, st.floats(0.01, 2.0))
@pytest.mark.parametrize("name", ["ppo", "grpo", "gspo", "cispo", "reinforce", "dro"])
def test_the_entropy_bonus_is_subtracted(name: str, rows: LossRows, coefficient: float) -> None:
    bonus = value_and_gradient(name, rows, {"entropy_coefficient": coefficient})[0]
    expected = coefficient * float((rows.weight_N * required_(rows.entropy_N)).sum())
    plain = value_and_gradient(name, rows)[0]
    assert plain - bonus == pytest.approx(expected, rel=1e-9, abs=1e-6 * abs(plain) + 1e-9)


@FEW
@given(PAIRED, POSITIVE, st.floats(0, 0.4), st.floats(0, 2), st.booleans())
def test_dpo(rows: LossRows, beta: float, smoothing: float, nll: float, mean: bool) -> None:
    options = {"beta": beta, "label_smoothing": smoothing, "nll_coefficient": nll, "length_normalised": mean}
    expected = slow_pairs(rows, beta=beta, smoothing=smoothing, nll=nll, kind="mean" if mean else "sum")
    assert_same(value_and_gradient("dpo", rows, options), expected)


@FEW
@given(PAIRED, POSITIVE, st.floats(0.05, 1.0))
def test_dmpo(rows: LossRows, beta: float, gamma: float) -> None:
    expected = slow_pairs(rows, beta=beta, kind="phi", gamma=gamma)
    assert_same(value_and_gradient("dmpo", rows, {"beta": beta, "gamma": gamma}), expected)


@FEW
@given(PAIRED, POSITIVE, POSITIVE, POSITIVE)
def test_kto(rows: LossRows, beta: float, good: float, bad: float) -> None:
    options = {"beta": beta, "desirable_weight": good, "undesirable_weight": bad}
    assert_same(value_and_gradient("kto", rows, options), slow_kto(rows, beta=beta, good=good, bad=bad))


@FEW
@given(ROWS, st.integers(0, 2**20))
@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo", "dro", "reinforce"])
def test_a_missing_log_probability_is_ratio_one(name: str, rows: LossRows, seed: int) -> None:
    lost_N = torch.rand(len(rows.logprobs_N), generator=torch.Generator().manual_seed(seed)) < 0.4
    stored_N = required_(rows.behaviour_logprobs_N)
    holes = replace(rows, behaviour_logprobs_N=stored_N.masked_fill(lost_N, float("nan")))
    filled = replace(rows, behaviour_logprobs_N=stored_N.where(~lost_N, rows.logprobs_N))
    expected, actual = value_and_gradient(name, filled), value_and_gradient(name, holes)
    assert_same(actual, (expected[0], expected[1].tolist()))
