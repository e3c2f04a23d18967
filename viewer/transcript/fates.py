"""What training did with a step's tokens: which its clip stops, what they weighed, and why that is not known.

A clip looks at the ratio to the policy that sampled, under the weights of the update. Of these the lake knows the
checkpoints that were rescored, so a flag is said to be that of a checkpoint, and of an update only where the checkpoint
holds the weights with which the update began.
"""

import math
from collections.abc import Sequence
from typing import Any

import polars as pl

from lake.read.ratio_limits import Fate, RatioLimits
from lake.read.text_table import counted
from viewer import plain
from viewer.queries import Row
from viewer.queries.updates import Consumed

_ORDER = tuple(Fate)
_TONES = {Fate.MASKED: "masked", Fate.LIMITED: "limited", Fate.KEPT: "kept"}
"""How a fate is drawn, where it is not that the clip stops the gradient."""


def tracks(row: Row, rescored: Sequence[Row], consumed: Sequence[Consumed], most: int) -> list[dict[str, Any]]:
    """A track for each job and each rescored policy of its own: of each token the place of its fate in `names`."""
    found = []
    for one in consumed:
        for seen in rescored:
            if seen["series_id"] in one.policies and (values := _fates(row, seen, one)) is not None:
                label = f"{_name(one)}: clip at {_when(one, seen)}"
                names, tones = map(str, _ORDER), (_TONES.get(fate, "stopped") for fate in _ORDER)
                track = {"label": label, "kind": "fate", "values": values[:most]}
                found.append(track | {"names": list(names), "tones": list(tones)})
    return found


def _fates(row: Row, seen: Row, one: Consumed) -> list[int | None] | None:
    """The fate of each token under a policy, by its place in `Fate`; None for those that carried no loss.

    None in whole where it is not known, or the loss sets no limits.
    """
    limits = one.limits
    if isinstance(limits, str) or limits == RatioLimits() or one.advantage is None:
        return None
    if row["action_logprobs"] is None or seen["log_ratio"] is None:
        return None
    of_unit = one.unit_log_ratios.get((seen["series_id"], row["encoding_id"]))
    if limits.unit != "token" and of_unit is None:
        return None
    size = min(len(row["action_logprobs"]), len(seen["logprobs"]))
    names = {"new": seen["logprobs"], "old": row["action_logprobs"], "sampled": row["action_mask"]}
    tokens = pl.DataFrame({name: values[:size] for name, values in names.items()})
    ratio = (pl.col("new").cast(pl.Float64) - pl.col("old")).exp()
    unit_ratio = ratio if of_unit is None else pl.lit(math.exp(of_unit))
    fate = pl.lit(_ORDER.index(Fate.KEPT))
    for name, where in reversed(limits.fates(ratio, unit_ratio, pl.lit(one.advantage))):
        fate = pl.when(where).then(_ORDER.index(name)).otherwise(fate)
    return tokens.select(pl.when("sampled").then(fate).alias("fate"))["fate"].to_list()


def _when(one: Consumed, seen: Row) -> str:
    """The checkpoint, and how its weights stand to the updates that consumed the step."""
    done = one.policies[seen["series_id"]]
    name = plain.one_line(seen["checkpoint"])
    if done in one.updates:
        return f"{name}, the weights with which update {done} began"
    return f"{name}, {after(done)}"


def after(done: int) -> str:
    """Which weights of a run: those after so many updates."""
    return f"after {counted(done, 'update')}" if done else "before the first update"


def told(one: Consumed) -> str:
    """What a job did with the step, in a sentence."""
    updates = ", ".join(map(str, one.updates)) + (", ..." if one.times > len(one.updates) else "")
    parts = [
        f"{_name(one)} ({plain.one_line(one.loss)}) consumed the step {counted(one.times, 'time')}, in update {updates}"
    ]
    if one.advantage is not None:
        parts.append(f"advantage {plain.number(one.advantage)} of {plain.one_line(one.credit or '')}")
    elif one.credit is not None:
        parts.append(f"no advantage of {plain.one_line(one.credit)}")
    if one.weights is None:
        parts.append(
            "what a token weighed is not on record (losses on preferences weigh units; older versions kept none)"
        )
    else:
        low, high = (plain.number(weight) for weight in one.weights)
        said = low if low == high else f"{low} to {high}"
        parts.append(f"a token's loss counted {said} of the update's{_averaged(one)}")
    return "; ".join(parts) + "."


def _averaged(one: Consumed) -> str:
    return "" if one.averaged is None else f" ({plain.one_line(one.averaged)})"


def notes(row: Row, rescored: Sequence[Row], consumed: Sequence[Consumed]) -> list[str]:
    """Why no clip is told of a job that consumed the step."""
    found = []
    for one in consumed:
        reason = _unknown(row, rescored, one)
        if reason is not None:
            found.append(f"No clip of {_name(one)} is told: {reason}.")
    return found


def _unknown(row: Row, rescored: Sequence[Row], one: Consumed) -> str | None:
    """Why no fate of a token is known; None where one is."""
    limits = one.limits
    if isinstance(limits, str):
        return limits
    own = [seen for seen in rescored if seen["series_id"] in one.policies]
    of_units = [one.unit_log_ratios.get((seen["series_id"], row["encoding_id"])) for seen in own]
    run = plain.one_line(one.run or "RUN")
    reasons = {
        f"{plain.one_line(one.loss)} limits no ratio": limits == RatioLimits(),
        "the policy that sampled left no log-probabilities": row["action_logprobs"] is None,
        f"none of its policies was rescored on this step (trajlake rescore {run}@UPDATES)": not own,
        "the advantage that it took is not known": one.advantage is None,
        "the log-probabilities are of another distribution": all(seen["log_ratio"] is None for seen in own),
        f"its ratio is that of the whole {limits.unit}, not all of which is known to be rescored": (
            limits.unit != "token" and all(value is None for value in of_units)
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def reference_of(series_id: int, consumed: Sequence[Consumed]) -> str:
    """Which jobs a policy was the reference of, for a label."""
    jobs = [_name(one) for one in consumed if series_id in one.references]
    return f" (reference of {', '.join(jobs)})" if jobs else ""


def _name(one: Consumed) -> str:
    return plain.one_line(one.run or "a run")
