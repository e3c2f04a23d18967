"""docs/guides/prompts.md: its commands run, before scripted endpoints that stand in for the models."""

import re
from pathlib import Path

import lake
from testkit.guide_pages import run_in_process
from testkit.prompt_server import prompt_server
from testkit.shared import CHECKOUT

PAGE = Path(CHECKOUT, "docs", "guides", "prompts.md").read_text("utf-8")


def test_the_commands_of_the_page(tmp_path: Path) -> None:
    (commands,) = re.findall(r"^```bash\n(.+?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    with prompt_server() as player, prompt_server() as reflector:
        commands = commands.replace("http://127.0.0.1:8000", player.url).replace("http://127.0.0.1:8001", reflector.url)
        assert "held out, " in run_in_process(commands, tmp_path)
    lk = lake.open(tmp_path / "L")
    best = (tmp_path / "best.txt").read_text("utf-8").strip()
    prompts = lk.sql("SELECT DISTINCT initial_messages FROM episodes WHERE run_id = 'with-best'")["initial_messages"]
    assert all(best in text for text in prompts)
    splits = lk.sql("SELECT DISTINCT split FROM episodes WHERE run_id LIKE '%held-out%'")["split"].to_list()
    assert splits == ["held_out"]
    runs = lk.sql("SELECT DISTINCT run_id FROM episodes")["run_id"].to_list()
    assert {"prompts.reflect-1.0", "prompts.reflect-2.0", f"prompts.{lake.ids.to_text(lake.ids.text_hash(best))}"} <= {
        *runs
    }
