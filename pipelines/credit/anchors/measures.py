"""Measures of anchor definitions on a lake's steps before credit, and a suggested definition.

`advise` searches the states for counters and error texts. It suggests a definition without them and does not apply it:
the user knows what the texts mean.

Counters, such as move numbers, clocks and budgets, make every state look new. A number is a counter if

1. its neighbouring words are the same, it occurs once in a text that has it, and in at least 5 % of the steps
   (`COMMON`);
2. between successive texts of an episode that have it, it changes at least four times in five (`CHANGES`) and turns
   back at most one time in fifty (`TURNS`), over at least 20 moves (`MOVES`) and two an episode (`LONG`). In the tested
   games a score, a level or the number of carried things changes at most at one step in five. Move counters change at
   every step, or at nine of ten steps where refused commands do not count;
3. it hides shared states: without all such numbers, at least 2 % of the steps (`HIDDEN`) have a text that occurred in
   the same group with other numbers;
4. it is not a location: siblings with the same number differ in the rest of the text in at least one case in ten
   (`ELSEWHERE`). A page or a floor has its text, which is the same for siblings on the same page.

A number that rises with nearly every step and is part of the situation, such as a score that pays for every move, looks
like a counter.

Error texts, such as "You can't see any such thing.", are false anchors. The search uses no mark and no list of phrases,
only the steps before and after the text. Entries are the steps where a text follows another one. A text is an error if

1. it is short, at most 300 characters (`LONGEST`), and has at least ten entries (`ENTRIES`), which are at least one
   step in two hundred (`COMMON_TEXT`);
2. it follows many states, and many actions lead to it: at least four states (`STATES_BEFORE`) and three actions
   (`ACTIONS_BEFORE`), as effective numbers, 1 / sum of squared shares, which discount strays. Many states but one
   action lead to a menu; the first state of an episode follows nothing;
3. it hides the state. Take two steps of a group that came to it from different states and then took the same action.
   Such pairs meet the same next text less than half as often (`SAME_NEXT`) as pairs in any one other state. The test
   needs five pairs (`PAIRS`) and a world that repeats itself in half of the cases (`REPEATS`). After a room, even one
   with many doors, the same action leads to the same place. A step's state before is the last one that is not a
   suspect; steps after a suspect are excluded.

All texts that pass 1 and 2 start as suspects. Rooms with many doors then hide each other's pairs, so the search goes in
rounds. A round clears the texts with three pairs (`UNDECIDED`), or two equal ones (`AGREE`), in their favour. It then
tests texts with fewer pairs with only the decided error texts hidden, and clears those with three pairs that nearly
always (`ALONE`) meet the same next text. With fewer pairs, or in a world without repetition, a text stays undecided. On
the text game of examples/, over seven draws, error texts meet the same next text in at most 7 % of their pairs and
rooms in all. In the demo's house, no text passes 2 (at most 2.2 effective actions). On tau-bench the empty answer and
`[]` pass 2 (85 and 12), with one pair each, and stay undecided.

The search misjudges an answer that hides the state and that one command asks for, such as a list of carried things. It
misses an error text that repeats the command, because each repetition is a new text.

Axes: `_N` rows in canonical order, `_V` distinct texts.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import process_time
from typing import Self

import numpy as np
import polars as pl

from lake.errors import DataRefusedError
from lake.judgements.selections import select_where
from lake.lake import Lake
from lake.read.parquet import collect_rows
from lake.read.snapshot import Snapshot
from lake.read.text_table import count_noun
from lake.tables import TABLES
from pipelines.credit.anchors import Anchors, Chain
from pipelines.credit.anchors.definitions import (
    CanonicalJson,
    ExactText,
    LastStates,
    NoErrors,
    States,
    Substitution,
    Substitutions,
    ToolResults,
)
from pipelines.credit.estimators.protocol import STATE_COLUMNS
from pipelines.credit.health import hash_action, hash_decisions
from pipelines.credit.steps import KEYS, Bools, InputNeeds, StepBatch, select_inputs

ACTIONS = ("action", "tool_calls")
"""Columns of an action; a frame may have neither."""


@dataclass(frozen=True, slots=True)
class Walks:
    """Active steps of episodes in order."""

    batch: StepBatch
    included_N: Bools
    """Rows of compared episodes."""
    facts: pl.DataFrame
    """Per row `group_id`, `episode_id` (number of the run of rows), `included`, `taken` (hash of the action, NULL if
    unknown), `led_here` (hash of the action before, NULL at the first step), `is_error` (the mark, NULL if absent),
    `score` (of the episode, NULL if absent), `has_actions`."""

    @classmethod
    def of(cls, steps: pl.LazyFrame, columns: tuple[str, ...]) -> Self:
        """Read, sort and check steps; DataRefusedError without a step to compare, ContractError as in `StepBatch.of`.

        Steps have the keys, the columns of the definitions, and where known `status`, `episode_score`, `is_active`,
        `action`, `tool_calls`, `state_is_error`.
        """
        present = steps.collect_schema().names()
        extras = [name for name in (*ACTIONS, "state_is_error") if name in present]
        needs = InputNeeds(anchor_columns=tuple(dict.fromkeys((*columns, *extras))))
        batch = StepBatch.of(collect_rows(select_inputs(steps, needs)), needs)
        if batch is None:
            msg = "there are no active steps to measure anchors on; collect or ingest episodes first"
            raise DataRefusedError(msg)
        included_N = ~batch.episodes.spread(batch.broken_E & np.isnan(batch.score_E))
        if not included_N.any():
            raise DataRefusedError(
                f"nothing to compare: {count_noun(len(batch.broken_E), 'episode')} failed, without a score. See why: "
                "`trajlake sql 'SELECT status, stop_reason, count(*) FROM episodes GROUP BY ALL'`"
            )
        actions = [name for name in ACTIONS if name in extras]
        rows = batch.frame.select(
            pl.Series("group_id", batch.groups.ids_N()),
            pl.Series("episode_id", batch.episodes.ids_N()),
            pl.Series("included", included_N),
            (hash_action(actions) if actions else pl.lit(None, pl.UInt64)).alias("taken"),
            (
                pl.col("state_is_error").cast(pl.Boolean) if "state_is_error" in extras else pl.lit(None, pl.Boolean)
            ).alias("is_error"),
            pl.Series("score", batch.episodes.spread(batch.score_E), nan_to_null=True),
            pl.lit(bool(actions)).alias("has_actions"),
        )
        return cls(batch, included_N, rows.with_columns(take_previous("taken").alias("led_here")))

    def texts(self) -> tuple[pl.Series, pl.DataFrame]:
        """Return a code of each row's state (NULL: unknown), and the table of `code` and `text`."""
        states = States.of(self.batch, self.included_N, reads_state=True, reads_text=True)
        return states.codes_N.alias("code"), states.texts()

    def count_copies(self) -> pl.DataFrame:
        """Count per group all episodes and the copies of earlier ones: group_id, episodes, copies."""
        steps = self.batch.frame.select("state_hash", taken=self.facts["taken"], episode_id=self.facts["episode_id"])
        groups = self.facts.unique("episode_id", maintain_order=True).select("episode_id", "group_id")
        hashes = pl.col("decisions").drop_nulls()
        figures = groups.join(hash_decisions(steps), on="episode_id").group_by("group_id", maintain_order=True)
        return figures.agg(episodes=pl.len(), copies=hashes.len() - hashes.n_unique())


def take_previous(name: str) -> pl.Expr:
    """Return a column's value at the episode's previous step, NULL at the first."""
    same = pl.col("episode_id") == pl.col("episode_id").shift()
    return pl.when(same).then(pl.col(name).shift())


def take_next(name: str) -> pl.Expr:
    """Return a column's value at the episode's next step, NULL at the last."""
    same = pl.col("episode_id") == pl.col("episode_id").shift(-1)
    return pl.when(same).then(pl.col(name).shift(-1))


_NUMBERS = Substitutions(substitutions=(Substitution(pattern="[0-9]+", replacement="0"),))
CANDIDATES: dict[str, Anchors] = {
    "exact": ExactText(),
    "no errors": NoErrors(),
    "tool results": ToolResults(),
    "json": CanonicalJson(),
    "numbers alike": _NUMBERS,
    "numbers alike, no errors": Chain(steps=(NoErrors(), _NUMBERS)),
    "last 2 states": LastStates(k=2),
}
"""Definitions that are measured by default: cheap ones that show the nature of the texts."""


def collect_columns(definitions: Iterable[Anchors], present: list[str]) -> tuple[str, ...]:
    """Return the columns that the definitions read, once each."""
    return tuple(dict.fromkeys(name for definition in definitions for name in definition.columns(present)))


def measure(walks: Walks, definitions: Mapping[str, Anchors]) -> pl.DataFrame:
    """Measure the definitions over the same steps; the walks have the columns that the definitions read.

    The result has one row per definition, with its name in `anchors`. Shares of the compared episodes' steps (`steps`):
    `known` (with a key), `shared` (two or more episodes of the group visited the state), `singleton` (no other step has
    the state). `states` is the number of distinct states. Over shared states: `episodes` (mean number of visiting
    episodes), `one_action` (share with one action), `ways_in` (mean number of distinct actions before), `errors` (share
    of steps with an error mark). `seconds` is CPU time. NULL means unknown.
    """
    return pl.concat(_measure_definition(name, definition, walks) for name, definition in definitions.items())


def _measure_definition(name: str, definition: Anchors, walks: Walks) -> pl.DataFrame:
    start = process_time()
    keys_N = definition.keys(walks.batch, walks.included_N)
    seconds = process_time() - start
    rows = walks.facts.with_columns(keys_N.alias("key")).filter("included")
    states = (
        rows.lazy()
        .filter(pl.col("key").is_not_null())
        .group_by("group_id", "key")
        .agg(
            pl.len().alias("steps"),
            pl.col("episode_id").n_unique().alias("episodes"),
            pl.when(pl.col("has_actions").any()).then(pl.col("taken").n_unique()).alias("actions"),
            pl.when(pl.col("has_actions").any()).then(pl.col("led_here").drop_nulls().n_unique()).alias("ways_in"),
            pl.col("is_error").sum().alias("errors"),
            pl.col("is_error").count().alias("marked"),
        )
    )
    steps, shared = pl.col("steps"), pl.col("episodes") >= 2
    return states.select(
        pl.lit(name).alias("anchors"),
        pl.lit(rows.height).alias("steps"),
        (steps.sum() / rows.height).alias("known"),
        (steps.filter(shared).sum() / rows.height).alias("shared"),
        ((steps == 1).sum() / rows.height).alias("singleton"),
        pl.len().alias("states"),
        pl.col("episodes").filter(shared).mean(),
        (pl.col("actions").filter(shared) == 1).mean().alias("one_action"),
        pl.col("ways_in").filter(shared).mean(),
        pl.when(pl.col("marked").filter(shared).sum() > 0)
        .then(pl.col("errors").filter(shared).sum() / steps.filter(shared).sum())
        .alias("errors"),
        pl.lit(seconds).alias("seconds"),
    ).collect()


def find_largest_anchors(walks: Walks, definition: Anchors, count: int) -> pl.DataFrame:
    """Return the shared anchors with most steps, one row per key, most steps first. The walks have `state`.

    Columns: `state` (its first text), `steps`, `groups`, `states_before` and `actions_before` (distinct states and
    actions that led to it), `actions` (distinct actions there), `score_std` (mean deviation of the visiting episodes'
    scores over its groups, weighted by steps). NULL means unknown.
    """
    codes_N, texts_V = walks.texts()
    keys_N = definition.keys(walks.batch, walks.included_N)
    rows = walks.facts.with_columns(keys_N.alias("key"), codes_N.alias("code")).filter("included")
    rows = rows.with_columns(take_previous("key").alias("came")).filter(pl.col("key").is_not_null())
    of_groups = rows.group_by("key", "group_id").agg(
        pl.len().alias("n"), pl.col("episode_id").n_unique().alias("episodes"), pl.col("score").std(ddof=1)
    )
    shared = of_groups.filter(pl.col("episodes") >= 2)
    is_scored = pl.col("score").is_not_null()
    sizes = shared.group_by("key").agg(
        pl.col("n").sum().alias("steps"),
        pl.len().alias("groups"),
        ((pl.col("score") * pl.col("n")).sum() / pl.col("n").filter(is_scored).sum()).fill_nan(None).alias("score_std"),
    )
    largest = sizes.sort("steps", "key", descending=[True, False]).head(count)
    visits = rows.join(shared, on=["key", "group_id"], how="semi").join(largest.select("key"), on="key", how="semi")
    by_action = pl.when(pl.col("has_actions").any())
    ways = (
        visits.join(texts_V, on="code", how="left")
        .group_by("key")
        .agg(
            pl.col("text").min().alias("state"),
            pl.col("came").drop_nulls().n_unique().alias("states_before"),
            by_action.then(pl.col("led_here").drop_nulls().n_unique()).alias("actions_before"),
            by_action.then(pl.col("taken").n_unique()).alias("actions"),
        )
    )
    names = ["state", "steps", "groups", "states_before", "actions_before", "actions", "score_std"]
    return largest.join(ways, on="key", maintain_order="left").select(names)


def scan_steps(
    snapshot: Snapshot, definitions: Sequence[Anchors], *, where: str | None = None, groups: int | None = None
) -> pl.LazyFrame:
    """Scan the steps to measure, always with their states.

    `where` is a SQL predicate over `episodes`. `groups` limits the number of groups, to those with the smallest ids;
    ids are hashes, so this is a fair sample. UsageError for a bad predicate, DataRefusedError without an episode.
    """
    of_steps, of_episodes = TABLES["steps"].names, TABLES["episodes"].names
    present = [*of_steps, *of_episodes]
    definition_columns = collect_columns(definitions, present)
    episode_columns = [name for name in definition_columns if name in of_episodes and name not in of_steps]
    columns = ["episode_id", "group_id", "status", "env_return AS episode_score", *episode_columns]
    episodes = select_where(snapshot, list(dict.fromkeys(columns)), where)
    if groups is not None:
        sampled_ids = episodes["group_id"].unique().sort().head(groups)
        episodes = episodes.filter(pl.col("group_id").is_in(sampled_ids.implode()))
    step_names = (
        name
        for name in (*STATE_COLUMNS, *definition_columns, "is_active", "state_is_error", *ACTIONS)
        if name in of_steps
    )
    read = [name for name in dict.fromkeys(step_names) if name not in KEYS]
    steps = snapshot.scan("steps").select("episode_id", "step_index", *read)
    return steps.join(episodes.lazy(), on="episode_id", how="inner")


COMMON, CHANGES, TURNS, HIDDEN, ELSEWHERE = 0.05, 0.8, 0.02, 0.02, 0.1
MOVES, LONG = 20, 2
ONCE = 0.99
"""Minimum share of the texts with the number that have it once."""
ALIKE = 0.95
"""Minimum share of a number's occurrences with a character, for the character to be its neighbour."""
NUMBER = "[0-9]+(?::[0-9]{2})*"
"""A number or a time of day; the value of 10:05:30 is 100530."""
_WIDTH = 16
_NEIGHBOURS = ((1, 0), (2, 0), (1, 1), (4, 0), (2, 2), (8, 0), (0, 4), (4, 4), (_WIDTH, 0), (0, _WIDTH))
"""Numbers of characters before and after that identify a number: tried in order until it is a counter."""
_LONGEST = 4000
"""Characters read of a longer text, half at each end, where status lines are."""
_GAP = "\x00"


@dataclass(frozen=True, slots=True)
class Counter:
    """A number that grows or falls with the steps."""

    substitution: Substitution
    """Substitution that removes it from a text."""
    example: str
    """The number with its neighbours in one text."""
    present: float
    """Share of the steps whose text has it."""
    changes: float
    """Share of changes between successive texts of an episode that have it."""


def find_counters(walks: Walks) -> list[Counter]:
    """Find the counters in the states, the most frequent first, independent of the order of the walks."""
    codes_N, texts_V = walks.texts()
    rows = walks.facts.select("group_id", "episode_id", codes_N).filter(pl.Series(walks.included_N))
    steps = rows.height
    rows = rows.filter(pl.col("code").is_not_null())
    texts_V = texts_V.join(rows.select("code").unique(), on="code", how="semi").sort("code")
    candidates = list(_find_candidates(rows, _extract_numbers(texts_V), steps)) if rows.height else []
    if not candidates:
        return []
    substitutions = Substitutions(substitutions=tuple(counter.substitution for counter, _ in candidates))
    rest_V = texts_V.select("code", rest=substitutions.rewrite(texts_V["text"]).hash())
    rows = rows.join(rest_V, on="code", maintain_order="left")
    hidden = rows.filter(pl.col("code").n_unique().over("group_id", "rest") > 1).height
    if hidden < HIDDEN * steps:
        return []
    counters = []
    for counter, occurrences in candidates:
        # Criterion 4: texts with the same number differ often enough, or siblings never have the same number.
        cells = rows.join(occurrences.select("code", "value"), on="code").group_by("group_id", "value")
        figures = cells.agg(episodes=pl.col("episode_id").n_unique(), rests=pl.col("rest").n_unique())
        meetings = figures.filter(pl.col("episodes") > 1)
        if meetings.filter(pl.col("rests") > 1).height >= ELSEWHERE * meetings.height:
            counters.append(counter)
    return sorted(counters, key=lambda counter: (-counter.present, counter.substitution.pattern))


def _extract_numbers(texts_V: pl.DataFrame) -> pl.DataFrame:
    """Extract the numbers of each text: code, number, value, before and after (neighbours in the line, digits as 0)."""
    half, text = _LONGEST // 2, pl.col("text")
    ends = (
        pl.when(text.str.len_chars() > _LONGEST).then(text.str.head(half) + "\n" + text.str.tail(half)).otherwise(text)
    )
    lines = ("\n" + ends + "\n").str.replace_all(_GAP, " ", literal=True).alias("text")
    between, same = pl.col("between"), pl.col("code") == pl.col("code").shift()
    digit_before = pl.when(same).then(between.shift().str.tail(_WIDTH) + "0").otherwise(pl.lit(""))
    return (
        texts_V.lazy()
        .filter(text.str.contains("[0-9]"))
        .select("code", lines)
        .select(
            "code",
            pl.concat_list(text.str.extract_all(NUMBER), pl.lit(None, pl.String)).alias("number"),
            text.str.replace_all(NUMBER, _GAP).str.replace_all("[ \t]+", " ").str.split(_GAP).alias("between"),
        )
        .explode("number", "between")
        .select(
            "code",
            "number",
            pl.col("number").str.replace_all(":", "", literal=True).cast(pl.Int64, strict=False).alias("value"),
            (digit_before + between).str.extract(f"(\n?[^\n]{{0,{_WIDTH}}})$", 1).alias("before"),
            between.shift(-1).str.extract(f"^([^\n]{{0,{_WIDTH}}}\n?)", 1).alias("after"),
        )
        .filter(pl.col("value").is_not_null())
        .collect()
    )


def _find_candidates(rows: pl.DataFrame, numbers: pl.DataFrame, steps: int) -> Iterator[tuple[Counter, pl.DataFrame]]:
    """Yield the counters by criteria 1 and 2, identified by few neighbours, with their occurrences."""
    numbers = numbers.join(rows.group_by("code").agg(visits=pl.len()), on="code")
    for width_before, width_after in _NEIGHBOURS:
        neighbours = pl.struct(pl.col("before").str.tail(width_before), pl.col("after").str.head(width_after))
        numbers_of_name = numbers.with_columns(name=neighbours.hash())
        often = numbers_of_name.group_by("name").agg(pl.col("visits").sum(), once=pl.col("code").n_unique() / pl.len())
        often = often.filter((pl.col("visits") >= COMMON * steps) & (pl.col("once") >= ONCE))
        numbers_of_name = numbers_of_name.join(often.select("name"), on="name", how="semi")
        for name, changes in _find_monotone(rows, numbers_of_name).sort("name").iter_rows():
            places = numbers_of_name.filter(name=name)
            if (label := _find_label(places)) is not None:
                number = places.sort("value")["number"][places.height // 2]
                example = f"{label[0]}{number}{label[1]}".strip()
                substitution = _build_substitution(*label, clock=places["number"].str.contains(":", literal=True).any())
                present = int(places.unique("code")["visits"].sum()) / steps
                yield Counter(substitution, example, present, changes), places
                numbers = numbers.join(places, on=["code", "before", "after"], how="anti")
        if numbers.is_empty():
            return


def _find_monotone(rows: pl.DataFrame, numbers: pl.DataFrame) -> pl.DataFrame:
    """Return `name` and `changes` of the numbers that change at nearly every step, in one direction."""
    readings = rows.with_row_index("row").join(numbers.select("code", "name", "value"), on="code").sort("name", "row")
    same = (pl.col("episode_id") == pl.col("episode_id").shift()) & (pl.col("name") == pl.col("name").shift())
    change = pl.when(same).then(pl.col("value") - pl.col("value").shift())
    shares = (
        readings.select("name", "episode_id", change=change)
        .group_by("name")
        .agg(
            pl.col("change").count().alias("moves"),
            pl.col("episode_id").n_unique().alias("episodes"),
            (pl.col("change") > 0).mean().alias("rises"),
            (pl.col("change") < 0).mean().alias("falls"),
        )
        .filter(pl.col("moves") >= pl.max_horizontal(pl.lit(MOVES), LONG * pl.col("episodes")))
    )
    changes, turns = pl.max_horizontal("rises", "falls"), pl.min_horizontal("rises", "falls")
    return shares.filter((changes >= CHANGES) & (turns <= TURNS)).select("name", changes=changes)


def _find_label(places: pl.DataFrame) -> tuple[str, str] | None:
    """Return the common text before and after a number, digits as 0; None if it is too short."""
    before = _find_common(places["before"], from_end=True)
    after = _find_common(places["after"], from_end=False)
    label = before.rpartition("0")[2]
    if _count_letters(label) >= 3:
        before = label
    if not before.startswith(("\n", " ")) and " " in before.strip(" "):
        before = before.partition(" ")[2]  # drop half a word
    if _count_letters(before) >= 2:
        after = ""
    return (before.lstrip(" "), after) if _count_letters(before + after) >= 2 else None


def _build_substitution(text_before: str, text_after: str, *, clock: bool) -> Substitution:
    """Build the substitution that removes the number between these texts, with the blanks before it."""
    before = ("^" if text_before.startswith("\n") else "") + _build_pattern(text_before.strip("\n "))
    after = _build_pattern(text_after.removesuffix("\n")) + ("$" if text_after.endswith("\n") else "")
    number, flag = NUMBER if clock else "[0-9]+", "(?m)" if "\n" in text_before + text_after else ""
    pattern = f"{flag}({before})[ \\t]*{number}" + (f"({after})" if text_after else "")
    return Substitution(pattern=pattern, replacement="$1$2" if text_after else "$1")


def _find_common(sides: pl.Series, *, from_end: bool) -> str:
    """Return the longest text that nearly all sides have at their end or start."""
    common = ""
    for length in range(1, _WIDTH + 2):
        cut = sides.str.tail(length) if from_end else sides.str.head(length)
        text, count = cut.value_counts().sort("count", cut.name, descending=True).row(0)
        if count < ALIKE * len(sides) or len(text) < length:
            return common
        common = text
    return common


def _count_letters(text: str) -> int:
    """Count characters except blanks and punctuation; the end of a line counts."""
    return len(re.sub("[ .,;]", "", text))


def _build_pattern(context: str) -> str:
    """Build a pattern for a number's neighbours, with blanks of any width and any other number."""
    return escape_pattern(context).replace(" ", "[ \\t]+").replace("0", "[0-9:]+")


def escape_pattern(text: str) -> str:
    """Return a pattern that matches exactly the text, in the syntax of Rust's regex crate."""
    return re.sub(r"[\\.+*?()|\[\]{}^$]", r"\\\g<0>", text)


LONGEST, ENTRIES, COMMON_TEXT = 300, 10, 0.005
STATES_BEFORE, ACTIONS_BEFORE = 4.0, 3.0
SAME_NEXT, REPEATS, PAIRS, UNDECIDED, AGREE, ALONE = 0.5, 0.5, 5, 3, 2, 0.9


@dataclass(frozen=True, slots=True)
class ErrorText:
    """A text that many different states lead to."""

    text: str
    """The state without counters."""
    steps: int
    states_before: int
    """Number of distinct states before it."""
    actions_before: int
    """Number of distinct actions before it."""
    pairs: int
    """Pairs of steps of a group that came to it from different states and then took the same action."""
    same_next: float | None
    """Share of these pairs with the same next text."""
    usual: float
    """The same share over all other texts."""

    @property
    def is_decided(self) -> bool:
        """Return whether criterion 3 has enough pairs in a world that repeats itself."""
        return self.pairs >= PAIRS and self.usual >= REPEATS


def find_error_texts(walks: Walks, texts_V: pl.DataFrame, codes_N: pl.Series) -> list[ErrorText]:
    """Find the error texts and the undecided ones, the most frequent first.

    Args:
        walks: the steps; without actions the result is empty.
        texts_V: `code` and `text` of each state, without counters; several codes may have one text.
        codes_N: code of each row, NULL for an unknown state, which neither follows nor precedes a text.
    """
    names_V = texts_V.select("code", place=pl.col("text").rank("dense"))
    rows = walks.facts.with_columns(codes_N.alias("code")).filter("included")
    rows = rows.join(names_V, on="code", how="left", maintain_order="left")
    rows = rows.with_columns(take_previous("place").alias("came"))
    entries = rows.filter(pl.col("came") != pl.col("place"), pl.col("taken").is_not_null())
    short = texts_V.filter(pl.col("text").str.len_chars() <= LONGEST).join(names_V, on="code")
    passing = _find_widely_reached(entries, rows.height).join(short.unique("place").select("place", "text"), on="place")
    suspects = _find_suspects(rows, passing).join(rows.group_by("place").agg(steps=pl.len()), on="place")
    suspects = suspects.sort("steps", "text", descending=[True, False])
    return [ErrorText(**row) for row in suspects.select(ErrorText.__slots__).iter_rows(named=True)]


def _find_suspects(rows: pl.DataFrame, passing: pl.DataFrame) -> pl.DataFrame:
    """Return the texts that no pairs clear, with pairs, same_next and usual."""
    few, agree = pl.col("pairs") < UNDECIDED, pl.col("same").fill_null(0) >= AGREE
    is_state = (~few | agree) & (pl.col("same_next") >= SAME_NEXT * pl.col("usual"))
    clear_count = -1
    while clear_count:
        suspects = _add_pairs(rows, passing, hidden=passing["place"])
        passing = suspects.filter(~is_state.fill_null(value=False)).select(passing.columns)
        clear_count = suspects.height - passing.height
    errors, undecided = suspects.filter(~few), suspects.filter(few)
    alone = _add_pairs(rows, undecided.select(passing.columns), hidden=errors["place"])
    is_state = ~few & (pl.col("same_next") >= ALONE * pl.col("usual"))
    return pl.concat([errors, undecided.join(alone.filter(is_state), on="place", how="anti")])


def _add_pairs(rows: pl.DataFrame, texts: pl.DataFrame, *, hidden: pl.Series) -> pl.DataFrame:
    """Return the texts with pairs, same_next (NULL without pairs) and usual, as `_count_pairs` counts them."""
    pairs, usual = _count_pairs(rows, texts["place"], hidden)
    rows_of_pairs = texts.join(pairs, on="place", how="left").with_columns(
        pl.col("pairs").fill_null(0), usual=pl.lit(usual)
    )
    return rows_of_pairs.with_columns(same_next=pl.col("same") / pl.when(pl.col("pairs") > 0).then("pairs"))


def _find_widely_reached(entries: pl.DataFrame, steps: int) -> pl.DataFrame:
    """Return place, states_before and actions_before of the texts that pass 1 (except length) and 2."""

    def reached_by(name: str) -> pl.DataFrame:
        counts = entries.group_by("place", name).agg(n=pl.len().cast(pl.Float64)).group_by("place")
        n = pl.col("n")
        return counts.agg(n.sum().alias("entries"), pl.len().alias(name), (n.sum() ** 2 / (n**2).sum()).alias("many"))

    states, actions = reached_by("came"), reached_by("led_here")
    enough = pl.col("entries") >= max(ENTRIES, COMMON_TEXT * steps)
    states = states.filter(enough & (pl.col("many") >= STATES_BEFORE))
    reached = states.join(actions.filter(pl.col("many") >= ACTIONS_BEFORE), on="place")
    return reached.select("place", states_before="came", actions_before="led_here")


def _count_pairs(rows: pl.DataFrame, places: pl.Series, hidden: pl.Series) -> tuple[pl.DataFrame, float]:
    """Count the pairs of steps of a group with the same place and action, and those with the same next text.

    Returns place, pairs and same per place of `places`, over pairs from different states. Also returns the share of
    pairs with the same next text over all other places (0 without pairs). Hidden texts and the place itself are not
    states before or after a step.
    """
    state = pl.when(~pl.col("place").is_in(hidden.implode())).then("place")
    rows = rows.with_columns(state.forward_fill().over("episode_id").alias("last_state"), state.alias("state"))
    rows = rows.with_columns(take_previous("last_state").alias("origin"), take_next("state").alias("goes"))
    rows = rows.drop_nulls(["goes", "taken"])
    widely = rows.join(places.to_frame(), on="place", how="semi").drop_nulls("origin")
    widely = widely.filter(pl.col("origin") != pl.col("place"), pl.col("goes") != pl.col("place"))

    def alike(steps: pl.DataFrame, *names: str) -> pl.DataFrame:
        counts = steps.group_by("place", "group_id", "taken", *names).agg(n=pl.len().cast(pl.Int64))
        n, label = pl.col("n"), "_".join(("alike", *names))
        return counts.group_by("place").agg((n * (n - 1) // 2).sum().alias(label))

    counts_by_place = alike(widely)
    for names in (("origin",), ("goes",), ("origin", "goes")):
        counts_by_place = counts_by_place.join(alike(widely, *names), on="place")
    elsewhere = rows.filter(pl.col("state").is_not_null(), ~pl.col("place").is_in(places.implode()))
    pairs, same = (int(alike(elsewhere, *names).drop("place").to_series().sum()) for names in ((), ("goes",)))
    return counts_by_place.select(
        "place",
        pairs=pl.col("alike") - pl.col("alike_origin"),
        same=pl.col("alike_goes") - pl.col("alike_origin_goes"),
    ), same / pairs if pairs else 0.0


SUGGESTED = "suggested"
"""Name of the suggested definition among the measured ones."""
_EXCERPT = 58


@dataclass(frozen=True, slots=True)
class Advice:
    """Counters, error texts, and the `definition` without them, which is absent if the states have neither."""

    counters: tuple[Counter, ...]
    error_texts: tuple[ErrorText, ...]
    undecided: tuple[ErrorText, ...]
    definition: Anchors | None

    def lines(self) -> list[str]:
        """Describe each counter and text."""
        lines = [
            f'counter: "{shorten(counter.example)}", in {counter.present:.0%} of the steps; from one of them to '
            f"the next it changes in {counter.changes:.0%} of the cases, in one direction"
            for counter in self.counters
        ]
        lines += [
            f"error text: {_describe_reach(text)}; of {text.pairs} pairs of them with the same next action, "
            f"{text.same_next:.0%} met the same next text (elsewhere {text.usual:.0%})"
            for text in self.error_texts
        ]
        lines += [
            f"undecided: {_describe_reach(text)}; too few of them have the same next action (pairs: {text.pairs}) to "
            "decide whether it is one situation"
            for text in self.undecided
        ]
        return lines


def advise(walks: Walks) -> Advice:
    """Find counters, and then error texts in the rest of the texts. The walks have `state`."""
    counters = find_counters(walks)
    codes_N, texts_V = walks.texts()
    stages: list[Substitutions | NoErrors] = []
    if counters:
        substitutions = Substitutions(substitutions=tuple(counter.substitution for counter in counters))
        texts_V = texts_V.with_columns(text=substitutions.rewrite(texts_V["text"]))
        stages.append(substitutions)
    error_candidates = find_error_texts(walks, texts_V, codes_N)
    error_texts = [text for text in error_candidates if text.is_decided]
    undecided = tuple(text for text in error_candidates if not text.is_decided)
    if error_texts:
        texts = "|".join(escape_pattern(error.text) for error in error_texts)
        stages.append(NoErrors(pattern=rf"\A(?:{texts})\z"))
    definition: Anchors | None = Chain(steps=tuple(stages)) if len(stages) > 1 else stages[0] if stages else None
    return Advice(tuple(counters), tuple(error_texts), undecided, definition)


def _describe_reach(candidate: ErrorText) -> str:
    return (
        f'"{shorten(candidate.text)}", {candidate.steps} steps, after {candidate.states_before} different states by '
        f"{candidate.actions_before} different actions"
    )


def shorten(text: str) -> str:
    """Return the start of a text as one line."""
    line = " ".join(text.split())
    return line if len(line) <= _EXCERPT else line[: _EXCERPT - 3] + "..."


KIND = "anchors"


def record_measures(
    lake: Lake, snapshot: Snapshot, *, definitions: Mapping[str, Anchors], measured: pl.DataFrame, **sample: str | int
) -> int:
    """Store a measurement as the counts of a job of kind `anchors`, which the viewer shows; return the job's id.

    Args:
        lake: lake to write.
        snapshot: measured snapshot.
        definitions: name in `measured` -> definition.
        measured: result of `measure`.
        sample: options of the measured part of the lake: `where`, `groups`.
    """
    definitions_json = {name: definition.model_dump(mode="json") for name, definition in definitions.items()}
    with lake.job(
        kind=KIND,
        parameters=dict(sample) | {"definitions": definitions_json},
        snapshot=snapshot,
        code=[sys.modules[__name__]],
    ) as job:
        job.counts |= {"rows_in": int(measured["steps"].max() or 0), "rows_out": 0, "definitions": measured.to_dicts()}  # type: ignore[arg-type]
    return job.job_id
