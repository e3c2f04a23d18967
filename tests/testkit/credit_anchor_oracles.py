"""The estimators with anchors, slowly: see `credit_oracles.py`. Anchors are exact states."""

import statistics
from collections.abc import Callable
from typing import Any

from testkit.credit_oracles import Episode, Number, Row, episodes_of, finished, penalised, siblings_of
from testkit.gigpo_oracle import EPSILON, returns_to_go, tied


def anchored(
    steps: list[Row],
    options: Any,
    episode_side: Callable[[Episode, Row, list[float]], float],
    step_side: Callable[[Row, list[Row]], float],
    combine: Callable[[Row], Number],
) -> list[Row]:
    """Rows of an estimator with anchors. `step_side` gets a known row and those of the group, with `S` and `past`."""
    episodes = episodes_of(steps, options)
    penalty = options.invalid_action_penalty
    rows: list[tuple[Episode, int, Row]] = []
    for episode in episodes:
        states = [row["state"] for row in episode.rows]
        returns = returns_to_go(episode.step_rewards(options), options.gamma)
        for number, (row, value) in enumerate(zip(episode.rows, returns, strict=True)):
            invalid = row["is_action_valid"] is False
            past = states[: number + 1][::-1]
            step_score = None if value is None else value - penalty * invalid
            info = {"episode": episode, "number": number, "past": past, "S": step_score, "invalid": invalid}
            counts = not episode.excluded and step_score is not None
            info |= {"counts": counts, "known": counts and past[0] is not None, "return_to_go": value}
            rows.append((episode, number, info))
    out = []
    for episode, number, info in rows:
        group = [sibling for e, _, sibling in rows if e.group == episode.group]
        siblings = [e for e in siblings_of(episode, episodes) if not e.excluded and e.score(options) is not None]
        scores = [e.score(options) for e in siblings]
        own_score = episode.score(options)
        info["a_episode"] = None if episode not in siblings else episode_side(episode, info, scores)
        same = members(info, group, 1, options)
        is_member = info in same
        info["a_step"] = step_side(info, group) if info["counts"] else None
        flags = {
            "constant_anchor": is_member and tied([m["S"] for m in same]),
            "dead_group": tied(scores),
            "revisit": info["known"] and not is_member,
            "singleton_anchor": is_member and len(same) == 1,
            "singleton_group": len(scores) == 1,
            "unknown_return": info["return_to_go"] is None,
            "unknown_state": info["past"][0] is None,
            "unscored": own_score is None,
        }
        values = {name: info[name] for name in ("return_to_go", "a_episode", "a_step")}
        sizes = {"anchor_size": len(same), "anchor_episodes": len({m["episode"].id for m in same})}
        values |= sizes | {"group_size": len(scores), "anchor": info["past"][0], "advantage": combine(info)}
        out.append(finished(episode, number, flags, **values))
    return out


def members(row: Row, group: list[Row], length: int, options: Any) -> list[Row]:
    """Known rows of the group that share the last `length` states with `row`."""
    past = row["past"][:length]
    if len(past) < length or None in past:
        return []
    visits = [sibling for sibling in group if sibling["past"][:length] == past]
    if options.revisits == "first":  # of all visits: a trajectory whose first visit is unknown has no member
        first: dict[int, Row] = {}
        for visit in visits:
            first.setdefault(visit["episode"].id, visit)
        visits = list(first.values())
    return [visit for visit in visits if visit["known"]]


def gigpo_loo(steps: list[Row], options: Any) -> list[Row]:
    def minus_others(value: float, values: list[float]) -> float:
        if len(values) == 1 or tied(values):
            return 0.0
        return value - (sum(values) - value) / (len(values) - 1)

    def episode_side(episode: Episode, row: Row, scores: list[float]) -> float:
        cost = options.invalid_action_penalty * row["invalid"] if len(scores) > 1 else 0.0
        return minus_others(episode.score(options), scores) - cost

    def step_side(row: Row, group: list[Row]) -> float:
        same = members(row, group, 1, options)
        return minus_others(row["S"], [m["S"] for m in same]) if row in same else 0.0

    def combine(row: Row) -> Number:
        weights = (1.0, options.omega) if options.combination == "sum" else (options.omega, 1.0 - options.omega)
        terms = [(w, row[name]) for w, name in zip(weights, ("a_episode", "a_step"), strict=True) if w != 0.0]
        return None if any(value is None for _, value in terms) else sum(w * value for w, value in terms)

    return anchored(steps, options, episode_side, step_side, combine)


def hgpo(steps: list[Row], options: Any) -> list[Row]:
    rows = penalised(steps, Penalised(options), options.norm)
    a_episode = {(row["episode_id"], row["step_index"]): row["a_episode"] for row in rows}

    def population(value: float, values: list[float]) -> float:
        if tied(values):
            return 0.0
        centre = value - statistics.fmean(values)
        return centre if options.norm == "mean_norm" else centre / (statistics.pstdev(values) + EPSILON)

    def levels(row: Row, group: list[Row]) -> list[tuple[float, float]]:
        rows_out = []
        for length in range(1, options.history + 2):
            same = members(row, group, length, options)
            if row in same and len(same) > 1:
                rows_out.append((float(length + 1) ** options.alpha, population(row["S"], [m["S"] for m in same])))
        return [pair for pair in rows_out if options.zeros == "count" or abs(pair[1]) > 1e-9]

    def mean(pairs: list[tuple[float, float]]) -> float:
        return sum(w * a for w, a in pairs) / sum(w for w, _ in pairs) if pairs else 0.0

    def step_side(row: Row, group: list[Row]) -> float:
        row["levels"] = levels(row, group)
        return mean(row["levels"])

    def episode_side(episode: Episode, row: Row, _: list[float]) -> float:
        return a_episode[episode.id, episode.rows[row["number"]]["step_index"]]

    def combine(row: Row) -> Number:
        if row["a_step"] is None or not options.episode_level:
            return row["a_step"]
        if row["a_episode"] is None:
            return None
        base = [(1.0, row["a_episode"])] if options.zeros == "count" or abs(row["a_episode"]) > 1e-9 else []
        return mean(row["levels"] + base)

    return anchored(steps, options, episode_side, step_side, combine)


class Penalised:
    """HGPO's options as GRPO's."""

    singleton = "zero"

    def __init__(self, options: Any) -> None:
        self.options = options

    def __getattr__(self, name: str) -> Any:
        return getattr(self.options, name)


ANCHOR_ORACLES: dict[str, Callable[[list[Row], Any], list[Row]]] = {"gigpo_loo": gigpo_loo, "hgpo": hgpo}
