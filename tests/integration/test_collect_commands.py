"""`trajlake collect` from options to rows: who speaks, what the engine is asked for, what the lake has of it."""

import json
import time
from pathlib import Path

import pytest

import lake
from lake.write.tokenizers import read_vocabulary
from pipelines.collect.environments.house import list_vocabulary
from testkit.chat_models import tokenizer_of
from testkit.command_line import runner
from testkit.token_engine import TokenEngine, token_engine
from trainer.online.demo import TinyPolicyConfig, build_model, build_tokenizer
from trainer.policy import tiny_model
from trainer.policy.tiny_model import TinyModelConfig

CALL = '<tool_call>{"name": "look", "arguments": {"at": "door"}}</tool_call>'
BROKEN = '<tool_call>{"name": "look"'
ENVIRONMENT = """
from pipelines.collect.environments import Outcome

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


class Door:
    name, split = "door", None

    async def reset(self, task):
        self.asked = 0
        return Outcome(messages=[{"role": "user", "content": "Where?"}], tools=[TOOL], task_id=str(task.seed))

    async def step(self, action):
        self.asked += 1
        calls = action.get("tool_calls") or []
        shown = [{"role": "tool", "tool_call_id": call["id"], "content": "a door"} for call in calls]
        return Outcome(messages=shown or [{"role": "user", "content": "Say it again."}], terminated=self.asked == 2)

    async def close(self):
        pass


def make():
    return Door()
"""


@pytest.fixture
def cli(tmp_path, monkeypatch, capsys):
    run = runner(monkeypatch, capsys)
    monkeypatch.setenv("TRAJLAKE_SPOOL", str(tmp_path / "spool"))
    return run


def collect(cli, folder: Path, *options: str | Path):
    small = ("--groups", "2", "--group-size", "2", "--lake", folder / "lake", *options)
    done = cli("collect", *small)
    assert done.code == 0, done.err
    columns = "step_index, action, tool_calls, is_action_valid, finish_reason, extra, constrained, action_ids"
    return lake.open(str(folder / "lake")).sql(
        f"SELECT {columns}, logprobs_mode FROM steps JOIN tokens USING (episode_id, step_index)"
    )


def assert_lake_has_tokenizer(tmp_path, tokenizer):
    lk = lake.open(tmp_path / "lake")
    [encoding_id] = lk.sql("SELECT DISTINCT encoding_id FROM tokens")["encoding_id"]
    vocabulary = read_vocabulary(lk.snapshot().objects, encoding_id)
    assert vocabulary is not None
    assert set(vocabulary) >= set(tokenizer.get_vocab().values())


def test_tool_calls_drift_and_unreadable_calls_are_in_the_steps(tmp_path, cli):
    tokenizer = tokenizer_of("tools")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "door.py").write_text(ENVIRONMENT)

    def answer(prompt_ids, seed, most):
        if tokenizer.decode(prompt_ids).count("<|im_start|>assistant") == 1:
            # The engine makes a seed of each sample: a thousand times the request's, and the sample's number.
            said = tokenizer.encode(CALL if seed // 1000 % 2 == 0 else BROKEN, add_special_tokens=False)
        else:
            said = tokenizer.convert_tokens_to_ids(["g", "o"])  # which the tokenizer makes one of
        return [*said, tokenizer.eos_token_id]

    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "string"}')
    with token_engine(TokenEngine(answer)) as engine:
        engine.adapters["pi"] = "/adapter"
        began = time.monotonic()
        rows = collect(
            cli,
            tmp_path,
            *("--env", f"{tmp_path / 'door.py'}:make", "--engine", engine.url, "--model", tmp_path / "model"),
            *("--set", f"player.answer_schema={schema}", "--set", "player.adapter=pi", "--groups", "4"),
            *("--set", "player.requests_per_second=20", "--set", "player.tokens_per_second=100000"),
        )
        assert time.monotonic() - began >= (len(engine.calls) - 1) / 20
        bodies = [call.body for call in engine.calls]
    assert {body["model"] for body in bodies} == {"pi"}
    assert all(body["sampling_params"]["structured_outputs"] == {"json": {"type": "string"}} for body in bodies)
    first = rows.filter(rows["step_index"] == 0)
    read = first.filter(first["tool_calls"].is_not_null())
    unread = first.filter(first["tool_calls"].is_null())
    assert len(read) > 0
    assert len(unread) > 0
    for row in read.iter_rows(named=True):
        [call] = json.loads(row["tool_calls"])
        assert call["function"] == {"name": "look", "arguments": '{"at": "door"}'}
    assert set(unread["is_action_valid"]) == {False}
    assert all("is not closed" in json.loads(extra)["tool_call_fault"] for extra in unread["extra"])
    last = rows.filter(rows["step_index"] == 1)
    assert all(json.loads(extra)["drift"]["retokenised"]["tokens"] == 2 for extra in last["extra"])
    assert rows["constrained"].to_list() == [[True] * len(ids) for ids in rows["action_ids"]]
    assert_lake_has_tokenizer(tmp_path, tokenizer)


def test_a_model_plays_in_the_collecting_process(tmp_path, cli):
    tokenizer = build_tokenizer(list_vocabulary())
    build_model(tokenizer, TinyPolicyConfig(), seed=0).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = collect(
        cli, tmp_path, "--env", "house", "--env-arg", "horizon=3", "--model", tmp_path / "model", "--max-tokens", "4"
    )
    assert len(rows) == 2 * 2 * 3
    assert set(rows["logprobs_mode"]) == {"processed"}
    assert all(len(ids) <= 4 for ids in rows["action_ids"])
    assert_lake_has_tokenizer(tmp_path, tokenizer)


def test_a_model_in_the_collecting_process_is_held_to_a_schema(tmp_path, cli):
    """What it says is no action of the game, but every answer is JSON of the schema, or marked as cut."""
    tokenizer = tiny_model.build_tokenizer(['{"verb": "look", "at": 3}', "door"], 300)
    tiny_model.build_model(tokenizer, TinyModelConfig()).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    schema = {"properties": {"verb": {"enum": ["look", "go"]}}, "required": ["verb"], "additionalProperties": False}
    (tmp_path / "schema.json").write_text(json.dumps({"type": "object", **schema}))
    options = ("--env", "house", "--env-arg", "horizon=3", "--model", tmp_path / "model", "--max-tokens", "24")
    rows = collect(cli, tmp_path, *options, "--set", f"player.answer_schema={tmp_path}/schema.json")
    assert rows["constrained"].to_list() == [[True] * len(ids) for ids in rows["action_ids"]]
    assert set(rows["finish_reason"]) == {"stop", "length"}
    for row in rows.iter_rows(named=True):
        is_cut = row["action_ids"][-1] != tokenizer.eos_token_id
        assert is_cut == (row["finish_reason"] == "length")
        assert is_cut or json.loads(row["action"])["verb"] in {"look", "go"}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--set", "player.adapter=pi", "--model", "x"), "player.adapter is for engines"),
        (("--set", "player.answer_schema=SCHEMA", "--model", "x"), "a model in this process cannot be held to it"),
        (("--set", "player.answer_schema=SCHEMA", "--model", "x"), "/properties/at/uniqueItems: "),
        (("--set", "player.answer_schema=BROKEN", "--model", "x"), "is not JSON"),
        (("--set", "player.answer_schema=LIST", "--model", "x"), "holds list; valid: a JSON schema"),
    ],
)
def test_options_of_speakers_that_cannot_be_are_refused(tmp_path, options, told, cli, monkeypatch):
    schema = '{"properties": {"at": {"uniqueItems": true}}}'
    for name, text in {"SCHEMA": schema, "BROKEN": "{", "LIST": "[]"}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    assert told in cli("collect", "--lake", tmp_path / "lake", "--env", "house", *options).fault
    assert not (tmp_path / "lake").exists()


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B: no such folder; valid: a model's folder"),
        ("run-1", "run-1 is the folder of a training run; its model is run-1/final"),
        ("foreign", "foreign contains no tokenizer: "),
    ],
)
def test_nothing_is_fetched_for_a_tokenizer_and_no_code_of_it_is_run(tmp_path, model, told, cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run-1" / "final").mkdir(parents=True)
    (tmp_path / "run-1" / "final" / "config.json").write_text("{}")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": [null, "own.Own"]}}')
    (tmp_path / "foreign" / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: ...\n")
    with token_engine() as engine:
        done = cli("collect", "--env", "house", "--engine", engine.url, "--model", model, "--lake", tmp_path / "lake")
    assert (done.code, told in done.err) == (2, True), done.err
    assert "trust_remote_code" in done.err or model != "foreign"
    assert not (tmp_path / "ran").exists()


def test_an_engine_of_another_tokenizer_is_refused_by_both_folders(tmp_path, cli, wording):
    """Its ids would be recorded as if they were this tokenizer's; and the environment's name is looked up first."""
    for name, words in (("served", ["one"]), ("given", ["two", "three"])):
        build_tokenizer(words).save_pretrained(tmp_path / name)
    with token_engine() as engine:
        engine.folder = str(tmp_path / "served")
        options = ("--engine", engine.url, "--model", tmp_path / "given", "--lake", tmp_path / "lake")
        done = cli("collect", "--env", "house", *options)
        unknown = cli("collect", "--env", "no_such_thing", *options)
    assert done.code == 2
    assert f"serves {tmp_path / 'served'}, whose tokenizer" in wording(done.err)
    assert f"that in {tmp_path / 'given'}" in done.err
    assert "no_such_thing" in unknown.err
    assert not (tmp_path / "lake").exists()
