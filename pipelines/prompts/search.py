"""The search: rounds of proposing, testing and ranking, and a comparison on held-out starts at the end.

Round 0 plays the first prompt and those that were given beside it. Every further round asks the reflecting model for
prompts made from the best so far (the beam), plays those that are new, and ranks all candidates anew. All of them play
the same starts with the same seeds.
"""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from lake import ids
from lake.errors import DataRefusedError
from lake.read.online_runs import of_round
from lake.read.text_table import counted
from pipelines.collect.environments import Task
from pipelines.collect.manager.rounds import all_failed
from pipelines.collect.manager.run import StoppedError, write_metrics
from pipelines.collect.tasks import TaskSet
from pipelines.collect.wiring import told_options
from pipelines.prompts.candidates import Candidate
from pipelines.prompts.evidence import contrasts
from pipelines.prompts.ledger import HeldOut, Ledger, LeftOut, Round
from pipelines.prompts.play import Answer, Arena, Reflection, read_answers
from pipelines.prompts.ranking import Standing, compared_with, rank, read_played
from pipelines.prompts.reflection import NoProposalError, read_answer, reflection_messages


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is searched, and how."""

    run: str
    first: Candidate
    given: list[Candidate]
    rounds: int
    """Of reflection, that the search has in the end."""
    candidates: int
    """Prompts that a round asks for."""
    beam: int
    """Candidates that a round is made from."""
    starts: TaskSet
    held_out: TaskSet
    held_out_args: dict[str, Any] = {}
    """Arguments of the environment on held-out starts."""
    seed: int = 0

    def settings(self, arena: Arena, reflection: Reflection | None) -> dict[str, Any]:
        """What a search is made with, as its jobs' parameters say it; `Ledger` refuses another."""
        search = {
            "first": self.first.id,
            "given": [one.id for one in self.given],
            "candidates": self.candidates,
            "beam": self.beam,
            "starts": ids.to_text(self.starts.fingerprint),
            "held_out": ids.to_text(self.held_out.fingerprint),
            "held_out_args": self.held_out_args,
            "group_size": arena.group_size,
            "seed": self.seed,
            "score": [one.target for one in arena.scoring.scorers()],
            "rank_by": arena.rank_by,
        }
        return {
            "search": search,
            "reflection": {} if reflection is None else reflection.model_dump(exclude={"url"}),
            "player": told_options(arena.options),
        }


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a search came to."""

    candidates: dict[str, Candidate]
    standings: list[Standing]
    left_out: list[LeftOut]
    held_out: HeldOut | None
    """None if the first prompt is the best, which there is nothing to compare with."""
    looks: int
    """Candidates that were compared on the held-out starts, this one among them."""

    @property
    def best(self) -> Candidate:
        """The one that stands first."""
        return self.candidates[self.standings[0].candidate]


@dataclass(kw_only=True)
class Search:
    """A search, from wherever an earlier process left it.

    Args:
        plan: what is searched.
        arena: where candidates play.
        ledger: what was decided before.
        reflection: who proposes; None: candidates are those that were given.
    """

    plan: Plan
    arena: Arena
    ledger: Ledger
    reflection: Reflection | None = None
    _known: dict[str, Candidate] = field(default_factory=dict)
    """All candidates, in the order in which they were made."""

    def run(self) -> Result:
        """Go through what is missing of its rounds, and compare the best with the first prompt.

        Raises:
            DataRefusedError: no return of the first prompt is known.
            UsageError, StartError, StoppedError: as `collect`; after StoppedError the same goes on.
        """
        done: list[Round] = []
        for number in range(self.plan.rounds + 1):
            found = self.ledger.rounds.get(number) or self._round(number, done)
            self._known |= {one.id: one for one in found.candidates}
            done.append(found)
        standings = done[-1].standings
        held_out = None if standings[0].candidate == self.plan.first.id else self._held_out(standings[0].candidate)
        return Result(
            candidates=self._known,
            standings=standings,
            left_out=[one for each in done for one in each.left_out],
            held_out=held_out,
            looks=len({one.best for one in self.ledger.held_out.values()}),
        )

    def _round(self, number: int, before: list[Round]) -> Round:
        plan = self.plan
        with self.ledger.job("round", number) as job:
            given = {one.id: one for one in (*reversed(plan.given), plan.first)}
            made, left_out = self._proposed(number, before) if number else (list(reversed(given.values())), [])
            for place, one in enumerate(made, start=1):
                self.arena.say(f"round {number}: candidate {place} of {len(made)}, {one.id}")
                self.arena.play(self._run_of(one.id), one, plan.starts, {})
            names = [*self._known, *(one.id for one in made)]
            snapshot = self.arena.lake.snapshot()
            played = {name: read_played(snapshot, self._run_of(name), self.arena.rank_by) for name in names}
            if not played[plan.first.id].returns:
                run = self._run_of(plan.first.id)
                problem = all_failed(self.arena.lake, of_round(run, 0))
                raise DataRefusedError(
                    f"no rollout of the first prompt has a return (run {run!r}), and prompts are ranked by "
                    f"{self.arena.rank_by}" + (f": {problem}" if problem else "")
                )
            standings = rank(played, plan.first.id, seed=plan.seed)
            beam = [one.candidate for one in standings if one.difference is not None][: plan.beam]
            found = Round(candidates=made, left_out=left_out, standings=standings, beam=beam)
            job.counts |= msgspec.to_builtins(found) | {
                "rows_in": len(made) + len(left_out),
                "rows_out": len(made),
                "rows_dropped": len(left_out),
            }
            first = next(one for one in standings if one.candidate == plan.first.id)
            write_metrics(job, number, {"return/best": standings[0].mean, "return/first": first.mean})
        return found

    def _proposed(self, number: int, before: list[Round]) -> tuple[list[Candidate], list[LeftOut]]:
        """New candidates, and answers that became none."""
        assert self.reflection is not None
        beam = before[-1].beam
        tasks, parents = self._requests(number, before)
        made: dict[str, Candidate] = {}
        left_out: list[LeftOut] = []
        for answer in self._answers(number, tasks):
            parent = parents[answer.seed]
            try:
                one = self._candidate(answer, parent, number, made)
            except NoProposalError as fault:
                left_out.append(LeftOut(parent=parent, reason=str(fault), episode=answer.episode))
                continue
            made[one.id] = one
        self.arena.say(
            f"round {number}: {counted(len(made), 'new candidate')} made from {counted(len(beam), 'candidate')}"
            + (f", {counted(len(left_out), 'answer')} left out ({left_out[0].reason})" if left_out else "")
        )
        return list(made.values()), left_out

    def _candidate(self, answer: Answer, parent: str, number: int, made: dict[str, Candidate]) -> Candidate:
        """What an answer proposes. Raises NoProposalError."""
        assert self.reflection is not None
        if answer.error is not None:
            raise NoProposalError(f"the endpoint failed: {answer.error}")
        found = read_answer(answer.text, is_cut=answer.is_cut, longest=self.reflection.longest)
        one = Candidate(
            text=found.text,
            made="reflection",
            round=number,
            parent=parent,
            critique=found.critique,
            episode=answer.episode,
        )
        if one.id == parent:
            raise NoProposalError("its prompt is the present one, unchanged")
        if one.id in self._known or one.id in made:
            raise NoProposalError(f"its prompt is that of candidate {one.id}")
        return one

    def _requests(self, number: int, before: list[Round]) -> tuple[list[Task], list[str]]:
        """What the reflecting model is asked in a round: the tasks, and the candidate that each is about.

        Requests about one candidate show other attempts each time, those of earlier rounds counted in.
        """
        assert self.reflection is not None
        beam, shown = before[-1].beam, self.reflection.contrasts
        asked = [one.parent for each in before for one in each.candidates]
        asked += [one.parent for each in before for one in each.left_out]
        snapshot = self.arena.lake.snapshot()
        means = {one.candidate: one.mean for one in before[-1].standings}
        tasks: list[Task] = []
        parents: list[str] = []
        for index in range(self.plan.candidates):
            parent = beam[index % len(beam)]
            text = self._known[parent].text
            seen = contrasts(
                snapshot,
                self._run_of(parent),
                text,
                score=self.arena.rank_by,
                first=shown * [*asked, *parents].count(parent),
                count=shown,
            )
            messages = reflection_messages(
                text, means[parent], seen, longest=self.reflection.longest, budget=self.reflection.budget
            )
            tasks.append(Task(seed=index, name=f"{parent}/{number}/{index}", messages=messages))
            parents.append(parent)
        return tasks, parents

    def _answers(self, number: int, tasks: list[Task]) -> list[Answer]:
        """The reflecting model's answers. Where an earlier process got nothing but failures, it is asked again.

        Raises:
            StoppedError: it answers nothing at all.
        """
        assert self.reflection is not None
        attempt = 0
        while _is_all_failed(read_answers(self.arena.lake.snapshot(), run := self._asked(number, attempt)), tasks):
            attempt += 1
        answers = self.arena.reflect(run, self.reflection, tasks)
        if _is_all_failed(answers, tasks):
            raise StoppedError(
                f"the reflecting endpoint answered nothing: {answers[0].error}; the same command asks again"
            )
        return answers

    def _held_out(self, best: str) -> HeldOut:
        """The best candidate against the first prompt, on the held-out starts."""
        plan = self.plan
        if (found := self.ledger.held_out.get(plan.rounds)) is not None:
            return found
        names = (best, plan.first.id)
        with self.ledger.job("held_out", plan.rounds) as job:
            for name in names:
                self.arena.say(f"held-out starts: candidate {name}")
                run = f"{plan.run}.held-out.{name}"
                self.arena.play(run, self._known[name], plan.held_out, plan.held_out_args)
            snapshot = self.arena.lake.snapshot()
            by = self.arena.rank_by
            one, other = (read_played(snapshot, f"{plan.run}.held-out.{name}", by) for name in names)
            seen = sorted(read_played(snapshot, self._run_of(plan.first.id), by).returns.keys() & other.returns.keys())
            compared = compared_with(one, other, seed=plan.seed, without=seen)
            found = HeldOut(
                best=best,
                first=plan.first.id,
                value=compared.value,
                against=compared.against,
                difference=compared.difference,
                low=compared.low,
                high=compared.high,
                p=compared.p,
                test=compared.test,
                starts=compared.tasks,
                seen=len(seen),
                unknown=one.unknown + other.unknown,
            )
            job.counts |= msgspec.to_builtins(found)
            write_metrics(job, plan.rounds, {"held_out/difference": found.difference, "held_out/p": found.p})
        self.ledger.held_out[plan.rounds] = found
        return found

    def _run_of(self, candidate: str) -> str:
        return f"{self.plan.run}.{candidate}"

    def _asked(self, number: int, attempt: int) -> str:
        return f"{self.plan.run}.reflect-{number}.{attempt}"


def _is_all_failed(answers: list[Answer], tasks: list[Task]) -> bool:
    return len(answers) == len(tasks) and all(answer.error is not None for answer in answers)
