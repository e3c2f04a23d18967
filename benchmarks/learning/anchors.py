"""Which normalisation of the state makes anchors meaningful: measured on rollouts of start weights, before any RL.

A step is meaningfully anchored if two or more siblings visited its state and the returns-to-go from there differ: only
then does GiGPO's step advantage say something. A looser definition raises that share whatever it is worth, so the
number of distinct actions that led into a shared state stands beside it: where many do, texts are equal and situations
are not.
"""

from pathlib import Path

import polars as pl
from pydantic import BaseModel, ConfigDict, TypeAdapter

from benchmarks.learning.play import play
from benchmarks.learning.settings import TUNING_SEED, Game, Settings
from benchmarks.learning.start import gold_lake, start_weights
from lake.lake import Lake
from pipelines.credit.anchors import Anchors
from pipelines.credit.anchors.measures import Walks, collect_columns, measure, scan_steps
from pipelines.credit.estimators.normalise import discount_rewards

RUN = "anchors"
"""The run that is measured."""
GAMMA = 0.95
FIRST_WORLD = 500
"""Of the fold `train`: beyond those that were cloned."""


def _texts(*pairs: tuple[str, str]) -> dict[str, object]:
    return {
        "kind": "substitutions",
        "substitutions": [{"pattern": pattern, "replacement": replacement} for pattern, replacement in pairs],
    }


# A message is the game's answer, then what `look around` and `inventory` say, each a paragraph; an answer that is the
# view itself stands there once. The task comes before all of it in the first message.
_ANSWER = _texts(
    (r"(?s)\A(Your task .*?)\n\n(You are in .*?)\n\nInventory.*\z", "$1 $2"),
    (r"(?s)\A(.+?)\n\nYou are in .*\z", "$1"),
    (r"(?s)\n\nInventory.*\z", ""),
)
_STATE = (r"(?s)\A.*?(You are in )", "$1")
_VIEW = (r"(?s)\n\nInventory.*\z", "")
_ROOM = (r"(?s)\AYou are in the ([a-z ]+).*\z", "$1")
DEFINITIONS: dict[str, dict[str, object]] = {
    "game's answer alone": _ANSWER,
    "answer, view, inventory (as shown)": {"kind": "exact"},
    "view and inventory": _texts(_STATE),
    "view alone": _texts(_STATE, _VIEW),
    "room's name": _texts(_STATE, _ROOM),
    "view and inventory, no errors": {"kind": "chain", "steps": [{"kind": "no_errors"}, _texts(_STATE)]},
    "last 2 of view and inventory": {"kind": "chain", "steps": [_texts(_STATE), {"kind": "last_states", "k": 2}]},
    "step number": {"kind": "columns", "names": ["step_index"]},
}
"""What is compared, by its name in the table."""
CHOSEN = "view and inventory"
"""What GiGPO's anchors are in the study."""


class AnchorRow(BaseModel):
    """A definition, measured."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    shared: float
    """Share of steps in a state that two or more siblings visited."""
    meaningful: float
    """Share of steps in a shared state whose returns-to-go differ."""
    singleton: float
    """Share of steps in a state that no other step has."""
    ways_in: float
    """Mean number of distinct actions that led into a shared state."""


class AnchorTable(BaseModel):
    """What a game's rollouts were like, and what each definition makes of them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    game: str
    episodes: int
    steps: int
    success: float
    invalid: float
    """Share of actions that the game does not list."""
    rows: list[AnchorRow]


def anchor_table(out: Path, settings: Settings, game: Game) -> AnchorTable:
    """The table of a game, measured if it is not there."""
    path = out / "anchors" / f"{game.name}.json"
    if path.exists():
        return AnchorTable.model_validate_json(path.read_text())
    model = start_weights(out, settings, game, TUNING_SEED)
    lk = gold_lake(out, settings, game)
    play(
        lk,
        settings,
        game,
        model,
        RUN,
        split="train",
        worlds=range(FIRST_WORLD, FIRST_WORLD + settings.anchor_groups),
        siblings=settings.group_size,
        seed=TUNING_SEED,
    )
    table = measured(lk, game.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(table.model_dump_json(indent=1) + "\n")
    return table


def measured(lk: Lake, game: str) -> AnchorTable:
    """Measure every definition on the rollouts of a lake."""
    definitions = {
        name: TypeAdapter[Anchors](Anchors).validate_python(document) for name, document in DEFINITIONS.items()
    }
    snapshot, where = lk.snapshot(), f"run_id = '{RUN}'"
    steps = scan_steps(snapshot, list(definitions.values()), where=where)
    rewards = snapshot.scan("steps").select("episode_id", "step_index", "reward")
    steps = steps.join(rewards, on=["episode_id", "step_index"])
    columns = collect_columns(definitions.values(), steps.collect_schema().names())
    walks = Walks.of(steps, (*columns, "reward"))
    figures = {row["anchors"]: row for row in measure(walks, definitions).iter_rows(named=True)}
    rows = [
        AnchorRow(name=name, meaningful=meaningful(walks, definition), **_rounded(figures[name]))
        for name, definition in definitions.items()
    ]
    facts = lk.sql(f"SELECT count(*), avg((env_return >= 1)::INT) FROM episodes WHERE {where}").row(0)
    actions = lk.sql(
        "SELECT count(*), avg((NOT is_action_valid)::INT) FROM steps JOIN episodes USING (episode_id) "
        f"WHERE episodes.run_id = '{RUN}'"
    ).row(0)
    return AnchorTable(
        game=game, episodes=facts[0], steps=actions[0], success=facts[1], invalid=round(actions[1], 4), rows=rows
    )


def meaningful(walks: Walks, definition: Anchors) -> float:
    """Share of the steps in a state that siblings share and from which their returns-to-go differ.

    Args:
        walks: with the column `reward`.
        definition: of the same state.
    """
    batch = walks.batch
    returns_N = discount_rewards(batch.reward_N, batch.episodes, GAMMA)
    rows = walks.facts.with_columns(
        definition.keys(batch, walks.included_N).alias("key"), pl.Series("return", returns_N)
    ).filter("included")
    of_state = ["group_id", "key"]
    differ = (pl.col("return").max() - pl.col("return").min()) > 1e-9
    is_compared = ((pl.col("episode_id").n_unique() >= 2) & differ).over(of_state) & pl.col("key").is_not_null()
    return round(float(rows.select(is_compared.mean()).item()), 4)


def _rounded(row: dict[str, float]) -> dict[str, float]:
    return {name: round(float(row[name] or 0.0), 4) for name in ("shared", "singleton", "ways_in")}
