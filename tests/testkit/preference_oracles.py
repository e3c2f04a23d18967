"""The losses on preferences written out slowly, one pair or unit at a time, gradients by hand."""

import math

from testkit.loss_oracles import Token, tokens_of
from trainer.losses import LossRows


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def factors_of(unit: list[Token], kind: str, gamma: float) -> list[float]:
    """What each token's log-ratio is multiplied by: 1, 1 / T, or DMPO's phi."""
    if kind == "sum":
        return [1.0] * len(unit)
    if kind == "mean":
        return [1 / len(unit)] * len(unit)
    first, last = unit[0]["step"], unit[-1]["step"]
    turns = last - first + 1
    losses = []
    for token in unit:
        k = token["step"] - first
        # Over the geometric sums themselves: the remaining discounted turns by all of them.
        rest = sum(gamma**j for j in range(turns - k))
        losses.append(gamma**k * rest / sum(gamma**j for j in range(turns)))
    return losses


def slow_pairs(
    rows: LossRows, *, beta: float, smoothing: float = 0.0, nll: float = 0.0, kind: str = "sum", gamma: float = 1.0
) -> tuple[float, list[float]]:
    """Total and gradient by lp of the mean over pairs."""
    tokens = tokens_of(rows)
    assert rows.sign_U is not None
    assert rows.weight_U is not None
    units = len(rows.weight_U)
    gradient = [0.0] * len(tokens)
    total = 0.0
    places = {u: [n for n, token in enumerate(tokens) if token["unit"] == u] for u in range(units)}
    scores, factors = {}, {}
    for u in range(units):
        unit = [tokens[n] for n in places[u]]
        factors[u] = factors_of(unit, kind, gamma)
        scores[u] = sum(f * (token["lp"] - token["ref"]) for f, token in zip(factors[u], unit, strict=True))
    for pair in range(units // 2):
        better, rejected = sorted((2 * pair, 2 * pair + 1), key=lambda u: -float(rows.sign_U[u]))  # type: ignore[index]
        weight = float(rows.weight_U[better] + rows.weight_U[rejected])
        z = beta * (scores[better] - scores[rejected])
        total -= weight * ((1 - smoothing) * math.log(sigmoid(z)) + smoothing * math.log(sigmoid(-z)))
        slope = -(1 - smoothing) * sigmoid(-z) + smoothing * sigmoid(z)
        for u, sign in ((better, 1), (rejected, -1)):
            for n, factor in zip(places[u], factors[u], strict=True):
                gradient[n] += weight * slope * beta * sign * factor
        for n in places[better]:
            total -= weight * nll * tokens[n]["lp"] / len(places[better])
            gradient[n] -= weight * nll / len(places[better])
    return total, gradient


def slow_kto(rows: LossRows, *, beta: float, good: float, bad: float) -> tuple[float, list[float]]:
    """Total and gradient by lp; z0 is the mean score of the rows themselves."""
    tokens = tokens_of(rows)
    assert rows.sign_U is not None
    units = len(rows.sign_U)
    places = {u: [n for n, token in enumerate(tokens) if token["unit"] == u] for u in range(units)}
    scores = {u: sum(tokens[n]["lp"] - tokens[n]["ref"] for n in places[u]) for u in range(units)}
    origin = max(0.0, sum(scores.values()) / units)
    total, gradient = 0.0, [0.0] * len(tokens)
    for u in range(units):
        sign = float(rows.sign_U[u])
        weight = (good if sign > 0 else bad) / units
        value = sigmoid(beta * sign * (scores[u] - origin))
        total += weight * (1 - value)
        for n in places[u]:
            gradient[n] -= weight * value * (1 - value) * beta * sign
    return total, gradient
