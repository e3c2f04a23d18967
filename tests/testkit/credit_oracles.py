"""Every estimator, slowly: dictionaries, loops and `statistics`, from the definitions and from nothing in `pipelines`.

`ORACLES[name](steps, options)` gives the rows of the table of advantages that `name` must give; `options` is any object
with the estimator's options as attributes. GiGPO is in `gigpo_oracle.py`, its relatives with anchors in
`credit_anchor_oracles.py`.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from testkit.gigpo_oracle import EPSILON, normalised, returns_to_go, tied

Row = dict[str, Any]
Number = float | None


class Episode:
    """One trajectory: its active rows in order, and what is known of it before anything is compared."""

    def __init__(self, rows: list[Row], options: Any) -> None:
        self.rows = rows
        self.id, self.group, self.status = (rows[0][name] for name in ("episode_id", "group_id", "status"))
        self.truncated = self.status == "truncated"
        self.given: Number = rows[0]["episode_score"]
        self.rewards = [options.default_step_reward if row["reward"] is None else row["reward"] for row in rows]
        self.masked = self.truncated and options.truncated == "mask"
        self.shut_out = self.truncated and options.truncated == "exclude"
        self.excluded = self.shut_out or (self.status in {"aborted", "failed"} and self.given is None)

    def score(self, options: Any) -> Number:
        if options.episode_source == "score":
            return self.given
        return None if None in self.rewards else sum(self.rewards)

    def step_rewards(self, options: Any) -> list[Number]:
        if options.step_source == "rewards":
            return self.rewards
        if options.step_source == "terminal_score":
            return [0.0] * (len(self.rows) - 1) + [self.given]
        last = None if None in {self.rewards[-1], self.given} else self.rewards[-1] + self.given
        return [*self.rewards[:-1], last]


def episodes_of(steps: list[Row], options: Any) -> list[Episode]:
    rows: dict[Any, list[Row]] = defaultdict(list)
    for row in sorted(steps, key=lambda row: (row["group_id"], row["episode_id"], row["step_index"])):
        if row["is_active"] is not False:
            rows[row["episode_id"]].append(row)
    return [Episode(rows_of_episode, options) for rows_of_episode in rows.values()]


def finished(episode: Episode, number: int, flags: dict[str, bool], **values: Any) -> Row:
    """An output row; what is not given is not computed."""
    masked = episode.masked
    flags = flags | {"excluded": episode.excluded, "masked": masked, "truncated": episode.truncated}
    defaults = {"anchor": None, "return_to_go": None, "a_episode": None, "a_step": None}
    row = {name: episode.rows[number][name] for name in ("episode_id", "step_index", "group_id")}
    sizes = {"anchor_size": 0, "anchor_episodes": 0}
    row |= defaults | sizes | values
    row["advantage"] = None if masked else row["advantage"]
    row["flags"] = ",".join(sorted(name for name, is_set in flags.items() if is_set))
    return row


# ---------------------------------------------------------------- one advantage for a whole trajectory


def siblings_of(episode: Episode, episodes: list[Episode]) -> list[Episode]:
    return [other_episode for other_episode in episodes if other_episode.group == episode.group]


def compared_scores(
    steps: list[Row],
    options: Any,
    advantage: Callable[[Episode, list[Episode], list[Episode]], Number],
    *,
    score_of: Callable[[Episode], Number] | None = None,
    weightless: Callable[[Episode], bool] = lambda _: False,
    dead: Callable[[list[Episode]], bool] | None = None,
    flags: Callable[[Episode], dict[str, bool]] = lambda _: {},
) -> list[Row]:
    """Rows of an estimator that compares scores.

    Args:
        steps: input rows.
        options: the estimator's options.
        advantage: of an episode that takes part, from its siblings that do and all episodes that do.
        score_of: the score of an episode.
        weightless: episodes that cannot be compared although they are scored.
        dead: whether two or more siblings say nothing.
        flags: further flags.
    """
    episodes = episodes_of(steps, options)
    score_of = score_of or (lambda episode: episode.score(options))
    dead = dead or (lambda group: tied([score_of(e) for e in group]))
    compared = [e for e in episodes if not e.excluded and score_of(e) is not None and not weightless(e)]
    out = []
    for episode in episodes:
        siblings = siblings_of(episode, compared)
        value = advantage(episode, siblings, compared) if episode in compared else None
        rows_out = {
            "dead_group": len(siblings) >= 2 and dead(siblings),
            "singleton_group": len(siblings) == 1,
            "unscored": score_of(episode) is None,
        }
        for number in range(len(episode.rows)):
            row = {"a_episode": value, "advantage": value, "group_size": len(siblings)}
            out.append(finished(episode, number, rows_out | flags(episode), **row))
    return out


def penalised(steps: list[Row], options: Any, norm: str) -> list[Row]:
    """GRPO and Dr. GRPO with GiGPO's options: unit, lone trajectories, malformed actions."""
    rows = compared_scores(steps, options, lambda *_: 0.0)
    episodes = {e.id: e for e in episodes_of(steps, options)}
    invalid = {(r["episode_id"], r["step_index"]): r["is_action_valid"] is False for r in steps}
    penalty = options.invalid_action_penalty
    for row in rows:
        if row["a_episode"] is None:
            continue
        taking_part = [r for r in rows if r["group_id"] == row["group_id"] and r["a_episode"] is not None]

        def unit(r: Row) -> float:
            cost = penalty * invalid[r["episode_id"], r["step_index"]]
            return episodes[r["episode_id"]].score(options) - cost

        scores = [episodes[e].score(options) for e in dict.fromkeys(r["episode_id"] for r in taking_part)]
        own_score = episodes[row["episode_id"]].score(options)
        if options.baseline == "rows":
            row["found"] = normalised(unit(row), [unit(r) for r in taking_part], norm, options.singleton)
            continue
        row["found"] = normalised(own_score, scores, norm, options.singleton)
        claims_nothing = len(scores) == 1 and options.singleton == "zero"
        if invalid[row["episode_id"], row["step_index"]] and penalty > 0.0 and not claims_nothing:
            deviation = 1.0 if len(scores) == 1 else 0.0 if tied(scores) else statistics.stdev(scores)
            row["found"] -= penalty if norm == "mean_norm" else penalty / max(deviation, penalty)
    for row in rows:
        row["a_episode"] = row.get("found")
        row["advantage"] = None if episodes[row["episode_id"]].masked else row.pop("found", None)
    return rows


def grpo(steps: list[Row], options: Any) -> list[Row]:
    return penalised(steps, options, "mean_std_norm")


def dr_grpo(steps: list[Row], options: Any) -> list[Row]:
    return penalised(steps, options, "mean_norm")


def rloo(steps: list[Row], options: Any) -> list[Row]:
    def advantage(episode: Episode, siblings: list[Episode], _: list[Episode]) -> float:
        scores = [e.score(options) for e in siblings]
        other_scores = [e.score(options) for e in siblings if e is not episode]
        return 0.0 if not other_scores or tied(scores) else episode.score(options) - statistics.fmean(other_scores)

    return compared_scores(steps, options, advantage)


def maxrl(steps: list[Row], options: Any) -> list[Row]:
    def advantage(episode: Episode, siblings: list[Episode], _: list[Episode]) -> float:
        scores = [e.score(options) for e in siblings]
        mean = statistics.fmean(scores)
        return 0.0 if len(scores) == 1 or tied(scores) else (episode.score(options) - mean) / (mean + EPSILON)

    return compared_scores(steps, options, advantage)


def opo(steps: list[Row], options: Any) -> list[Row]:
    def length(episode: Episode) -> Number:
        return float(len(episode.rows)) if options.length == "steps" else episode.rows[0]["completion_tokens"]

    def advantage(episode: Episode, siblings: list[Episode], _: list[Episode]) -> float:
        scores = [e.score(options) for e in siblings]
        if len(scores) == 1 or tied(scores):
            return 0.0
        weights = [length(e) for e in siblings]
        if sum(weights) == 0.0:
            weights = [1.0] * len(weights)
        weighed = sum(w * s for w, s in zip(weights, scores, strict=True))
        return episode.score(options) - weighed / sum(weights)

    return compared_scores(
        steps,
        options,
        advantage,
        weightless=lambda e: length(e) is None,
        flags=lambda e: {"unknown_length": length(e) is None},
    )


# ---------------------------------------------------------------- batches


def batch_of(episode: Episode, options: Any) -> Any:
    return "all" if options.batch_key == "all" else episode.rows[0][options.batch_key]


def whitened(value: float, values: list[float]) -> float:
    if len(values) == 1 or tied(values):
        return 0.0
    return (value - statistics.fmean(values)) / (statistics.stdev(values) + EPSILON)


def in_batches(
    steps: list[Row],
    options: Any,
    group_stage: Callable[[Episode, list[Episode]], float],
    batch_stage: Callable[[float, Episode, list[Episode], dict[Any, float]], float],
    compared: Callable[[Episode, list[Episode]], float],
    **extra: Any,
) -> list[Row]:
    """Rows of an estimator with a group stage and a batch stage; the second sees the first's outcome by episode.

    `compared` gives the values by whose deviation the batch stage divides.
    """

    def advantage(episode: Episode, siblings: list[Episode], everyone: list[Episode]) -> Number:
        mine = batch_of(episode, options)
        if mine is None:
            return None
        batch = [e for e in everyone if batch_of(e, options) == mine]
        stage = {e.id: group_stage(e, siblings_of(e, everyone)) for e in batch}
        return batch_stage(stage[episode.id], episode, siblings, stage)

    score_of = extra.get("score_of", lambda episode: episode.score(options))
    everyone = [e for e in episodes_of(steps, options) if not e.excluded and score_of(e) is not None]

    def flags(episode: Episode) -> dict[str, bool]:
        mine = batch_of(episode, options)
        part = mine is not None and episode.id in {e.id for e in everyone}
        batch = [e for e in everyone if batch_of(e, options) == mine]
        values = [compared(e, siblings_of(e, everyone)) for e in batch]
        return {
            "unknown_batch": mine is None,
            "singleton_batch": part and len(values) == 1,
            "constant_batch": part and tied(values),
        }

    return compared_scores(steps, options, advantage, flags=flags, **extra)


def centred(options: Any) -> Callable[[Episode, list[Episode]], float]:
    def stage(episode: Episode, siblings: list[Episode]) -> float:
        scores = [e.score(options) for e in siblings]
        return normalised(episode.score(options), scores, "mean_norm", "zero")

    return stage


def batch_std(steps: list[Row], options: Any) -> list[Row]:
    score = {e.id: e.score(options) for e in episodes_of(steps, options)}

    def batch_stage(value: float, _: Episode, __: list[Episode], stage: dict[Any, float]) -> float:
        scores = [score[e] for e in stage]
        return 0.0 if len(scores) == 1 or tied(scores) else value / (statistics.stdev(scores) + EPSILON)

    return in_batches(steps, options, centred(options), batch_stage, lambda e, _: score[e.id])


def reinforce_pp_baseline(steps: list[Row], options: Any) -> list[Row]:
    def batch_stage(value: float, _: Episode, siblings: list[Episode], stage: dict[Any, float]) -> float:
        scores = [e.score(options) for e in siblings]
        return 0.0 if len(scores) == 1 or tied(scores) else whitened(value, list(stage.values()))

    return in_batches(steps, options, centred(options), batch_stage, centred(options))


def gdpo(steps: list[Row], options: Any) -> list[Row]:
    names = list(options.components)

    def reward(episode: Episode, name: str) -> Number:
        return episode.rows[0][f"score_{name}"]

    def reward_is_known(episode: Episode) -> Number:
        return None if any(reward(episode, name) is None for name in names) else 1.0

    def group_stage(episode: Episode, siblings: list[Episode]) -> float:
        return sum(
            weight * normalised(reward(episode, name), [reward(e, name) for e in siblings], "mean_std_norm", "zero")
            for name, weight in options.components.items()
        )

    def dead(siblings: list[Episode]) -> bool:
        return all(tied([reward(e, name) for e in siblings]) for name in names)

    def batch_stage(value: float, _: Episode, siblings: list[Episode], stage: dict[Any, float]) -> float:
        return 0.0 if len(siblings) == 1 or dead(siblings) else whitened(value, list(stage.values()))

    # An episode that lacks a reward is one without a score.
    rows = [{**row, "episode_score": None if any(row[f"score_{n}"] is None for n in names) else 1.0} for row in steps]
    return in_batches(rows, options, group_stage, batch_stage, group_stage, score_of=reward_is_known, dead=dead)


# ---------------------------------------------------------------- one advantage per step


def compared_steps(
    steps: list[Row], options: Any, advantage: Callable[[Episode, int], tuple[Number, dict[str, bool]]], **extra: Any
) -> list[Row]:
    """Rows of an estimator of steps; `advantage` gives the value of a step and its flags."""
    episodes = episodes_of(steps, options)
    returns = {e.id: returns_to_go(e.step_rewards(options), options.gamma) for e in episodes}
    out = []
    for episode in episodes:
        siblings = siblings_of(episode, episodes)
        size = sum(not e.excluded and returns[e.id][0] is not None for e in siblings)
        for number in range(len(episode.rows)):
            value, flags = advantage(episode, number)
            value = None if episode.excluded else value
            own_return = returns[episode.id][number]
            flags = flags | {"unknown_return": own_return is None}
            row = {"return_to_go": own_return, "a_step": value, "advantage": value, "group_size": size}
            out.append(finished(episode, number, flags, **row))
    return out


def discounted_grpo(steps: list[Row], options: Any) -> list[Row]:
    episodes = episodes_of(steps, options)
    returns = {e.id: returns_to_go(e.step_rewards(options), options.gamma) for e in episodes}

    def rivals(episode: Episode, number: int) -> list[float]:
        same = options.compare == "same_step"
        values_at = [
            value
            for sibling in siblings_of(episode, episodes)
            if not sibling.excluded
            for index, value in enumerate(returns[sibling.id])
            if index == number or not same
        ]
        return [value for value in values_at if value is not None]

    def advantage(episode: Episode, number: int) -> tuple[Number, dict[str, bool]]:
        own_return = returns[episode.id][number]
        part = own_return is not None and not episode.excluded
        values = rivals(episode, number)
        siblings = siblings_of(episode, episodes)
        complete = [e for e in siblings if not e.excluded and returns[e.id][0] is not None]
        silent = all(
            len(rivals(e, i)) == 1 or tied(rivals(e, i))
            for e in siblings
            if not e.excluded
            for i, value in enumerate(returns[e.id])
            if value is not None
        )
        flags = {
            "constant_step": part and tied(values),
            "dead_group": len(complete) >= 2 and silent,
            "singleton_group": len(complete) == 1,
            "singleton_step": part and len(values) == 1,
        }
        return normalised(own_return, values, options.norm, "zero") if part else None, flags

    return compared_steps(steps, options, advantage)


def reinforce_pp(steps: list[Row], options: Any) -> list[Row]:
    episodes = episodes_of(steps, options)
    returns = {e.id: returns_to_go(e.step_rewards(options), options.gamma) for e in episodes}
    batches: dict[Any, list[float]] = defaultdict(list)
    for episode in episodes:
        if not episode.excluded:
            batches[batch_of(episode, options)] += [value for value in returns[episode.id] if value is not None]

    def advantage(episode: Episode, number: int) -> tuple[Number, dict[str, bool]]:
        batch, own_return = batch_of(episode, options), returns[episode.id][number]
        part = batch is not None and own_return is not None and not episode.excluded
        flags = {
            "constant_batch": part and tied(batches[batch]),
            "singleton_batch": part and len(batches[batch]) == 1,
            "unknown_batch": batch is None,
        }
        return whitened(own_return, batches[batch]) if part else None, flags

    return compared_steps(steps, options, advantage)


def gae(steps: list[Row], options: Any) -> list[Row]:
    def deltas(episode: Episode) -> list[Number]:
        values = [row["value_estimate"] for row in episode.rows]
        values.append(episode.rows[0]["final_value_estimate"] if episode.truncated else 0.0)
        return [
            None if None in {reward, now, after} else reward + options.gamma * after - now
            for reward, (now, after) in zip(episode.step_rewards(options), pairwise(values), strict=True)
        ]

    def advantage(episode: Episode, number: int) -> tuple[Number, dict[str, bool]]:
        later = deltas(episode)[number:]
        values = [row["value_estimate"] for row in episode.rows[number:]]
        if episode.truncated:
            values.append(episode.rows[0]["final_value_estimate"])
        decay = options.gamma * options.lam
        value = None if None in later else sum(decay**k * delta for k, delta in enumerate(later))
        return value, {"unknown_value": None in values}

    return compared_steps(steps, options, advantage)


ORACLES: dict[str, Callable[[list[Row], Any], list[Row]]] = {
    "batch_std": batch_std,
    "discounted_grpo": discounted_grpo,
    "dr_grpo": dr_grpo,
    "gae": gae,
    "gdpo": gdpo,
    "grpo": grpo,
    "maxrl": maxrl,
    "opo": opo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "rloo": rloo,
}
