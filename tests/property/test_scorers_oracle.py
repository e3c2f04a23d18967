"""Every built-in scorer against its slow, obvious twin, on generated episodes.

An example is a handful of episodes scored at once: a call costs some milliseconds, no matter what it is given.
"""

import json
import math
from datetime import UTC, datetime, timedelta
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.score.scorers import (
    AnswerQuality,
    Coordination,
    ExactMatch,
    FormatValidity,
    FuzzyMatch,
    KlInReward,
    LengthPenalty,
    Restart,
    RubricTerms,
    Scorer,
    ToolSuccess,
    Voting,
)
from pipelines.score.scorers.protocol import Normalise
from testkit import scorer_oracles as oracle
from testkit.examples import examples
from testkit.scorer_frames import coordination, scored, values, vote
from testkit.scorer_strategies import FLAG, LONG, PATHS, SCALARS, STEPS, TEXTS, TRUTHS, some, steps_of, tool_steps

FEW = settings(max_examples=examples(15), deadline=None)
Case = tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]
"""An episode, and its rows of other tables."""


def agree(scorer: Scorer, cases: list[Case], expected: list[oracle.Values]) -> pl.DataFrame:
    """Score all cases at once, and compare each with what is expected of it."""
    episodes, tables = [], {name: [] for case in cases for name in case[1]}
    for number, (episode, rows) in enumerate(cases):
        episodes.append(episode | {"episode_id": number})
        for name, steps_of_episode in rows.items():
            tables[name] += [row | {"episode_id": number} for row in steps_of_episode]
    actual = scored(scorer, episodes, **tables)
    known_scores = values(actual)
    assert known_scores.keys() == {(number, step) for number, scores_of in enumerate(expected) for step in scores_of}, (
        actual,
        expected,
    )
    for (number, step), mine in known_scores.items():
        value = expected[number][step]
        assert (mine is None) == (value is None), (cases[number], step, mine, value)
        if value is not None and mine is not None:
            assert math.isclose(mine, value, rel_tol=1e-12, abs_tol=1e-12), (cases[number], step, mine, value)
    return actual


# ---------------------------------------------------------------- answers


@FEW
@given(
    rollouts=some(st.tuples(STEPS, TRUTHS)),
    options=st.fixed_dictionaries(
        {
            "answer": st.sampled_from(["last_text", "last", "all"]),
            "truth_path": PATHS,
            "mode": st.sampled_from(["equals", "contains"]),
            "require": st.sampled_from(["any", "all"]),
            "numbers": st.booleans(),
            "no_answer": st.sampled_from([None, 0.0, -1.0]),
            "normalise": st.builds(
                Normalise,
                **dict.fromkeys(("unicode", "lowercase", "punctuation", "articles", "whitespace"), st.booleans()),
            ),
        }
    ),
)
def test_exact_match(rollouts: list[Any], options: dict[str, Any]) -> None:
    scorer = ExactMatch(**options)
    config = scorer.model_dump()
    cases: list[Case] = [({"ground_truth": truth}, {"steps": steps}) for steps, truth in rollouts]
    agree(scorer, cases, [oracle.exact_match(episode, rows["steps"], config) for episode, rows in cases])


@FEW
@given(
    rollouts=some(st.tuples(STEPS, TRUTHS)),
    measure=st.sampled_from(["token_f1", "jaccard", "difflib"]),
    path=PATHS,
    most=st.sampled_from([5, 30, 2000]),
)
def test_fuzzy_match(rollouts: list[Any], measure: Any, path: str, most: int) -> None:
    scorer = FuzzyMatch(measure=measure, truth_path=path, max_characters=most)
    config = scorer.model_dump()
    cases: list[Case] = [({"ground_truth": truth}, {"steps": steps}) for steps, truth in rollouts]
    agree(scorer, cases, [oracle.fuzzy_match(episode, rows["steps"], config) for episode, rows in cases])


@pytest.mark.parametrize("measure", ["token_f1", "jaccard", "difflib"])
@FEW
@given(pairs=some(st.tuples(TEXTS, TEXTS)))
def test_similarities_lie_between_0_and_1_and_know_equality(measure: Any, pairs: list[tuple[str, str]]) -> None:
    pairs = [*pairs, *((a, f" {a}\t") for a, _ in pairs)]
    episodes = [{"episode_id": n, "ground_truth": json.dumps(b)} for n, (_, b) in enumerate(pairs)]
    steps = [step | {"episode_id": n} for n, (a, _) in enumerate(pairs) for step in steps_of([a], [True])]
    actual = values(scored(FuzzyMatch(measure=measure, normalise=Normalise()), episodes, steps=steps))
    for n, (a, b) in enumerate(pairs):
        value = actual[n, None]
        assert value is None or 0.0 <= value <= 1.0
        if value is not None and oracle.split(a) == oracle.split(b):
            assert value == 1.0


# ---------------------------------------------------------------- tools


@settings(max_examples=examples(20), deadline=None)
@given(rollouts=some(tool_steps()))
def test_tool_success(rollouts: list[Any]) -> None:
    cases: list[Case] = [(episode, {"steps": steps}) for episode, steps in rollouts]
    agree(ToolSuccess(), cases, [oracle.tool_success(*rollout) for rollout in rollouts])


# ---------------------------------------------------------------- MassGen


@FEW
@given(
    rollouts=some(st.tuples(st.lists(LONG, max_size=3).map(lambda texts: steps_of(texts, [True] * 9)), TRUTHS)),
    is_reported=st.booleans(),
)
def test_answer_quality(rollouts: list[Any], is_reported: bool) -> None:
    scorer = AnswerQuality(reference="ground_truth" if is_reported else "none")
    cases: list[Case] = [({"ground_truth": truth}, {"steps": steps}) for steps, truth in rollouts]
    expected = [oracle.answer_quality(episode, rows["steps"], reference=is_reported) for episode, rows in cases]
    actual = agree(scorer, cases, expected)["value"].drop_nulls()
    assert actual.is_between(0.0, (1.0 if is_reported else 0.7) + 1e-12).all()


AGENTS = st.sampled_from(["ann", "bob", "cyd", "d\u00e9"])
VOTES = st.lists(st.tuples(AGENTS, AGENTS, st.integers(0, 5), st.sampled_from([None, 0, 1])), max_size=8)


def vote_spans(votes: list[Any]) -> list[dict[str, Any]]:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    return [
        vote(voter, choice, number, step_index=step, started_at=at + timedelta(seconds=n))
        for n, (voter, choice, number, step) in enumerate(votes)
    ]


@FEW
@given(elections=some(VOTES))
def test_voting(elections: list[Any]) -> None:
    cases: list[Case] = [({}, {"spans": vote_spans(votes)}) for votes in elections]
    agree(Voting(), cases, [oracle.voting(rows["spans"]) for _, rows in cases])


@FEW
@given(
    elections=some(st.tuples(VOTES, st.one_of(st.none(), st.integers(0, 20_000)), st.integers(0, 20_000))),
    quality=st.sampled_from([0.0, 0.7, 0.71, 1.0]),
)
def test_coordination(elections: list[Any], quality: float) -> None:
    cases: list[Case] = [
        ({"prompt_tokens": read, "completion_tokens": written}, {"spans": vote_spans(votes)})
        for votes, read, written in elections
    ]
    expected = [oracle.coordination(episode, rows["spans"], quality) for episode, rows in cases]
    agree(Coordination(quality=quality, missing="null"), cases, expected)
    assumed = [oracle.coordination(episode, rows["spans"], quality, assumes=True) for episode, rows in cases]
    agree(Coordination(quality=quality), cases, assumed)


QUALITY = st.one_of(st.none(), st.sampled_from([0.0, 0.2, 0.5, 0.7, 0.75, 1.0]))


@FEW
@given(rollouts=some(st.lists(st.tuples(st.booleans(), QUALITY, QUALITY), max_size=4)))
def test_restart(rollouts: list[Any]) -> None:
    cases: list[Case] = []
    expected: list[oracle.Values] = []
    for decisions in rollouts:
        data = [
            dict(zip(("should_restart", "previous_quality", "new_quality"), decision, strict=True))
            for decision in decisions
        ]
        spans = [coordination("restart_decision", decision, step_index=n) for n, decision in enumerate(data)]
        cases.append(({}, {"spans": spans}))
        rewards = [oracle.restart(*decision) for decision in decisions]
        expected.append({None: oracle.mean(rewards), **dict(enumerate(rewards))})
    agree(Restart(), cases, expected)


# ---------------------------------------------------------------- form, length, KL, rubrics


@st.composite
def length_options(draw: Any) -> dict[str, Any]:
    most = draw(st.integers(1, 60))
    cache = draw(st.integers(0, most))
    return {
        "max_length": most,
        "cache": cache,
        "min_length": draw(st.integers(0, most - cache)),
        "unit": draw(st.sampled_from(["characters", "words"])),
        "of": draw(st.sampled_from(["episode", "steps", "answer"])),
        "no_answer": draw(st.sampled_from([None, -1.0])),
    }


@FEW
@given(rollouts=some(st.lists(st.tuples(TEXTS, FLAG, FLAG), max_size=5)), options=length_options())
def test_length(rollouts: list[Any], options: dict[str, Any]) -> None:
    scorer = LengthPenalty(**options)
    config = scorer.model_dump()
    cases: list[Case] = []
    for rows in rollouts:
        steps = steps_of([row[0] for row in rows], [row[1] for row in rows])
        copied = [None if row[2] is None else not row[2] for row in rows]
        cases.append(({}, {"steps": [s | {"is_copied_context": c} for s, c in zip(steps, copied, strict=True)]}))
    agree(scorer, cases, [oracle.length(rows["steps"], config) for _, rows in cases])


def answered(texts: list[str]) -> list[Case]:
    return [({}, {"steps": steps_of([text], [True])}) for text in texts]


TAGGED = st.lists(st.sampled_from(["<a>", "</a>", "<b>", "</b>", "x", " "]), max_size=7).map("".join)
WELL = st.tuples(TEXTS, TEXTS, st.sampled_from(["", " ", "x"])).map(lambda t: f"<a>{t[0]}</a>{t[2]}<b>{t[1]}</b>{t[2]}")


@FEW
@given(texts=some(st.one_of(TEXTS, TAGGED, WELL)), only=st.booleans())
def test_tags(texts: list[str], only: bool) -> None:
    scorer = FormatValidity(rule={"kind": "tags", "tags": ("a", "b"), "only": only}, no_answer=0.0)
    agree(scorer, answered(texts), [{None: float(oracle.has_tags(text, ("a", "b"), only=only))} for text in texts])


JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=8
)


@FEW
@given(values=some(st.tuples(JSON, st.integers(0, 3), st.sampled_from(["", "", " ", ",", "NaN", "//"]))))
def test_json(values: list[Any]) -> None:
    full_texts = [(json.dumps(value, ensure_ascii=False), cut, glue) for value, cut, glue in values]
    texts = [text[: len(text) - cut] + glue for text, cut, glue in full_texts]
    scorer = FormatValidity(rule={"kind": "json"}, no_answer=0.0)
    agree(scorer, answered(texts), [{None: float(oracle.is_json(text))} for text in texts])


RATIO = st.one_of(st.none(), st.floats(-9, 9), st.just("missing"))


@FEW
@given(rollouts=some(st.lists(st.tuples(RATIO, FLAG, FLAG, FLAG), max_size=5)), beta=st.sampled_from([0.0, 0.1, 1.0]))
def test_kl_in_reward(rollouts: list[Any], beta: float) -> None:
    cases: list[Case] = []
    expected: list[oracle.Values] = []
    for rows in rollouts:
        steps = [
            {"step_index": n, "is_active": a, "trainable": b, "is_copied_context": None if c is None else not c}
            for n, (_, a, b, c) in enumerate(rows)
        ]
        stored = {n: row[0] for n, row in enumerate(rows) if row[0] != "missing"}
        ratios = [{"step_index": n, "checkpoint": "ref", "log_ratio": value} for n, value in stored.items()]
        ratios += [{"step_index": n, "checkpoint": "other", "log_ratio": 9.0} for n in stored]
        cases.append(({}, {"steps": steps, "ratios": ratios}))
        expected.append(oracle.kl_in_reward(steps, stored, beta))
    agree(KlInReward(checkpoint="ref", beta=beta), cases, expected)


CRITERION = st.lists(st.sampled_from(["be", "Be", "brief", "cite", "sources"]), min_size=1, max_size=4).map(" ".join)
CRITERIA = st.lists(CRITERION, max_size=7)


@FEW
@given(rollouts=some(st.tuples(CRITERIA, CRITERIA, st.integers(0, 6))))
def test_rubric_terms(rollouts: list[Any]) -> None:
    scorer = RubricTerms(min_criteria=2, max_criteria=4, max_questions=2)
    cases: list[Case] = []
    expected: list[oracle.Values] = []
    for written, true, turns in rollouts:
        steps = steps_of([*["why?"] * turns, json.dumps({"criteria": written})], [True] * 9)
        cases.append(({"ground_truth": json.dumps(true)}, {"steps": steps}))
        value = oracle.rubric_terms(written, true, turns, scorer.model_dump()) if true else None
        expected.append({None: value})
    agree(scorer, cases, expected)
