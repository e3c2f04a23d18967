"""From the components' scores to a reward: the weighted sum, or the expression, and what an unknown score means."""

from functools import reduce
from operator import add

import polars as pl

from pipelines.score.reward_components import error_of
from pipelines.score.reward_definition import RewardDefinition
from pipelines.score.reward_expression import Expression


def rewarded(components: pl.DataFrame, definition: RewardDefinition) -> pl.DataFrame:
    """Rewards of rows with the components' scores.

    Args:
        components: from `component_rows`; or any frame with a Float64 column of each component's name, and optionally
            `error of NAME`.
        definition: the reward.

    Returns:
        The other columns, with value, reason, error and metrics (as in `scores`); in the same order. An unknown
        component that leaves no reward is its reason; a formula that gives no number of known ones is an error.
    """
    aliases = [component.alias for component in definition.components]
    errors = {
        alias: pl.col(error_of(alias)) if error_of(alias) in components.columns else pl.lit(None, pl.String)
        for alias in aliases
    }
    unknown = pl.concat_list(
        pl.when(pl.col(alias).is_null()).then(
            pl.concat_str(pl.lit(alias), pl.lit(" ("), pl.coalesce(errors[alias], pl.lit("NULL")), pl.lit(")"))
        )
        for alias in aliases
    ).list.drop_nulls()
    told = unknown.list.join("; ")
    if definition.sql is None:
        valued = components.with_columns(value=_weighted(definition))
    else:
        valued = components.with_columns(value=Expression(definition.sql, aliases).values(components))
    finite = pl.col("value").is_finite().fill_null(False)
    is_missing = unknown.list.len() > 0
    is_partial = is_missing & pl.lit(definition.on_null == "renormalise")
    return valued.with_columns(
        # Minus zero is zero: it would be shown, and stored, as another number.
        value=pl.when(finite).then(pl.when(pl.col("value") == 0.0).then(0.0).otherwise("value")),
        reason=pl.when(finite & is_partial)
        .then(pl.format("renormalised without {}", told))
        .when(~finite & is_missing)
        .then(pl.format("unknown: {}", told)),
        error=pl.when(~finite & ~is_missing).then(pl.lit("the formula gives no finite number")),
        metrics=pl.struct(aliases).struct.json_encode(),
    ).drop(*aliases, *(error_of(alias) for alias in aliases), strict=False)


def _weighted(definition: RewardDefinition) -> pl.Expr:
    """The weighted sum, added in the order of the components."""
    parts = [(part.weight, pl.col(part.alias)) for part in definition.components]
    if definition.on_null == "null":
        return reduce(add, (weight * score for weight, score in parts))
    total = sum(weight for weight, _ in parts)
    present = reduce(add, (weight * score.is_not_null().cast(pl.Float64) for weight, score in parts))
    known = reduce(add, (weight * score.fill_null(0.0) for weight, score in parts))
    complete = pl.all_horizontal(score.is_not_null() for _, score in parts)
    return pl.when(complete).then(known).when(present > 0.0).then(known * (total / present))
