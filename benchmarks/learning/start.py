"""The weights that every arm of a seed starts from: fresh ones of that seed, which cloned the game's gold paths."""

import shutil
from pathlib import Path

import lake
from benchmarks.learning.settings import Game, Settings
from benchmarks.learning.tokenizer import build_tokenizer
from benchmarks.learning.traces import RUN, record_traces
from lake.lake import Lake
from trainer.config import TrainConfig
from trainer.online.demo import TinyPolicyConfig, build_model
from trainer.runs.offline import make_deterministic, train

_MESSAGES = f"""
SELECT s.state, s.action FROM steps AS s JOIN episodes AS e USING (episode_id)
WHERE e.run_id = '{RUN}' ORDER BY e.seed, s.step_index
"""
MAX_POSITIONS = 2048


def gold_lake(out: Path, settings: Settings, game: Game) -> Lake:
    """The lake of a game's traces, recorded if they are not there."""
    lk = lake.open(out / game.name / "lake", create=True)
    if lk.sql("SELECT count(*) FROM episodes WHERE run_id = ?", [RUN]).item() == 0:
        record_traces(lk, game, settings.traces)
    return lk


def start_weights(out: Path, settings: Settings, game: Game, seed: int) -> Path:
    """Folder of a seed's start weights, made if it is not there."""
    folder = out / game.name / f"start-{seed}"
    if (folder / "done").exists():
        return folder / "final"
    lk = gold_lake(out, settings, game)
    for model_folder in (folder, fresh := out / game.name / f"fresh-{seed}"):
        shutil.rmtree(model_folder, ignore_errors=True)
    _fresh(lk, settings, seed, fresh)
    config = TrainConfig(
        model=str(fresh),
        loss="sft",
        where=f"run_id = '{RUN}' AND env_return >= 1",
        epochs=settings.clone_epochs,
        learning_rate=settings.clone_rate,
        episodes_per_step=16,
        seed=seed,
        checkpoint_every=1_000_000,
        threads=1,
    )
    make_deterministic(config)
    model = train(lk, config, folder, run_id=folder.name).model
    (folder / "done").touch()
    return model


def _fresh(lk: Lake, settings: Settings, seed: int, folder: Path) -> None:
    """Random weights of a seed, with the game's tokenizer."""
    rows = lk.sql(_MESSAGES)
    tokenizer = build_tokenizer([text for row in rows.iter_rows() for text in row if text], settings.vocabulary)
    shape = TinyPolicyConfig(
        num_layers=settings.layers,
        num_heads=settings.heads,
        intermediate_size=256,
        initializer_range=0.05,
        max_positions=MAX_POSITIONS,
    )
    build_model(tokenizer, shape, seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
