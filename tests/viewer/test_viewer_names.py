"""Names before ids: episodes, groups and jobs by what people call them, and whose advantages a page shows."""

import json
import re
from typing import Any

import pytest

from lake import Lake, ids
from lake.judgements.credit import find_credit
from testkit.lakes import RUN, add_credit, add_training, build_lake
from testkit.streamlit_pages import column, columns, job_choice, open_page, words
from viewer import navigation
from viewer.server import ENVIRONMENT


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Two series of credit, the second of two jobs, and a training job."""
    lk = build_lake(tmp_path_factory.mktemp("names"))
    add_credit(lk, omega=0.0)
    add_credit(lk)
    add_credit(lk)
    add_training(lk)
    return lk


@pytest.fixture
def lk(shared: Lake, monkeypatch: pytest.MonkeyPatch) -> Lake:
    monkeypatch.setenv(ENVIRONMENT, shared.uri)
    return shared


@pytest.mark.parametrize(
    ("kind", "parameters", "name"),
    [
        ("credit", {"estimator": "gigpo", "score": "env_return"}, "gigpo"),
        ("score", {"scorer": "tools_worked", "version": "1"}, "tools_worked"),
        ("reward", {"reward": "mixed"}, "mixed"),
        ("train", {"loss": "awr"}, "awr"),
        ("train", {"loss": {"name": "awr", "beta": 0.5}}, "awr"),
        ("train", {"loss": {"beta": 0.5}}, None),
        ("train", {"ppo": {"clip": 0.2}}, "ppo, online"),
        ("ingest", {"source": "a.json"}, "a.json"),
        ("collect", {"environment": "maze"}, "maze"),
        ("credit", {"estimator": None}, None),
        ("credit", ["estimator"], None),
        ("of another kind", {"estimator": "gigpo"}, None),
    ],
)
def test_a_job_is_named_by_what_it_ran(kind: str, parameters: Any, name: str | None) -> None:
    assert navigation.name_job(kind, json.dumps(parameters)) == name


@pytest.mark.parametrize("parameters", [None, "", '{"estimator": "gi', "[" * 100_000])
def test_parameters_that_cannot_be_read_name_nothing(parameters: str | None) -> None:
    assert navigation.name_job("credit", parameters) is None


def test_an_episode_is_named_by_run_task_and_rollout() -> None:
    facts = {"run_id": "r", "task_id": "44", "rollout_index": 3, "collection_round": None, "seed": None, "attempt": 0}
    assert navigation.name_episode(facts) == "r / 44 / 3"
    assert navigation.name_episode(facts | {"rollout_index": 1_372_356_748}) == "r / 44 / 51cc808c", "a hash"
    assert navigation.name_sibling(facts | {"rollout_index": 1_372_356_748}) == "rollout 51cc808c"
    assert navigation.name_episode(facts | {"collection_round": 0, "attempt": 2}) == "r / 44 / 3, round 0, attempt 2"
    assert navigation.name_group(facts) == "r / 44"
    assert navigation.name_group(facts | {"collection_round": 1, "seed": 7}) == "r / 44, round 1, seed 7"


def test_every_list_names_its_rows_and_ends_with_their_ids(lk: Lake) -> None:
    at = open_page("jobs")
    assert list(zip(column(at, "jobs", "kind"), column(at, "jobs", "name"), strict=True)) == [
        ("train", "ppo"),
        *[("credit", "gigpo")] * 3,
        ("collect", "maze"),
    ]
    assert all(len(job) == ids.TEXT_LENGTH for job in column(at, "jobs", "job_id"))
    shown_columns = columns(open_page("groups"), "groups")
    assert shown_columns[:2] == ["run_id", "task_id"]
    assert shown_columns[-1] == "group_id"


def test_headings_are_names(lk: Lake) -> None:
    row = lk.sql("SELECT episode_id, group_id FROM episodes WHERE task_id = 'mixed' AND rollout_index = 2").to_dicts()[
        0
    ]
    round_ = lk.sql("SELECT collection_round FROM episodes WHERE episode_id = ?", [row["episode_id"]]).item()
    episode = open_page("episode", episode=row["episode_id"])
    bar = re.sub("<[^>]*>", "", words(episode))
    assert f"Episode {RUN} \u203a mixed \u203a group \u203a rollout 2, round {round_}" in bar
    assert ids.to_text(row["episode_id"]) in words(episode)
    group = open_page("group", group=row["group_id"])
    assert group.header[0].value == f"Group `{RUN} / mixed, round {round_}, seed 7`"
    job = lk.sql("SELECT job_id FROM job_runs WHERE kind = 'credit' LIMIT 1").item()
    assert open_page("job", job=job).header[0].value == "Job `credit gigpo`"
    assert " ppo " in job_choice(open_page("training")).options[0]


def test_pages_with_advantages_say_whose_they_are(lk: Lake) -> None:
    """The current credit unless the address names another: the estimator, its series, and the job that was named."""
    snapshot = lk.snapshot()
    first = lk.sql("SELECT job_id FROM job_runs WHERE kind = 'credit' ORDER BY ended_at LIMIT 1").item()
    row = lk.sql("SELECT episode_id, group_id FROM episodes WHERE task_id = 'mixed' LIMIT 1").to_dicts()[0]
    current, then = (f"`{find_credit(snapshot, name).title}`" for name in (None, ids.to_text(first)))
    for page, address in (("episode", {"episode": row["episode_id"]}), ("group", {"group": row["group_id"]})):
        assert f"Advantages by {current}." in words(open_page(page, **address))
        assert f"Advantages by {then}." in words(open_page(page, **address, credit=first))
    assert current in words(open_page("training"))
