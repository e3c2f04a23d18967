"""From a selection's judged steps to the two sides of each pair, or to labelled episodes.

What is in no pair, or has no label, carries no loss. The members of a pair are arranged side by side: the chosen side,
then the rejected one. A side of a pair of steps is the step's training sequence up to and including its action, of
which that action alone carries loss. A grafted side ends in two rows of other steps: the context of the chosen step
without its action, then the rejected action without its context.
"""

from typing import TYPE_CHECKING

import polars as pl

from lake.errors import NoPairsError
from lake.judgements.scores import episode_scores
from trainer.data.select.pairs import Finding, Preferences, episode_pairs, labels, step_pairs
from trainer.data.select.refusals import Drop

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lake.read.snapshot import Snapshot
    from trainer.config import TrainConfig
    from trainer.losses import Needs

_STEP = ["episode_id", "step_index"]
_ADVICE = {
    "scored siblings": "no group has two episodes with an outcome that can be trained on: score siblings and compute "
    "credit again, or widen --where",
    "margin": "equals are never paired: lower loss.pairs.margin, or collect where outcomes differ",
    "same anchor, other episode": "no two episodes share an anchor: choose a credit job with anchors (`trajlake credit "
    "gigpo`), or compare whole episodes with loss.pairs.kind = episode",
    "distinct actions": "where episodes share an anchor they did the same; collect at a higher temperature, or compare "
    "whole episodes with loss.pairs.kind = episode",
    "identical contexts": "the histories before a shared anchor differ: set loss.pairs.graft to put both actions onto "
    "the chosen one's context, or compare whole episodes with loss.pairs.kind = episode",
    "grafted within max_length": "raise max_length",
    "whole within max_length": "max_length cuts one of the two, which came out as it did with what is cut: raise it",
}
"""What to do where a condition leaves nothing."""
_OUT = r"(^|,)(masked|excluded)(,|$)"
"""Flags of steps that the credit job keeps out of the loss, truncated ones for example."""


def find_preferences(
    snapshot: "Snapshot",
    members: pl.DataFrame,
    credit: pl.DataFrame | None,
    config: "TrainConfig",
    needs: "Needs",
    sources: pl.DataFrame | None,
) -> Preferences:
    """What the trained steps of a selection are compared with.

    Args:
        credit: of `read_advantages` with the columns `credit_columns` names; required for pairs, and for labels without
            a threshold.
        sources: episode_id, source of a mixture; None without one. Pairs do not reach across sources.

    Raises:
        NoPairsError: no pair satisfies the conditions; the message says how many each left.
    """
    pairs, rule = needs.pairs, needs.labels
    trained = members.filter("trained").select("episode_id").unique()
    if rule is not None and rule.threshold is not None:
        scores = episode_scores(snapshot, rule.score).rename({"score": "outcome"})
        return labels(trained.join(scores, on="episode_id", how="left"), rule.threshold)
    if credit is None:
        raise ValueError("preferences need a credit job: pass its source")
    credit = credit.filter(~pl.col("flags").str.contains(_OUT)).join(trained, on="episode_id", how="semi")
    credit = credit.with_columns(source=0) if sources is None else credit.join(sources, on="episode_id")
    if pairs is None:
        return labels(_outcomes(credit), None)
    if pairs.kind == "episode":
        cut = members.filter(pl.col("reason") == Drop.OVER_LENGTH)["episode_id"].unique()
        found = episode_pairs(_outcomes(credit), pairs, cut)
    else:
        found = step_pairs(snapshot, members, credit, pairs, config.fitted_length)
    if found.sides.is_empty():
        _refuse(found.findings, config.loss.name)
    return found


def credit_columns(needs: "Needs") -> tuple[str, ...]:
    """Columns of `advantages` that preferences are made from."""
    if needs.pairs is not None and needs.pairs.kind == "step":
        return ("anchor_key", "return_to_go")
    return ("a_episode",) if needs.pairs or needs.labels else ()


def drop_uncompared(members: pl.DataFrame, preferences: Preferences, reason: str) -> pl.DataFrame:
    """Members in which only what is compared is trained; the rest gets a reason, unless it has one already."""
    keys = _STEP if preferences.kind == "step" else ["episode_id"]
    compared = preferences.sides.select(*keys, compared=pl.lit(value=True)).unique()
    members = members.join(compared, on=keys, how="left", maintain_order="left")
    left_out = pl.col("compared").is_null()
    return members.with_columns(
        reason=pl.coalesce("reason", pl.when(left_out).then(pl.lit(reason))),
        trained=pl.col("trained") & ~left_out,
        loss_tokens=pl.when(left_out).then(0).otherwise(pl.col("loss_tokens")),
    ).drop("compared")


def arrange_sides(members: pl.DataFrame, preferences: Preferences) -> pl.DataFrame:
    """The members of the sides, of sequences with a trained step, after `drop_uncompared`.

    Labels: the members and `sign`. Pairs: the members of each side and `pair`, `sign`, sorted by pair, chosen side
    first. If a side is grafted, also `takes_context` and `takes_action`: which part of the row belongs to it.
    """
    sides = preferences.sides
    if preferences.kind == "step":
        return _arranged_steps(members, sides)
    if preferences.kind == "label":
        return members.join(sides.select("episode_id", "sign"), on="episode_id", maintain_order="left")
    joined = members.join(sides.select("pair", "sign", "episode_id"), on="episode_id", maintain_order="left")
    return joined.sort("pair", "sign", descending=[False, True], maintain_order=True)


def _arranged_steps(members: pl.DataFrame, sides: pl.DataFrame) -> pl.DataFrame:
    """The members of sides that are steps."""
    grafted = pl.any_horizontal(pl.col(f"context_{name}") != pl.col(name) for name in _STEP)
    sides = sides.with_columns(grafted=grafted)
    home = members.filter("trained").select(*_STEP, "sequence", before=pl.col("end") - pl.col("n_action"))
    sides = sides.join(home, left_on=[f"context_{name}" for name in _STEP], right_on=_STEP)
    on_path = sides.select(
        "pair", "sign", "sequence", "grafted", last="context_step_index", episode_id="context_episode_id"
    )
    path = members.join(on_path, on=["episode_id", "sequence"]).filter(pl.col("step_index") <= pl.col("last"))
    is_last = pl.col("step_index") == pl.col("last")
    compared = is_last & ~pl.col("grafted")
    cut = is_last & pl.col("grafted")
    path = path.with_columns(
        trained=compared,
        loss_tokens=pl.when(compared).then("loss_tokens").otherwise(0),
        end=pl.col("end") - pl.when(cut).then("n_action").otherwise(0),
        takes_context=pl.lit(value=True),
        takes_action=~cut,
        place=pl.lit(0),
    )
    action = members.filter("trained").drop("sequence").join(sides.filter("grafted"), on=_STEP)
    action = action.with_columns(
        end=pl.col("before") + pl.col("n_action"),
        takes_context=pl.lit(value=False),
        takes_action=pl.lit(value=True),
        place=pl.lit(1),
    )
    both = pl.concat([path.select(columns := path.drop("grafted", "last").columns), action.select(columns)])
    both = both.sort("pair", "sign", "place", "step_index", descending=[False, True, False, False]).drop("place")
    return both if action.height else both.drop("takes_context", "takes_action")


def _outcomes(credit: pl.DataFrame) -> pl.DataFrame:
    """A row for each episode: the largest A_E of its steps, which differ only where one is lowered for its action."""
    return credit.group_by("episode_id", "group_id", "source").agg(outcome=pl.col("a_episode").max())


def _refuse(findings: "Sequence[Finding]", loss: str) -> None:
    empty = next(finding.name for finding in findings if not finding.number)
    counts = "; ".join(f"{finding.name}: {finding.number:,} {finding.note}" for finding in findings)
    raise NoPairsError(f"{loss} refused (no_pairs): {counts}. {_ADVICE[empty]}")
