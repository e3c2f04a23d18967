"""The file of `trajlake loop`: what is refused, with which words, before anything is made."""

import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lake.errors import TrajlakeError, UsageError
from testkit.loops import run_of, write_config
from testkit.word_game import TARGET, save_model
from testkit.wording import Wording
from trainer.online.commands import loop
from trainer.online.settings import OnlineConfig, read_config
from trainer.online.start import build_job_parameters


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("config")
    return str(write_config(folder, save_model(folder / "model")))


def test_options_of_the_estimator_stand_in_its_own_section(config: str) -> None:
    assert read_config(config, {}).loop.credit.build().model_dump()["omega"] == 0.5
    settings = {"loop": {"credit": {"options": {"omega": 2.0}}}}
    assert read_config(config, settings).loop.credit.build().model_dump()["omega"] == 2.0


def test_what_is_given_goes_before_the_file(config: str) -> None:
    settings = {"loop": {"rounds": 9, "collect": {"groups": 2}}, "trainer": {"loss": {"name": "reinforce"}}}
    config_read = read_config(config, settings)
    assert (config_read.loop.rounds, config_read.loop.collect.groups, config_read.loop.collect.group_size) == (9, 2, 4)
    assert config_read.trainer.loss.name == "reinforce"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loop": {"round": 9}}, "there is no option `loop.round`"),
        ({"loop": {"mode": "sft"}}, r"\[loop.sft\] is for the modes sft and sft\+rl"),
        ({"loop": {"collect": {"player": {"model": "m"}}}}, "is the model that is trained; set `model` in"),
        ({"loop": {"collect": {"keep": "first"}}}, "needs `oversample`"),
        ({"loop": {"collect": {"carry_over": True}}}, 'needs `keep = "first"`'),
        ({"loop": {"credit": {"estimator": "none"}}}, "no estimator 'none'; valid: "),
        ({"loop": {"credit": {"options": {"gama": 1}}}}, "credit.gigpo: there is no option `gama`"),
        ({"trainer": {"validation": {"where": "true"}}}, r"a loop has \[loop.evaluation\]"),
        ({"trainer": {"learning_rate": 1e300}}, "`learning_rate` is 1e\\+300; valid: 1e\\+30 or less"),
        ({"loop": {"credit": "gigpo"}}, "`loop.credit` is 'gigpo'; valid: keys with values"),
        ({"loop": {"score": "exact"}}, "`loop.score` is 'exact'; valid: keys with values"),
        ({"rounds": 9}, "^--set: there is no section rounds; valid: loop, trainer"),
        (
            {"loop": {"collect": {"player": {"engines": ["http://127.0.0.1:9"], "api": "chat"}}}},
            "gives no token ids: a loop needs vLLM or SGLang",
        ),
        ({"loop": {"collect": {"keep": "best"}}}, "needs `oversample`"),
        ({"loop": {"collect": {"filters": ["dead_group"]}}}, "loop.collect.filters.*'dead_group'"),
        ({"loop": {"collect": {"filters": [{"kind": "length", "most": 3}]}}}, "`loop.collect.filters.*most`"),
        ({"loop": {"sync_every": 2, "evaluation": {"every": 3}}}, "`evaluation.every` is 3; valid: a multiple"),
        ({"trainer": {"selection": "clean"}}, "`trainer.selection` .*`loop.collect.filters`"),
        ({"trainer": {"advantages": "rloo"}}, "`trainer.advantages` "),
        ({"trainer": {"checkpoint_every": 7}}, "`trainer.checkpoint_every` "),
    ],
)
def test_what_is_wrong_is_named(config: str, settings: dict[str, Any], message: str, wording: Wording) -> None:
    with pytest.raises(UsageError, match=message) as error:
        read_config(config, settings)
    wording(error.value, CONFIG=config)


def test_a_file_without_a_model_is_told_where_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "loop.toml"
    file.write_text('[trainer]\nloss = "ppo"\n[loop.collect.player]\nenv = "house"\n')
    with pytest.raises(UsageError, match=r"^\[trainer\] model missing: say which model"):
        read_config(str(file), {})


@pytest.mark.parametrize(
    ("pair", "run", "message"),
    [
        ("loop.rounds=2", "a/b", "invalid --run 'a/b'"),
        ("loop.collect.player.env=hous", "r", "--env hous: valid: house"),
        ('loop.evaluation.env_args={"splt": "x"}', "r", "splt"),
        ('loop.collect.player.answer_schema={"not": {}}', "r", "loop.collect.player.answer_schema: "),
        ("trainer.model=/nowhere", "r", "/nowhere holds no model"),
        ("trainer.where=run_id =", "r", "trainer.where"),
        ('loop.score.targets=["sucess"]', "r", "'sucess' is not a scorer; valid: "),
        ("loop.credit.score=sucess", "r", "`loop.credit.score` is 'sucess'; valid: env_return: "),
        ("loop.credit.rewards=sucess", "r", "`loop.credit.rewards` is 'sucess'; valid: env_reward: "),
        ("loop.evaluation.score=sucess", "r", "`loop.evaluation.score` is 'sucess'; valid: env_return: "),
        ("loop.collect.prompts=none.jsonl", "r", "none.jsonl: No such file"),
        ('loop.collect.player.engines=["foo"]', "r", "'foo'; valid: http://127.0.0.1:8000"),
    ],
)
def test_a_command_that_is_refused_leaves_nothing_behind(
    tmp_path: Path, config: str, pair: str, run: str, message: str, wording: Wording
) -> None:
    words = ["--config", config, "--set", pair, "--run", run, "--out", tmp_path / "out", "--lake", tmp_path / "lake"]
    done = CliRunner().invoke(loop, list(map(str, words)))
    assert isinstance(done.exception, TrajlakeError)
    assert message in wording(done.exception, CONFIG=config, GAME=TARGET)
    assert not list(tmp_path.iterdir())


def test_the_job_of_a_run_holds_no_key(config: str) -> None:
    scorer = {"target": "a.py:b", "arguments": {"api_key": "sk-0123456789abcdef"}}
    config_read = read_config(config, {"loop": {"score": {"targets": [scorer]}}})
    parameters = build_job_parameters(config_read)
    assert "sk-" not in str(parameters)
    assert parameters["trainer"] == config_read.trainer.model_dump(mode="json")


def test_the_stage_before_has_the_machine_of_the_rounds_unless_it_says_otherwise(config: str) -> None:
    machine = {"threads": 3, "dtype": "bfloat16", "attention": "sdpa", "read_threads": 1}
    settings = {"loop": {"mode": "sft+rl", "sft": {"dtype": "float32"}}, "trainer": {**machine, "epochs": 2}}
    stage = read_config(config, settings).loop.sft
    assert stage is not None
    assert {name: getattr(stage, name) for name in machine} == machine | {"dtype": "float32"}
    assert (stage.epochs, stage.minibatches) == (1, None)


@pytest.mark.parametrize(
    ("loss", "credit", "is_refused"),
    [
        ("awr", {}, True),
        ("awr", {"options": {"singleton": "raw"}}, False),
        ("awr", {"estimator": "rloo"}, True),
        ("awr", {"estimator": "reinforce_pp", "options": {"batch_key": "collection_round"}}, False),
        ("dpo", {"estimator": "gae"}, True),
        ("sft", {}, False),
    ],
)
def test_rounds_of_lone_episodes_are_refused_where_siblings_are_compared(
    config: str, loss: str, credit: dict[str, Any], is_refused: bool
) -> None:
    settings: dict[str, Any] = {"loop": {"collect": {"group_size": 1}, "credit": {"options": {}} | credit}}
    settings["trainer"] = {"loss": loss, "minibatches": 1}
    text = Path(config).read_text().replace("[credit.gigpo]\nomega = 0.5\n", "")
    file = Path(config).with_name(f"{loss}-{len(str(credit))}.toml")
    file.write_text(text)
    if not is_refused:
        read_config(str(file), settings)
        return
    with pytest.raises(UsageError, match="group_size"):
        read_config(str(file), settings)
    assert read_config(str(file), {**settings, "loop": {**settings["loop"], "collect": {"group_size": 2}}})


def test_filters_are_written_in_a_line_or_as_keys(config: str) -> None:
    sections = {
        "kind": "combined",
        "keep": "any",
        "filters": [{"kind": "diversity"}, {"kind": "min_reward", "at_least": 1}],
    }
    filters = ["min_reward=0.5", "dead_groups", "length:min_tokens=2,max_tokens=90", sections]
    config_read = read_config(config, {"loop": {"collect": {"filters": filters}}})
    assert [step_filter.kind for step_filter in config_read.loop.collect.filters] == [
        "min_reward",
        "dead_groups",
        "length",
        "combined",
    ]
    again = build_job_parameters(config_read)
    assert OnlineConfig.model_validate(again).loop.collect.filters == config_read.loop.collect.filters


@pytest.mark.parametrize(
    ("ahead", "sync_every", "versions"),
    [
        (0, 1, [0, 1, 2, 3, 4, 5]),
        (1, 1, [0, 0, 1, 2, 3, 4]),
        (0, 3, [0, 0, 0, 3, 3, 3]),
        (1, 2, [0, 0, 0, 2, 2, 4]),
    ],
)
def test_a_round_is_played_by_the_newest_version_that_was_delivered(
    config: str, ahead: int, sync_every: int, versions: list[int]
) -> None:
    loop = {"ahead": ahead, "sync_every": sync_every, "evaluation": {"every": 6}}
    run = run_of(read_config(config, {"loop": loop}), {}, {})
    assert [run._playing(number) for number in range(6)] == versions
    assert all(run._synced(number) >= run._playing(number) for number in range(6))


@pytest.mark.parametrize("words", [["--ranks", "2"], []])
def test_several_processes_are_refused_with_what_has_them(
    tmp_path: Path, config: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not words:
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
    options = ["--config", config, "--out", tmp_path / "out", "--lake", tmp_path / "lake", *words]
    done = CliRunner().invoke(loop, list(map(str, options)))
    assert isinstance(done.exception, UsageError)
    assert "train --ranks" in str(done.exception)
    assert not list(tmp_path.iterdir())


def test_prompts_need_no_environment_beside_them(tmp_path: Path) -> None:
    file = tmp_path / "loop.toml"
    file.write_text('[loop.collect]\nprompts = "p.jsonl"\n[trainer]\nmodel = "m"\nloss = "ppo"\n')
    assert read_config(str(file), {}).shows_prompts
    assert not read_config(str(file), {"loop": {"collect": {"player": {"env": "house"}}}}).shows_prompts


GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "loop.md"
FILES = re.findall(r"```toml\n(.*?)```", GUIDE.read_text(), re.DOTALL)


@pytest.mark.parametrize("text", FILES)
def test_the_files_of_the_guide_are_read(tmp_path: Path, text: str) -> None:
    """Parts of a file among them."""
    file = tmp_path / "loop.toml"
    file.write_text(text if "[trainer]" in text else f'{text}\n[trainer]\nmodel = "m"\nloss = "ppo"\n')
    settings = {} if "env =" in text or "prompts =" in text else {"loop": {"collect": {"player": {"env": "house"}}}}
    config_read = read_config(str(file), settings)
    assert config_read.loop.collect.model_fields_set
    assert len(FILES) == 5
