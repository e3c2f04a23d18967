"""A credit job in a few figures and, where they look wrong, in words: what to read before training on it.

A dead group teaches nothing about the outcome; a step whose state no sibling shares has no step advantage. Healthy
GiGPO training has fewer than 35 % singleton anchors; where almost no state is shared, the text needs normalising first.
"""

import polars as pl
from pydantic import BaseModel

from pipelines.credit.flags import Flag


class CreditSummary(BaseModel, frozen=True, extra="forbid"):
    """Counts over the rows of one credit job."""

    episodes: int
    """Distinct episodes."""
    steps: int
    """Rows."""
    undefined_steps: int
    """Rows whose advantage is NULL."""
    groups: int
    """Task groups: live, dead, singleton and unscored ones add up to this."""
    live_groups: int
    """Two or more scored siblings with different scores."""
    dead_groups: int
    """Two or more scored siblings, all with the same score."""
    singleton_groups: int
    """One scored sibling."""
    unscored_groups: int
    """No scored sibling."""
    shared_steps: int
    """Steps whose anchor state two or more trajectories of the group visited."""
    singleton_steps: int
    """Steps whose anchor state no other step has."""

    @property
    def shared_fraction(self) -> float | None:
        """Fraction of steps that share their anchor state with a sibling; None without steps."""
        return self.shared_steps / self.steps if self.steps else None


def summarise(advantages: pl.LazyFrame) -> CreditSummary:
    """Count what the advantages of one job, as an estimator returns them, rest on."""
    flags = advantages.select(pl.col("flags").unique()).collect()["flags"].to_list()
    dead = pl.col("flags").is_in(_carrying(Flag.DEAD_GROUP, flags))
    single = pl.col("flags").is_in(_carrying(Flag.SINGLETON_ANCHOR, flags))
    groups = advantages.group_by("group_id").agg(pl.col("group_size").first(), dead.any().alias("dead"))
    rows = advantages.select(
        pl.col("episode_id").n_unique().alias("episodes"),
        pl.len().alias("steps"),
        pl.col("advantage").is_null().sum().alias("undefined_steps"),
        (pl.col("anchor_episodes") >= 2).sum().alias("shared_steps"),
        single.sum().alias("singleton_steps"),
    )
    by_group = groups.select(
        pl.len().alias("groups"),
        ((pl.col("group_size") >= 2) & ~pl.col("dead")).sum().alias("live_groups"),
        pl.col("dead").sum().alias("dead_groups"),
        (pl.col("group_size") == 1).sum().alias("singleton_groups"),
        (pl.col("group_size") == 0).sum().alias("unscored_groups"),
    )
    return CreditSummary.model_validate(pl.concat([rows, by_group], how="horizontal").collect().row(0, named=True))


def _carrying(flag: Flag, flags: list[str]) -> list[str]:
    """The distinct values of the column that name the flag: comparing with them is cheaper than splitting each row."""
    return [value for value in flags if flag.value in value.split(",")]


HEALTHY_SINGLETONS = 0.35
"""GiGPO trains well with fewer singleton steps than this (arXiv 2505.10978)."""
MOSTLY = 0.5
MANY_DOUBTED = 0.05
_ADDED = ("episodes", "steps", "shared_steps", "singleton_steps", "anchors", "sign_disagreements")
_KNOWN = ("one_action_anchors", "error_anchors", "error_steps", "empty_steps")
DIAGNOSED = (*_ADDED, *_KNOWN, "defined_steps", "scored", "is_dead")
"""The columns of `credit_groups` that a diagnosis reads."""


class CreditDiagnosis(CreditSummary):
    """The counts of a credit job, and what its anchors are worth."""

    has_anchors: bool
    """The estimator compared steps at all."""
    anchors: int
    """Distinct anchor states."""
    one_action_anchors: int | None
    """Shared anchors where all took the same action; None if actions were not read."""
    error_anchors: int | None
    """Shared anchors whose state is an error text; None if that was not read."""
    error_steps: int | None
    """Steps in those."""
    empty_steps: int | None
    """Steps in shared anchors whose states say nothing; None if that was not read."""
    sign_disagreements: int
    """Steps where A_E and A_S have opposite signs."""

    def warnings(self) -> list[str]:
        """What looks wrong, each with the command to run next (LAKE: the lake). Empty if nothing does."""
        found = []
        judged = self.live_groups + self.dead_groups
        if self.groups and self.unscored_groups + self.singleton_groups > MOSTLY * self.groups:
            alone = self.unscored_groups + self.singleton_groups
            found.append(
                f"{alone} of {self.groups} groups have fewer than two episodes with a score: nothing is compared "
                "there. Score them: `trajlake score FILE.py:FUNCTION --lake LAKE`"
            )
        if judged and self.dead_groups > MOSTLY * judged:
            found.append(
                f"In {self.dead_groups} of {judged} groups all episodes have the same score, so A_E is 0 there. Tasks "
                "of another difficulty, more siblings or a finer score would tell more: "
                "`trajlake score FILE.py:FUNCTION --lake LAKE`"
            )
        if self.steps and self.undefined_steps > MOSTLY * self.steps:
            found.append(
                f"{self.undefined_steps} of {self.steps} advantages are unknown (NULL). Their flags say why: `trajlake "
                "sql 'SELECT flags, count(*) FROM latest_advantages WHERE NOT defined GROUP BY ALL' --lake LAKE`"
            )
        if self.has_anchors and self.steps:
            found.extend(self._anchor_warnings())
        return found

    def _anchor_warnings(self) -> list[str]:
        found = []
        alone = self.singleton_steps / self.steps
        if alone > HEALTHY_SINGLETONS:
            found.append(
                f"{alone:.0%} of the steps are in a state that no other step of their group has, so they get no step "
                f"advantage (usual: below {HEALTHY_SINGLETONS:.0%}). See what makes the states differ: "
                "`trajlake anchors --lake LAKE`"
            )
        said = {
            "error texts, which say little of the situation. See what leaving them out would give": self.error_steps,
            "empty states (blank, [] or null), which anything may lead to. See how many ways did": self.empty_steps,
        }
        found.extend(
            f"{steps} of the {self.shared_steps} steps with a shared state are at {what}: "
            "`trajlake anchors --lake LAKE`"
            for what, steps in said.items()
            if steps and steps > MANY_DOUBTED * self.shared_steps
        )
        if self.shared_steps and self.empty_steps is None and self.error_steps is not None:
            found.append(
                f"How many of the {self.shared_steps} steps with a shared state are at empty states is unknown: an "
                "older version computed some of the groups. Count them: `trajlake credit ... --force --lake LAKE`"
            )
        return found


def diagnose(groups: pl.LazyFrame) -> CreditDiagnosis:
    """Add up one row per group with the `DIAGNOSED` columns of `credit_groups`; those without episodes do not count.

    Figures of actions, error texts and empty states are None if a group that shares states lacks them: a group that an
    older job computed, which did not look for them, may stand beside newer ones.
    """
    scored, dead = pl.col("scored"), pl.col("is_dead")
    row = (
        groups.filter(pl.col("episodes") > 0)
        .select(
            pl.col(*_ADDED).cast(pl.Int64).sum(),  # sums of 32-bit integers would wrap
            (pl.col("steps") - pl.col("defined_steps")).cast(pl.Int64).sum().alias("undefined_steps"),
            pl.len().alias("groups"),
            ((scored >= 2) & ~dead).sum().alias("live_groups"),
            dead.sum().alias("dead_groups"),
            (scored == 1).sum().alias("singleton_groups"),
            (scored == 0).sum().alias("unscored_groups"),
            (pl.col("anchors") > 0).any().alias("has_anchors"),
            *(pl.when(_is_known(n)).then(pl.col(n).cast(pl.Int64).sum()).alias(n) for n in _KNOWN),
        )
        .collect()
        .row(0, named=True)
    )
    return CreditDiagnosis.model_validate(row)


def _is_known(name: str) -> pl.Expr:
    found = pl.col(name).is_not_null()
    return found.any() & (found | (pl.col("shared_steps") == 0)).all()
