"""Drawn texts in a real browser: code, diffs, tables, checklists, a terminal and JSON look as such, light and dark."""

import json
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe

from lake import ids
from lake.records import EpisodeRecord, StepRecord
from testkit.command_line import runner
from testkit.hostile_markup import VECTORS
from testkit.lakes import build_lake

pytestmark = pytest.mark.browser

PROSE = """## Plan

| file | lines |
|------|------:|
| a.py | 120   |

- [x] read
- [ ] fix

```python
def run(text):
    return [int(sign) for sign in text]  # digits
```

It is $x^2$.
"""
EDIT = {"file_path": "a.py", "old_string": "n = 10\nm = 1", "new_string": "n = 25\nm = 1"}
TODOS = {"todos": [{"content": "read", "status": "completed"}, {"content": "fix", "status": "pending"}]}
OUTPUT = "10 %\r100 %\n\x1b[32m2 passed\x1b[0m \x1b[41mred ground\x1b[0m"
LONG = {"text": "It is longer than a line. " * 4}
DOCUMENT = json.dumps({"a_very_long_name_of_a_field": {"city": "Seattle", **LONG}, "short": {"n": 1, **LONG}})
CALLS = (
    *(("Edit", EDIT, "done"), ("TodoWrite", TODOS, "ok")),
    *(("Bash", {"command": "cd /a && ls"}, OUTPUT), ("get", {}, DOCUMENT)),
)
COLOUR = "node => getComputedStyle(node).color"
GROUND = "node => getComputedStyle(node).backgroundColor"


def drawn() -> EpisodeRecord:
    """An episode with a text of every kind, and one with every hostile text in each kind."""
    hostile = "\n\n".join(VECTORS)
    steps = [StepRecord(state="Go.", state_role="user", action=PROSE)]
    hostile_calls = (
        ("write", {"path": hostile, "content": hostile, hostile: [hostile]}, hostile),
        ("edit", {"path": "x.html", "old_str": hostile, "new_str": f"{hostile}+"}, f"\x1b[1m{hostile}"),
        ("apply", {"patch": f"*** Begin Patch\n*** Update File: {hostile}"}, f"--- a\n+++ b\n@@ -1\n+{hostile}"),
    )
    for number, (name, arguments, result) in enumerate((*CALLS, *hostile_calls)):
        steps[-1].tool_calls = [{"id": str(number), "function": {"name": name, "arguments": json.dumps(arguments)}}]
        message = {"role": "tool", "tool_call_id": str(number), "content": result}
        steps.append(StepRecord(state=result, state_role="tool", context=[message], action=f"Step {number}."))
    steps[-1].action = hostile
    return EpisodeRecord(task_id="drawn", rollout_index=0, status="completed", steps=steps)


def test_texts_look_as_what_they_are_and_hostile_ones_do_nothing(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a file, whose policy forbids inline scripts and styles: a markup with either would make an error.

    The light one is wide, the dark one narrow.
    """
    lk = build_lake(tmp_path / "lake", [drawn()])
    out = tmp_path / "drawn.html"
    episode = ids.to_text(lk.sql("SELECT episode_id FROM episodes").item())
    assert runner(monkeypatch, capsys)("page", "--lake", lk.uri, episode, "--out", str(out)).code == 0
    colours = [check_looks(browser, out.as_uri(), scheme) for scheme in ("light", "dark")]
    light, dark = colours
    assert all(light[name] != dark[name] for name in light), "each theme has colours of its own"


def check_looks(browser: Any, address: str, scheme: str) -> dict[str, str]:
    """Check the elements of every kind of text; return the colours of some."""
    page = browser.new_page(viewport={"width": 480 if scheme == "dark" else 1280, "height": 9000}, color_scheme=scheme)
    faults: list[str] = []
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text))
    page.goto(address)
    page.locator(".drawn").filter(has_text="Step 5.").wait_for()
    prose = page.locator(".drawn").filter(has=page.locator(".heading", has_text="Plan"))
    assert prose.locator("td").all_inner_texts() == ["a.py", "120"]
    assert prose.locator("td.right").evaluate("node => getComputedStyle(node).textAlign") == "right"
    assert prose.locator(".task .box").count() == 2
    assert prose.locator("math msup").count() == 1
    assert prose.locator("pre .hl-keyword").first.inner_text().strip() == "def"

    diff = page.locator(".diff").filter(has_text="m = 1")
    assert (diff.locator(".removed").inner_text(), diff.locator(".added").inner_text()) == ("n = 10", "n = 25")
    assert diff.locator(".added b").inner_text() == "25"
    assert [box.inner_text() for box in page.locator(".checklist .box").all()] == ["done", "to do"]

    terminal = page.locator(".terminal").filter(has_text="2 passed")
    assert terminal.inner_text().splitlines()[0] == "100 %"
    tree = page.locator(".drawn > .tree").filter(has_text="Seattle")
    lefts = [tree.get_by_text(name, exact=True).bounding_box()["x"] for name in ("city", "n")]
    assert lefts[0] == lefts[1], "an entry is indented by its depth, not by the length of a key"

    looks = {
        "keyword": prose.locator(".hl-keyword").first.evaluate(COLOUR),
        "comment": prose.locator(".hl-comment").evaluate(COLOUR),
        "green": terminal.locator(".fg2").evaluate(COLOUR),
        "red ground": terminal.locator(".bg1").evaluate(GROUND),
        "done": page.locator(".checklist .box.done").evaluate(GROUND),
        "words": prose.evaluate(COLOUR),
    }
    assert len({looks[name] for name in ("keyword", "comment", "green", "words")}) == 4
    assert diff.locator(".added").evaluate(GROUND) != diff.locator(".removed").evaluate(GROUND)

    assert page.locator(".drawn").count() > 20
    foreign = (
        ".drawn :is(script, style, img, iframe, svg, form, base, a, input, [id], [style], [href], [src], [onerror])"
    )
    assert page.locator(foreign).count() == 0
    violations = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    serious = [rule for rule in violations if rule["impact"] in ("serious", "critical")]
    nodes = [f"{rule['id']}: {node['target']} {node['failureSummary']}" for rule in serious for node in rule["nodes"]]
    assert nodes == []

    block = page.locator(".block").filter(has=page.locator(".heading", has_text="Plan"))
    block.get_by_role("button", name="as written").click()
    assert "## Plan" in page.locator("pre").filter(has_text="| a.py | 120").inner_text()
    assert page.evaluate("window.hostile") is None
    assert [url for url in asked if url != address] == []
    assert faults == []
    page.close()
    return looks
