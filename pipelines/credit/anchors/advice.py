"""What to take out of the states' texts: counters, and texts that say nothing of where the agent is.

Put together as a definition that `credit` takes as it is, and never applied by itself: whoever knows what the texts
mean decides. `counters.py` says what a counter is. Error texts such as "You can't see any such thing." are false
anchors.

No mark of a converter is read, and no list of phrases: such a text gives itself away by what comes before and after it.
It is one if all of this holds, over the steps where it follows another text (its entries):

1. it is short, at most 300 characters (`LONGEST`), and has at least ten entries (`ENTRIES`), which are at least one
   step in two hundred (`COMMON`);
2. it follows many states, and many actions lead to it: at least four of the former (`STATES_BEFORE`) and three of the
   latter (`ACTIONS_BEFORE`), as effective numbers, 1 / sum of squared shares, so that a few strays do not count. A
   menu is reached from everywhere, but by one action; the first state of an episode follows nothing;
3. it forgets the state, and the world does not. Where two steps of a group had come to it from different states and
   then took the same action, they met the same next text less than half as often (`SAME_NEXT`) as two steps do that
   took the same action in any one other state; of at least five such pairs (`PAIRS`), in a world where the latter is
   usual (`REPEATS`: in half of the cases). After a room, even one with many doors, the same action leads to the same
   place. The state that a step came from is the last one that is not itself suspected; steps that a suspected text
   follows are left out, for what makes no sense makes none anywhere.

All texts that pass 1 and 2 are suspected at first. Rooms with many doors then hide the pairs of each other, so the
search goes in rounds. In each, texts that three pairs (`UNDECIDED`), or two that agree (`AGREE`), speak for are
cleared, and the rest is looked at again. A text that still has fewer pairs is looked at with the decided error texts
alone hidden, and cleared by three pairs that nearly always (`ALONE`) meet the same next text. With fewer pairs, or
where nothing repeats itself, 3 is not known: such a text is reported as undecided. On the text game of examples/, over
seven draws, the error texts meet the same next text in at most 7 % of their pairs and rooms in all; on the demo's
house, where nothing is an error alone, no text passes 2 (at most 2.2 effective actions); on tau-bench the empty answer
and `[]` pass 2 (85 and 12), with one pair each, and stay undecided.

What this cannot tell: an answer that hides the state and is asked for by one command, such as a list of what is
carried; and an error text that repeats what was said, which is another text each time.
"""

from dataclasses import dataclass

import polars as pl

from pipelines.credit.anchors import Anchors, Chain
from pipelines.credit.anchors.counters import Counter, escape, find_counters
from pipelines.credit.anchors.measures import Walks, after, before
from pipelines.credit.anchors.texts import NoErrors, Substitutions

LONGEST, ENTRIES, COMMON = 300, 10, 0.005
STATES_BEFORE, ACTIONS_BEFORE = 4.0, 3.0
SAME_NEXT, REPEATS, PAIRS, UNDECIDED, AGREE, ALONE = 0.5, 0.5, 5, 3, 2, 0.9


@dataclass(frozen=True, slots=True)
class ErrorText:
    """A text that many different states lead to."""

    text: str
    """The state, after the substitutions that it was looked for with."""
    steps: int
    states_before: int
    """Distinct states that it follows."""
    actions_before: int
    """Distinct actions that led to it."""
    pairs: int
    """Pairs of steps of a group that came to it from different states and then did the same."""
    same_next: float | None
    """Share of these pairs that met the same next text."""
    usual: float
    """That share after all other texts: how far this world repeats itself."""

    @property
    def is_decided(self) -> bool:
        """Whether there are pairs enough, in a world that repeats itself, to say that it forgets the state."""
        return self.pairs >= PAIRS and self.usual >= REPEATS


def find_error_texts(walks: Walks, texts_V: pl.DataFrame, codes_N: pl.Series) -> list[ErrorText]:
    """The texts that pass, or that may pass but cannot be decided; the most frequent first.

    Args:
        walks: the steps. Without actions nothing is found.
        texts_V: `code` and `text` of each state, without counters; several codes may have one text.
        codes_N: code of each row, NULL where the state is unknown: such a step follows, and leads to, nothing.
    """
    names_V = texts_V.select("code", place=pl.col("text").rank("dense"))
    rows = walks.facts.with_columns(codes_N.alias("code")).filter("included")
    rows = rows.join(names_V, on="code", how="left", maintain_order="left")
    rows = rows.with_columns(before("place").alias("came"))
    entries = rows.filter(pl.col("came") != pl.col("place"), pl.col("taken").is_not_null())
    short = texts_V.filter(pl.col("text").str.len_chars() <= LONGEST).join(names_V, on="code")
    passing = _widely_reached(entries, rows.height).join(short.unique("place").select("place", "text"), on="place")
    found = _suspected(rows, passing).join(rows.group_by("place").agg(steps=pl.len()), on="place")
    found = found.sort("steps", "text", descending=[True, False])
    return [ErrorText(**row) for row in found.select(ErrorText.__slots__).iter_rows(named=True)]


def _suspected(rows: pl.DataFrame, passing: pl.DataFrame) -> pl.DataFrame:
    """Return the passing texts that no pairs clear, with pairs, same_next and usual."""
    few, agree = pl.col("pairs") < UNDECIDED, pl.col("same").fill_null(0) >= AGREE
    is_state = (~few | agree) & (pl.col("same_next") >= SAME_NEXT * pl.col("usual"))
    cleared = -1
    while cleared:
        suspected = _with_pairs(rows, passing, hidden=passing["place"])
        passing = suspected.filter(~is_state.fill_null(value=False)).select(passing.columns)
        cleared = suspected.height - passing.height
    errors, rest = suspected.filter(~few), suspected.filter(few)
    alone = _with_pairs(rows, rest.select(passing.columns), hidden=errors["place"])
    is_state = ~few & (pl.col("same_next") >= ALONE * pl.col("usual"))
    return pl.concat([errors, rest.join(alone.filter(is_state), on="place", how="anti")])


def _with_pairs(rows: pl.DataFrame, texts: pl.DataFrame, *, hidden: pl.Series) -> pl.DataFrame:
    """Return the texts with pairs, same_next (NULL without pairs) and usual, as `_pairs` counts them."""
    pairs, usual = _pairs(rows, texts["place"], hidden)
    found = texts.join(pairs, on="place", how="left").with_columns(pl.col("pairs").fill_null(0), usual=pl.lit(usual))
    return found.with_columns(same_next=pl.col("same") / pl.when(pl.col("pairs") > 0).then("pairs"))


def _widely_reached(entries: pl.DataFrame, steps: int) -> pl.DataFrame:
    """place, states_before and actions_before of what passes 1 (but for its length) and 2."""

    def reached_by(name: str) -> pl.DataFrame:
        counts = entries.group_by("place", name).agg(n=pl.len().cast(pl.Float64)).group_by("place")
        n = pl.col("n")
        return counts.agg(n.sum().alias("entries"), pl.len().alias(name), (n.sum() ** 2 / (n**2).sum()).alias("many"))

    states, actions = reached_by("came"), reached_by("led_here")
    enough = pl.col("entries") >= max(ENTRIES, COMMON * steps)
    states = states.filter(enough & (pl.col("many") >= STATES_BEFORE))
    both = states.join(actions.filter(pl.col("many") >= ACTIONS_BEFORE), on="place")
    return both.select("place", states_before="came", actions_before="led_here")


def _pairs(rows: pl.DataFrame, places: pl.Series, hidden: pl.Series) -> tuple[pl.DataFrame, float]:
    """Pairs of steps of a group in one place that did the same, and those of them that met the same next text.

    Per place of `places`, of pairs that came from different states: place, pairs, same. And over all other places the
    share of the pairs that met the same next text (0 without any pair). Hidden texts, and a place itself, are no state
    that its steps come from or go to.
    """
    state = pl.when(~pl.col("place").is_in(hidden.implode())).then("place")
    rows = rows.with_columns(state.forward_fill().over("episode_id").alias("last_state"), state.alias("state"))
    rows = rows.with_columns(before("last_state").alias("origin"), after("state").alias("goes"))
    rows = rows.drop_nulls(["goes", "taken"])
    widely = rows.join(places.to_frame(), on="place", how="semi").drop_nulls("origin")
    widely = widely.filter(pl.col("origin") != pl.col("place"), pl.col("goes") != pl.col("place"))

    def alike(of: pl.DataFrame, *names: str) -> pl.DataFrame:
        counts = of.group_by("place", "group_id", "taken", *names).agg(n=pl.len().cast(pl.Int64))
        n, label = pl.col("n"), "_".join(("alike", *names))
        return counts.group_by("place").agg((n * (n - 1) // 2).sum().alias(label))

    found = alike(widely)
    for names in (("origin",), ("goes",), ("origin", "goes")):
        found = found.join(alike(widely, *names), on="place")
    elsewhere = rows.filter(pl.col("state").is_not_null(), ~pl.col("place").is_in(places.implode()))
    pairs, same = (int(alike(elsewhere, *names).drop("place").to_series().sum()) for names in ((), ("goes",)))
    return found.select(
        "place",
        pairs=pl.col("alike") - pl.col("alike_origin"),
        same=pl.col("alike_goes") - pl.col("alike_origin_goes"),
    ), same / pairs if pairs else 0.0


NAME = "suggested"
"""What the definition is called among the measured ones."""
_EXCERPT = 58


@dataclass(frozen=True, slots=True)
class Advice:
    """What was found; `definition` (without the counters, no anchors at error texts) is None if nothing was."""

    counters: tuple[Counter, ...]
    error_texts: tuple[ErrorText, ...]
    undecided: tuple[ErrorText, ...]
    definition: Anchors | None

    def lines(self) -> list[str]:
        """One sentence per finding."""
        found = [
            f'counter: "{in_a_line(one.example)}", in {one.present:.0%} of the steps; from one of them to the next it '
            f"changes in {one.changes:.0%} of the cases, in one direction"
            for one in self.counters
        ]
        found += [
            f"error text: {_reached(one)}; of {one.pairs} pairs of them that then did the same, {one.same_next:.0%} "
            f"met the same next text (elsewhere {one.usual:.0%})"
            for one in self.error_texts
        ]
        found += [
            f"undecided: {_reached(one)}; too few of them then did the same (pairs: {one.pairs}) to tell whether it is "
            "one situation"
            for one in self.undecided
        ]
        return found


def advise(walks: Walks) -> Advice:
    """Look for counters, and then for error texts in what is left. The walks hold `state`."""
    counters = find_counters(walks)
    codes_N, texts_V = walks.texts()
    stages: list[Substitutions | NoErrors] = []
    if counters:
        without = Substitutions(substitutions=tuple(one.substitution for one in counters))
        texts_V = texts_V.with_columns(text=without.rewrite(texts_V["text"]))
        stages.append(without)
    found = find_error_texts(walks, texts_V, codes_N)
    error_texts = [one for one in found if one.is_decided]
    if error_texts:
        texts = "|".join(escape(one.text) for one in error_texts)
        stages.append(NoErrors(pattern=rf"\A(?:{texts})\z"))
    definition: Anchors | None = Chain(steps=tuple(stages)) if len(stages) > 1 else stages[0] if stages else None
    return Advice(tuple(counters), tuple(error_texts), tuple(one for one in found if not one.is_decided), definition)


def _reached(found: ErrorText) -> str:
    return (
        f'"{in_a_line(found.text)}", {found.steps} steps, after {found.states_before} different states by '
        f"{found.actions_before} different actions"
    )


def in_a_line(text: str) -> str:
    """The beginning of a text, as one line."""
    line = " ".join(text.split())
    return line if len(line) <= _EXCERPT else line[: _EXCERPT - 3] + "..."
