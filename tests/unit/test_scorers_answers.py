"""exact_match, fuzzy_match and answer_quality: which text is the answer, what it is compared with, every constant."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from pipelines.score.scorers import AnswerQuality, ExactMatch, FuzzyMatch
from pipelines.score.scorers.protocol import Normalise
from testkit.scorer_frames import error, reason, says, score_episode, scored, values
from testkit.wording import Wording

SQUAD = Normalise(punctuation=True, articles=True)
AS_IS = Normalise(unicode=False, lowercase=False, whitespace=False)


def truth(value: Any) -> dict[str, Any]:
    return {"ground_truth": json.dumps(value)}


# ---------------------------------------------------------------- which text is the answer


@pytest.mark.parametrize(
    ("options", "actions", "expected"),
    [
        ({}, ["no", "yes"], 1.0),
        ({}, ["yes", "  \n"], 1.0),
        ({"answer": "last"}, ["yes", "  \n"], None),
        ({"answer": "last"}, ["no", "yes"], 1.0),
        ({"answer": "all", "mode": "contains"}, ["yes", "no"], 1.0),
        ({"answer": "all"}, ["yes", "no"], 0.0),
        ({}, [], None),
        ({"no_answer": 0.0}, [" "], 0.0),
        ({"no_answer": -1.0, "answer": "last"}, ["yes", ""], -1.0),
        ({"extract": r"<answer>(.*?)</answer>"}, ["<answer>no</answer> so <answer>yes</answer>"], 1.0),
        ({"extract": r"<answer>(.*?)</answer>"}, ["yes"], None),
        ({"extract": r"<answer>(.*?)</answer>", "no_answer": 0.0}, ["yes"], 0.0),
        ({"extract": r"[a-z]+$"}, ["I say yes"], 1.0),
        ({"extract": r"(no)?yes"}, ["yes"], 1.0),
    ],
)
def test_the_answer(options: dict[str, Any], actions: list[str], expected: float | None) -> None:
    assert score_episode(ExactMatch(**options), truth("yes"), steps=says(*actions)) == expected


def test_inactive_steps_answer_nothing_and_order_is_by_step() -> None:
    steps = says("first", "last", "padding")
    steps[2]["is_active"] = False
    assert score_episode(ExactMatch(), truth("last"), steps=list(reversed(steps))) == 1.0
    assert score_episode(ExactMatch(answer="all"), truth("first\nlast"), steps=list(reversed(steps))) == 1.0


def test_reasons_name_what_is_missing(wording: Wording) -> None:
    for scorer, episode, steps, words in (
        (ExactMatch(), truth("x"), None, "has no answer"),
        (ExactMatch(extract="z"), truth("x"), "a", "that `extract` finds"),
        (ExactMatch(), {"ground_truth": None}, "a", "has no ground truth"),
        (ExactMatch(truth_path="a.0"), truth({"a": 1}), "a", "has nothing at 'a.0'"),
        (ExactMatch(truth_path="a"), truth({"a": []}), "a", "no text at 'a'"),
        (ExactMatch(), truth({"a": 1}), "a", "has no text"),
        (ExactMatch(normalise=SQUAD), truth("The!"), "a", "empty after normalisation"),
    ):
        text = reason(scorer, episode, **({} if steps is None else {"steps": says(steps)}))
        assert wording(text).endswith(words)
    for scorer, episode, steps, words in (
        (ExactMatch(), {"ground_truth": "{"}, "a", "is not JSON"),
        (FuzzyMatch(measure="difflib", max_characters=3), truth("x"), "abcd", "max_characters = 3"),
        (ExactMatch(), {"ground_truth": "[" * 100_000}, "a", "is not JSON"),
    ):
        assert wording(error(scorer, episode, steps=says(steps))).endswith(words)


@pytest.mark.parametrize("pattern", ["(", "a{99999999}", "(?=x)", r"\1", "*"])
def test_a_pattern_that_is_none_is_refused(pattern: str) -> None:
    with pytest.raises(ValidationError, match="regular expression"):
        ExactMatch(extract=pattern)


# ---------------------------------------------------------------- exact match


@pytest.mark.parametrize(
    ("answer", "ground_truth", "options", "expected"),
    [
        ("Paris", "paris", {}, 1.0),
        ("Paris", "paris", {"normalise": AS_IS}, 0.0),
        ("  a \n b ", "a b", {}, 1.0),
        ("a\u2028b", "a b", {}, 1.0),
        ("\uff15\uff12", "52", {}, 1.0),
        ("\uff15\uff12", "52", {"normalise": AS_IS}, 0.0),
        ("The cat!", "cat", {"normalise": SQUAD}, 1.0),
        ("The cat!", "cat", {}, 0.0),
        ("theatre", "atre", {"normalise": SQUAD}, 0.0),
        ("42", 42, {}, 1.0),
        ("4.50", 4.5, {}, 0.0),
        ("4.50", 4.5, {"numbers": True}, 1.0),
        ("$1,000", "1000.0", {"numbers": True}, 1.0),
        ("50 %", "50", {"numbers": True}, 1.0),
        ("1e3", "1000", {"numbers": True}, 1.0),
        ("1_000", "1000", {"numbers": True}, 0.0),
        ("inf", "nan", {"numbers": True}, 0.0),
        ("1e999", "1e998", {"numbers": True}, 0.0),
        ("1001", "1000", {"numbers": True, "tolerance": 0.001}, 1.0),
        ("1002", "1000", {"numbers": True, "tolerance": 0.001}, 0.0),
        ("true", True, {}, 1.0),
        ("b", ["a", "b"], {}, 1.0),
        ("b", ["a", "b"], {"require": "all"}, 0.0),
        ("b", ["b", "B "], {"require": "all"}, 1.0),
        ("x is 1,286 dollars", ["327", "1286"], {"mode": "contains", "normalise": SQUAD}, 1.0),
        ("x is 1,286 dollars", ["327", "1286"], {"mode": "contains", "normalise": SQUAD, "require": "all"}, 0.0),
        ("a.c", "a.c", {"mode": "contains"}, 1.0),
        ("abc", "a.c", {"mode": "contains"}, 0.0),
        ("b", {"x": {"y": ["a", "b"]}}, {"truth_path": "x.y"}, 1.0),
        ("b", {"x": [{"y": "b"}]}, {"truth_path": "x.0.y"}, 1.0),
        ("b", ["b", {"no": "text"}, None, ["nested"]], {"require": "all"}, 1.0),
    ],
)
def test_exact_match(answer: str, ground_truth: Any, options: dict[str, Any], expected: float) -> None:
    assert score_episode(ExactMatch(**options), truth(ground_truth), steps=says(answer)) == expected


def test_metrics_count_truths() -> None:
    frame = scored(ExactMatch(), [{"episode_id": 1, **truth(["a", "b", "A"])}], steps=says("a"))
    assert json.loads(frame["metrics"].item()) == {"truths": 3, "matched": 2}


# ---------------------------------------------------------------- fuzzy match


@pytest.mark.parametrize(
    ("measure", "answer", "ground_truth", "expected"),
    [
        ("token_f1", "the cat sat", "cat sat down", 2 * 2 / (2 + 3)),
        ("token_f1", "cat cat", "cat", 2 * 1 / 3),
        ("token_f1", "cat cat dog", "cat cat", 2 * 2 / 5),
        ("token_f1", "dog", "cat", 0.0),
        ("token_f1", "!!!", "cat", 0.0),
        ("jaccard", "cat cat sat", "cat down", 1 / 3),
        ("jaccard", "!!!", "cat", 0.0),
        ("difflib", "abcd", "bcde", 0.75),
        ("difflib", "cat", "cat", 1.0),
        ("token_f1", "cat", ["dog", "cat sat"], 2 / 3),
    ],
)
def test_fuzzy_match(measure: Any, answer: str, ground_truth: Any, expected: float) -> None:
    assert score_episode(FuzzyMatch(measure=measure), truth(ground_truth), steps=says(answer)) == pytest.approx(
        expected, rel=1e-12
    )


def test_the_best_of_several_truths_is_unknown_if_one_cannot_be_compared() -> None:
    scorer = FuzzyMatch(measure="difflib", max_characters=5)
    assert score_episode(scorer, truth(["cat", "c" * 6]), steps=says("cat")) is None
    assert score_episode(scorer, truth(["cat", "c" * 5]), steps=says("cat")) == 1.0


def test_a_long_text_gets_no_other_formula() -> None:
    """With difflib's autojunk the frequent letter of a text above 200 characters would count for nothing."""
    text = "a" * 300
    assert score_episode(FuzzyMatch(measure="difflib"), truth(text), steps=says("c" + text)) == pytest.approx(600 / 601)


# ---------------------------------------------------------------- answer quality: constants of MassGen's RewardComputer

FILLER = "word " * 20
"""100 characters without a mark of anything."""


@pytest.mark.parametrize(
    ("text", "structure"),
    [
        ("one paragraph", 0.1),
        ("one\n\ntwo", 0.3),
        ("one\n\n \n\n", 0.1),
        ("# head\nx", 0.1 + 0.15),
        ("# head\n## head\nx", 0.1 + 0.3),
        ("#head", 0.1),
        ("INTRODUCTION\nx", 0.1 + 0.15),
        ("ABCD\nx", 0.1),
        ("- item", 0.1 + 0.2),
        ("  12. item", 0.1 + 0.2),
        ("\u2022 item", 0.1 + 0.2),
        ("-item", 0.1),
        ("Overall, fine", 0.1 + 0.2),
        ("the SUMMARY", 0.1 + 0.2),
        ("in conclusion, the summary", 0.1 + 0.2),
        ("# a\n\n# b\n\n- c\n\noverall", 1.0),
    ],
)
def test_structure(text: str, structure: float) -> None:
    frame = scored(AnswerQuality(), [{"episode_id": 1}], steps=says(text))
    assert json.loads(frame["metrics"].item())["structure"] == pytest.approx(structure, abs=1e-12)


@pytest.mark.parametrize(
    ("text", "depth"),
    [
        ("x" * 99, 0.0),
        ("x" * 100, 0.2),
        ("x" * 199, 0.2),
        ("x" * 200, 0.4),
        ("x" * 2000, 0.4),
        ("x" * 2001, 0.3),
        ("\u4f60" * 200, 0.4),
        ("such as", 0.2),
        ("E.G. this, for example", 0.2),
        ("because", 0.05),
        ("because because", 0.05),
        ("because, therefore, thus", 0.15),
        ("because therefore thus since", 0.2),
        ("because therefore thus since as a result consequently", 0.2),
        ("sincere", 0.05),
        ("7", 0.2),
        ("\u0663", 0.2),
        (FILLER * 3 + "for instance, since 7 because, therefore, thus", 1.0),
    ],
)
def test_depth(text: str, depth: float) -> None:
    frame = scored(AnswerQuality(), [{"episode_id": 1}], steps=says(text))
    assert json.loads(frame["metrics"].item())["depth"] == pytest.approx(depth, abs=1e-12)


@pytest.mark.parametrize(
    ("answer", "reference", "similarity"),
    [("the Cat", "the cat", 1.0), ("a b", "b c", 1 / 3), ("a", "b", 0.0), ("cat!", "cat", 0.0), ("a", ["b", "a"], 1.0)],
)
def test_similarity_to_a_reference(answer: str, reference: Any, similarity: float) -> None:
    scorer = AnswerQuality(reference="ground_truth")
    alone = score_episode(AnswerQuality(), steps=says(answer))
    assert alone is not None
    assert score_episode(scorer, truth(reference), steps=says(answer)) == pytest.approx(
        alone + 0.3 * similarity, abs=1e-12
    )


def test_the_most_is_0_7_without_a_reference_and_1_with() -> None:
    best = "# a\n\n# b\n\n- c\n\noverall 7 such as because therefore thus since " + FILLER * 2
    assert score_episode(AnswerQuality(), steps=says(best)) == pytest.approx(0.7)
    assert score_episode(AnswerQuality(reference="ground_truth"), truth(best), steps=says(best)) == pytest.approx(1.0)


def test_no_answer_and_no_reference_are_unknown() -> None:
    assert score_episode(AnswerQuality(), steps=says(" ")) is None
    assert score_episode(AnswerQuality(no_answer=0.0), steps=says(" ")) == 0.0
    scorer = AnswerQuality(reference="ground_truth", no_answer=0.0)
    assert str(reason(scorer, {"ground_truth": None}, steps=says("x"))).endswith("no ground truth")
    assert score_episode(scorer, truth("x"), steps=says("")) == 0.0


def test_scores_come_in_the_order_of_the_episodes() -> None:
    episodes = [{"episode_id": n, **truth(str(n))} for n in (5, 2, 9)]
    steps = [step | {"episode_id": n} for n in (9, 5, 2) for step in says(str(n))]
    assert list(values(scored(ExactMatch(), episodes, steps=steps))) == [(5, None), (2, None), (9, None)]
