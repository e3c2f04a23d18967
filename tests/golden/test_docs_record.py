"""docs/guides/record.md: its program records what its query shows."""

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from lake.cli import trajlake
from testkit.shared import CHECKOUT

PAGE = Path(CHECKOUT, "docs", "guides", "record.md").read_text("utf-8")


def test_the_program_records_what_the_query_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAJLAKE_SPOOL", str(tmp_path / "spool"))
    (program,) = re.findall(r"^```python\n(.+?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    exec(compile(program, "record.md", "exec"), {})
    (block,) = re.findall(r"^```console\n\$ trajlake (sql.+?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    command, _, shown = block.partition("\n")
    done = CliRunner().invoke(trajlake, shlex.split(command))
    assert done.output.split() == shown.split()
