"""What to take out of the states' texts: counters, and texts that say nothing of where the agent is.

Found in the texts and in what came before and after them (`anchor_counters`, `anchor_errors` say by which criteria),
and put together as a definition that `credit` takes as it is. Never applied by itself: the person decides, who knows
what the texts mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pipelines.credit.anchor_counters import Counter, escape, find_counters
from pipelines.credit.anchor_errors import ErrorText, find_error_texts
from pipelines.credit.anchor_walks import Walks
from pipelines.credit.anchors import Anchors, Chain, NoErrors, Substitutions

NAME = "suggested"
"""What the definition is called among the measured ones."""
_EXCERPT = 58


@dataclass(frozen=True, slots=True)
class Advice:
    """What was found; `definition` is None where there is nothing to take out.

    Attributes:
        counters: numbers that grow or fall with the steps.
        error_texts: texts that forget the state.
        undecided: texts that many states lead to, of which it is not known whether they forget it.
        definition: the texts without the counters, and without anchors at the error texts.
    """

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
    """Look for counters, and then for error texts in what is left.

    Args:
        walks: steps, with `state`.
    """
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
        stages.append(NoErrors(pattern=_any_of([one.text for one in error_texts])))
    definition: Anchors | None = Chain(steps=tuple(stages)) if len(stages) > 1 else stages[0] if stages else None
    return Advice(tuple(counters), tuple(error_texts), tuple(one for one in found if not one.is_decided), definition)


def _any_of(texts: Sequence[str]) -> str:
    """A pattern that matches these texts, whole, and no others."""
    return rf"\A(?:{'|'.join(escape(text) for text in texts)})\z"


def _reached(found: ErrorText) -> str:
    """A text and how differently it was reached."""
    return (
        f'"{in_a_line(found.text)}", {found.steps} steps, after {found.states_before} different states by '
        f"{found.actions_before} different actions"
    )


def in_a_line(text: str) -> str:
    """The beginning of a text, as one line."""
    line = " ".join(text.split())
    return line if len(line) <= _EXCERPT else line[: _EXCERPT - 3] + "..."
