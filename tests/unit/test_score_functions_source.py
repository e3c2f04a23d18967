"""The version of a reward function: its source and what it imports from its own folder, read without running it."""

import re
from pathlib import Path

import pytest

from lake.errors import UsageError
from pipelines.score.functions import find_source

FILES = {
    "rewards.py": "import json\nimport helpers\nfrom shared.texts import clean\n\n\ndef score(messages): ...\n",
    "helpers.py": "import numpy\nimport deep.er.est\n",
    "shared/__init__.py": "",
    "shared/texts.py": "from . import words\nfrom .more import x\nfrom ..outside import y\n",
    "shared/words.py": "",
    "shared/more/__init__.py": "from ..words import z\n",
    "deep/er/est.py": "def late():\n    import lazy\n",
    "lazy.py": "import rewards\n",
    "unrelated.py": "raise SystemExit\n",
    "data.txt": "x",
}
IMPORTED = [
    "",
    "deep/er/est.py",
    "helpers.py",
    "lazy.py",
    "shared/__init__.py",
    "shared/more/__init__.py",
    "shared/texts.py",
    "shared/words.py",
]


def written(folder: Path, files: dict[str, str] = FILES) -> str:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return f"{folder / 'rewards.py'}:score"


def test_everything_that_is_imported_from_the_folder_counts(tmp_path: Path) -> None:
    source = find_source(written(tmp_path))
    assert [name for name, _ in source.files] == IMPORTED
    assert source.path == tmp_path / "rewards.py"
    assert source.name == "score"


def test_a_version_is_the_same_in_every_folder_and_with_every_line_end(tmp_path: Path) -> None:
    first = find_source(written(tmp_path / "a"))
    (tmp_path / "b").mkdir()
    windows = {name: text.replace("\n", "\r\n") for name, text in FILES.items()}
    windows["rewards.py"] = "\ufeff" + windows["rewards.py"]
    assert find_source(written(tmp_path / "b", windows)).hash == first.hash
    assert re.fullmatch("[0-9a-z]{13}", first.hash)
    # Pinned: a version must not change with Python, the machine or this package.
    assert first.hash == "67v2tkha9ggx7"


@pytest.mark.parametrize("name", [name for name in IMPORTED if name])
def test_a_change_of_any_of_them_is_a_new_version(tmp_path: Path, name: str) -> None:
    target = written(tmp_path)
    before = find_source(target).hash
    path = tmp_path / name
    path.write_text(path.read_text() + "\n# a comment is a change: what was run is what a version stands for\n")
    assert find_source(target).hash != before


def test_what_is_not_imported_does_not_count(tmp_path: Path) -> None:
    target = written(tmp_path)
    before = find_source(target).hash
    for name in ("unrelated.py", "data.txt", "numpy.txt"):
        (tmp_path / name).write_text("other")
    assert find_source(target).hash == before


def test_two_functions_of_a_file_have_versions_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "two.py"
    path.write_text("def a(messages): ...\ndef b(messages): ...\n")
    assert find_source(f"{path}:a").hash != find_source(f"{path}:b").hash


def test_nothing_of_it_runs(tmp_path: Path) -> None:
    path = tmp_path / "hostile.py"
    path.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nimport helper\ndef score(messages): ...\n")
    (tmp_path / "helper.py").write_text("raise SystemExit(3)\n")
    assert len(find_source(f"{path}:score").files) == 2
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "text",
    [
        "def score(messages): ...",
        "async def score(messages): ...",
        "from helpers import score",
        "from helpers import other as score",
        "import score",
        "score = lambda messages: 1.0",
        "score: object = None",
        "a, (score, b) = 1, (2, 3)",
        "class score: ...",
        "try:\n    import x as y\nexcept ImportError:\n    score = None",
        "if True:\n    def score(messages): ...",
        "from helpers import *",
    ],
)
def test_a_name_may_be_bound_in_any_way(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rewards.py"
    path.write_text(text)
    assert find_source(f"{path}:score").name == "score"


@pytest.mark.parametrize(
    ("text", "target", "message"),
    [
        ("def other(messages): ...", ":score", r"rewards.py has no function `score`. Its functions: other$"),
        ("def f():\n    score = 1", ":score", r"has no function `score`. Its functions: f$"),
        ("x = 1", ":score", r"has no function `score`. It has no functions$"),
        ("def f(:\n", ":score", r"rewards.py, line 1: "),
        ("x = 1\n  y = 2\n", ":score", r"rewards.py, line 2: unexpected indent"),
        ("x = '\0'", ":score", r"rewards.py.*: source code (string )?cannot contain null bytes"),
        (
            "def a(): ...\ndef b(): ...",
            "",
            r"does not name a reward function; write module.py:function. Its functions: a, b$",
        ),
        ("def a(): ...", ":not a name", r"does not name a reward function; write module.py:function$"),
    ],
)
def test_what_is_wrong_is_said_and_what_is_there(tmp_path: Path, text: str, target: str, message: str) -> None:
    path = tmp_path / "rewards.py"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        find_source(f"{path}{target}")


def test_a_missing_file_a_folder_and_no_text_are_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"gone.py: No such file .*a Python file"):
        find_source(f"{tmp_path / 'gone.py'}:f")
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(UsageError, match=r"folder.py: Is a directory"):
        find_source(f"{tmp_path / 'folder.py'}:f")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    with pytest.raises(UsageError, match=r"latin.py is not UTF-8 text"):
        find_source(f"{tmp_path / 'latin.py'}:f")


def test_a_syntax_error_in_an_import_names_the_import(tmp_path: Path) -> None:
    target = written(tmp_path)
    (tmp_path / "lazy.py").write_text("def\n")
    with pytest.raises(UsageError, match=r"lazy.py, line 1: invalid syntax"):
        find_source(target)


def test_imports_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import b\ndef f(messages): ...\n")
    (tmp_path / "b.py").write_text("import a\nimport b\n")
    assert [name for name, _ in find_source(f"{tmp_path / 'a.py'}:f").files] == ["", "b.py"]
