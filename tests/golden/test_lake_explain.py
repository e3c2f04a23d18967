"""What `ingest --explain` prints for files of three formats; `make golden` writes the files again."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from lake.cli import trajlake

HERE = Path(__file__).parent
GOLDEN = HERE / "explain"
EXPLAINED = {
    "verifiers_traces.txt": ["verifiers_traces/traces.jsonl"],
    "atif.txt": ["harbor"],
    "otlp.txt": ["otlp/openai_v2.jsonl", "otlp/traceloop_langgraph.json.gz"],
}
"""Golden file -> the files or folders of `tests/golden/formats` that it explains."""


def explain_files(name: str) -> str:
    """What the command prints."""
    files = [str(HERE / "formats" / file) for file in EXPLAINED[name]]
    done = CliRunner().invoke(trajlake, ["ingest", "--explain", *files], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize("name", EXPLAINED)
def test_a_record_is_explained_as_before(name: str) -> None:
    text = explain_files(name)
    assert text == (GOLDEN / name).read_text("utf-8")
    assert max(map(len, text.splitlines())) <= 80
