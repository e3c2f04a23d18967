"""The training page in a real browser while `trajlake loop` runs: it moves on alone."""

import os
import re
import signal
import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

import lake
from lake import ids
from lake.read.training import LOOP
from testkit.browsers import chromium
from testkit.loops import loop_process, looped, write_config
from testkit.viewer_process import viewer
from testkit.word_game import save_model
from trainer.online.settings import read_config

pytestmark = pytest.mark.browser

PATIENCE = 240_000
"""Milliseconds that a round of the loop and drawing it may take on a busy machine."""
ROUNDS = re.compile(r"(\d+) of 500 rounds")


def wait_for_job(folder: Path) -> int:
    """The loop's training job, once it has started."""
    deadline = time.monotonic() + PATIENCE / 1000
    lk = lake.open(folder, create=True)
    while time.monotonic() < deadline:
        rows = lk.sql(f"SELECT json_extract_string(parameters, '$.train_job') FROM job_runs WHERE kind = '{LOOP}'")
        if rows.height:
            return ids.from_text(rows.item())
        time.sleep(0.2)
    pytest.fail("the loop did not begin")


def done(page: Any) -> int:
    """Rounds that the page says are done."""
    match = ROUNDS.search(page.get_by_test_id("stProgress").inner_text())
    assert match is not None
    return int(match.group(1))


@pytest.mark.slow("the training page moves on by itself while `trajlake loop` runs")
def test_the_page_follows_a_run_and_shows_its_rounds(tmp_path: Path) -> None:
    lake.open(tmp_path / "lake", create=True)
    config = write_config(tmp_path, save_model(tmp_path / "model"))
    running = loop_process(tmp_path, config, "--set", "loop.rounds=500", "--set", "loop.evaluation.every=500")
    try:
        job = wait_for_job(tmp_path / "lake")
        with viewer(str(tmp_path / "lake")) as viewer_shown, chromium() as browser:
            page = browser.new_page(viewport={"width": 1440, "height": 1400})
            page.set_default_timeout(PATIENCE)
            page.goto(f"{viewer_shown.address}/training?job={ids.to_text(job)}")
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


@pytest.mark.slow("points of the curves of a loop open what they are of")
def test_points_open_what_they_are_of(tmp_path: Path) -> None:
    """Of three rounds of two updates: held-out episodes, a round's episodes, groups and updates, and the round."""
    looped(tmp_path, read_config(str(write_config(tmp_path, save_model(tmp_path / "model"))), {}))
    query = f"SELECT json_extract_string(parameters, '$.train_job') FROM job_runs WHERE kind = '{LOOP}'"
    job = lake.open(tmp_path / "lake").sql(query).item()
    expected = {
        "success": ("/episodes", {"run": ["asking-eval"], "version": ["3"]}),
        "mean_return": ("/episodes", {"run": ["asking"], "round": ["2"]}),
        "live_share": ("/groups", {"run": ["asking"], "round": ["2"]}),
        "entropy": ("/training", {"job": [job], "round": ["2"], "update": ["4"]}),
        "seconds": ("/training", {"job": [job], "round": ["2"]}),
    }
    with viewer(str(tmp_path / "lake")) as viewer_shown, chromium() as browser:
        page = browser.new_page(viewport={"width": 1440, "height": 1400})
        page.set_default_timeout(PATIENCE)
        for name, (path, parameters) in expected.items():
            page.goto(f"{viewer_shown.address}/training?job={job}&axis=Tokens")
            chart = page.locator(f".st-key-loop-{name}").get_by_test_id("stVegaLiteChart")
            chart.locator("canvas").first.wait_for()
            box = chart.bounding_box()
            page.mouse.click(box["x"] + box["width"] * 0.95, box["y"] + box["height"] / 2)
            page.wait_for_url(lambda url, was=page.url: url != was)
            parts_of_url = urlsplit(page.url)
            assert (parts_of_url.path, parse_qs(parts_of_url.query)) == (path, parameters), name
