"""Texts drawn as what they are: the markup of each kind, its bounds, and that no foreign markup is in it."""

import json
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit.hostile_markup import VECTORS
from viewer import plain
from viewer.transcript import formulas, rendering
from viewer.transcript.rendering import detect, find_language, render

KINDS: tuple[rendering.Kind, ...] = ("markdown", "json", "terminal", "code", "diff", "call")


class Page(HTMLParser):
    """The elements of a markup with their attributes, and its words."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.by_class: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(markup)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in ("br", "hr"):
            return
        self._open.append(dict(attrs).get("class") or tag)
        self.by_class.setdefault(self._open[-1], []).append("")

    def handle_endtag(self, tag: str) -> None:
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self.words += data
        for name in set(self._open):
            self.by_class[name][-1] += data


def call(**arguments: Any) -> Page:
    """The drawn arguments of a tool call."""
    text = json.dumps(arguments)
    assert detect(text, "call") == "call"
    return Page(render(text, "call"))


def diff(text: str) -> dict[str, list[str]]:
    """The files and rows of a drawn diff."""
    rows = Page(render(text, "diff")).by_class
    names = ("file", "row added", "row removed", "row same", "row hunk", "row meta")
    return {name: rows[name] for name in names if name in rows}


GIT = """diff --git a/src/maze.py b/src/maze.py
index 20edef5..5857437 100755
--- a/src/maze.py
+++ b/src/maze.py
@@ -1,3 +1,3 @@ class Maze
 def walk(a: float) -> float
--- old dashes
+++ new pluses
     return a
diff --git a/gone.txt b/gone.txt
deleted file mode 100644
--- a/gone.txt
+++ /dev/null
@@ -1 +0,0 @@
-last words
"""
PATCH = """*** Begin Patch
*** Update File: /work/JOKE.md
@@
-The machine approves.
+The cactus approves.
*** Add File: new.py
+import os
*** End Patch"""
TRACEBACK = """Traceback (most recent call last):
  File "a_b_c.py", line 1, in __init__
    self.run(**options)
ValueError: a_b_c"""
LOG = "2026-03-01 10:00:00 INFO start_of_run\n2026-03-01 10:00:01 ERROR __main__ failed"
MODULE = "import os\n\n# walk\ndef walk(self):\n    # twice\n    return self.__dict__\n"
NUMBERED = "[File: /repo/tests/colon.py (3 lines total)]\n1:def f(a):\n2:    return 'x'\n3:\n(Open file: /repo)"


@pytest.mark.parametrize(
    ("text", "role", "tool", "kind"),
    [
        ("**Hello**", "user", "", "markdown"),
        ("go **north**", "", "", "text"),
        ("It is 7.", "tool", "", "text"),
        ('{"a": 1}', "tool", "", "json"),
        ('{"a": 1}', "call", "", "call"),
        ('{"a": 1', "tool", "", "text"),
        ("17", "tool", "", "text"),
        (GIT, "tool", "Bash", "diff"),
        ("\n" + GIT, "user", "", "diff"),
        ("I changed this:\n" + GIT, "tool", "", "diff"),
        ("I changed this:\n" + GIT, "assistant", "", "markdown"),
        (PATCH, "call", "apply_patch", "diff"),
        ("10 %\r20 %\rdone", "tool", "", "terminal"),
        ("a\r\nb", "tool", "", "text"),
        ("\x1b[31mred", "assistant", "", "terminal"),
        (NUMBERED, "user", "", "code"),
        ("     1\u2192import os\n     2\u2192import re", "tool", "Read", "code"),
        ("import os", "tool", "read_file", "code"),
        ("1. one\n2. two", "user", "", "markdown"),
        *((text, role, "", "text") for text in (TRACEBACK, LOG, MODULE) for role in ("user", "assistant")),
        ("<env>\n  <cwd>/x</cwd>\n  <os>y</os>\n</env>", "user", "", "text"),
        (f"```\n{TRACEBACK}\n```", "user", "", "markdown"),
        ("- one\n  - two\n    more\n  - three", "user", "", "markdown"),
        ("\\frac{a}{b}\n\\boxed{4}", "assistant", "", "markdown"),
        ("# Title\n\nIt is `x`:\n    indented\n    lines", "user", "", "markdown"),
    ],
)
def test_the_kind_of_a_text(text: str, role: str, tool: str, kind: str) -> None:
    assert detect(text, role, tool) == kind


def test_prose_has_tables_tasks_and_code_and_links_are_words() -> None:
    page = Page(
        render(
            "# Plan\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n- [x] read\n- [ ] fix\n\n~~old~~ [site](http://beacon.invalid/)"
            " ![picture](http://beacon.invalid/x.png)\n\n```python\ndef f(): return 'x'\n```\n\n```unknown\n$x$\n```",
            "markdown",
        )
    )
    assert page.by_class["heading level1"] == ["Plan"]
    assert (page.by_class["td"], page.by_class["right"]) == (["1"], ["b", "2"])
    assert page.by_class["task done"] == ["done read"]
    assert page.by_class["task open"] == ["to do fix"]
    assert page.by_class["hl-keyword"] == ["def ", "return "]
    assert page.by_class["code"][1] == "$x$"
    assert "site (http://beacon.invalid/) ![picture](http://beacon.invalid/x.png)" in page.words
    assert not {"a", "img"} & {tag for tag, _ in page.elements}


def test_indented_paragraphs_and_names_keep_their_signs() -> None:
    """Markdown would drop the indentation of a traceback, and read the underscores of a name as emphasis."""
    prose = "It **fails** in `run`:\n\n" + TRACEBACK + "\n\nSo __init__ and _a_b_ of a_b_c are _not_ __two words__."
    page = Page(render(prose, "markdown"))
    assert page.by_class["code"] == ["run", TRACEBACK]
    assert (page.by_class["em"], page.by_class["strong"]) == (["not"], ["fails", "two words"])
    assert "So __init__ and _a_b_ of a_b_c are not two words." in page.words
    listed = Page(render("1. one\n   two\n\nAn item:\n- a\n  b", "markdown"))
    assert "code" not in listed.by_class


def test_formulas_are_drawn_where_markdown_is_and_not_in_code() -> None:
    markup = render("| $|x|$ |\n|---|\n| **$y_1^*$** |\n\n    $indented$\n\n`$code$`\n\n$$\n- a\n$$", "markdown")
    page = Page(markup)
    assert [tag for tag, _ in page.elements].count("math") == 3
    assert page.by_class["code"] == ["$indented$", "$code$"]
    assert "<code>$code$</code>" in markup
    assert '<span class="formula"><math display="block">' in markup
    assert "\ufdd0" not in markup


def test_a_git_diff_has_files_and_rows_and_marks_changed_words() -> None:
    rows = diff(GIT)
    assert rows["file"] == ["src/maze.py +1 \u22121", "gone.txt +0 \u22121"]
    assert rows["row added"] == ["++ new pluses"]
    assert rows["row removed"] == ["-- old dashes", "last words"]
    assert rows["row same"] == ["def walk(a: float) -> float", "    return a"]
    assert "row meta" in rows
    marked = Page(render(GIT.replace("-- old dashes", "n = 10").replace("++ new pluses", "n = 25"), "diff"))
    assert marked.by_class["b"] == ["10", "25"]


def test_a_patch_without_counts_has_files_and_rows() -> None:
    rows = diff(PATCH)
    assert rows["file"] == ["/work/JOKE.md +1 \u22121", "new.py +1 \u22120"]
    assert rows["row added"] == ["The cactus approves.", "import os"]
    assert "row hunk" not in rows
    shell = call(command=["bash", "-lc", f"apply_patch <<'EOF'\n{PATCH}\nEOF"])
    assert shell.by_class["file"] == rows["file"]


@pytest.mark.parametrize(
    "arguments",
    [
        {"file_path": "/a/b.py", "old_string": "x = 1\ny", "new_string": "x = 2\ny"},
        {"command": "str_replace", "path": "/a/b.py", "old_str": "x = 1\ny", "new_str": "x = 2\ny"},
        {"path": "/a/b.py", "search": "x = 1\ny", "replace": "x = 2\ny"},
        {"file_path": "/a/b.py", "edits": [{"old_string": "x = 1\ny", "new_string": "x = 2\ny"}]},
    ],
)
def test_edits_are_diffs_under_their_path(arguments: dict[str, Any]) -> None:
    page = call(**arguments)
    assert page.by_class["file"] == ["/a/b.py +1 \u22121"]
    assert (page.by_class["row removed"], page.by_class["row added"]) == (["x = 1"], ["x = 2"])
    assert page.by_class["row same"] == ["y"]
    assert page.words.count("/a/b.py") == 1


def test_arguments_have_the_look_of_their_language() -> None:
    assert call(command="for f in *; do echo $f; done").by_class["hl-keyword"] == ["for ", "in ", "do ", "done"]
    assert call(code="import os").by_class["hl-keyword"] == ["import "]
    assert call(code="const a = 1", language="javascript").by_class["hl-keyword"] == ["const "]
    assert call(query="SELECT 1").by_class["hl-keyword"] == ["SELECT "]
    assert "code" not in call(query="flights to SFO").by_class
    written = call(command="create", path="/w/a.py", file_text="def f():\n    pass")
    assert written.by_class["hl-name"] == ["f"]
    assert written.by_class["string"] == ["create", "/w/a.py"]
    assert call(file_path="/w/a.md", content="# A\n\nb").by_class["code"] == ["# A\n\nb"], "any file's text is code"
    assert "code" not in call(content="# A\n\nb").by_class


@pytest.mark.parametrize(
    "plan",
    [
        {"todos": [{"content": "a <b>", "status": "completed"}, {"content": "c", "status": "in_progress"}]},
        {"explanation": "", "plan": [{"step": "a <b>", "status": "completed"}, {"step": "c", "status": "in_progress"}]},
        {"task_list": [{"title": "a <b>", "status": "done"}, {"title": "c", "status": "in_progress"}]},
    ],
)
def test_a_plan_is_a_checklist(plan: dict[str, Any]) -> None:
    page = call(**plan)
    assert page.by_class["task done"] == ["done a <b>"]
    assert page.by_class["task doing"] == ["in progress c"]


def test_a_plan_of_another_shape_stays_a_tree() -> None:
    page = call(plan=[{"step": "a" * rendering.MAX_SHORT, "status": "odd"}])
    assert page.by_class["key"] == ["plan", "0", "step", "status"]


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        ("10 %\r50 %\r100 %\nend", "100 %\nend"),
        ("long line\rab", "abng line"),
        ("long line\r\x1b[Kab", "ab"),
        ("abc\b\bX", "aXc"),
        ("a\r\nb", "a\nb"),
        ("one\ntwo\x1b[1A\rONE\n", "ONE\ntwo"),
        ("x\x1b]0;title\x07y\x1b[?25lz", "xyz"),
        ("a\x1b[99999Cb\x1b[9999999999999999Cc", None),
        ("\x1b[8m\u202ehidden", r"\u202ehidden"),
    ],
)
def test_a_terminal_shows_what_its_screen_shows_at_the_end(output: str, shown: str | None) -> None:
    words = Page(render(output, "terminal")).words.removeprefix("\n")
    assert len(words) < 10_000 if shown is None else words == shown


def test_colours_of_a_terminal_are_classes() -> None:
    output = "\x1b[1;31mA\x1b[22mB\x1b[0m \x1b[38;5;196mC\x1b[39;44mD\x1b[0;38;2;0;200;0mE\x1b[m"
    page = Page(render(output, "terminal"))
    assert {name: texts for name, texts in page.by_class.items() if name not in ("terminal", "pre")} == {
        "bold fg1": ["A"],
        "fg1": ["B"],
        "fg9": ["C"],
        "bg4": ["D"],
        "fg2": ["E"],
    }


def test_json_is_a_tree_by_depth_with_exact_numbers() -> None:
    long = "Sixty characters of a city and of its airport, so no line fits."
    flight = f'{{"number": "HAT072", "price": 12345678901234567890, "to": "{long}"}}'
    text = f'{{"flights": [{flight}], "note": "a\\nb", "none": null, "n": NaN}}'
    page = Page(render(text, "json"))
    assert page.by_class["key"] == ["flights", "0", "number", "price", "to", "note", "none", "n"]
    assert page.by_class["count"] == ["1 entry", "3 fields"]
    assert page.by_class["figure"] == ["12345678901234567890", "NaN"]
    assert page.by_class["string long"] == ["a\nb"]
    assert len(page.by_class["tree"]) == 3


def test_json_that_fits_in_a_line_stands_in_a_line() -> None:
    assert Page(render('{"a": [1, "x_y"], "b": {}}', "json")).words == '{"a": [1, "x_y"], "b": {}}'
    long = {"list": list(range(40)), "pair": {"x": 1.5, "y": None}, "note": {"text": "a\nb"}}
    page = Page(render(json.dumps(long), "json"))
    assert page.by_class["line"] == ['{"x": 1.5, "y": null}']
    assert page.by_class["count"] == ["40 entries", "1 field"]
    assert Page(render(json.dumps({"q": {"a": 1}}), "call")).by_class["line"] == ['{"a": 1}']


def test_a_file_that_a_tool_read_has_its_numbers_in_a_gutter() -> None:
    page = Page(render(NUMBERED, "code"))
    assert page.by_class["gutter"] == ["1", "2", "3"]
    assert page.by_class["meta"] == ["[File: /repo/tests/colon.py (3 lines total)]", "(Open file: /repo)"]
    assert page.by_class["hl-name"] == ["f"], "the language is that of the path in the first line"
    for text in ("     1\u2192import os", "    17\u2192import os\n\n<system-reminder>"):
        page = Page(render(text, "code", "python"))
        assert page.by_class["gutter"] == [text.split("\u2192")[0].strip()]
        assert page.by_class["hl-keyword"] == ["import "]
    assert "gutter" not in Page(render("8:30 is the time", "code")).by_class
    assert find_language('{"file_path": "/a/b.tsx"}') == "tsx"
    assert find_language('{"file_path": "/a/b.exe"}') == find_language("[]") == find_language("x") == ""
    assert Page(render("import os", "code", "python")).by_class["hl-keyword"] == ["import "]


def check_markup(markup: str) -> Page:
    """Parse a markup; it has listed elements, classes and attributes only, and no invisible sign."""
    page = Page(markup)
    plain_tags = set(rendering._PLAIN_TAGS.split())
    for tag, attributes in page.elements:
        if tag in formulas._MATHML:
            assert set(attributes) <= {*formulas._ATTRIBUTES, "display"}
            continue
        assert tag in plain_tags
        assert set(attributes) <= {"class", "open", "start", "tabindex"}
        assert set((attributes.get("class") or "").split()) <= rendering._CLASSES
    assert page.words == plain.visible(page.words)
    return page


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", VECTORS)
def test_hostile_text_is_text(kind: rendering.Kind, text: str) -> None:
    forms = [text, json.dumps({text: text, "deep": [text]})]
    forms.append(json.dumps({"path": text, "content": text, "command": text}))
    edit = {"file_path": text, "old_string": text, "new_string": f"{text}+"}
    plan = {"plan": [{"step": text, "status": "pending"}]}
    forms += [json.dumps(edit), json.dumps(plan), f"*** Begin Patch\n*** Update File: {text}\n@@ {text}\n+{text}"]
    for form in forms:
        check_markup(render(form, kind, text))
        check_markup(render(form, kind, "html"))


@pytest.mark.parametrize("text", VECTORS)
def test_markup_of_a_fault_in_this_program_is_cleaned(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were a text not escaped, the sanitiser would still leave listed elements alone."""
    faulty = {"code": lambda *_: f'<pre class="code tools" style="x" onclick="y">{text}</pre>'}
    monkeypatch.setattr(rendering, "_DRAWERS", faulty)
    render.cache_clear()
    markup = render(text, "code")
    render.cache_clear()
    for tag, attributes in Page(markup).elements:
        assert tag in rendering._PLAIN_TAGS.split()
        assert set(attributes) <= {"class", "open", "start", "tabindex"}
        assert set((attributes.get("class") or "").split()) <= rendering._CLASSES


@given(
    st.text(max_size=200) | st.text("<>&\"'`*_|[]()!~#-+=:\\$\n {}a1\x1bm;\r\b", max_size=200), st.sampled_from(KINDS)
)
def test_no_text_makes_other_markup(text: str, kind: rendering.Kind) -> None:
    page = check_markup(render(text, kind, "python"))
    if kind == "code" and not rendering._NUMBERED.match(text):
        assert page.words.removeprefix("\n") == plain.visible(text)


WIDE, DEEP = "Q" * 1_000_000, 5000


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (WIDE, "markdown"),
        (WIDE, "code"),
        (WIDE, "terminal"),
        (WIDE, "diff"),
        ("- " * DEEP + "Q", "markdown"),
        (">" * DEEP + "Q", "markdown"),
        ("\n".join("  " * level + "- Q" for level in range(90)), "markdown"),
        ("![[" * 6000 + "Q", "markdown"),
        ("*a **b " * 2800 + "Q", "markdown"),
        ("|a" * 3000 + "|\n" + "|-" * 3000 + "|\nx", "markdown"),
        ("$Q" * 9000, "markdown"),
        ("\\[Q" * 6000, "markdown"),
        ("# Q\n\n" * 4000, "markdown"),
        ("```\nx\n```\n" * 2000, "markdown"),
        ("[" * DEEP + "Q" + "]" * DEEP, "json"),
        ('{"Q":' * 900 + "1" + "}" * 900, "json"),
        (json.dumps([{"Q": number} for number in range(9000)]), "json"),
        (json.dumps({"Q": [[]] * 9000}), "call"),
        (json.dumps({"old_string": "a\nx\n" * 8000, "new_string": "b\nx\n" * 8000}), "call"),
        ("@@ -1,9999 +1,9999 @@\n" + "-x\n+y\n" * 9000, "diff"),
        ("(" * 40_000 + "Q", "code"),
        ("'" * 40_001 + "Q", "code"),
        ('"""\\' * 9000 + "Q", "code"),
        ("\x1b[31mx\x1b[0m" * 9000, "terminal"),
        ("Q\x1b[9999C" * 3000, "terminal"),
        ("\r\x1b[4000C" * 8000 + "Q", "terminal"),
        ("Q" + "\x1b[9999B\n" * 9000, "terminal"),
    ],
)
def test_what_is_too_large_stays_whole_and_light(text: str, kind: rendering.Kind) -> None:
    """No text of any shape hangs, fails, or makes more elements than a page may have."""
    page = check_markup(render(text, kind, "python"))
    assert len(page.elements) < 3 * rendering.MAX_PIECES + 1000
    if kind in ("markdown", "code"):
        assert page.words.count("Q") == text.count("Q")


@pytest.mark.parametrize("kind", KINDS)
def test_what_takes_too_long_is_shown_as_it_was_written(kind: rendering.Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "SECONDS", -1.0)
    render.cache_clear()
    text = json.dumps({"a": ["**x**", 1]})
    page = Page(render(text, kind, "python"))
    render.cache_clear()
    assert "hl-number" not in page.by_class
    assert "figure" not in page.by_class
    if kind in ("markdown", "json", "call"):
        (note,) = page.by_class["note"]
        assert "as it was written" in note
    assert "**x**" in page.words
