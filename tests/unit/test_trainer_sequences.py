"""Which token rows form one sequence, on the cases that occur."""

import polars as pl
import pytest

from lake import ids
from lake.errors import ContractError
from trainer.data.sequences import link_sequences

COLUMNS = ["episode_id", "step_index", "n_context", "n_action", "prefix_step_index", "prefix_length"]


def rows(*values: tuple[int, int, int, int, int | None, int]) -> pl.DataFrame:
    types = [pl.Int64, *[pl.Int32] * 5]
    return pl.DataFrame(values, schema=dict(zip(COLUMNS, types, strict=True)), orient="row")


def linked(frame: pl.DataFrame) -> list[tuple[int, int, int, bool, int]]:
    return link_sequences(frame).select("episode_id", "sequence", "step_index", "repeated", "end").rows()


def test_an_append_only_episode_is_one_sequence() -> None:
    links = linked(rows((5, 0, 10, 2, None, 0), (5, 1, 3, 2, 0, 12), (5, 2, 0, 1, 1, 17)))
    assert links == [(5, 0, 0, False, 12), (5, 0, 1, False, 17), (5, 0, 2, False, 18)]


def test_a_null_prefix_opens_a_new_sequence() -> None:
    links = linked(rows((5, 0, 10, 2, None, 0), (5, 1, 4, 2, None, 0), (5, 2, 1, 1, 1, 6)))
    assert links == [(5, 0, 0, False, 12), (5, 1, 1, False, 6), (5, 1, 2, False, 8)]


def test_a_fork_repeats_the_path_to_the_step_it_extends() -> None:
    links = linked(rows((5, 0, 10, 2, None, 0), (5, 1, 3, 2, 0, 12), (5, 2, 1, 1, 0, 12)))
    assert links == [(5, 0, 0, False, 12), (5, 0, 1, False, 17), (5, 1, 0, True, 12), (5, 1, 2, False, 14)]


def test_a_step_without_tokens_may_lie_between() -> None:
    assert linked(rows((5, 0, 4, 2, None, 0), (5, 2, 3, 2, 0, 6))) == [(5, 0, 0, False, 6), (5, 0, 2, False, 11)]


def test_a_prefix_without_tokens_names_the_row() -> None:
    with pytest.raises(ContractError, match=f"episode_id={ids.to_text(5)}, step_index=2: extends step 1, which has no"):
        link_sequences(rows((5, 0, 4, 2, None, 0), (5, 2, 3, 2, 1, 6)))


def test_a_prefix_length_that_does_not_fit_names_the_row() -> None:
    with pytest.raises(ContractError, match=r"step_index=1: has prefix_length 7, .* ends at 6"):
        link_sequences(rows((5, 0, 4, 2, None, 0), (5, 1, 3, 2, 0, 7)))


def test_no_rows_give_no_sequences() -> None:
    assert link_sequences(rows()).is_empty()
