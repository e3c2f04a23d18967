"""What is trained on, and what is not and why: the selected episodes' token rows, judged one by one.

Steps that carry no loss stay in their sequence as context as long as a later step is trained; what comes after the last
trained step is cut off. Every row that carries no loss has exactly one reason, the first that applies in the order of
`trainer.data.select.refusals.Drop`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import polars as pl

from lake.errors import DataRefusedError
from lake.judgements.credit import Credit, read_advantages
from lake.judgements.predicates import select_where
from lake.judgements.selections import Kept, read_kept
from lake.read.parquet import collected
from lake.read.snapshot import Snapshot
from trainer.config import TrainConfig
from trainer.data.select.mixture import assign
from trainer.data.select.pairs import Finding
from trainer.data.select.portions import Portions, compact, joined, only
from trainer.data.select.preferences import arrange_sides, credit_columns, drop_uncompared, find_preferences
from trainer.data.select.refusals import Drop, refuse_step_advantages
from trainer.data.select.sequences import link_sequences
from trainer.data.select.token_rows import choose_encoding, read_token_rows, with_staleness
from trainer.losses import Needs

_TIE = 1e-9
"""Advantages that are closer are equal, relative to their size above 1."""
_TENTH = 10
"""A limit on length that takes away more than one live step of so many is told."""
_STEPS = {"episode_id": pl.Int64, "step_index": pl.Int32}
_JUDGED = ("is_active", "is_copied_context", "trainable", "filtered", "flags", "reason", "repeated")
"""Columns that matter until every step is judged."""


@dataclass(frozen=True, slots=True)
class TooLong:
    """What a limit on the length of sequences takes away, and which one would not."""

    steps: int
    """Live steps that end beyond it: they would be trained but for their length."""
    live: int
    """All live steps, those within it included."""
    most: int
    """Smallest limit that takes at most a tenth of them away."""
    every: int
    """Smallest limit that takes none away."""

    def describe(self, limit: int) -> str:
        """For people: what `limit` does, and what would be better."""
        share = f"{self.steps:,} of {self.live:,} live steps ({self.steps / self.live:.0%})"
        better = f"--max-length {self.most} would leave out at most a tenth, {self.every} none"
        return f"max_length {limit} leaves out {share}; {better}"


@dataclass(frozen=True, slots=True)
class Selection:
    """The judged rows of a run."""

    members: pl.DataFrame
    """Rows of sequences with at least one trained step, up to its last trained step; sorted by episode_id, sequence,
    step_index. Beside the columns of `trainer.data.select.sequences`: trained, loss_tokens, advantage. Those of losses
    on preferences are arranged as `trainer.data.select.preferences.arrange_sides` says."""
    drops: pl.DataFrame
    """reason, episodes, steps, tokens: what carries no loss. tokens counts action tokens."""
    episodes: int
    """Episodes selected by --where and --selection."""
    provenance: str
    """engine or rendered."""
    encoding_id: int | None
    """The encoding that is trained on; None if there is no row."""
    source: Credit | None
    """Where advantages come from, if they are used."""
    groups: int | None
    """Groups of the selected episodes, if advantages are used."""
    dead_groups: int | None
    """Those without signal."""
    max_length: int
    """Longest sequence in tokens: the configuration's, or what fits the data."""
    sources: pl.DataFrame | None = None
    """episode_id, source: position in the mixture of each selected episode; None without a mixture."""
    findings: tuple[Finding, ...] = ()
    """How many candidates were found for pairs or labels, if the loss is one on preferences."""
    advantage_mean: float = 0.0
    """Subtracted from the advantages (0 where the loss takes them as they are)."""
    advantage_scale: float = 1.0
    """The advantages are divided by this."""
    too_long: TooLong | None = None
    """What that takes away, if it is more than a tenth."""
    advantage_ties: bool = False
    """The loss normalises advantages, and those of the trained steps are all equal up to rounding."""


def select_episodes(
    snapshot: Snapshot, where: str | None, kept: Kept | None = None, place: str = "--where"
) -> pl.DataFrame:
    """The episodes of a predicate, of those a selection kept: episode_id and num_steps, sorted by id.

    Args:
        where: SQL predicate over `episodes`; None takes them all.
        kept: a selection; None takes all that satisfy the predicate.
        place: where the predicate stands, for messages.

    Raises:
        UsageError: the predicate is not one SQL expression over `episodes`.
        DataRefusedError: no episode satisfies it, or the selection kept none of them.
    """
    episodes = select_where(snapshot, ("episode_id", "num_steps"), where, place)
    if kept is None:
        return episodes
    left = episodes.join(kept.episodes, on="episode_id", how="semi", maintain_order="left")
    if left.is_empty():
        msg = f"selection {kept.describe()}; none of the {episodes.height} chosen ones is among them: widen --where"
        raise DataRefusedError(msg)
    return left


def provenance_of(snapshot: Snapshot, episode_ids: pl.Series, wanted: str) -> str:
    """What `TrainConfig.tokens` means for these episodes: engine or rendered."""
    if wanted != "auto":
        return wanted
    engine = snapshot.scan("tokens").filter(pl.col("provenance") == "engine").select("episode_id")
    # The first rows usually tell; a set of all ids takes much memory where these are many.
    some = collected(engine.head(1000))["episode_id"]
    if some.is_empty() or episode_ids.is_in(some.implode()).any():
        return "rendered" if some.is_empty() else "engine"
    found = engine.filter(pl.col("episode_id").is_in(episode_ids.implode())).head(1)
    return "rendered" if collected(found).is_empty() else "engine"


def select(
    snapshot: Snapshot,
    config: TrainConfig,
    needs: Needs,
    *,
    source: Credit | None = None,
    own_encoding: Callable[[], int] | None = None,
    episodes: pl.DataFrame | None = None,
    kept: Kept | None = None,
    longest: int | None = None,
) -> Selection:
    """Judge every step of the selected episodes.

    Args:
        source: where advantages come from; required if the loss needs them or dead groups are left out.
        own_encoding: gives the encoding_id of the model's tokenizer under the provenance in question, if known.
        kept: the selection that `episodes` honour, if one is; None reads that of `config.selection`.
        longest: tokens that the model was made for; a limit that fits the data goes no higher.
    """
    kept = read_kept(snapshot, config.selection) if kept is None and config.selection is not None else kept
    episodes = select_episodes(snapshot, config.where, kept) if episodes is None else episodes
    episodes, sources, dropped = _mixed(snapshot, config, episodes, kept)
    provenance = provenance_of(snapshot, episodes["episode_id"], config.tokens)
    portions = Portions(episodes)
    parts, encoding_id = _linked(snapshot, portions, provenance, own_encoding)
    config = _fitted(config, parts, longest)
    credit = None if source is None else _credit(snapshot, source, episodes["episode_id"], needs)
    dead_flags = [] if credit is None else _dead_flags(credit)
    groups, dead_groups = _groups(credit, dead_flags)
    _add_marks(parts, snapshot, portions, credit, dropped)
    _replace(parts, lambda part: _judge(part, needs, config, dead_flags))
    too_long = _too_long(parts, config)
    preferences = None
    if needs.pairs or needs.labels:
        # Who is compared with whom is found among all of them.
        members = joined(parts)
        preferences = find_preferences(snapshot, members, credit, config, needs, sources)
        parts = [drop_uncompared(members, preferences, Drop.UNPAIRED if needs.pairs else Drop.UNLABELLED)]
    drops, num_episodes = _drops(parts, portions.episodes if preferences is None else [episodes]), episodes.height
    del episodes, portions  # as much memory as a column of the members
    _replace(parts, _trim)
    members = joined(parts)
    if preferences is not None:
        members = arrange_sides(members, preferences)
    mean, scale, ties = _normalisation(members) if needs.normalised_advantages else (0.0, 1.0, False)
    return Selection(
        members=members.with_columns(advantage=(pl.col("advantage") - mean) / scale),
        drops=drops,
        episodes=num_episodes,
        provenance=provenance,
        encoding_id=encoding_id,
        source=source,
        groups=groups,
        dead_groups=dead_groups,
        max_length=config.fitted_length,
        too_long=too_long,
        sources=sources,
        findings=() if preferences is None else tuple(preferences.findings),
        advantage_mean=mean,
        advantage_scale=scale,
        advantage_ties=ties,
    )


def _mixed(
    snapshot: Snapshot, config: TrainConfig, episodes: pl.DataFrame, kept: Kept | None
) -> tuple[pl.DataFrame, pl.DataFrame | None, pl.DataFrame]:
    """The episodes that some source of the mixture has, their sources, and the single steps that selections dropped."""
    dropped = pl.DataFrame(schema=_STEPS) if kept is None else kept.dropped_steps
    if not config.mixture:
        return episodes, None, dropped
    sources, mixed_dropped = assign(snapshot, config.mixture, episodes)
    episodes = episodes.join(sources, on="episode_id", how="semi", maintain_order="left")
    return episodes, sources, pl.concat([dropped, mixed_dropped]).unique()


def _linked(
    snapshot: Snapshot, portions: Portions, provenance: str, own_encoding: Callable[[], int] | None
) -> tuple[list[pl.DataFrame], int | None]:
    """The members of sequences of each portion, and their encoding_id."""
    rows, encoding_id = choose_encoding(list(read_token_rows(snapshot, portions)), provenance, own_encoding)
    parts = with_staleness(snapshot, portions, rows)
    _replace(parts, link_sequences)
    return parts, encoding_id


def _replace(parts: list[pl.DataFrame], make: Callable[[pl.DataFrame], pl.DataFrame]) -> None:
    """Put what is made of each portion into its place, one after the other."""
    for number, part in enumerate(parts):
        parts[number] = compact(make(part))


def _add_marks(
    parts: list[pl.DataFrame],
    snapshot: Snapshot,
    portions: Portions,
    credit: pl.DataFrame | None,
    dropped_steps: pl.DataFrame,
) -> None:
    """Add to the members of each portion what is known of their steps, by which they are judged."""
    special = portions.read([_special_steps(snapshot)])
    known: Sequence[pl.DataFrame | None] = [None] * len(parts)
    if credit is not None:
        known = portions.deal(credit.select(*_STEPS, "advantage", "flags"))
    for number, (flags, of_part) in enumerate(zip(special, known, strict=True)):
        parts[number] = compact(_marked(_join(parts[number], flags, of_part), dropped_steps))


def _special_steps(snapshot: Snapshot) -> pl.LazyFrame:
    """Flags of the few steps that are inactive, copied, or another policy's."""
    ordinary = pl.col("is_active") & pl.col("trainable") & ~pl.col("is_copied_context")
    return snapshot.scan("steps").filter(~ordinary).select(*_STEPS, "is_active", "is_copied_context", "trainable")


def _marked(members: pl.DataFrame, dropped_steps: pl.DataFrame) -> pl.DataFrame:
    """Add `filtered`: a selection dropped the step (NULL where none did)."""
    if dropped_steps.is_empty():
        return members.with_columns(filtered=pl.lit(None, pl.Boolean))
    marks = dropped_steps.with_columns(filtered=pl.lit(value=True))
    return members.join(marks, on=["episode_id", "step_index"], how="left", maintain_order="left")


def _dead_flags(credit: pl.DataFrame) -> list[str]:
    """The distinct `flags` that say that a group has no signal."""
    found = credit["flags"].unique().sort()
    return [flags for flags in found if {"dead_group", "singleton_group"} & set(flags.split(","))]


def _groups(credit: pl.DataFrame | None, dead_flags: list[str]) -> tuple[int | None, int | None]:
    """How many groups there are, and how many of them without signal; None without credit."""
    if credit is None:
        return None, None
    return credit["group_id"].n_unique(), credit.filter(pl.col("flags").is_in(dead_flags))["group_id"].n_unique()


def _join(members: pl.DataFrame, special: pl.DataFrame, credit: pl.DataFrame | None) -> pl.DataFrame:
    """Add the flags of special steps, the advantage and its flags (each NULL where there is none)."""
    keys = ["episode_id", "step_index"]
    members = members.join(special, on=keys, how="left", maintain_order="left")
    if credit is None:
        return members.with_columns(advantage=pl.lit(None, pl.Float64), flags=pl.lit(None, pl.String))
    return members.join(credit.select(*keys, "advantage", "flags"), on=keys, how="left", maintain_order="left")


def _credit(snapshot: Snapshot, source: Credit, episode_ids: pl.Series, needs: Needs) -> pl.DataFrame:
    """The credit rows, with what the loss needs beside the advantage, or in its place."""
    columns = ["advantage", "flags", *credit_columns(needs), *["a_step"] * needs.step_advantages]
    credit = read_advantages(snapshot, source, episode_ids, columns)
    if not needs.step_advantages:
        return credit
    refuse_step_advantages(credit, source.title)
    return credit.with_columns(advantage="a_step")


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


def _fitted(config: TrainConfig, parts: Sequence[pl.DataFrame], longest: int | None) -> TrainConfig:
    """The configuration with a limit on the length of sequences: its own, or the data's longest, up to the model's."""
    if config.max_length is not None:
        return config
    needed = max(2, *(part.select(pl.col("end").max().fill_null(0)).item() for part in parts))
    return config.model_copy(update={"max_length": needed if longest is None else min(needed, longest)})


def _too_long(parts: Sequence[pl.DataFrame], config: TrainConfig) -> TooLong | None:
    """What the limit takes away of the steps that would be trained without it, if it is more than a tenth."""
    is_live = ~pl.col("repeated") & pl.col("reason").fill_null(Drop.OVER_LENGTH).eq(Drop.OVER_LENGTH)
    ends = [part.lazy().filter(is_live).select("end") for part in parts]
    counts = pl.concat(end.select(over=(pl.col("end") > config.fitted_length).sum(), live=pl.len()) for end in ends)
    over, live = counts.sum().collect().row(0)
    if over * _TENTH <= live:
        return None
    end_S = pl.concat(ends).collect()["end"].sort()
    return TooLong(over, live, most=int(end_S[-1 - live // _TENTH]), every=int(end_S[-1]))


def _drops(parts: Sequence[pl.DataFrame], of_parts: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """What carries no loss, by reason, in order of precedence, from the members and the episodes of each part."""
    reasons, absent = [], []
    for members, episodes in zip(parts, of_parts, strict=True):
        once = members.lazy().filter(~pl.col("repeated"))
        by_reason = once.filter(pl.col("reason").is_not_null()).group_by("reason")
        of_reason = by_reason.agg(
            episodes=pl.col("episode_id").n_unique().cast(pl.Int64),
            steps=pl.len().cast(pl.Int64),
            tokens=pl.col("n_action").cast(pl.Int64).sum(),
        )
        reasons.append(of_reason.collect())
        found = once.group_by("episode_id").agg(found=pl.len().cast(pl.Int64))
        lacks = pl.col("num_steps") - pl.col("found").fill_null(0)
        lacking = (
            episodes.lazy().join(found, on="episode_id", how="left").select(lacks=lacks).filter(pl.col("lacks") > 0)
        )
        absent.append(lacking.select(episodes=pl.len().cast(pl.Int64), steps=pl.col("lacks").sum()).collect())
    counted = pl.concat(reasons).group_by("reason").sum()
    episodes_without, steps_without = pl.concat(absent).sum().row(0)
    if episodes_without:
        row = (str(Drop.NO_TOKENS), episodes_without, steps_without, None)
        counted = pl.concat([counted, pl.DataFrame([row], schema=counted.schema, orient="row")])
    order = pl.Enum([str(reason) for reason in Drop])
    return counted.sort(pl.col("reason").cast(order))


def _trim(members: pl.DataFrame) -> pl.DataFrame:
    """Cut each sequence after its last trained step; drop sequences without any."""
    last = pl.col("step_index").filter(pl.col("trained")).max().over("episode_id", "sequence")
    left = only(members, pl.col("step_index") <= last)
    return left.drop(_JUDGED).with_columns(pl.col("end", "loss_tokens").cast(pl.Int32))


def _normalisation(members: pl.DataFrame) -> tuple[float, float, bool]:
    """Mean and population standard deviation of the trained steps' advantages, and whether these are all equal.

    Equal is up to rounding, which must not be blown up to a deviation of 1; the scale is 1 then.
    """
    advantage_S = members.lazy().filter("trained").select("advantage").collect()["advantage"].sort()
    if advantage_S.is_empty():
        return 0.0, 1.0, False
    mean, std = float(advantage_S.mean()), float(advantage_S.std(ddof=0) or 0.0)  # type: ignore[arg-type]
    ties = float(advantage_S[-1] - advantage_S[0]) <= _TIE * max(1.0, abs(mean))
    return mean, 1.0 if ties else std, ties
