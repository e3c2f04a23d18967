"""Counters in the text of states: move numbers, clocks, budgets. They make every state look like a new one.

A number in a text is taken for a counter if

1. the same words stand beside it, it occurs once in a text that has it, and in at least 5 % of the steps (`COMMON`);
2. from one text of an episode that has it to the next it changes at least four times in five (`CHANGES`) and turns back
   at most one time in fifty (`TURNS`), seen in at least 20 moves (`MOVES`), two an episode (`LONG`): any two numbers
   are in some order. A score, a level or the number of things in hand changes now and then: in the
   games this was tried on at most at one step in five, while move counters change at every step, and at nine of ten
   where refused commands do not count;
3. it hides something: with all such numbers left out, at least 2 % of the steps (`HIDDEN`) are in a text that occurred
   in the same group with other numbers;
4. it is no place: where episodes of a group have the same number, they differ in the rest of the text in at least one
   case in ten (`ELSEWHERE`). A page or a floor has a text of its own, and siblings on the same page read the same.

What this cannot tell: a number that rises with nearly every step, and at which siblings differ, but that is part of the
situation, such as a score that pays for every move. The pattern is therefore shown, and not applied by itself.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import polars as pl

from pipelines.credit.anchors.measures import Walks
from pipelines.credit.anchors.texts import Substitution, Substitutions

COMMON, CHANGES, TURNS, HIDDEN, ELSEWHERE = 0.05, 0.8, 0.02, 0.02, 0.1
MOVES, LONG = 20, 2
ONCE = 0.99
"""Share of the texts with the number that have it once."""
ALIKE = 0.95
"""Share of the places that must have a character for it to count as standing beside the number."""
NUMBER = "[0-9]+(?::[0-9]{2})*"
"""A number or a time of day; the value of 10:05:30 is 100530."""
_WIDTH = 16
_NEIGHBOURS = ((1, 0), (2, 0), (1, 1), (4, 0), (2, 2), (8, 0), (0, 4), (4, 4), (_WIDTH, 0), (0, _WIDTH))
"""How many characters before and after tell numbers apart: from few to many, until what they name is a counter."""
_LONGEST = 4000
"""Of a longer text the first and last half of this are looked at: status lines are at its ends."""
_GAP = "\x00"


@dataclass(frozen=True, slots=True)
class Counter:
    """A number that grows or falls with the steps."""

    substitution: Substitution
    """Takes it out of a text."""
    example: str
    """The number with what stands beside it, in one text."""
    present: float
    """Share of the steps whose text has it."""
    changes: float
    """How often it changes from one text of an episode that has it to the next."""


def find_counters(walks: Walks) -> list[Counter]:
    """The counters in the states of some episodes, the most frequent first; the order of the walks does not matter."""
    codes_N, texts_V = walks.texts()
    rows = walks.facts.select("group_id", "episode_id", codes_N).filter(pl.Series(walks.included_N))
    steps = rows.height
    rows = rows.filter(pl.col("code").is_not_null())
    texts_V = texts_V.join(rows.select("code").unique(), on="code", how="semi").sort("code")
    found = list(_candidates(rows, _numbers(texts_V), steps)) if rows.height else []
    if not found:
        return []
    substitutions = Substitutions(substitutions=tuple(counter.substitution for counter, _ in found))
    rest_V = texts_V.select("code", rest=substitutions.rewrite(texts_V["text"]).hash())
    rows = rows.join(rest_V, on="code", maintain_order="left")
    hidden = rows.filter(pl.col("code").n_unique().over("group_id", "rest") > 1).height
    if hidden < HIDDEN * steps:
        return []
    counters = [counter for counter, places in found if _is_no_place(rows, places)]
    return sorted(counters, key=lambda one: (-one.present, one.substitution.pattern))


def _numbers(texts_V: pl.DataFrame) -> pl.DataFrame:
    """The numbers of each text: code, number, value, before and after (its neighbours in the line, digits as 0)."""
    half, text = _LONGEST // 2, pl.col("text")
    ends = (
        pl.when(text.str.len_chars() > _LONGEST).then(text.str.head(half) + "\n" + text.str.tail(half)).otherwise(text)
    )
    whole = ("\n" + ends + "\n").str.replace_all(_GAP, " ", literal=True).alias("text")
    between, same = pl.col("between"), pl.col("code") == pl.col("code").shift()
    digit_before = pl.when(same).then(between.shift().str.tail(_WIDTH) + "0").otherwise(pl.lit(""))
    return (
        texts_V.lazy()
        .filter(text.str.contains("[0-9]"))
        .select("code", whole)
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


def _candidates(rows: pl.DataFrame, numbers: pl.DataFrame, steps: int) -> Iterator[tuple[Counter, pl.DataFrame]]:
    """Numbers that pass 1 and 2, told apart by as few neighbours as will do, with the places they are at."""
    numbers = numbers.join(rows.group_by("code").agg(visits=pl.len()), on="code")
    for left, right in _NEIGHBOURS:
        neighbours = pl.struct(pl.col("before").str.tail(left), pl.col("after").str.head(right))
        named = numbers.with_columns(name=neighbours.hash())
        often = named.group_by("name").agg(pl.col("visits").sum(), once=pl.col("code").n_unique() / pl.len())
        often = often.filter((pl.col("visits") >= COMMON * steps) & (pl.col("once") >= ONCE))
        named = named.join(often.select("name"), on="name", how="semi")
        for name, changes in _counting(rows, named).sort("name").iter_rows():
            places = named.filter(name=name)
            if (label := _label(places)) is not None:
                number = places.sort("value")["number"][places.height // 2]
                example = f"{label[0]}{number}{label[1]}".strip()
                substitution = _substitution(*label, clock=places["number"].str.contains(":", literal=True).any())
                present = int(places.unique("code")["visits"].sum()) / steps
                yield Counter(substitution, example, present, changes), places
                numbers = numbers.join(places, on=["code", "before", "after"], how="anti")
        if numbers.is_empty():
            return


def _counting(rows: pl.DataFrame, named: pl.DataFrame) -> pl.DataFrame:
    """`name` and `changes` of the numbers that change at nearly every step, and in one direction."""
    seen = rows.with_row_index("row").join(named.select("code", "name", "value"), on="code").sort("name", "row")
    same = (pl.col("episode_id") == pl.col("episode_id").shift()) & (pl.col("name") == pl.col("name").shift())
    change = pl.when(same).then(pl.col("value") - pl.col("value").shift())
    shares = (
        seen.select("name", "episode_id", change=change)
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


def _is_no_place(rows: pl.DataFrame, places: pl.DataFrame) -> bool:
    """Whether episodes with the same number are somewhere else often enough; true if no two ever had the same."""
    cells = rows.join(places.select("code", "value"), on="code").group_by("group_id", "value")
    figures = cells.agg(episodes=pl.col("episode_id").n_unique(), rests=pl.col("rest").n_unique())
    met = figures.filter(pl.col("episodes") > 1)
    return met.filter(pl.col("rests") > 1).height >= ELSEWHERE * met.height


def _label(places: pl.DataFrame) -> tuple[str, str] | None:
    """What nearly all places of a number have before and after it, digits as 0; None if that is next to nothing."""
    left = _common(places["before"], from_end=True)
    right = _common(places["after"], from_end=False)
    label = left.rpartition("0")[2]
    if _letters(label) >= 3:
        left = label
    if not left.startswith(("\n", " ")) and " " in left.strip(" "):
        left = left.partition(" ")[2]  # no half of a word
    if _letters(left) >= 2:
        right = ""
    return (left.lstrip(" "), right) if _letters(left + right) >= 2 else None


def _substitution(left: str, right: str, *, clock: bool) -> Substitution:
    """What takes the number between these out of a text, with the blanks before it."""
    before = ("^" if left.startswith("\n") else "") + _regex(left.strip("\n "))
    after = _regex(right.removesuffix("\n")) + ("$" if right.endswith("\n") else "")
    number, flag = NUMBER if clock else "[0-9]+", "(?m)" if "\n" in left + right else ""
    pattern = f"{flag}({before})[ \\t]*{number}" + (f"({after})" if right else "")
    return Substitution(pattern=pattern, replacement="$1$2" if right else "$1")


def _common(sides: pl.Series, *, from_end: bool) -> str:
    """The longest text that nearly all of the sides have at their end, or at their beginning."""
    common = ""
    for length in range(1, _WIDTH + 2):
        cut = sides.str.tail(length) if from_end else sides.str.head(length)
        text, count = cut.value_counts().sort("count", cut.name, descending=True).row(0)
        if count < ALIKE * len(sides) or len(text) < length:
            return common
        common = text
    return common


def _letters(text: str) -> int:
    """Characters that tell something: an end of a line does, a blank or the end of a sentence does not."""
    return len(re.sub("[ .,;]", "", text))


def _regex(context: str) -> str:
    """A pattern for what stands beside a number: blanks of any width, any other number."""
    return escape(context).replace(" ", "[ \\t]+").replace("0", "[0-9:]+")


def escape(text: str) -> str:
    """A pattern that matches the text and nothing else, in the syntax of Rust's regex crate."""
    return re.sub(r"[\\.+*?()|\[\]{}^$]", r"\\\g<0>", text)
