"""The best of its candidates against the first prompt, on held-out starts with an exact test; `make test-slow`.

The demo's game, and TextWorldExpress' coin with the package itself. Who plays and who reflects is a script
(`testkit.prompt_server`) whose skill follows from words of its prompt: what is tested is that the search finds them,
and what it says of that. Each test prints the comparison, no matter what comes out.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lake
from testkit.consumers import with_packages
from testkit.processes import environment
from testkit.prompt_server import ADVICE, SKILLS, prompt_server
from testkit.shared import CHECKOUT

pytestmark = pytest.mark.slow

COMMAND = ("-W", "ignore", "-c", "import sys; sys.modules['torch'] = None; from lake.cli import main; main()")
FIRST = "Answer with one short sentence."


def searched(python: Path, folder: Path, player: str, reflector: str, *options: str) -> dict[str, Any]:
    """What a search says of its best candidate on 20 held-out starts; it is printed, too."""
    with prompt_server() as server:
        engine = ["--engine", server.url, "--set", "player.api=chat", "--model", player]
        engine += ["--set", "player.sampling.max_tokens=16"]
        reflecting = ["--reflect", server.url, "--set", f"reflection.model={reflector}"]
        reflecting += ["--rounds", "4", "--set", "candidates=4"]
        shape = ["--first", FIRST, "--set", "starts=20", "--set", "held_out=20", "--set", "group_size=4", "--lake"]
        done = subprocess.run(
            [str(python), *COMMAND, "prompts", *engine, *reflecting, *shape, str(folder / "lake"), *options],
            env=environment(TRAJLAKE_SPOOL=str(folder / "spool"), PYTHONPATH=str(CHECKOUT)),
            capture_output=True,
            text=True,
            timeout=1200,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    print(done.stdout)
    jobs = lake.open(folder / "lake").sql("SELECT counts FROM job_runs WHERE kind = 'prompts' ORDER BY started_at")
    counts: dict[str, Any] = json.loads(jobs["counts"][-1])
    return counts


def read_system_prompt(folder: Path, run: str) -> str:
    """The system prompt of a run's policy."""
    lk = lake.open(folder / "lake")
    rows = lk.sql("SELECT DISTINCT initial_messages[1:4000] AS said FROM episodes WHERE run_id = ?", [run])
    return str(rows["said"][0])


def test_the_demos_game(tmp_path: Path) -> None:
    counts = searched(Path(sys.executable), tmp_path, "player", "reflector", "--env", "house", "--env-arg", "rooms=3")
    assert counts["test"] == "exact"
    assert counts["difference"] > 0.3
    assert counts["p"] < 0.001
    reply = read_system_prompt(tmp_path, f"prompts.held-out.{counts['best']}")
    assert sum(word in reply for word in SKILLS) >= 3


def test_textworld_express(tmp_path: Path) -> None:
    python = with_packages("textworld_express", ("textworld-express==1.1.0",))
    game = ["--env", "textworld-express:coin", "--env-arg", "numLocations=6", "--env-arg", "max_steps=20"]
    counts = searched(python, tmp_path, "walker", "coach", *game, "--set", "held_out_args.split=test")
    assert counts["test"] == "exact"
    assert counts["starts"] == 20
    assert counts["unknown"] == 0
    assert counts["difference"] > 0
    reply = read_system_prompt(tmp_path, f"prompts.held-out.{counts['best']}")
    assert ADVICE[0] in reply
    splits = lake.open(tmp_path / "lake").sql("SELECT DISTINCT split, run_id LIKE '%held-out%' FROM episodes")
    assert sorted(row for row in splits.rows() if row[0] is not None) == [("test", True), ("train", False)]
