"""Training in a real browser: alarms, averages and other jobs as painted; updates and jobs, and Back from them."""

import re
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from typing import Any

import polars as pl
import pytest

from lake import Lake, ids
from testkit.browser_pages import address, go, settled
from testkit.lakes import RUN, build_lake
from viewer.figures import NEGATIVE, OTHER_COLOURS, POSITIVE

pytestmark = pytest.mark.browser
VIEWPORT = {"width": 1440, "height": 900}

UPDATES = 40
HOSTILE = "a <img src=x onerror='window.hostile = 1'>"
"""Of a run that comes first by name."""

# Which rows and columns of the first chart hold a colour, as shares of its size: the first and the last of each, and
# how many stretches the columns are. A pixel counts if it is the colour on white, as opaque as asked for.
PAINTED = """
    ([colour, least, most]) => {
        const canvas = document.querySelector("[data-testid=stVegaLiteChart] canvas");
        if (!canvas?.width) return null;
        const { width, height } = canvas;
        const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
        const wanted = [1, 3, 5].map((at) => 255 - parseInt(colour.slice(at, at + 2), 16));
        const along = (one, other) => one.reduce((sum, value, band) => sum + value * other[band], 0);
        const rows = new Set(), columns = new Set();
        for (let place = 0; place < data.length; place += 4) {
            const found = [0, 1, 2].map((band) => 255 - data[place + band]);
            const opacity = along(found, wanted) / along(wanted, wanted);
            if (opacity < least || opacity > most) continue;
            if (found.some((value, band) => Math.abs(value - opacity * wanted[band]) > 8)) continue;
            rows.add(Math.floor(place / 4 / width));
            columns.add((place / 4) % width);
        }
        if (!rows.size) return null;
        const ends = (all, size) => [Math.min(...all) / size, Math.max(...all) / size];
        const stretches = [...columns].filter((column) => !columns.has(column - 1)).length;
        return { rows: ends(rows, height), columns: ends(columns, width), stretches };
    }
"""


def train(lk: Lake, run: str, losses: Sequence[float], alarms: Collection[int] = ()) -> str:
    """A training job with a loss and a batch of one episode for each update; its id."""
    episode, last = lk.sql("SELECT episode_id, num_steps - 1 FROM episodes ORDER BY 1 LIMIT 1").row(0)
    at = datetime(2026, 1, 1, tzinfo=UTC)
    values = [("loss", losses), *([("alarms", [float(n in alarms) for n in range(UPDATES)])] if alarms else [])]
    metrics = [
        {"step": n, "name": name, "value": value, "at": at} for name, points in values for n, value in enumerate(points)
    ]
    batch = {"episode_id": episode, "first_step": 0, "last_step": last, "action_tokens": 15, "epoch": 0}
    with lk.job(kind="train", run_id=run, parameters={"loss": "ppo"}) as job:
        job.write("metrics", pl.DataFrame(metrics))
        job.write("batches", pl.DataFrame([batch | {"optimizer_step": n} for n in range(UPDATES)]))
    return ids.to_text(job.job_id)


@pytest.fixture(scope="module")
def lk(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Two jobs, whose losses are far below and far above, and the newest, whose loss goes up and down."""
    lk = build_lake(tmp_path_factory.mktemp("training"))
    train(lk, HOSTILE, [-2.0] * UPDATES)
    train(lk, "high", [3.0] * UPDATES)
    train(lk, RUN, [float(n % 2) for n in range(UPDATES)], alarms=(*range(10, 15), 30, 31))
    return lk


LINE, SHADE = (0.5, 1.05), (0.1, 0.2)
"""How opaque lines and shades are; what an average stands for is drawn with less than a line's."""


def painted(page: Any, colour: str, opaque: tuple[float, float] = LINE, which: str = "true") -> dict[str, Any]:
    """What `PAINTED` says of a colour, once there is some and `which` holds of it."""
    condition = f"of => {{ const found = ({PAINTED})(of); return found && ({which}) ? found : null; }}"
    painted_mark: dict[str, Any] = page.wait_for_function(condition, arg=[colour, *opaque]).json_value()
    return painted_mark


def choose_beside(page: Any, name: str) -> None:
    """Choose another job by what its run is called, with the keyboard."""
    field = page.get_by_role("combobox", name="Compare with")
    field.focus()
    page.keyboard.type(name)
    page.get_by_role("option", name=name).wait_for()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.locator(".trajlake-legend", has_text=name).wait_for()
    page.keyboard.press("Escape")


def update_field(page: Any) -> Any:
    return page.get_by_role("spinbutton", name=f"Update, 0 to {UPDATES - 1}")


def type_update(page: Any, text: str) -> None:
    update_field(page).fill(text)
    update_field(page).press("Enter")


def shows_update(page: Any, text: str) -> None:
    """Wait until the page shows an update, or none, and its field says the same."""
    heading = page.get_by_role("heading", name=re.compile(rf"^Update {text or '[0-9]'}"))
    heading.wait_for(state="visible" if text else "detached")
    page.wait_for_function(
        "text => document.querySelector('[data-testid=stNumberInputField]')?.value === text", arg=text
    )
    settled(page, "Training")


@pytest.mark.slow("updates with an alarm are shaded")
def test_updates_with_an_alarm_are_shaded(page: Any) -> None:
    go(page, "/training", "Training")
    page.get_by_text("Shaded: an active alarm (7 updates).").wait_for()
    mark = painted(page, NEGATIVE, SHADE)
    assert mark["stretches"] >= 2, "the curve may part them"
    assert mark["rows"][1] - mark["rows"][0] > 0.5, "over the height of the chart"
    first, last = mark["columns"]
    assert 0.2 < first < 0.4 < 0.7 < last < 0.85, "from update 10 to update 31"


@pytest.mark.slow("a moving average is drawn and stays on a reload")
def test_the_moving_average_is_drawn_and_stays_on_a_reload(page: Any) -> None:
    go(page, "/training", "Training")
    top, bottom = painted(page, POSITIVE)["rows"]
    page.get_by_text("10", exact=True).click()
    narrower = f"found.rows[1] - found.rows[0] < {0.6 * (bottom - top)}"
    painted(page, POSITIVE, which=narrower)
    assert address(page) == {"average": "10"}
    page.reload()
    settled(page, "Training")
    painted(page, POSITIVE, which=narrower)


@pytest.mark.slow("other jobs are drawn in the colours of the legend")
def test_other_jobs_have_the_colours_of_the_legend(page: Any) -> None:
    """The one chosen first comes last by name."""
    go(page, "/training", "Training")
    choose_beside(page, "high")
    before = page.evaluate("history.length")
    choose_beside(page, "a <img")
    assert page.evaluate("history.length") == before + 1
    for _ in range(2):
        legend = page.locator(".trajlake-legend").all_inner_texts()
        assert [label.split()[0] for label in legend] == [RUN, "high", "a"]
        high, mine, low = (
            painted(page, colour)["rows"][0] for colour in (OTHER_COLOURS[0], POSITIVE, OTHER_COLOURS[1])
        )
        assert high < mine < low
        page.reload()
        settled(page, "Training")
    page.go_back()
    page.wait_for_function("document.querySelectorAll('.trajlake-legend').length === 2")


@pytest.mark.slow("a click beside a point of a curve opens it")
def test_a_click_a_few_pixels_beside_a_point_opens_it(page: Any) -> None:
    """Update 12 has the least loss, 0, between two of 1."""
    go(page, "/training", "Training")
    place = painted(page, POSITIVE)
    canvas = page.locator("[data-testid=stVegaLiteChart] canvas").first.bounding_box()
    first, last = place["columns"]
    across = first + (last - first) * 12 / (UPDATES - 1)
    page.mouse.click(canvas["x"] + canvas["width"] * across + 3, canvas["y"] + canvas["height"] * place["rows"][1] - 6)
    shows_update(page, "12")


@pytest.mark.slow("an update is typed, and Back leads out of it")
def test_an_update_is_typed_and_back_leads_out_of_it(page: Any, lk: Lake) -> None:
    go(page, f"/episodes?run={RUN}", "Episodes")
    page.get_by_role("link", name="Training", exact=True).click()
    shows_update(page, "")
    type_update(page, "12")
    shows_update(page, "12")
    job = lk.sql("SELECT job_id FROM job_runs WHERE kind = 'train' AND run_id = ?", [RUN]).item()
    assert address(page) == {"job": ids.to_text(job), "update": "12"}
    update_field(page).blur()
    page.keyboard.press("j")
    shows_update(page, "13")
    type_update(page, str(UPDATES))
    page.keyboard.press("Tab")
    assert address(page)["update"] == "13", "there is no such update"
    page.go_back()
    shows_update(page, "12")
    page.go_back()
    shows_update(page, "")
    page.go_forward()
    shows_update(page, "12")
    type_update(page, "")
    shows_update(page, "")
    page.go_back()
    shows_update(page, "12")
    page.go_back()
    shows_update(page, "")
    page.go_back()
    settled(page, "Episodes")
    assert address(page) == {"run": RUN}


@pytest.mark.slow("another job is one step of the history, and Back returns to the update")
def test_another_job_is_one_step_and_back_returns_to_the_first(page: Any) -> None:
    go(page, "/training", "Training")
    type_update(page, "12")
    shows_update(page, "12")
    field = page.get_by_role("combobox", name="Job")
    page.wait_for_function("document.querySelector('[data-testid=stMain]').scrollTop > 0")
    field.focus()
    page.keyboard.type("high")
    page.get_by_role("option", name="high").wait_for()
    page.keyboard.press("Enter")
    shows_update(page, "")
    assert field.input_value().startswith("high")
    page.go_back()
    shows_update(page, "12")
    assert field.input_value().startswith(RUN)
