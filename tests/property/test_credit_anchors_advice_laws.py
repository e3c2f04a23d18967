"""What `trajlake anchors` finds in texts alone, on games whose states are known.

1. A planted counter is found, no matter what it is called and no matter where it stands, and taking it out leaves the
   game's states.
2. A planted error text is found, and nothing else is taken for one.
3. A game with neither gets no advice; nor do a menu, a hub of many doors, a first state, a page number or a score.
4. The order of the rows makes no difference.
"""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.text_game import ERRORS
from pipelines.credit.anchors import Substitutions
from pipelines.credit.anchors.measures import PAIRS, advise
from testkit.anchor_keys import partition
from testkit.examples import examples
from testkit.text_games import Row, World, game_rows, reworded, walk_rows, walks_of

COUNTERS: dict[str, Callable[[int, str], str]] = {
    "after the view": lambda n, view: f"{view}\nMoves: {n}",
    "alone in its line": lambda n, view: f"{view}\n{n}\n",
    "at the right edge": lambda n, view: f"Turns{n:>6}\n{view}",
    "before the view": lambda n, view: f"Move {n}. {view}",
    "budget": lambda n, view: f"You have {500 - n} moves left. {view}",
    "clock": lambda n, view: f"[{n // 60 + 9:02}:{n % 60:02}] {view}",
    "in brackets": lambda n, view: f"{view} [{n}]",
    "in front of its word": lambda n, view: f"{view}\n{n} turns so far",
    "score and moves": lambda n, view: f"{view.partition(' ')[0]} =-3/{n}\n{view}",
    "seconds": lambda n, view: f"{view}\n2024-05-15T{n // 3600:02}:{n // 60 % 60:02}:{n % 60:02}",
}


def without(rows: list[Row], substitutions: Substitutions) -> list[int | None]:
    import polars as pl

    return partition(substitutions.rewrite(pl.Series([row["state"] for row in rows])).to_list())


@pytest.mark.parametrize("name", COUNTERS)
@settings(deadline=None, max_examples=examples(4))
@given(seed=st.integers(0, 10**6), start=st.integers(0, 90), pace=st.integers(1, 7))
def test_a_planted_counter_is_found(name: str, seed: int, start: int, pace: int) -> None:
    plain = game_rows(6, seed)
    rows = reworded(plain, lambda row: COUNTERS[name](start + pace * row["step_index"], row["state"]))
    advice = advise(walks_of(rows))
    assert len(advice.counters) == 1
    assert advice.error_texts == ()
    assert isinstance(advice.definition, Substitutions)
    assert without(rows, advice.definition) == partition([row["state"] for row in plain])


@settings(deadline=None, max_examples=examples(6))
@given(st.integers(0, 10**6), st.booleans())
def test_planted_error_texts_are_found_and_nothing_else(seed: int, counter: bool) -> None:
    rows = game_rows(40, seed, counter=counter, errors=True)
    advice = advise(walks_of(rows))
    assert {error_text.text for error_text in advice.error_texts} == set(ERRORS)
    assert len(advice.undecided) <= 1, "a room that hardly anyone visited twice"
    assert len(advice.counters) == counter
    for error_text in advice.error_texts:
        assert error_text.steps == sum(row["state"] == error_text.text for row in rows)
        assert error_text.pairs >= PAIRS


@settings(deadline=None, max_examples=examples(8))
@given(st.integers(0, 10**6), st.integers(2, 40))
def test_a_clean_game_gets_no_advice(seed: int, worlds: int) -> None:
    advice = advise(walks_of(game_rows(worlds, seed)))
    assert (advice.counters, advice.error_texts, advice.undecided, advice.definition) == ((), (), (), None)


@settings(deadline=None, max_examples=examples(6))
@given(st.integers(0, 10**6))
def test_the_order_of_the_rows_makes_no_difference(seed: int) -> None:
    rows = game_rows(12, seed, counter=True, errors=True)
    shuffled = random.Random(seed).sample(rows, len(rows))
    assert advise(walks_of(shuffled)) == advise(walks_of(rows))


ROOMS = [f"room {letter}" for letter in "abcdefgh"]
MENU: World = {room: {"menu": "menu", "wait": room} for room in ROOMS} | {"menu": {room: room for room in ROOMS}}
DOORS: World = {room: {f"leave {room}": "hub", "wait": room} for room in ROOMS} | {"hub": {r: r for r in ROOMS}}
SHORT: World = {"a": {"x": "a", "y": "a"}}
PAGES: World = {f"Page {n}.": {"next": f"Page {min(n + 1, 40)}."} for n in range(41)}


@pytest.mark.parametrize(
    ("world", "start", "text"),
    [
        (MENU, None, lambda row: row["state"]),
        (DOORS, None, lambda row: row["state"]),
        (DOORS, "hub", lambda row: row["state"]),
        (PAGES, "Page 0.", lambda row: row["state"]),
        (PAGES, "Page 0.", lambda row: f"{row['state']} What is {row['state'][5:-1]} times 7?"),
        (
            SHORT,
            "a",
            lambda row: f"You are on path {row['episode_id'] % 4}.{row['step_index']}." * bool(row["step_index"]),
        ),
        (DOORS, "hub", lambda row: f"Score: {row['step_index'] // 3}\n{row['state']}"),
        (DOORS, "hub", lambda row: f"{row['state']}\nDie: {hash((row['episode_id'], row['step_index'])) % 6}"),
    ],
    ids=["menu", "many doors", "first state", "bare pages", "pages", "two numbers", "score", "die"],
)
@settings(deadline=None, max_examples=examples(4))
@given(seed=st.integers(0, 10**6))
def test_what_is_shared_by_right_is_left_alone(
    world: World, start: str | None, text: Callable[[Row], str], seed: int
) -> None:
    rows = walk_rows(world, seed, start=start, steps=3 if world is SHORT else 12)
    advice = advise(walks_of(reworded(rows, text)))
    assert (advice.counters, advice.error_texts, advice.definition) == ((), (), None)


@settings(deadline=None, max_examples=examples(4))
@given(st.integers(0, 10**6))
def test_rooms_of_many_doors_do_not_hide_each_other(seed: int) -> None:
    """Every room follows many rooms by many actions, so all are suspected, and none is one text for many situations."""
    rng = random.Random(seed)
    halls = [f"hall {n}" for n in range(20)]
    world = {hall: {f"door {k}": rng.choice([h for h in halls if h != hall]) for k in range(8)} for hall in halls}
    advice = advise(walks_of(walk_rows(world, seed, groups=20)))
    assert advice.error_texts == ()
    assert len(advice.undecided) <= 1


def test_without_repeated_actions_an_error_text_stays_undecided() -> None:
    """No one did the same twice after it: whether it forgets the state cannot be known, and that is what is said."""
    rows = [
        row | {"action": f"{row['action']} {row['episode_id']} {row['step_index']}"}
        for row in game_rows(20, 1, errors=True)
    ]
    advice = advise(walks_of(rows))
    assert advice.definition is None
    assert {undecided_text.text for undecided_text in advice.undecided} >= set(ERRORS)
    assert all(undecided_text.pairs == 0 and undecided_text.same_next is None for undecided_text in advice.undecided)
    assert any(line.startswith("undecided: ") for line in advice.lines())
