"""Align: which step of an episode a function's step outputs mean.

`StepOutput.step_index` is the step's number (0, 1, 2, ...) or the index of its assistant message in `messages`: people
write both. A function may declare which (`step_index="step"` or `"message"`); otherwise whatever fits all outputs of an
episode is taken, and where both do or neither does, nothing is guessed: the outputs are reported. So is every output
that means no step, or a step that has one already.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipelines.score.results import StepOutput
from pipelines.score.reward_function import StepIndex

EXAMPLES = 5
"""Faults of an episode that are spelled out."""


@dataclass(frozen=True, slots=True)
class Aligned:
    """Step outputs by the step they mean."""

    outputs: dict[int, StepOutput] = field(default_factory=dict)
    """step_index -> its output."""
    faults: list[str] = field(default_factory=list)
    """One sentence per output that means no step."""

    @property
    def error(self) -> str | None:
        """The faults as one text."""
        if not self.faults:
            return None
        rest = len(self.faults) - EXAMPLES
        more = f"; and {rest} more" if rest > 0 else ""
        return f"{len(self.faults)} step outputs match no step: {'; '.join(self.faults[:EXAMPLES])}{more}"


def align(
    outputs: Sequence[StepOutput], steps_S: Sequence[int], messages_S: Sequence[int], meaning: StepIndex = "auto"
) -> Aligned:
    """Map step outputs to steps.

    Args:
        outputs: of one episode.
        steps_S: numbers of its active steps, in order.
        messages_S: index in `messages` of each step's assistant message.
        meaning: what `step_index` counts.
    """
    numbers = [_number(output.step_index) for output in outputs]
    of_message = dict(zip(messages_S, steps_S, strict=True))
    of_step = {step: step for step in steps_S}
    known = [number for number in numbers if number is not None]
    table: dict[int, int] | None = {"step": of_step, "message": of_message}.get(meaning)
    if meaning == "auto":
        hits = sum(n in of_step for n in known), sum(n in of_message for n in known)
        if hits[0] == hits[1] and any(of_step.get(n) != of_message.get(n) for n in known):
            pairs = zip(outputs, numbers, strict=True)
            unclear = (
                _unknown(o.step_index, steps_S, messages_S) if n is None else _ambiguous(n, of_step, of_message)
                for o, n in pairs
            )
            return Aligned(faults=list(unclear))
        table = of_message if hits[1] > hits[0] else of_step
    found = Aligned()
    for output, number in zip(outputs, numbers, strict=True):
        step = None if number is None else (table or {}).get(number)
        if step is None:
            found.faults.append(_unknown(output.step_index, steps_S, messages_S))
        elif step in found.outputs:
            found.faults.append(f"step_index {output.step_index} means step {step}, which has an output already")
        else:
            found.outputs[step] = output
    return found


def _number(step_index: object) -> int | None:
    """The index as a number; a text of digits is one."""
    if isinstance(step_index, bool):
        return None
    if isinstance(step_index, int):
        return step_index
    return int(step_index) if isinstance(step_index, str) and step_index.isascii() and step_index.isdecimal() else None


def _ambiguous(number: int, of_step: dict[int, int], of_message: dict[int, int]) -> str:
    meanings = []
    if number in of_step:
        meanings.append(f"step {number}")
    if number in of_message:
        meanings.append(f"message {number} (step {of_message[number]})")
    told = " or ".join(meanings) or "no step at all"
    return f'step_index {number} may mean {told}: declare @reward_function(step_index="step") or "message"'


def _unknown(step_index: object, steps_S: Sequence[int], messages_S: Sequence[int]) -> str:
    if not steps_S:
        return f"step_index {step_index!r}: the episode has no steps"
    said = f"{', '.join(map(str, messages_S[:EXAMPLES]))}{', ...' if len(messages_S) > EXAMPLES else ''}"
    return f"step_index {step_index!r}: valid are steps {steps_S[0]} to {steps_S[-1]}, or messages {said}"
