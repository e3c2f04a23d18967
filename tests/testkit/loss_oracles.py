"""The policy gradient losses written out slowly: a loop over tokens, gradients by hand, no tensors.

A token is a dict of floats (and its unit); an oracle returns the total and d total / d lp of every token. Nothing here
calls the code that it checks.
"""

import math
from typing import Any

from trainer.losses import LossRows

Token = dict[str, Any]
Term = tuple[float, float]
"""A token's loss and its derivative by lp."""


def tokens_of(rows: LossRows) -> list[Token]:
    """The rows as dicts; a NaN behaviour log-probability becomes the token's own, which is ratio 1."""
    names = {
        "lp": rows.logprobs_N,
        "w": rows.weight_N,
        "a": rows.advantages_N,
        "b": rows.behaviour_logprobs_N,
        "h": rows.entropy_N,
        "ref": rows.reference_logprobs_N,
        "prox": rows.proximal_logprobs_N,
        "unit": rows.unit_N,
        "step": rows.step_index_N,
    }
    columns = {key: value.detach().tolist() for key, value in names.items() if value is not None}
    tokens = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    for token in tokens:
        if "b" in token and math.isnan(token["b"]):
            token["b"] = token["lp"]
    return tokens


def clamp(value: float, low: float, high: float) -> float:
    return max(low, min(high, value))


def clipped_term(ratio: float, slope: float, a: float, low: float, high: float, dual: float | None) -> Term:
    """max(-r A, -clip(r) A), at most -c A for A < 0; `slope` is d r / d lp."""
    plain, clipped = -ratio * a, -clamp(ratio, 1 - low, 1 + high) * a
    loss, gradient = (plain, -slope * a) if plain >= clipped else (clipped, 0.0)
    if dual is not None and a < 0 and loss > -dual * a:
        return -dual * a, 0.0
    return loss, gradient


def ppo_terms(tokens: list[Token], low: float, high: float, dual: float | None, anchor: str = "b") -> list[Term]:
    terms = []
    for token in tokens:
        distance = token["lp"] - token[anchor]
        ratio = math.exp(clamp(distance, -20, 20))
        terms.append(clipped_term(ratio, ratio if abs(distance) < 20 else 0.0, token["a"], low, high, dual))
    return terms


def gspo_terms(tokens: list[Token], low: float, high: float, anchor: str = "b") -> list[Term]:
    terms = []
    for token in tokens:
        mates = [
            other_token["lp"] - other_token[anchor] for other_token in tokens if other_token["unit"] == token["unit"]
        ]
        log_s = sum(mates) / len(mates)
        s = math.exp(clamp(log_s, -20, 10))
        terms.append(clipped_term(s, s if -20 < log_s < 10 else 0.0, token["a"], low, high, None))
    return terms


def cispo_terms(tokens: list[Token], low: float, high: float, anchor: str = "b") -> list[Term]:
    terms = []
    for token in tokens:
        weight = clamp(math.exp(clamp(token["lp"] - token[anchor], -20, 20)), low, high)
        terms.append((-weight * token["a"] * token["lp"], -weight * token["a"]))
    return terms


def reinforce_terms(tokens: list[Token]) -> list[Term]:
    return [(-token["a"] * token["lp"], -token["a"]) for token in tokens]


def dro_terms(tokens: list[Token], beta: float) -> list[Term]:
    terms = []
    for token in tokens:
        distance = token["lp"] - token["b"]
        terms.append((beta / 2 * distance**2 - token["a"] * token["lp"], beta * distance - token["a"]))
    return terms


def likelihood_terms(tokens: list[Token], beta: float, limit: float) -> list[Term]:
    """min(exp(A / beta), limit) times the negative log-likelihood."""
    terms = []
    for token in tokens:
        weight = min(math.exp(min(token["a"] / beta, 80.0)), limit)
        terms.append((-weight * token["lp"], -weight))
    return terms


def kl_terms(tokens: list[Token], estimator: str, *, weighted: bool, limit: float = 10.0) -> list[Term]:
    """The penalty, with the gradient that `trainer.losses.policy` promises for each estimator."""
    terms = []
    for token in tokens:
        d = clamp(token["ref"] - token["lp"], -20, 20)
        k3 = min(math.exp(d) - d - 1, 10.0)
        value = {"k1": -d, "k2": d * d / 2, "k3": k3, "k3_straight": k3}[estimator]
        slope = {"k1": 1.0, "k2": -d, "k3": 1 - math.exp(d), "k3_straight": -d}[estimator]
        if (estimator == "k3" and k3 == 10.0) or (estimator in ("k1", "k3") and abs(d) == 20):
            slope = 0.0
        if not weighted:
            terms.append((value, slope))
            continue
        log_ratio = token["lp"] - token["b"]
        ratio = min(math.exp(clamp(log_ratio, -20, 20)), limit)
        moves = estimator in ("k1", "k3") and log_ratio > -20 and ratio < limit
        through = ratio * value if moves else 0.0
        terms.append((ratio * value, ratio * slope + through))
    return terms


def correction_weights(
    tokens: list[Token], method: str, low: float, high: float, policy: str
) -> list[tuple[float, bool]]:
    """Weight and whether it is kept, of each token; `policy` is lp or prox."""
    rows_out = []
    for token in tokens:
        mates = [
            other_token[policy] - other_token["b"] for other_token in tokens if other_token["unit"] == token["unit"]
        ]
        log_rho = {
            "token": token[policy] - token["b"],
            "icepop": token[policy] - token["b"],
            "sequence": sum(mates),
            "geometric": sum(mates) / len(mates),
        }[method.split("_", maxsplit=1)[0]]
        rho = math.exp(clamp(log_rho, -20, 20))
        if method.endswith("truncate"):
            rows_out.append((min(rho, high), True))
        else:
            keep = low <= rho <= high
            rows_out.append(((1.0 if method == "geometric_mask" else rho) if keep else 0.0, keep))
    return rows_out


def added_up(tokens: list[Token], *lists: list[Term]) -> tuple[float, list[float]]:
    """Sum of the plan's weights times the sums of terms, and its gradient."""
    total = sum(t["w"] * sum(part[0] for part in terms) for t, *terms in zip(tokens, *lists, strict=True))
    gradient = [t["w"] * sum(part[1] for part in terms) for t, *terms in zip(tokens, *lists, strict=True)]
    return total, gradient


def scaled(terms: list[Term], factors: list[float]) -> list[Term]:
    """Terms times constants."""
    return [(factor * value, factor * slope) for (value, slope), factor in zip(terms, factors, strict=True)]
