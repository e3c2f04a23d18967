"""The ledger: what a search decided, as jobs of kind `prompts`, one a round and one for each held-out comparison.

A round that is done is never decided again, so that a search goes on alike whatever became of its rollouts meanwhile.
One that a kill interrupted goes on as the same job: its rollouts, those of the reflecting model among them, are in the
lake as far as they got.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from lake.errors import UsageError
from lake.lake import Lake
from lake.write.jobs import Job
from pipelines.collect.manager.rounds import fixed_options
from pipelines.prompts.candidates import Candidate
from pipelines.prompts.ranking import Standing

KIND = "prompts"
Step = Literal["round", "held_out"]


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """An answer of the reflecting model that became no candidate."""

    parent: str
    reason: str
    episode: str


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """What a round came to: the counts of its job."""

    candidates: list[Candidate]
    """New ones."""
    left_out: list[LeftOut]
    standings: list[Standing]
    """Of all candidates so far, the best first."""
    beam: list[str]
    """Those that the next round is made from."""


class HeldOut(msgspec.Struct, frozen=True, kw_only=True):
    """The best candidate against the first prompt on starts that nothing before has seen: the counts of its job."""

    best: str
    first: str
    value: float | None
    """Mean return of the best."""
    against: float | None
    """That of the first prompt."""
    difference: float | None
    low: float | None
    """95 % interval of the difference."""
    high: float | None
    p: float | None
    """Two-sided, of the permutation test."""
    test: str | None
    starts: int
    seen: int
    """Starts that were left out, because the candidates had played them under another seed."""
    unknown: int
    """Rollouts of both without a return."""


class Ledger:
    """The jobs of one search.

    Args:
        lake: where they are.
        run: name of the search.
        settings: `search`, `reflection` and `player`, as the jobs' parameters say them.

    Raises:
        UsageError: the search was made with other settings.
    """

    def __init__(self, lake: Lake, run: str, settings: Mapping[str, Any]) -> None:
        self._lake, self._run, self._settings = lake, run, settings
        rows = lake.sql(
            "SELECT job_id, status, parameters, counts FROM job_runs WHERE kind = ? AND run_id = ? ORDER BY started_at",
            [KIND, run],
        )
        self._open: dict[tuple[Step, int], int] = {}
        self.rounds: dict[int, Round] = {}
        """Those that are done, by number."""
        self.held_out: dict[int, HeldOut] = {}
        """Comparisons that were made, by the number of the last round before them."""
        for job_id, status, parameters, counts in rows.iter_rows():
            told = msgspec.json.decode(parameters)
            _refuse_others(run, told, settings)
            step, number = told["step"], told["round"]
            if status != "succeeded":
                self._open[step, number] = job_id
            elif step == "round":
                self.rounds[number] = msgspec.json.decode(counts, type=Round)
            else:
                self.held_out[number] = msgspec.json.decode(counts, type=HeldOut)

    def job(self, step: Step, number: int) -> Job:
        """The job of a round, or of the comparison after it: another one, or one that did not end."""
        parameters = {"step": step, "round": number, **self._settings}
        return self._lake.job(kind=KIND, run_id=self._run, parameters=parameters, job_id=self._open.get((step, number)))


def _refuse_others(run: str, told: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raise UsageError: a search was made otherwise."""
    then, now = _fixed(told), _fixed(settings)
    others = [name for name in then if name in now and then[name] != now[name]]
    if others:
        said = ", ".join(f"{name.replace('_', ' ')} {then[name]!r} (now {now[name]!r})" for name in others)
        raise UsageError(f"search {run!r} was made with {said}; give the same again, or another --run")


def _fixed(settings: Mapping[str, Any]) -> dict[str, Any]:
    reflection = {f"reflect_{name}": value for name, value in settings["reflection"].items()}
    return {**settings["search"], **reflection, **fixed_options(settings["player"])}
