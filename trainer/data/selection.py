"""Selects the steps to train on, from the token rows of the selected episodes.

Steps that carry no loss stay in their sequence as context as long as a later step is trained. Everything after the last
trained step is cut off. Every row that carries no loss has exactly one reason, the first that applies in the order of
`trainer.data.refusals.Drop`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import polars as pl

from lake.errors import DataRefusedError
from lake.judgements.credit import Credit, read_advantages
from lake.judgements.selections import SelectedEpisodes, read_selection, select_where
from lake.read.parquet import collect_rows
from lake.read.snapshot import Snapshot
from trainer.config import MixtureSource, TrainConfig
from trainer.data.preferences import (
    CandidateCount,
    arrange_sides,
    drop_uncompared,
    find_preferences,
    list_credit_columns,
)
from trainer.data.refusals import Drop, refuse_step_advantages
from trainer.data.sequences import link_sequences
from trainer.data.token_rows import (
    Portions,
    add_staleness,
    choose_encoding,
    compact,
    concat_portions,
    filter_rows,
    read_token_rows,
)
from trainer.losses import Needs

_TIE = 1e-9
"""Advantages that differ by less are equal; relative to their size if that is above 1."""
_TENTH = 10
"""The run reports a limit on length that drops more than one in this many live steps."""
_STEPS = {"episode_id": pl.Int64, "step_index": pl.Int32}
VALUE_TARGET = "value_target"
"""Column of members for a value head: the lambda-return of the step."""
_CREDIT_COLUMNS = ("advantage", "flags", VALUE_TARGET)
_OF_EPISODES = "episode_id IN (SELECT unnest($episodes::BIGINT[]))"
_VALUES = {
    "value_estimate": f"SELECT episode_id, step_index, value_estimate AS value FROM steps WHERE {_OF_EPISODES}",
    "scorer": "SELECT episode_id, step_index, value FROM latest_scores "
    f"WHERE scorer = $scorer AND scorer_version = $version AND step_index IS NOT NULL AND {_OF_EPISODES}",
}
_JUDGED = ("is_active", "is_copied_context", "trainable", "filtered", "flags", "reason", "repeated")
"""Columns that are dropped once every step is judged."""


@dataclass(frozen=True, slots=True)
class LengthDrops:
    """Steps that a limit on the length of sequences drops, and better limits."""

    steps: int
    """Live steps that end beyond the limit; without it they would be trained."""
    live: int
    """All live steps, including those within the limit."""
    limit_for_most: int
    """Smallest limit that drops at most a tenth of them."""
    limit_for_all: int
    """Smallest limit that drops none."""

    def describe(self, limit: int) -> str:
        """Describe the effect of `limit` and suggest better limits."""
        share = f"{self.steps:,} of {self.live:,} live steps ({self.steps / self.live:.0%})"
        better = f"max_length {self.limit_for_most} would leave out at most a tenth, {self.limit_for_all} none"
        return f"max_length {limit} leaves out {share}; {better}"


@dataclass(frozen=True, slots=True)
class TrainingSelection:
    """The judged rows of a run."""

    members: pl.DataFrame
    """Rows of sequences with at least one trained step, up to its last trained step; sorted by episode_id, sequence,
    step_index. Columns: those of `trainer.data.sequences`, trained, loss_tokens, advantage. For losses on preferences
    `trainer.data.preferences.arrange_sides` defines the arrangement."""
    drops: pl.DataFrame
    """reason, episodes, steps, tokens: counts of rows without loss. tokens counts action tokens."""
    episodes: int
    """Number of episodes selected by `where` and `selection`."""
    provenance: str
    """engine or rendered."""
    encoding_id: int | None
    """The encoding that is trained; None if there is no row."""
    source: Credit | None
    """Credit job of the advantages, if they are used."""
    groups: int | None
    """Number of groups of the selected episodes, if advantages are used."""
    dead_groups: int | None
    """Number of groups without signal."""
    max_length: int
    """Longest sequence in tokens: the configuration's limit, or what fits the data."""
    sources: pl.DataFrame | None = None
    """episode_id, source: position in the mixture of each selected episode; None without a mixture."""
    candidate_counts: tuple[CandidateCount, ...] = ()
    """Counts of candidates for pairs or labels, for losses on preferences."""
    advantage_mean: float = 0.0
    """Number subtracted from the advantages (0 where the loss takes them unchanged)."""
    advantage_scale: float = 1.0
    """Divisor of the advantages."""
    length_drops: LengthDrops | None = None
    """Steps that `max_length` drops, if they are more than a tenth."""
    advantage_ties: bool = False
    """Whether the loss normalises advantages, and those of the trained steps are all equal up to rounding."""


def select_episodes(
    snapshot: Snapshot, where: str | None, selected: SelectedEpisodes | None = None, option: str = "--where"
) -> pl.DataFrame:
    """Select the episodes of a predicate, restricted to a stored selection: episode_id and num_steps, sorted by id.

    Args:
        where: SQL predicate over `episodes`; None takes all.
        selected: a selection; None takes all that satisfy the predicate.
        option: option or setting that holds the predicate, for messages.

    Raises:
        UsageError: the predicate is not one SQL expression over `episodes`.
        DataRefusedError: no episode satisfies it, or the selection has none of them.
    """
    episodes = select_where(snapshot, ("episode_id", "num_steps"), where, option)
    if selected is None:
        return episodes
    matching = episodes.join(selected.episodes, on="episode_id", how="semi", maintain_order="left")
    if matching.is_empty():
        msg = (
            f"selection {selected.describe()}; it has none of the {episodes.height} episodes of --where: widen --where"
        )
        raise DataRefusedError(msg)
    return matching


def resolve_provenance(snapshot: Snapshot, episode_ids: pl.Series, tokens: str) -> str:
    """Resolve `TrainConfig.tokens` for these episodes to engine or rendered."""
    if tokens != "auto":
        return tokens
    engine = snapshot.scan("tokens").filter(pl.col("provenance") == "engine").select("episode_id")
    # The first rows usually suffice; a set of all ids would take much memory.
    some = collect_rows(engine.head(1000))["episode_id"]
    if some.is_empty() or episode_ids.is_in(some.implode()).any():
        return "rendered" if some.is_empty() else "engine"
    engine_rows = engine.filter(pl.col("episode_id").is_in(episode_ids.implode())).head(1)
    return "rendered" if collect_rows(engine_rows).is_empty() else "engine"


def select(
    snapshot: Snapshot,
    config: TrainConfig,
    needs: Needs,
    *,
    source: Credit | None = None,
    own_encoding: Callable[[], int] | None = None,
    episodes: pl.DataFrame | None = None,
    selected: SelectedEpisodes | None = None,
    longest: int | None = None,
) -> TrainingSelection:
    """Judge every step of the selected episodes.

    Args:
        source: credit job of the advantages; required if the loss needs them or dead groups are dropped.
        own_encoding: returns the encoding_id of the model's tokenizer under the provenance in question, if known.
        selected: the selection that `episodes` come from, if any; None reads that of `config.selection`.
        longest: context length of the model in tokens; a limit that fits the data goes no higher.
    """
    if selected is None and config.selection is not None:
        selected = read_selection(snapshot, config.selection)
    episodes = select_episodes(snapshot, config.where, selected) if episodes is None else episodes
    episodes, sources, dropped_steps = _assign_mixture(snapshot, config, episodes, selected)
    provenance = resolve_provenance(snapshot, episodes["episode_id"], config.tokens)
    portions = Portions(episodes)
    rows, encoding_id = choose_encoding(list(read_token_rows(snapshot, portions)), provenance, own_encoding)
    portions_of_members = add_staleness(snapshot, portions, rows)
    _map_portions(portions_of_members, link_sequences)
    del rows
    config = _fit_length(config, portions_of_members, longest)
    credit = None
    if source is not None:
        credit = _read_credit(snapshot, source, episodes["episode_id"], needs, valued=config.value is not None)
    dead_flags: list[str] = []  # the distinct `flags` that mark a group without signal
    groups = dead_groups = None
    if credit is not None:
        all_flags = credit["flags"].unique().sort()
        dead_flags = [flags for flags in all_flags if {"dead_group", "singleton_group"} & set(flags.split(","))]
        groups = credit["group_id"].n_unique()
        dead_groups = credit.filter(pl.col("flags").is_in(dead_flags))["group_id"].n_unique()
    _add_judging_columns(portions_of_members, snapshot, portions, credit, dropped_steps)
    _map_portions(portions_of_members, lambda members: _judge(members, needs, config, dead_flags))
    length_drops = _measure_length_drops(portions_of_members, config)
    preferences = None
    if needs.pairs or needs.labels:
        # Pairs can connect episodes of different portions.
        members = concat_portions(portions_of_members)
        preferences = find_preferences(snapshot, members, credit, config, needs, sources)
        portions_of_members = [drop_uncompared(members, preferences, Drop.UNPAIRED if needs.pairs else Drop.UNLABELLED)]
    drops = _count_drops(portions_of_members, portions.episodes if preferences is None else [episodes])
    num_episodes = episodes.height
    del episodes, portions  # as much memory as a column of the members
    _map_portions(portions_of_members, _trim)
    members = concat_portions(portions_of_members)
    if preferences is not None:
        members = arrange_sides(members, preferences)
    mean, scale, ties = _compute_normalisation(members) if needs.normalised_advantages else (0.0, 1.0, False)
    return TrainingSelection(
        members=members.with_columns(advantage=(pl.col("advantage") - mean) / scale),
        drops=drops,
        episodes=num_episodes,
        provenance=provenance,
        encoding_id=encoding_id,
        source=source,
        groups=groups,
        dead_groups=dead_groups,
        max_length=config.fitted_length,
        length_drops=length_drops,
        sources=sources,
        candidate_counts=() if preferences is None else tuple(preferences.candidate_counts),
        advantage_mean=mean,
        advantage_scale=scale,
        advantage_ties=ties,
    )


def _assign_mixture(
    snapshot: Snapshot, config: TrainConfig, episodes: pl.DataFrame, selected: SelectedEpisodes | None
) -> tuple[pl.DataFrame, pl.DataFrame | None, pl.DataFrame]:
    """Return the episodes of the mixture, their sources, and the single steps that selections dropped."""
    dropped_steps = pl.DataFrame(schema=_STEPS) if selected is None else selected.dropped_steps
    if not config.mixture:
        return episodes, None, dropped_steps
    sources, mixed_dropped = assign_sources(snapshot, config.mixture, episodes)
    episodes = episodes.join(sources, on="episode_id", how="semi", maintain_order="left")
    return episodes, sources, pl.concat([dropped_steps, mixed_dropped]).unique()


def assign_sources(
    snapshot: Snapshot, mixture: Sequence[MixtureSource], episodes: pl.DataFrame
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Assign each episode to a source of the mixture, and find the single steps that the source's selection dropped.

    Returns episode_id, source (position in the mixture), each episode once, in the first source that contains it; and
    episode_id, step_index.

    Raises:
        UsageError: an invalid predicate, or an unknown selection.
        DataRefusedError: a source without episodes.
    """
    unassigned, assignments, dropped_steps = episodes.select("episode_id"), [], []
    for number, source in enumerate(mixture):
        option = f"mixture source {number}: where"
        where = select_where(snapshot, ("episode_id",), source.predicate, option, may_be_empty=True)
        matching = unassigned.join(where, on="episode_id", how="semi", maintain_order="left")
        if source.selection is not None:
            selected = read_selection(snapshot, source.selection)
            matching = matching.join(selected.episodes, on="episode_id", how="semi", maintain_order="left")
            dropped_steps.append(selected.dropped_steps.join(matching, on="episode_id", how="semi"))
        if matching.is_empty():
            msg = f"mixture source {number} ({source.describe()}) has no episode that is not in an earlier source"
            raise DataRefusedError(msg)
        unassigned = unassigned.join(matching, on="episode_id", how="anti", maintain_order="left")
        assignments.append(matching.with_columns(source=pl.lit(number, pl.Int32)))
    return pl.concat(assignments).sort("episode_id"), pl.concat([pl.DataFrame(schema=_STEPS), *dropped_steps])


def _map_portions(portions: list[pl.DataFrame], change: Callable[[pl.DataFrame], pl.DataFrame]) -> None:
    """Replace each portion by the result of a function, one after the other."""
    for number, portion in enumerate(portions):
        portions[number] = compact(change(portion))


def _add_judging_columns(
    portions_of_members: list[pl.DataFrame],
    snapshot: Snapshot,
    portions: Portions,
    credit: pl.DataFrame | None,
    dropped_steps: pl.DataFrame,
) -> None:
    """Add to the members of each portion the columns of their steps that `_judge` reads.

    The columns are the flags of special steps, the advantage and its flags (NULL where absent), and `filtered`: a
    selection dropped the step (NULL where none did).
    """
    ordinary = pl.col("is_active") & pl.col("trainable") & ~pl.col("is_copied_context")
    flags = ("is_active", "is_copied_context", "trainable")
    special_steps = portions.read([snapshot.scan("steps").filter(~ordinary).select(*_STEPS, *flags)])
    credit_portions = None
    if credit is not None:
        names = [name for name in _CREDIT_COLUMNS if name in credit.columns]
        credit_portions = portions.split(credit.select(*_STEPS, *names))
    filtered = dropped_steps.with_columns(filtered=pl.lit(value=True))
    for number, special in enumerate(special_steps):
        members = portions_of_members[number].join(special, on=list(_STEPS), how="left", maintain_order="left")
        if credit_portions is None:
            members = members.with_columns(advantage=pl.lit(None, pl.Float64), flags=pl.lit(None, pl.String))
        else:
            members = members.join(credit_portions[number], on=list(_STEPS), how="left", maintain_order="left")
        if filtered.is_empty():
            members = members.with_columns(filtered=pl.lit(None, pl.Boolean))
        else:
            members = members.join(filtered, on=list(_STEPS), how="left", maintain_order="left")
        portions_of_members[number] = compact(members)


def _read_credit(
    snapshot: Snapshot, source: Credit, episode_ids: pl.Series, needs: Needs, *, valued: bool
) -> pl.DataFrame:
    """Read the credit rows, with the columns that the loss needs in addition to the advantage, or in its place.

    With `valued`, also the targets of values.
    """
    columns = ["advantage", "flags", *list_credit_columns(needs), *["a_step"] * (needs.step_advantages or valued)]
    credit = read_advantages(snapshot, source, episode_ids, columns)
    if valued:
        credit = _add_value_targets(snapshot, source, credit)
    if not needs.step_advantages:
        return credit
    refuse_step_advantages(credit, source.title)
    return credit.with_columns(advantage="a_step")


def _add_value_targets(snapshot: Snapshot, source: Credit, credit: pl.DataFrame) -> pl.DataFrame:
    """Add the lambda-return: the advantage before any normalisation, plus the value that the estimator subtracted.

    Raises:
        DataRefusedError: the estimator has no values.
    """
    values = source.parameters.get("config", {}).get("values")
    if values is None:
        raise DataRefusedError(
            f"[trainer.value] trains on returns of `gae`, and {source.title} has no values: run `trajlake credit gae`"
        )
    is_recorded, version = values == "value_estimate", source.parameters.get("scorer_versions", {}).get(values)
    query = _VALUES["value_estimate" if is_recorded else "scorer"]
    params = {} if is_recorded else {"scorer": values.partition("@")[0], "version": version}
    rows = snapshot.sql(query, params | {"episodes": credit["episode_id"].unique().to_list()})
    valued = credit.join(rows, on=list(_STEPS), how="left", maintain_order="left")
    return valued.with_columns((pl.col("a_step") + pl.col("value")).alias(VALUE_TARGET)).drop("value")


def _judge(members: pl.DataFrame, needs: Needs, config: TrainConfig, dead_flags: list[str]) -> pl.DataFrame:
    """Add reason (NULL = trained), trained and loss_tokens."""
    live_only = needs.advantages if config.live_only is None else config.live_only
    too_old = pl.col("staleness") > config.max_staleness if config.max_staleness is not None else pl.lit(value=False)
    unknown = config.max_staleness is not None and config.unknown_staleness == "drop"
    tests = {
        Drop.DEAD_GROUP: pl.col("flags").is_in(dead_flags if live_only else []),
        Drop.NO_ADVANTAGE: pl.col("advantage").is_null() if needs.advantages else pl.lit(value=False),
        Drop.INACTIVE: ~pl.col("is_active"),
        Drop.COPIED_CONTEXT: pl.col("is_copied_context"),
        Drop.FILTERED: pl.col("filtered"),
        Drop.NOT_TRAINABLE: ~pl.col("trainable"),
        Drop.STALE: too_old.fill_null(value=unknown),
        Drop.NO_ACTION_TOKENS: pl.col("n_trained") == 0,
        Drop.NO_CONTEXT: (pl.col("prefix_length") + pl.col("n_context")) == 0,
        Drop.OVER_LENGTH: pl.col("end") > config.max_length,
    }
    reason = pl.coalesce(pl.when(test).then(pl.lit(str(name))) for name, test in tests.items())
    members = members.with_columns(reason=reason)
    trained = pl.col("reason").is_null() & ~pl.col("repeated")
    return members.with_columns(trained=trained).with_columns(
        loss_tokens=pl.when(trained).then(pl.col("n_trained")).otherwise(0).cast(pl.Int64)
    )


def _fit_length(config: TrainConfig, portions: Sequence[pl.DataFrame], longest: int | None) -> TrainConfig:
    """Return the configuration with a limit on length: the set one, or the longest sequence up to the model's limit."""
    if config.max_length is not None:
        return config
    needed = max(2, *(part.select(pl.col("end").max().fill_null(0)).item() for part in portions))
    return config.model_copy(update={"max_length": needed if longest is None else min(needed, longest)})


def _measure_length_drops(portions: Sequence[pl.DataFrame], config: TrainConfig) -> LengthDrops | None:
    """Measure what the limit drops of the steps that would be trained without it, if that is more than a tenth."""
    is_live = ~pl.col("repeated") & pl.col("reason").fill_null(Drop.OVER_LENGTH).eq(Drop.OVER_LENGTH)
    ends = [part.lazy().filter(is_live).select("end") for part in portions]
    counts = pl.concat(end.select(over=(pl.col("end") > config.fitted_length).sum(), live=pl.len()) for end in ends)
    over, live = counts.sum().collect().row(0)
    if over * _TENTH <= live:
        return None
    end_S = pl.concat(ends).collect()["end"].sort()
    return LengthDrops(over, live, limit_for_most=int(end_S[-1 - live // _TENTH]), limit_for_all=int(end_S[-1]))


def _count_drops(portions: Sequence[pl.DataFrame], episodes_of_portions: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Count the rows without loss by reason, in order of precedence, from members and episodes of each portion."""
    reasons, absent = [], []
    for members, episodes in zip(portions, episodes_of_portions, strict=True):
        first_members = members.lazy().filter(~pl.col("repeated"))
        by_reason = first_members.filter(pl.col("reason").is_not_null()).group_by("reason")
        of_reason = by_reason.agg(
            episodes=pl.col("episode_id").n_unique().cast(pl.Int64),
            steps=pl.len().cast(pl.Int64),
            tokens=pl.col("n_action").cast(pl.Int64).sum(),
        )
        reasons.append(of_reason.collect())
        with_tokens = first_members.group_by("episode_id").agg(steps=pl.len().cast(pl.Int64))
        lacks = pl.col("num_steps") - pl.col("steps").fill_null(0)
        lacking = episodes.lazy().join(with_tokens, on="episode_id", how="left").select(lacks=lacks)
        lacking = lacking.filter(pl.col("lacks") > 0)
        absent.append(lacking.select(episodes=pl.len().cast(pl.Int64), steps=pl.col("lacks").sum()).collect())
    counts = pl.concat(reasons).group_by("reason").sum()
    episodes_without, steps_without = pl.concat(absent).sum().row(0)
    if episodes_without:
        row = (str(Drop.NO_TOKENS), episodes_without, steps_without, None)
        counts = pl.concat([counts, pl.DataFrame([row], schema=counts.schema, orient="row")])
    order = pl.Enum([str(reason) for reason in Drop])
    return counts.sort(pl.col("reason").cast(order))


def _trim(members: pl.DataFrame) -> pl.DataFrame:
    """Cut each sequence after its last trained step; drop sequences without any."""
    last = pl.col("step_index").filter(pl.col("trained")).max().over("episode_id", "sequence")
    trained_paths = filter_rows(members, pl.col("step_index") <= last)
    return trained_paths.drop(_JUDGED).with_columns(pl.col("end", "loss_tokens").cast(pl.Int32))


def _compute_normalisation(members: pl.DataFrame) -> tuple[float, float, bool]:
    """Return mean and population standard deviation of the trained steps' advantages, and whether these are all equal.

    Equality is up to rounding, because rounding errors must not be scaled up to a deviation of 1. The scale is 1 then.
    """
    advantage_S = members.lazy().filter("trained").select("advantage").collect()["advantage"].sort()
    if advantage_S.is_empty():
        return 0.0, 1.0, False
    mean, std = float(advantage_S.mean()), float(advantage_S.std(ddof=0) or 0.0)  # type: ignore[arg-type]
    ties = float(advantage_S[-1] - advantage_S[0]) <= _TIE * max(1.0, abs(mean))
    return mean, 1.0 if ties else std, ties
