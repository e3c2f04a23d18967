"""Lakes of conversations with tools for tests of scoring, and scorers that run in this process."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from lake import EpisodeRecord, Lake, Snapshot, StepRecord
from lake.read.episodes import split_batches
from pipelines.score.functions import PartLimits
from pipelines.score.rollouts import RolloutInput, read_rollouts
from pipelines.score.rows import ResultReading, ScoredEpisodes, add_result
from testkit.copies import copied, empty_lake


def conversation(
    task: str, index: int = 0, *, turns: int = 3, answers: Sequence[str] = (), **fields: Any
) -> EpisodeRecord:
    """A chat in which each turn but the last calls a tool; `answers` are what the tools say.

    Its messages: system, user, then an assistant and a tool in turn, and the assistant's last word.
    """
    steps = []
    for n in range(turns):
        answer = answers[n - 1] if 0 < n <= len(answers) else f"result {n - 1}"
        call = {"id": f"c{n}", "type": "function", "function": {"name": "look", "arguments": f'{{"n": {n}}}'}}
        messages = [{"role": "tool", "tool_call_id": f"c{n - 1}", "content": answer}]
        steps.append(
            StepRecord(
                state=answer if n else f"{task}?",
                state_role="tool" if n else "user",
                context=messages if n else [],
                action="" if n < turns - 1 else f"done with {task}.{index}",
                tool_calls=[call] if n < turns - 1 else None,
                reward=float(n),
            )
        )
    values: dict[str, Any] = {
        "task_id": task,
        "rollout_index": index,
        "env_return": float(index % 2),
        "ground_truth": {"answer": f"done with {task}.0"},
        "initial_messages": [{"role": "system", "content": "Help."}, {"role": "user", "content": f"{task}?"}],
        "steps": steps,
    }
    return EpisodeRecord(**(values | fields))


def conversations(folder: Path, tasks: int = 3, siblings: int = 3, **fields: Any) -> Lake:
    """A lake of some groups, in run `r`."""

    def make(template: Path) -> None:
        records = [conversation(f"t{t}", i, **fields) for t in range(tasks) for i in range(siblings)]
        empty_lake(template).append(records, run_id="r")

    return copied(f"{tasks} x {siblings} conversations {sorted(fields.items())}", make, folder)


def module(folder: Path, text: str, name: str = "rewards.py") -> str:
    """Path of a file with a user's code; the usual imports come first."""
    head = "from pipelines.score import EvaluateResult, MetricResult, Message, StepOutput, reward_function\n"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(head + text, "utf-8")
    return str(path)


def score_rows(lk: Lake, columns: str = "s.*, task_id, rollout_index", where: str = "true") -> list[dict[str, Any]]:
    """The scores that count, with what is known of their episodes."""
    query = f"SELECT {columns} FROM latest_scores AS s JOIN episodes AS e USING (episode_id) WHERE {where}"
    return lk.sql(f"{query} ORDER BY e.task_id, e.rollout_index, s.scorer, s.step_index NULLS FIRST").to_dicts()


class InProcess:
    """A scorer that calls a function here: what the job does with it is what it does with any.

    Args:
        function: rollouts of one call -> a result for each; raises to fail them all.
        grouped: a call is a whole group.
        calls: takes the episode_ids of every call.
    """

    def __init__(
        self,
        function: Callable[[Sequence[RolloutInput]], list[Any]],
        *,
        name: str = "s",
        version: str = "1",
        grouped: bool = False,
        batch: int = 2,
    ) -> None:
        self.function = function
        self.name = name
        self.version = version
        self.is_grouped = grouped
        self.is_batched = False
        self.batch = batch
        self.printed = ""
        self.parameters: dict[str, Any] = {}
        self.calls: list[list[int]] = []

    def is_current(self) -> bool:
        return True

    isolation = None

    def check(self, snapshot: Snapshot) -> None:
        pass

    def score(
        self, snapshot: Snapshot, episodes: pl.DataFrame, part_limits: PartLimits | None = None
    ) -> Iterator[ScoredEpisodes]:
        for part in split_batches(episodes):
            rollouts = read_rollouts(snapshot, part, {"messages"})
            for unit in self._units(rollouts):
                self.calls.append([rollout.episode_id for rollout in unit])
                scored = ScoredEpisodes()
                try:
                    values, error = self.function(unit), None
                except RuntimeError as fault:
                    values, error = [None] * len(unit), str(fault)
                for rollout, value in zip(unit, values, strict=True):
                    add_result(scored, rollout, value, error, ResultReading(), len(unit) if self.is_grouped else None)
                yield scored

    def _units(self, rollouts: list[RolloutInput]) -> list[list[RolloutInput]]:
        if not self.is_grouped:
            return [rollouts[low : low + self.batch] for low in range(0, len(rollouts), self.batch)]
        groups: dict[int, list[RolloutInput]] = {}
        for rollout in rollouts:
            groups.setdefault(rollout.group_id, []).append(rollout)
        return list(groups.values())
