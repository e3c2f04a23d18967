"""docs/guides/prompts.md: its commands run, before scripted endpoints that stand in for the models."""

import os
import re
import subprocess
import sys
from pathlib import Path

import lake
from testkit.prompt_server import prompt_server
from testkit.shared import CHECKOUT

PAGE = Path(CHECKOUT, "docs", "guides", "prompts.md").read_text("utf-8")


def test_the_commands_of_the_page(tmp_path: Path) -> None:
    (commands,) = re.findall(r"^```bash\n(.+?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin" / "trajlake"
    tool.write_text(f'#!/bin/sh\nexec {sys.executable} -c "from lake.cli import main; main()" "$@"\n', "utf-8")
    tool.chmod(0o755)
    with prompt_server() as player, prompt_server() as reflector:
        commands = commands.replace("http://127.0.0.1:8000", player.url).replace("http://127.0.0.1:8001", reflector.url)
        done = subprocess.run(
            ["bash", "-euc", commands],
            cwd=tmp_path,
            env={
                "PATH": f"{tool.parent}:{os.environ['PATH']}",
                "PYTHONPATH": str(CHECKOUT),
                "HOME": str(tmp_path),
                "TRAJLAKE_SPOOL": str(tmp_path / "spool"),
            },
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "held out, " in done.stdout
    lk = lake.open(tmp_path / "L")
    best = (tmp_path / "best.txt").read_text("utf-8").strip()
    told = lk.sql("SELECT DISTINCT initial_messages FROM episodes WHERE run_id = 'with-best'")["initial_messages"]
    assert all(best in text for text in told)
    splits = lk.sql("SELECT DISTINCT split FROM episodes WHERE run_id LIKE '%held-out%'")["split"].to_list()
    assert splits == ["held_out"]
    runs = lk.sql("SELECT DISTINCT run_id FROM episodes")["run_id"].to_list()
    assert {"prompts.reflect-1.0", "prompts.reflect-2.0", f"prompts.{lake.ids.to_text(lake.ids.text_hash(best))}"} <= {
        *runs
    }
