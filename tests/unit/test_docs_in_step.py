"""Docs that cannot rot: generated pages equal what the code says now, and no link or path leads nowhere."""

import re
from collections import Counter
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

import lake

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("lake", "pipelines", "trainer", "viewer")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
SOURCES = sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
PATH_IN_CODE = re.compile(r"\bdocs/[\w./-]*\w")


def test_a_stale_page_is_named_then_written_as_this_checkout_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two pages, in this process; `make check` compares all of them, in another process."""
    monkeypatch.syspath_prepend(ROOT / "docs" / "generate")
    spec = spec_from_file_location("generate", ROOT / "docs" / "generate" / "__main__.py")
    assert spec is not None
    assert spec.loader is not None
    generate = module_from_spec(spec)
    spec.loader.exec_module(generate)
    names = ("reference/jsonl.md", "reference/tables.md")
    monkeypatch.setattr(generate, "DOCS", tmp_path)
    (tmp_path / "reference").mkdir()
    monkeypatch.setattr(generate, "PAGES", {name: generate.PAGES[name] for name in names})
    right = (ROOT / "docs" / "reference" / "jsonl.md").read_text("utf-8")
    (tmp_path / "reference" / "jsonl.md").write_text(right.replace("task_id", "task"), "utf-8")

    assert generate.main(["--check"]) == 1
    assert "docs/reference/jsonl.md, docs/reference/tables.md; run `make docs`" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "reference").iterdir()] == ["jsonl.md"]

    assert generate.main([]) == 0
    for name in names:
        assert (tmp_path / name).read_text("utf-8") == (ROOT / "docs" / name).read_text("utf-8")


@pytest.mark.parametrize("name", ["ingest", "sql", "tables", "history", "doctor", "credit", "train", "view", "demo"])
def test_every_command_has_a_section(name: str) -> None:
    assert f"\n## trajlake {name}\n" in (ROOT / "docs" / "reference" / "cli.md").read_text("utf-8")


def test_every_public_name_of_the_lake_is_on_the_python_page() -> None:
    page = (ROOT / "docs" / "reference" / "python.md").read_text("utf-8")
    for name in ("lake.open", "Lake", "Snapshot", "EpisodeRecord", "StepRecord", "TokensRecord", "lake.errors"):
        assert f"\n## {name}\n" in page
    for cls in (lake.Lake, lake.Snapshot):
        for name in (name for name in vars(cls) if not name.startswith("_")):
            section = page.partition(f"\n### {cls.__name__}.{name}\n")[2].partition("\n##")[0]
            assert section.strip().count("\n") > 3, f"{cls.__name__}.{name} has no docstring"


def test_every_key_of_the_main_configs_is_explained() -> None:
    from pipelines.credit import GiGPO
    from trainer.config import TrainConfig

    page = (ROOT / "docs" / "reference" / "config.md").read_text("utf-8")
    for config in (GiGPO, TrainConfig):
        section = page.partition(f".{config.__name__}\n")[2].partition("\n## ")[0]
        rows = {line.split("`")[1]: line for line in section.splitlines() if line.startswith("| `")}
        assert list(rows) == list(config.model_fields)
        assert [key for key, line in rows.items() if line.endswith("|  |")] == [], "a field without a docstring"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_link_leads_nowhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    targets = [target for target in LINK.findall(text) if "://" not in target]
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_no_path_of_docs_in_the_code_leads_nowhere() -> None:
    named = {
        (path.relative_to(ROOT).as_posix(), p)
        for path in SOURCES
        for p in PATH_IN_CODE.findall(path.read_text("utf-8"))
    }
    assert sorted(pair for pair in named if not exists(pair[1])) == []


def exists(path: str) -> bool:
    """Decisions may be named by their number alone."""
    return (ROOT / path).exists() or any((ROOT / path).parent.glob(f"{Path(path).name}-*"))


def test_every_promise_names_tests_that_exist() -> None:
    """Of the tests of a promise one at least runs in the default or the long suite."""
    text = (ROOT / "docs" / "guides" / "promises.md").read_text("utf-8")
    missing, slow_alone, number = [], [], 0
    for promise in re.split(r"^\* ", text, flags=re.MULTILINE)[1:]:
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", promise)
        number += len(named)
        suites = {f"{path}::{name}": suite_of(path, name) for path, name in named}
        missing += [name for name, suite in suites.items() if suite == ""]
        if named and set(suites.values()) == {"slow"}:
            slow_alone.append(promise.partition("\n")[0])
    assert number > 20
    assert not missing
    assert not slow_alone


FEATURES = {"A": 36, "B": 30, "C": 19, "D": 17, "E": 39}
"""Features of each system that docs/reference/systems.md answers to."""


def test_every_feature_of_the_five_systems_has_a_verdict_and_tests_that_exist() -> None:
    text = (ROOT / "docs" / "reference" / "systems.md").read_text("utf-8")
    stated_counts: dict[str, Counter[str]] = {}
    faults = []
    for system, section in re.findall(r"^## ([A-E]) (.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL):
        rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in section.splitlines() if line.startswith("| ")][2:]
        stated_counts[system] = Counter(verdict.strip() for _, verdict, _, _ in rows)
        for feature, verdict, where, tests in rows:
            named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", tests)
            faults += [f"{path}::{name}" for path, name in named if not suite_of(path, name)]
            if not where.strip() or not (named or verdict.strip() == "differs"):
                faults.append(feature)
    assert {system: counts.total() for system, counts in stated_counts.items()} == FEATURES
    summed = re.findall(r"^\| \[([A-E]): .*\| (\d+) \| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    stated = {system: (int(works), int(differs)) for system, _, works, differs in summed}
    assert stated == {system: (counts["works"], counts["differs"]) for system, counts in stated_counts.items()}
    assert sum(map(sum, stated.values())) == sum(FEATURES.values())
    assert not faults


def suite_of(path: str, name: str) -> str:
    """The suite of a test, as it is marked: "slow", or "usual"; empty if there is no such test."""
    source = (ROOT / path).read_text("utf-8") if (ROOT / path).exists() else ""
    written = re.search(rf"^((?:@.*\n(?:[ )].*\n)*)*)(?:async )?def {name}\(", source, re.MULTILINE)
    if written is None:
        return ""
    of_module = re.search(r"^pytestmark = .*(?:\n[ )\]].*)*", source, re.MULTILINE)
    marks = [*re.findall(r"^@(pytest\.mark\.slow\b)", written[1], re.MULTILINE)]
    marks += re.findall(r"pytest\.mark\.slow\b", of_module[0]) if of_module is not None else []
    return "slow" if marks else "usual"


def test_the_suite_of_a_test_is_seen_in_its_marks() -> None:
    engines = "tests/integration/test_online_loop_vllm.py"
    assert suite_of(engines, "test_the_test_tells_what_differs_from_what_does_not") == "usual"
    assert suite_of(engines, "test_the_loop_through_an_engine_is_the_loop_in_process") == "slow"
    of_massgen = "test_an_engine_that_does_not_answer_is_an_error_not_a_wrong_answer"
    assert suite_of("tests/integration/test_example_massgen_loop.py", of_massgen) == "slow"
    assert suite_of(engines, "test_of_nothing") == suite_of("tests/unit/test_nowhere.py", "test_of_nothing") == ""
