"""A user and password in an engine's URL reach the engine, and are shown nowhere: output, logs, tables, spool."""

import json
from base64 import b64encode
from pathlib import Path

import pytest

import lake
from lake.tables import TABLES
from pipelines.collect.environments.house import list_vocabulary
from testkit.commands import trajlake
from testkit.engine_server import engine_server
from testkit.processes import environment
from testkit.token_engine import Fault, token_engine
from trainer.online.demo import build_tokenizer

PASSWORD = "Xq7pass-word9"
ENCODED = b64encode(f"ann:{PASSWORD}".encode()).decode()
QUOTED = {"error": {"message": f"ann may not come in with {PASSWORD}: {ENCODED}"}}
"""What a server says that quotes what it refuses."""
AGENT = """
import json, urllib.error, urllib.request

def agent(task, client):
    body = json.dumps({"model": "echo-401", "messages": [{"role": "user", "content": "?"}], "temperature": 1.0})
    headers = {"Content-Type": "application/json"}
    try:
        urllib.request.urlopen(
            urllib.request.Request(client.base_url + "/chat/completions", body.encode(), headers)
        )
    except urllib.error.HTTPError as error:
        raise ValueError(error.read().decode()) from error
"""


def with_user(url: str) -> str:
    return url.replace("://", f"://ann:{PASSWORD}@")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    build_tokenizer(list_vocabulary()).save_pretrained(folder)
    return folder


def collected(folder: Path, *options: str | Path) -> tuple[int, str]:
    """Exit status and all that was said; the tables and the files say nothing of the password."""
    own = environment(XDG_STATE_HOME=str(folder / "state"), TMPDIR=str(folder))
    done = trajlake("collect", "--lake", folder / "L", "--groups", "1", "--group-size", "2", *options, env=own)
    said = done.stdout + done.stderr
    assert "Traceback" not in said
    hidden = (PASSWORD, ENCODED)
    if (folder / "L").exists():
        lk = lake.open(str(folder / "L"))
        said_by_tables = [repr(lk.sql(f"SELECT * FROM {name}").rows()) for name in TABLES]
        assert not [rows for rows in said_by_tables for secret in hidden if secret in rows]
    files = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    assert not [secret for secret in hidden for content in files if secret.encode() in content]
    assert not [secret for secret in hidden if secret in said], said
    return done.returncode, said


def test_of_an_engine_that_is_dead_the_address_alone_is_told(tmp_path: Path, model: Path) -> None:
    with token_engine() as engine:
        url = engine.url
    status, said = collected(tmp_path, "--env", "house", "--model", model, "--engine", with_user(url))
    assert status == 2
    assert said.startswith(f"trajlake: nothing answers at {url} ("), said
    assert not (tmp_path / "L").exists()


def test_an_engine_gets_them_and_what_it_quotes_is_left_out(tmp_path: Path, model: Path) -> None:
    with token_engine() as engine:
        engine.fail(Fault(status=503), Fault(cut=True))
        engine.always = Fault(status=401, text=json.dumps(QUOTED))
        options = ("--env", "house", "--model", model, "--engine", with_user(engine.url), "--set", "retries=0")
        status, said = collected(tmp_path, *options)
        assert set(engine.authorised) == {f"Basic {ENCODED}"}
    assert status == 1
    assert f"the first error: EngineRefusedError: POST /inference/v1/generate at {engine.url} answers 401" in said, said
    errors = lake.open(str(tmp_path / "L")).sql("SELECT error FROM episodes").rows()
    assert len(errors) == 2
    assert all("ann may not come in with [redacted]: [redacted]" in error for (error,) in errors), errors


@pytest.mark.slow("a user and password of an engine are shown nowhere before an agent either")
def test_before_an_agent_they_are_left_out_of_what_it_fails_with(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT, "utf-8")
    with engine_server() as engine:
        options = ("--agent", tmp_path / "agent.py:agent", "--engine", with_user(engine.url), "--set", "retries=0")
        status, _ = collected(tmp_path, *options)
    assert status == 1
    errors = lake.open(str(tmp_path / "L")).sql("SELECT error FROM episodes").rows()
    assert len(errors) == 2
    assert all("Basic [redacted]" in error or "uthorization" in error for (error,) in errors), errors
