"""Align against a slow obvious reading of its rules."""

from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from pipelines.score import StepOutput
from pipelines.score.rows import align_steps


@st.composite
def episodes(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Numbers of active steps, and the places of their messages: both rise."""
    count = draw(st.integers(0, 6))
    steps = sorted(draw(st.sets(st.integers(0, 9), min_size=count, max_size=count)))
    messages = sorted(draw(st.sets(st.integers(0, 15), min_size=count, max_size=count)))
    return steps, messages


INDICES = st.lists(st.one_of(st.integers(-2, 16), st.integers(-2, 16).map(str), st.sampled_from(["x", ""])), max_size=6)


def meant(index: Any, steps: list[int], messages: list[int], meaning: str) -> int | None:
    """The step an index means under one reading."""
    if isinstance(index, str):
        if not index.isdecimal():
            return None
        index = int(index)
    if meaning == "step":
        return index if index in steps else None
    return steps[messages.index(index)] if index in messages else None


def oracle(indices: list[Any], steps: list[int], messages: list[int], meaning: str) -> tuple[dict[int, int], int]:
    """Step -> position of its output, and how many outputs match nothing."""
    if meaning == "auto":
        readings = {m: [meant(i, steps, messages, m) for i in indices] for m in ("step", "message")}
        fits = {m: sum(step is not None for step in reading) for m, reading in readings.items()}
        if fits["step"] == fits["message"]:
            if readings["step"] != readings["message"]:
                return {}, len(indices)
            meaning = "step"
        else:
            meaning = max(fits, key=lambda m: fits[m])
    positions: dict[int, int] = {}
    faults = 0
    for position, index in enumerate(indices):
        step = meant(index, steps, messages, meaning)
        if step is None or step in positions:
            faults += 1
        else:
            positions[step] = position
    return positions, faults


@given(episodes(), INDICES, st.sampled_from(["auto", "step", "message"]))
def test_it_agrees_with_the_obvious_reading(episode: Any, indices: list[Any], meaning: Any) -> None:
    steps, messages = episode
    outputs = [StepOutput(step_index=index, base_reward=float(n)) for n, index in enumerate(indices)]
    alignment = align_steps(outputs, steps, messages, meaning)
    expected, faults = oracle(indices, steps, messages, meaning)
    assert {step: int(output.base_reward or 0) for step, output in alignment.outputs.items()} == expected
    assert len(alignment.faults) == faults


@given(episodes(), INDICES, st.sampled_from(["auto", "step", "message"]))
@example(([0, 1, 2], [2, 4, 6]), [2, "x"], "auto")
def test_every_output_is_a_step_or_a_fault(episode: Any, indices: list[Any], meaning: Any) -> None:
    steps, messages = episode
    alignment = align_steps([StepOutput(index, 0.0) for index in indices], steps, messages, meaning)
    assert len(alignment.outputs) + len(alignment.faults) == len(indices)
    assert set(alignment.outputs) <= set(steps)


@given(episodes(), st.data())
def test_outputs_for_all_steps_are_understood_either_way(episode: Any, data: st.DataObject) -> None:
    """Anyone who rewards every step is never misread: the last message lies behind the last step."""
    steps, messages = list(range(len(episode[0]))), [2 * n + 2 for n in range(len(episode[0]))]
    by_message = data.draw(st.booleans())
    indices = messages if by_message else steps
    alignment = align_steps([StepOutput(index, float(n)) for n, index in enumerate(indices)], steps, messages)
    assert alignment.faults == []
    assert [alignment.outputs[step].base_reward for step in steps] == [float(n) for n in range(len(steps))]
