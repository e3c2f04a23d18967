"""Rollouts for scorers, generated: texts full of what scorers look for, flags that may be unknown, tools that fail."""

import json
from typing import Any

from hypothesis import strategies as st

from testkit.scorer_frames import answer, call

WORDS = ["the", "a", "an", "cat", "Cat", "hat", "12", "1,200", "$5", "5.0", "3e2", "\u0663", "e.g.", "since", "thus"]
WORDS += [
    "because",
    "overall",
    "such as",
    "caf\u00e9",
    "\u01c5",
    "\uff11\uff12",
    "stra\u00dfe",
    "\u0130",
    "\u03a3\u03a3",
]
WORDS += ["\u4f60\u597d"]
MARKS = [" ", " ", " ", "\n", "\n\n", "\t", "\u00a0", "\u2028", "# ", "- ", "1. ", "!", ".", ","]
MARKS += ["ALL CAPS", "<a>", "</a>"]
TEXTS = st.lists(st.sampled_from(WORDS + MARKS), max_size=24).map("".join)
LONG = st.tuples(TEXTS, st.integers(1, 60)).map(lambda pair: pair[0] * pair[1])
SCALARS = st.one_of(TEXTS, st.integers(-9, 9), st.booleans(), st.none(), st.sampled_from([1.5, -2.0, 1e16]))
TRUTHS = st.one_of(
    st.none(),
    SCALARS.map(json.dumps),
    st.lists(SCALARS, max_size=4).map(json.dumps),
    st.fixed_dictionaries({"a": SCALARS, "b": st.lists(SCALARS, max_size=2)}).map(json.dumps),
)
PATHS = st.sampled_from(["", "", "a", "b", "b.0", "0", "x"])
FLAG = st.sampled_from([True, True, None, False])


def steps_of(texts: list[str], flags: list[Any], **fields: Any) -> list[dict[str, Any]]:
    return [
        {"episode_id": 1, "step_index": n, "action": text, "is_active": flag, **fields}
        for n, (text, flag) in enumerate(zip(texts, flags, strict=False))
    ]


STEPS = st.lists(st.tuples(TEXTS, FLAG), max_size=5).map(
    lambda rows: steps_of([t for t, _ in rows], [f for _, f in rows])
)


def some(case: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(case, min_size=1, max_size=8)


TOOLS = ["web_search", "SEARCH", "code_run", "execute", "vote", "new_answer", "book", "search_code"]
RESULTS = st.one_of(
    st.none(),
    TEXTS,
    st.sampled_from(
        ["", "{}", "[]", " {} ", "Error: x", " \texception", "errors are fine", "Traceback (most", "x" * 101]
    ),
    st.sampled_from(
        ["stderr: ERROR", "an Exception", '{"error": "x"}', '{"error": null}', '{"error": ""}', "[1]", "{x"]
    ),
    st.fixed_dictionaries(
        {},
        optional={
            key: st.sampled_from([None, "", "text", [], [1], {"a": 1}, 0, 1, True, False])
            for key in ("error", "results", "articles", "output", "stdout", "other")
        },
    ).map(json.dumps),
)
IDS = st.sampled_from(["c1", "c2", None])


@st.composite
def tool_steps(draw: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    count = draw(st.integers(0, 4))
    messages = st.lists(
        st.one_of(st.builds(answer, RESULTS, IDS), st.just({"role": "user", "content": "hello"})), max_size=3
    )
    calls = st.lists(st.builds(call, st.sampled_from(TOOLS), IDS), max_size=3)
    steps = [
        {
            "episode_id": 1,
            "step_index": n,
            "action": "",
            "is_active": draw(FLAG),
            "tool_calls": json.dumps(drawn) if (drawn := draw(st.one_of(st.none(), calls))) is not None else None,
            "context": json.dumps(draw(messages)),
        }
        for n in range(count)
    ]
    last = draw(st.one_of(st.none(), messages.map(json.dumps)))
    return {"episode_id": 1, "final_observation": last}, steps
