"""The value head: its gradient, what a loop stores of it and resumes to the bit, and where it is refused."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch  # noqa: TID253 - a script that does nothing without it
from safetensors.torch import load_file

import lake
from lake.errors import DataRefusedError, UsageError
from lake.judgements.credit import find_credit
from lake.lake import Lake
from lake.read.training import METRICS
from pipelines.collect.environments import Outcome, Task
from pipelines.collect.policies import Message
from pipelines.credit.estimators.gae import GAE
from pipelines.credit.job import run_credit
from testkit.lakes import add_credit
from testkit.loops import FILE, facts, looped
from testkit.training import config, gradients, random_model, token_episodes, token_lake
from testkit.word_game import Asking, save_model
from trainer.backends.base import SingleDevice
from trainer.config import OptimizerConfig, ValueConfig
from trainer.data.plan import Plan
from trainer.data.selection import TrainingSelection, select
from trainer.data.stream import Stream
from trainer.losses import Loss, LossResult, LossRows
from trainer.online import loop, rollouts
from trainer.online.settings import OnlineConfig, read_config
from trainer.policy.model import PackedPolicy


class Silent(Loss):
    """A loss without a gradient: what is left is the value's."""

    name: str = "silent"

    def compute(self, rows: LossRows) -> LossResult:
        return LossResult(0.0 * rows.logprobs_N.sum(), {})


def valued_backend(**options: Any) -> SingleDevice:
    policy = PackedPolicy(random_model(), kernels="eager")
    policy.add_value_head(ValueConfig(coefficient=0.7, **options))
    torch.manual_seed(3)
    torch.nn.init.normal_(policy.model.value_head.weight)
    return SingleDevice(policy, OptimizerConfig())


@pytest.fixture(scope="module")
def valued_lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Episodes with recorded values and `gae` over them."""
    episodes, rng = token_episodes(3, 3), np.random.default_rng(0)
    for step in (step for episode in episodes for step in episode.steps):
        step.value_estimate = float(rng.normal())
    lk = token_lake(tmp_path_factory.mktemp("lake") / "lake", episodes)
    run_credit(lk, GAE(gamma=0.9, lam=0.8))
    return lk


def selected(lk: Lake) -> TrainingSelection:
    settings = config("ppo", value={})
    return select(lk.snapshot(), settings, settings.loss.needs, source=find_credit(lk.snapshot(), None))


def value_gradient(lk: Lake, backend: SingleDevice, budget: int) -> dict[str, torch.Tensor]:
    settings = config("ppo", value={}, token_budget=budget, episodes_per_step=100)
    with Stream(lk.snapshot(), Plan(selected(lk), settings), settings.loss.needs, settings) as stream:
        _, batches = next(stream.steps())
    for batch in batches:
        backend.forward_backward(batch, Silent())
    return gradients(backend)


def slow_value(model: Any, ids: list[int]) -> torch.Tensor:
    hidden_TD = model.base_model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
    value: torch.Tensor = model.value_head(hidden_TD[-1])[0]
    return value


def prompts_of(lk: Lake, where: str) -> dict[tuple[int, int | None], list[int]]:
    """The tokens before each action of append-only episodes."""
    rows = lk.sql(
        f"SELECT episode_id, step_index, context_ids, action_ids FROM tokens SEMI JOIN "
        f"(SELECT episode_id FROM episodes WHERE {where}) USING (episode_id) ORDER BY ALL"
    )
    prompts: dict[tuple[int, int | None], list[int]] = {}
    ids: list[int] = []
    for episode_id, step, context, action in rows.iter_rows():
        ids = [*(ids if step else []), *context]
        prompts[episode_id, step] = list(ids)
        ids += action
    return prompts


def test_the_gradient_is_that_of_the_mean_squared_error_however_a_step_is_cut(valued_lake: Lake) -> None:
    credit = valued_lake.sql(
        "SELECT episode_id, step_index, a_step + value_estimate FROM latest_advantages "
        "JOIN steps USING (episode_id, step_index)"
    )
    model = valued_backend().policy.model
    model.set_attn_implementation("eager")
    prompts = prompts_of(valued_lake, "true")
    errors = [(slow_value(model, prompts[row[:2]]) - row[2]) ** 2 for row in credit.rows()]
    (0.7 * torch.stack(errors).mean()).backward()  # type: ignore[no-untyped-call]
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for budget in (12, 40, 100_000):
        actual = value_gradient(valued_lake, valued_backend(), budget)
        assert actual.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(actual[name], gradient, atol=1e-5, rtol=1e-4, msg=name)


def test_a_detached_head_alone_learns_from_values(valued_lake: Lake) -> None:
    moved = {name for name, g in value_gradient(valued_lake, valued_backend(detach=True), 40).items() if g.any()}
    assert moved == {"value_head.weight", "value_head.bias"}


class Cut(Asking):
    """About half of the starts are cut off by a limit instead of ending."""

    def reset(self, task: Task) -> Outcome:
        self._is_cut = random.Random(task.seed).random() < 0.5
        return super().reset(task)

    def step(self, action: Message) -> Outcome:
        outcome = super().step(action)
        if not (self._is_cut and outcome.terminated):
            return outcome
        return Outcome(messages=outcome.messages, reward=outcome.reward, truncated=True)


def make(split: str = "train") -> Cut:
    """Make one."""
    return Cut(split)


def document(folder: Path, model: Path, estimator: str = "gae", **settings: Any) -> OnlineConfig:
    text = FILE.format(model=model, env=f"{__file__}:make").replace("[credit.gigpo]\nomega = 0.5\n", "")
    (folder / "loop.toml").write_text(text)
    options = {"gamma": 0.9, "bootstrap": True} if estimator == "gae" else {}
    rounds = {"rounds": 2, "credit": {"estimator": estimator, "options": options}} | settings.pop("loop", {})
    settings = {"loop": rounds, "trainer": {"value": {}} | settings.pop("trainer", {})}
    config = read_config(str(folder / "loop.toml"), settings)
    return config.model_copy(update={"loop": config.loop.model_copy(update={"evaluation": None})})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "random")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """The folder of an undisturbed loop of two rounds."""
    folder = tmp_path_factory.mktemp("run")
    looped(folder, document(folder, model))
    return folder


def read_values(lk: Lake) -> pl.DataFrame:
    return lk.sql("SELECT episode_id, step_index, value FROM current_scores WHERE scorer = 'value_head' ORDER BY ALL")


def test_each_state_gets_the_value_of_the_weights_that_played(run: Path, model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    lk = lake.open(run / "lake")
    value_of = {(episode, step): value for episode, step, value in read_values(lk).iter_rows()}
    weights = load_file(sorted((run / "out" / "checkpoints").glob("*/weights.safetensors"))[0])
    played: Any = AutoModelForCausalLM.from_pretrained(model)
    played.value_head = torch.nn.Linear(64, 1)
    assert not played.load_state_dict(weights, strict=False).unexpected_keys
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    prompts = prompts_of(lk, "collection_round = 1")
    cut = lk.sql(
        "SELECT episode_id, list({role: 'user', content: state} ORDER BY step_index), "
        "list(action ORDER BY step_index), final_observation FROM episodes JOIN steps USING (episode_id) "
        "WHERE collection_round = 1 AND status = 'truncated' GROUP BY ALL"
    )
    for episode, observations, actions, final in cut.iter_rows():
        answers = [{"role": "assistant", "content": action} for action in actions]
        chat = [message for turn in zip(observations, answers, strict=True) for message in turn] + json.loads(final)
        prompts[episode, None] = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    with torch.no_grad():
        expected = {key: float(slow_value(played, ids)) for key, ids in prompts.items()}
    assert 0 < len(cut) < 16
    assert any(expected.values())
    assert {key: value_of[key] for key in expected} == pytest.approx(expected, abs=1e-5)
    first = prompts_of(lk, "collection_round = 0")
    assert all(value_of[key] == 0.0 for key in first)  # the head starts at 0
    ends = lk.sql("SELECT episode_id FROM episodes WHERE status = 'truncated'").to_series()
    assert value_of.keys() == {*first, *prompts, *((episode, None) for episode in ends)}


def test_advantages_are_returns_minus_these_values_with_a_bootstrap_at_limits(run: Path) -> None:
    rows = lake.open(run / "lake").sql(
        "SELECT a.advantage, "
        "a.return_to_go + 0.9 ** (3 - a.step_index) * if(e.status = 'truncated', f.value, 0) - v.value "
        "FROM latest_advantages AS a JOIN episodes AS e USING (episode_id) "
        "JOIN current_scores AS v USING (episode_id, step_index) "
        "LEFT JOIN current_scores AS f ON f.episode_id = a.episode_id AND f.step_index IS NULL"
    )
    assert rows.height == 2 * 16 * 3
    assert rows.to_series(0).to_list() == pytest.approx(rows.to_series(1).to_list())


def test_updates_report_how_well_values_explain_returns(run: Path) -> None:
    rows = lake.open(run / "lake").sql(
        "SELECT name, value FROM run_metrics WHERE name IN ('value_loss', 'value_target', 'explained_variance')"
    )
    assert set(rows["name"]) <= METRICS.keys()
    assert rows.height == 3 * 4
    assert rows["value"].is_finite().all()


def test_exported_models_have_no_value_head(run: Path) -> None:
    exported = [*(run / "out").glob("versions/*/model.safetensors"), run / "out" / "final" / "model.safetensors"]
    assert len(exported) > 1
    assert not any("value_head" in name for path in exported for name in load_file(path))


def test_a_run_that_died_after_its_values_resumes_to_the_bit_and_scores_nothing_again(
    tmp_path: Path, model: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, compute_credit = document(tmp_path, model), rollouts.compute_credit

    def die_in_round_1(lk: Lake, credit: Any, where: str, *rest: Any) -> Any:
        if "collection_round = 1" in where:
            raise KeyboardInterrupt
        return compute_credit(lk, credit, where, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "compute_credit", die_in_round_1)
        with pytest.raises(KeyboardInterrupt):
            looped(tmp_path, settings)
    values = read_values(lake.open(tmp_path / "lake"))
    looped(tmp_path, settings, resumes=True)
    resumed, undisturbed = lake.open(tmp_path / "lake"), lake.open(run / "lake")
    assert facts(resumed) == facts(undisturbed)
    assert values.equals(read_values(resumed))
    assert values.equals(read_values(undisturbed))
    assert resumed.sql("SELECT count(*) FROM job_runs WHERE kind = 'score'").item() == 2


def test_lone_rollouts_are_trained_on_and_limits_are_ends_by_default(tmp_path: Path, model: Path) -> None:
    settings = {"rounds": 1, "collect": {"groups": 4, "group_size": 1}, "credit": {"estimator": "gae"}}
    assert looped(tmp_path, document(tmp_path, model, loop=settings)).optimizer_steps == 2
    credit = find_credit(lake.open(tmp_path / "lake").snapshot(), None)
    assert (credit.parameters["config"]["values"], credit.parameters["config"]["bootstrap"]) == ("value_head", False)


@pytest.mark.parametrize(
    ("estimator", "trainer_settings", "message"),
    [
        ("gae", {"value": None}, r"gae needs a value of each step.*add \[trainer\.value\]"),
        ("gigpo", {}, r"\[trainer\.value\] is for the estimator gae"),
        ("gae", {"loss": "sft"}, r"\[trainer\.value\] has no effect with the loss sft"),
        ("gae", {"loss": "dpo"}, r"\[trainer\.value\] has no effect with the loss dpo"),
    ],
)
def test_a_critic_without_use_and_gae_without_a_critic_are_refused(
    tmp_path: Path, model: Path, estimator: str, trainer_settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        document(tmp_path, model, estimator, trainer=trainer_settings)


def test_credit_without_values_is_refused(tmp_path: Path) -> None:
    lk = token_lake(tmp_path / "lake")
    add_credit(lk)
    with pytest.raises(DataRefusedError, match="credit gae"):
        selected(lk)
