"""The training page in a real browser while `trajlake loop` runs: it moves on by itself."""

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import lake
from lake import ids
from lake.read.online_runs import LOOP
from testkit.browsers import chromium
from testkit.loops import loop_process, write_config
from testkit.viewer_process import viewer
from testkit.word_game import save_model

pytestmark = pytest.mark.browser

PATIENCE = 240_000
"""Milliseconds that a round of the loop and drawing it may take on a busy machine."""
ROUNDS = re.compile(r"(\d+) of 500 rounds")


def begun(place: Path) -> int:
    """The loop's training job, once it has begun."""
    deadline = time.monotonic() + PATIENCE / 1000
    lk = lake.open(place, create=True)
    while time.monotonic() < deadline:
        rows = lk.sql(f"SELECT json_extract_string(parameters, '$.train_job') FROM job_runs WHERE kind = '{LOOP}'")
        if rows.height:
            return ids.from_text(rows.item())
        time.sleep(0.2)
    pytest.fail("the loop did not begin")


def done(page: Any) -> int:
    """Rounds that the page says are done."""
    found = ROUNDS.search(page.get_by_test_id("stProgress").inner_text())
    assert found is not None
    return int(found.group(1))


def test_the_page_follows_a_run_and_shows_its_rounds(tmp_path: Path) -> None:
    lake.open(tmp_path / "lake", create=True)
    config = write_config(tmp_path, save_model(tmp_path / "model"))
    running = loop_process(tmp_path, config, "--set", "loop.rounds=500", "--set", "loop.evaluation.every=500")
    try:
        job = begun(tmp_path / "lake")
        with viewer(str(tmp_path / "lake")) as shown, chromium() as browser:
            page = browser.new_page(viewport={"width": 1440, "height": 1400})
            page.set_default_timeout(PATIENCE)
            page.goto(f"{shown.address}/training?job={ids.to_text(job)}")
            page.get_by_text("running", exact=True).wait_for()
            page.get_by_test_id("stProgress").wait_for()
            before = done(page)
            page.wait_for_function(
                "before => { const bar = document.querySelector('[data-testid=stProgress]');"
                " return bar && parseInt(bar.innerText) > before; }",
                arg=before,
            )
            page.get_by_role("heading", name="Rounds", exact=True).wait_for()
            assert page.get_by_test_id("stException").count() == 0
            assert f"job={ids.to_text(job)}" in page.url, "a redrawn page stays with its job"
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        running.communicate()
