"""docs/guides/credit-at-scale.md and several-lakes.md: their code runs, and prints what the page says."""

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from pipelines.credit.estimators import ESTIMATORS

GUIDES = Path(__file__).resolve().parents[2] / "docs/guides"
PAGE = (GUIDES / "credit-at-scale.md").read_text("utf-8")
BLOCK = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize(("page", "number"), [("credit-at-scale", 2), ("several-lakes", 1)])
def test_the_code_prints_what_the_page_says(
    page: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (GUIDES / f"{page}.md").read_text("utf-8")
    blocks = BLOCK.findall(text)
    assert len(blocks) == text.count("```python") == number
    names: dict[str, object] = {}
    for code, expected in blocks:
        stream = StringIO()
        with redirect_stdout(stream):
            exec(code, names)
        assert stream.getvalue() == expected


def test_the_estimators_that_need_a_whole_batch_are_named() -> None:
    whole_estimators = [name for name in ESTIMATORS if not ESTIMATORS[name].incremental]
    (line,) = re.findall(r"\*\*Batch-normalised estimators\*\* \((.*?)\)", PAGE)
    assert re.findall(r"`(\w+)`", line) == sorted(whole_estimators)


def test_the_tests_that_the_page_names_are_there() -> None:
    root = Path(__file__).resolve().parents[2]
    named = re.findall(r"`((?:tests|benchmarks)/[\w/]+\.py)`", PAGE)
    assert len(named) == 4
    assert all((root / path).is_file() for path in named)
