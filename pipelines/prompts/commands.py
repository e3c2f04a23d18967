"""Command `prompts`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lake.cli.options import SectionedCommand, echo_rows, lake_option, quiet
from lake.errors import UsageError
from lake.read.text_table import cell, counted
from pipelines.collect.options import (
    COUNT,
    HOW_SAMPLED,
    MANY_AT_ONCE,
    WHICH_ENGINES,
    Teller,
    player_options,
    playing_options,
)

if TYPE_CHECKING:
    from pipelines.collect.tasks import TaskSet
    from pipelines.prompts.ledger import HeldOut
    from pipelines.prompts.play import Reflection
    from pipelines.prompts.search import Plan, Result
    from pipelines.score.scoring import ScoringConfig

_SECTIONS = {
    "Which prompts": ("first", "given", "out"),
    "Who plays": ("env", "env_args", "model", "tokenizer", "policy"),
    "Who reflects": (
        "reflect",
        "reflect_model",
        "reflect_temperature",
        "reflect_max_tokens",
        "reflect_contrasts",
        "reflect_budget",
        "longest",
    ),
    "What they are ranked by": ("scorers", "rank_by"),
    "The search": ("lake_uri", "run", "rounds", "candidates", "beam"),
    "What is played": ("starts", "held_out", "held_out_args", "group_size", "tasks", "first_seed", "seed"),
    "Which engines": WHICH_ENGINES,
    "How actions are sampled": HOW_SAMPLED,
    "Many at once": MANY_AT_ONCE,
}


@click.command(cls=SectionedCommand, sections=_SECTIONS)
@lake_option
@playing_options
@click.option("--first", required=True, metavar="FILE|TEXT", help="The prompt to improve; '' is none at all.")
@click.option(
    "--candidate", "given", multiple=True, metavar="FILE|TEXT", help="A prompt to test beside it; several are ranked."
)
@click.option("--out", type=click.Path(dir_okay=False), help="File that the best prompt is written to.")
@click.option(
    "--reflect",
    metavar="URL",
    help="Endpoint of the OpenAI form that proposes prompts; its key is in TRAJLAKE_REFLECT_KEY. It is shown "
    "transcripts.  [default: none; only --candidate is ranked]",
)
@click.option("--reflect-model", metavar="NAME", help="The name that it knows its model by.")
@click.option("--reflect-temperature", type=click.FloatRange(min=0), default=1.0, show_default=True, help="Its own.")
@click.option("--reflect-max-tokens", type=COUNT, default=2048, show_default=True, help="Tokens of its answers.")
@click.option(
    "--reflect-contrasts", type=COUNT, default=2, show_default=True, help="Pairs of attempts that it sees at once."
)
@click.option(
    "--reflect-budget",
    type=click.IntRange(min=1000),
    default=16_000,
    show_default=True,
    help="Characters of transcripts that it sees at once.",
)
@click.option("--longest", type=COUNT, default=4000, show_default=True, help="Characters of a proposed prompt.")
@click.option(
    "--score",
    "scorers",
    multiple=True,
    metavar="SCORER|FILE:FUNCTION",
    help="Scores the rollouts of every candidate, as `trajlake score` does; several run in this order.",
)
@click.option(
    "--rank-by",
    metavar="NAME",
    help="A scorer, or env_return: what candidates are ranked by.  [default: the last --score, else env_return]",
)
@click.option("--run", default="prompts", show_default=True, help="Name of the search; the same goes on where it was.")
@click.option("--rounds", type=COUNT, default=3, show_default=True, help="Rounds of proposals, with --reflect.")
@click.option("--candidates", type=COUNT, default=4, show_default=True, help="Prompts that a round asks for.")
@click.option("--beam", type=COUNT, default=2, show_default=True, help="The best, which a round is made from.")
@click.option("--starts", type=COUNT, default=32, show_default=True, help="Starts that candidates are ranked on.")
@click.option(
    "--held-out", type=COUNT, default=64, show_default=True, help="Other starts, for the comparison at the end."
)
@click.option(
    "--held-out-arg",
    "held_out_args",
    multiple=True,
    metavar="KEY=VALUE",
    help="Argument of the environment on these, as split=held_out.",
)
@click.option("--group-size", type=COUNT, default=4, show_default=True, help="Rollouts of a candidate from a start.")
@click.option("--prompts", "tasks", type=click.Path(dir_okay=False), help="Starts from a file.  [default: seeds]")
@click.option("--first-seed", type=click.IntRange(min=0), default=0, show_default=True, help="First seed of a start.")
@click.option("--seed", type=int, default=0, show_default=True, help="Decides the samples.")
def prompts(*, lake_uri: str, out: str | None, **given: Any) -> None:
    """Search for a better system prompt: propose, test on the same starts, rank.

    Each round an endpoint (--reflect) is shown the best and worst attempts of the best prompts so far, and proposes
    others; all play the same starts with the same seeds. At the end the best is compared with the first one on
    held-out starts. Everything is recorded; the same command goes on after a kill, and with more --rounds.
    """
    import lake
    from pipelines.collect.manager.scheduler import Limits
    from pipelines.prompts.ledger import Ledger
    from pipelines.prompts.play import Arena
    from pipelines.prompts.search import Search

    quiet()
    reflection = _reflection(given)
    options = player_options(given)
    plan = _plan(given, reflection)
    scoring, rank_by = _scoring(given)
    names = ("parallel", "retries", "grace")
    limits = Limits(episode_seconds=given["episode_timeout"], **{name: given[name] for name in names})
    tell = Teller()
    lk = lake.open(lake_uri, create=True)
    arena = Arena(
        lake=lk,
        options=options,
        scoring=scoring,
        rank_by=rank_by,
        limits=limits,
        group_size=given["group_size"],
        seed=plan.seed,
        say=tell.say,
        progress=tell.progress,
    )
    ledger = Ledger(lk, plan.run, plan.settings(arena, reflection))
    found = Search(plan=plan, arena=arena, ledger=ledger, reflection=reflection).run()
    if out is not None:
        Path(out).write_text(found.best.text + "\n", "utf-8")
    _tell(found, plan)


def _reflection(given: dict[str, Any]) -> "Reflection | None":
    """Who reflects. Raises UsageError: the model is not named, or there is nobody and nothing to rank."""
    from pipelines.prompts.play import Reflection

    if given["reflect"] is None:
        if not given["given"]:
            raise UsageError("give --reflect URL, which proposes prompts, or --candidate FILE, prompts to be ranked")
        return None
    if given["reflect_model"] is None:
        raise UsageError("--reflect needs --reflect-model NAME: the name that the endpoint knows its model by")
    return Reflection(
        url=given["reflect"],
        model=given["reflect_model"],
        temperature=given["reflect_temperature"],
        max_tokens=given["reflect_max_tokens"],
        contrasts=given["reflect_contrasts"],
        budget=given["reflect_budget"],
        longest=given["longest"],
    )


def _scoring(given: dict[str, Any]) -> "tuple[ScoringConfig, str]":
    """What scores rollouts, and which score ranks. Raises UsageError: no such scorer, or one that is not given."""
    from lake.judgements.scores import ENV_RETURN
    from pipelines.score.scoring import ScoringConfig

    scoring = ScoringConfig(targets=given["scorers"])
    names = [ENV_RETURN, *(scorer.work().name for scorer in scoring.scorers())]
    rank_by = given["rank_by"] or names[-1]
    if rank_by not in names:
        raise UsageError(f"--rank-by {rank_by}: nothing gives that score; valid: {', '.join(names)}, as --score says")
    return scoring, rank_by


def _plan(given: dict[str, Any], reflection: "Reflection | None") -> "Plan":
    """What is searched. Raises UsageError: no environment, or prompts or starts that are none."""
    from lake.settings import from_pairs
    from pipelines.collect.manager.rounds import Wanted
    from pipelines.prompts.candidates import Candidate, given_text
    from pipelines.prompts.search import Plan

    if given["env"] is None:
        raise UsageError("give --env: the environment whose rewards prompts are ranked by")
    starts, held_out = _tasks(given)
    Wanted(run=given["run"], groups=1, group_size=1)  # a name that no run can have is refused before anything is asked
    return Plan(
        run=given["run"],
        first=Candidate(text=given_text(given["first"], "--first"), made="first"),
        given=[Candidate(text=given_text(one, "--candidate"), made="given") for one in given["given"]],
        rounds=0 if reflection is None else given["rounds"],
        candidates=given["candidates"],
        beam=given["beam"],
        starts=starts,
        held_out=held_out,
        held_out_args=from_pairs(given["held_out_args"]),
        seed=given["seed"],
    )


def _tasks(given: dict[str, Any]) -> "tuple[TaskSet, TaskSet]":
    """The starts of the search, and the held-out ones. Raises UsageError: the file has too few."""
    from pipelines.collect.tasks import listed, order, read_tasks, seeds

    count, held_out, first = given["starts"], given["held_out"], given["first_seed"]
    if given["tasks"] is None:
        return seeds(first, count), seeds(first + count, held_out)
    rows = read_tasks(given["tasks"]).tasks
    if len(rows) < count + held_out:
        raise UsageError(
            f"{given['tasks']} has {counted(len(rows), 'task')}, and --starts {count} with --held-out {held_out} are "
            f"{count + held_out}; give fewer, or a file with more"
        )
    mixed = [rows[place] for place in order(len(rows), given["seed"], 0)]
    return listed(mixed[:count]), listed(mixed[count : count + held_out])


def _tell(found: "Result", plan: "Plan") -> None:
    """The table of candidates, the comparison on held-out starts, and the best prompt."""
    import polars as pl

    rows = []
    for one in found.standings:
        candidate = found.candidates[one.candidate]
        made = candidate.made if candidate.parent is None else f"from {candidate.parent}"
        rows.append(
            {
                "rank": one.rank,
                "candidate": candidate.id,
                "made": made,
                "round": candidate.round,
                "return": one.mean,
                "difference": one.difference,
                "low": one.low,
                "high": one.high,
                "p": one.p,
                "starts": one.starts,
                "unknown": one.unknown,
            }
        )
    echo_rows(pl.DataFrame(rows, infer_schema_length=None), "table")
    tested = counted(len(found.candidates), "prompt")
    click.echo(f"{tested} tested on the same {counted(len(plan.starts.tasks), 'start')}; the best of many is the best")
    click.echo("partly by chance; what it is worth is what held-out starts say:")
    held_out = found.held_out
    if held_out is None:
        click.echo(f"no candidate is better than the first prompt, {plan.first.id}; there is nothing to compare")
    else:
        click.echo(_compared(held_out, found.looks))
    click.echo(f"the best prompt, {found.best.id}:")
    click.echo("\n".join(cell(line) for line in found.best.text.splitlines()) or "(none: no system prompt at all)")


def _compared(found: "HeldOut", looks: int) -> str:
    """The comparison on held-out starts, in a sentence."""
    if found.difference is None:
        return "no held-out start has a return of both prompts"
    within = "" if found.low is None else f", 95 % interval {found.low:+.4g} to {found.high:+.4g}"
    told = (
        f"held out, {counted(found.starts, 'start')}: the best {found.value:.4g}, the first {found.against:.4g}; "
        f"difference {found.difference:+.4g}{within}; p = {found.p:.4g} ({found.test} sign-flip test)"
    )
    notes = []
    if found.seen:
        notes.append(
            f"{counted(found.seen, 'held-out start')} left out: the search had played the same under another seed"
        )
    if found.unknown:
        notes.append(f"{counted(found.unknown, 'rollout')} without a return")
    if looks > 1:
        notes.append(f"{looks} prompts were compared on these starts, one after the other: p is for one comparison")
    return "\n".join([told, *notes])
