"""GiGPO, slowly: dictionaries, loops and `statistics`, written from the definitions and from nothing in `pipelines`.

The fast estimator, its SQL twin and this must agree. It reads the same option names; anchors are given as a function.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable
from difflib import SequenceMatcher
from typing import Any

Row = dict[str, Any]
EPSILON = 1e-6


def returns_to_go(rewards: list[float | None], gamma: float) -> list[float | None]:
    """G of every step, from the last one backwards."""
    out: list[float | None] = []
    following: float | None = 0.0
    for reward in reversed(rewards):
        following = None if reward is None or following is None else reward + gamma * following
        out.append(following)
    return out[::-1]


def tied(values: list[float]) -> bool:
    return len(values) >= 2 and max(values) - min(values) <= 1e-9 * max(1.0, abs(max(values)))


def normalised(value: float, values: list[float], norm: str, singleton: str) -> float:
    """One value against its group, itself included."""
    if len(values) == 1:
        if singleton == "zero":
            return 0.0
        return value if norm == "mean_norm" else value / (1.0 + EPSILON)
    if tied(values):
        return 0.0
    centred = value - statistics.fmean(values)
    return centred if norm == "mean_norm" else centred / (statistics.stdev(values) + EPSILON)


def exact_keys(rows: list[Row]) -> dict[tuple[Any, int], Any]:
    """The state itself is the key."""
    return {(row["episode_id"], row["step_index"]): row["state"] for row in rows}


def similar_keys(threshold: float) -> Callable[[list[Row]], dict[tuple[Any, int], Any]]:
    """Greedy first-match clustering in (episode, step) order, without any shortcut."""

    def keys(rows: list[Row]) -> dict[tuple[Any, int], Any]:
        clusters: dict[Any, list[str]] = defaultdict(list)
        visits: dict[tuple[Any, int], Any] = {}
        for row in sorted(rows, key=lambda row: (row["episode_id"], row["step_index"])):
            firsts, text = clusters[row["group_id"]], row["state"]
            if text is None or not row["takes_part"]:
                first = None
            else:
                matches = (f for f in firsts if SequenceMatcher(None, text, f).ratio() >= threshold)
                first = next(matches, None)
                if first is None:
                    firsts.append(text)
                    first = text
            visits[row["episode_id"], row["step_index"]] = first
        return visits

    return keys


def gigpo(steps: list[Row], options: Any, keys: Callable[[list[Row]], dict[tuple[Any, int], Any]]) -> list[Row]:
    """Advantages of every active step, sorted by (group, episode, step).

    Args:
        steps: rows with every input column; `state` may be any hashable.
        options: an object with the estimator's options as attributes.
        keys: anchor key of (episode_id, step_index); rows it is given also have `takes_part`.

    Returns:
        Rows with the output columns, `anchor` (the key as `keys` gave it) in place of `anchor_key`.
    """
    steps = [row for row in steps if row["is_active"] is not False]
    steps = sorted(steps, key=lambda row: (row["group_id"], row["episode_id"], row["step_index"]))
    episodes: dict[Any, list[Row]] = defaultdict(list)
    for row in steps:
        episodes[row["episode_id"]].append(row)

    penalty = options.invalid_action_penalty
    out: dict[tuple[Any, int], Row] = {}
    score: dict[Any, float | None] = {}
    excluded: dict[Any, bool] = {}
    for episode, rows in episodes.items():
        episode_score, status = rows[0]["episode_score"], rows[0]["status"]
        rewards = [options.default_step_reward if row["reward"] is None else row["reward"] for row in rows]
        if options.episode_source == "score":
            score[episode] = episode_score
        else:
            score[episode] = None if None in rewards else sum(rewards)
        excluded[episode] = (status in {"aborted", "failed"} and episode_score is None) or (
            status == "truncated" and options.truncated == "exclude"
        )
        if options.step_source == "terminal_score":
            rewards = [0.0] * (len(rows) - 1) + [episode_score]
        elif options.step_source == "rewards_plus_terminal":
            last = None if None in {rewards[-1], episode_score} else rewards[-1] + episode_score
            rewards = [*rewards[:-1], last]
        for row, value in zip(rows, returns_to_go(rewards, options.gamma), strict=True):
            step_score = None if value is None else value - (penalty if row["is_action_valid"] is False else 0.0)
            out[episode, row["step_index"]] = {
                **{name: row[name] for name in ("episode_id", "step_index", "group_id")},
                "state": row["state"],
                "takes_part": not excluded[episode],
                "return_to_go": value,
                "step_score": step_score,
                "invalid": row["is_action_valid"] is False,
                "status": status,
            }
    anchor = keys(list(out.values()))
    for key, row in out.items():
        row["anchor"] = anchor[key]

    for row in out.values():
        _episode_side(row, out, score, excluded, options)
        _step_side(row, out, excluded, options)
        _combine(row, score[row["episode_id"]], excluded[row["episode_id"]], options)
    return list(out.values())


def _episode_side(
    row: Row, out: dict[Any, Row], score: dict[Any, Any], excluded: dict[Any, bool], options: Any
) -> None:
    penalty, norm = options.invalid_action_penalty, options.episode_norm
    siblings = [sibling for sibling in out.values() if sibling["group_id"] == row["group_id"]]
    counted = [o for o in siblings if not excluded[o["episode_id"]] and score[o["episode_id"]] is not None]
    by_trajectory = [score[episode] for episode in dict.fromkeys(o["episode_id"] for o in counted)]
    row["group_size"], row["dead"] = len(by_trajectory), tied(by_trajectory)
    own_score = score[row["episode_id"]]
    if own_score is None or excluded[row["episode_id"]]:
        row["a_episode"] = None
    elif options.baseline == "rows":
        by_row = [score[o["episode_id"]] - penalty * o["invalid"] for o in counted]
        row["a_episode"] = normalised(own_score - penalty * row["invalid"], by_row, norm, options.singleton)
    else:
        row["a_episode"] = normalised(own_score, by_trajectory, norm, options.singleton)
        alone = len(by_trajectory) == 1
        if row["invalid"] and penalty > 0.0 and not (alone and options.singleton == "zero"):
            if norm == "mean_norm":
                cost = penalty
            else:
                deviation = 1.0 if alone else 0.0 if tied(by_trajectory) else statistics.stdev(by_trajectory)
                cost = penalty / max(deviation, penalty)
            row["a_episode"] -= cost


def _step_side(row: Row, out: dict[Any, Row], excluded: dict[Any, bool], options: Any) -> None:
    def is_first_visit(sibling: Row) -> bool:
        visits = [
            o["step_index"]
            for o in out.values()
            if o["episode_id"] == sibling["episode_id"] and o["anchor"] == sibling["anchor"]
        ]
        return options.revisits == "keep" or sibling["step_index"] == min(visits)

    members = [
        sibling
        for sibling in out.values()
        if sibling["group_id"] == row["group_id"]
        and row["anchor"] is not None
        and sibling["anchor"] == row["anchor"]
        and not excluded[sibling["episode_id"]]
        and sibling["step_score"] is not None
        and is_first_visit(sibling)
    ]
    values = [member["step_score"] for member in members]
    is_member = any(member is row for member in members)
    row["anchor_size"] = len(members)
    row["anchor_episodes"] = len({member["episode_id"] for member in members})
    unknown = excluded[row["episode_id"]] or row["step_score"] is None
    row["revisit"] = not unknown and row["anchor"] is not None and not is_member
    row["single"] = is_member and len(members) == 1
    row["constant"] = is_member and tied(values)
    if unknown:
        row["a_step"] = None
    else:
        row["a_step"] = normalised(row["step_score"], values, options.step_norm, "zero") if is_member else 0.0


def _combine(row: Row, score: float | None, excluded: bool, options: Any) -> None:
    truncated = row["status"] == "truncated"
    masked = truncated and options.truncated == "mask"
    if options.combination == "sum":
        terms = [(1.0, row["a_episode"]), (options.omega, row["a_step"])]
    else:
        terms = [(options.omega, row["a_episode"]), (1.0 - options.omega, row["a_step"])]
    terms = [(weight, value) for weight, value in terms if weight != 0.0]
    is_known = not masked and all(value is not None for _, value in terms)
    row["advantage"] = sum(weight * value for weight, value in terms) if is_known else None
    flags = {
        "constant_anchor": row["constant"],
        "dead_group": row["dead"],
        "excluded": excluded,
        "masked": masked,
        "revisit": row["revisit"],
        "singleton_anchor": row["single"],
        "singleton_group": row["group_size"] == 1,
        "truncated": truncated,
        "unknown_return": row["return_to_go"] is None,
        "unknown_state": row["anchor"] is None,
        "unscored": score is None,
    }
    row["flags"] = ",".join(sorted(name for name, is_set in flags.items() if is_set))
