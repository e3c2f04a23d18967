"""Command `prompts`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lake.cli.options import SectionedCommand, echo_rows, hide_progress_bars, lake_option
from lake.errors import UsageError
from lake.read.text_table import count_noun, format_cell
from pipelines.collect.commands import (
    COUNT,
    HOW_SAMPLED,
    MANY_AT_ONCE,
    WHICH_ENGINES,
    ProgressPrinter,
    playing_options,
    read_player_options,
)

if TYPE_CHECKING:
    from pipelines.collect.tasks import TaskSet
    from pipelines.prompts.candidates import ReflectionConfig
    from pipelines.prompts.search import HeldOutComparison, SearchPlan, SearchReport
    from pipelines.score.scoring import ScoringConfig

_SECTIONS = {
    "Which prompts": ("first", "user_candidates", "out"),
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
@click.option("--first", required=True, metavar="FILE|TEXT", help="Prompt to improve; '' for no system prompt.")
@click.option(
    "--candidate",
    "user_candidates",
    multiple=True,
    metavar="FILE|TEXT",
    help="Further prompt to test and rank; repeatable.",
)
@click.option("--out", type=click.Path(dir_okay=False), help="Output file for the best prompt.")
@click.option(
    "--reflect",
    metavar="URL",
    help="Endpoint with the OpenAI API that proposes prompts; its key is in TRAJLAKE_REFLECT_KEY. It receives "
    "transcripts.  [default: none; only --candidate is ranked]",
)
@click.option("--reflect-model", metavar="NAME", help="Model name at the reflecting endpoint.")
@click.option(
    "--reflect-temperature",
    type=click.FloatRange(min=0),
    default=1.0,
    show_default=True,
    help="Sampling temperature of the reflecting model.",
)
@click.option(
    "--reflect-max-tokens", type=COUNT, default=2048, show_default=True, help="Maximum tokens of a reflecting answer."
)
@click.option("--reflect-contrasts", type=COUNT, default=2, show_default=True, help="Pairs of attempts in a request.")
@click.option(
    "--reflect-budget",
    type=click.IntRange(min=1000),
    default=16_000,
    show_default=True,
    help="Maximum characters of transcripts in a request.",
)
@click.option("--longest", type=COUNT, default=4000, show_default=True, help="Maximum characters of a proposed prompt.")
@click.option(
    "--score",
    "scorers",
    multiple=True,
    metavar="SCORER|FILE:FUNCTION",
    help="Scorer of the candidates' rollouts, as in `trajlake score`; repeatable, run in this order.",
)
@click.option(
    "--rank-by",
    metavar="NAME",
    help="Scorer, or env_return, that ranks the candidates.  [default: the last --score, else env_return]",
)
@click.option("--run", default="prompts", show_default=True, help="Name of the search; an existing search resumes.")
@click.option("--rounds", type=COUNT, default=3, show_default=True, help="Number of proposal rounds, with --reflect.")
@click.option("--candidates", type=COUNT, default=4, show_default=True, help="Number of prompts that a round asks for.")
@click.option(
    "--beam", type=COUNT, default=2, show_default=True, help="Number of best candidates that a round improves."
)
@click.option("--starts", type=COUNT, default=32, show_default=True, help="Number of starts that rank the candidates.")
@click.option(
    "--held-out", type=COUNT, default=64, show_default=True, help="Number of further starts, for the final comparison."
)
@click.option(
    "--held-out-arg",
    "held_out_args",
    multiple=True,
    metavar="KEY=VALUE",
    help="Environment argument on held-out starts, e.g. split=held_out; repeatable.",
)
@click.option(
    "--group-size", type=COUNT, default=4, show_default=True, help="Number of rollouts per candidate and start."
)
@click.option("--prompts", "tasks", type=click.Path(dir_okay=False), help="File with the starts.  [default: seeds]")
@click.option("--first-seed", type=click.IntRange(min=0), default=0, show_default=True, help="First seed of a start.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the samples.")
def prompts(*, lake_uri: str, out: str | None, **options: Any) -> None:
    """Search for a better system prompt: propose, test on the same starts, rank.

    Each round sends the best and worst attempts of the best prompts so far to an endpoint (--reflect), which proposes
    new prompts. All prompts play the same starts with the same seeds. At the end the best prompt is compared with the
    first one on held-out starts. Everything is recorded. Rerun the same command to resume after a crash, or with more
    --rounds to continue.
    """
    import lake
    from pipelines.collect.manager.scheduler import RolloutLimits
    from pipelines.prompts.candidates import Arena
    from pipelines.prompts.search import PromptLedger, PromptSearch

    hide_progress_bars()
    reflection = _read_reflection(options)
    player_options = read_player_options(options)
    plan = _read_plan(options, reflection)
    scoring, rank_by = _read_scoring(options)
    limits = RolloutLimits(
        episode_seconds=options["episode_timeout"], **{name: options[name] for name in ("parallel", "retries", "grace")}
    )
    printer = ProgressPrinter()
    lk = lake.open(lake_uri, create=True)
    arena = Arena(
        lake=lk,
        options=player_options,
        scoring=scoring,
        rank_by=rank_by,
        limits=limits,
        group_size=options["group_size"],
        seed=plan.seed,
        say=printer.say,
        progress=printer.progress,
    )
    ledger = PromptLedger(lk, plan.run, plan.settings(arena, reflection))
    report = PromptSearch(plan=plan, arena=arena, ledger=ledger, reflection=reflection).run()
    if out is not None:
        Path(out).write_text(report.best.text + "\n", "utf-8")
    _print_report(report, plan)


def _read_reflection(options: dict[str, Any]) -> "ReflectionConfig | None":
    """Return the reflecting endpoint. Raises UsageError: no model name, or neither endpoint nor candidates."""
    from pipelines.prompts.candidates import ReflectionConfig

    if options["reflect"] is None:
        if not options["user_candidates"]:
            raise UsageError("give --reflect URL, which proposes prompts, or --candidate FILE, prompts to be ranked")
        return None
    if options["reflect_model"] is None:
        raise UsageError("--reflect needs --reflect-model NAME: the model name at the endpoint")
    return ReflectionConfig(
        url=options["reflect"],
        model=options["reflect_model"],
        temperature=options["reflect_temperature"],
        max_tokens=options["reflect_max_tokens"],
        contrasts=options["reflect_contrasts"],
        budget=options["reflect_budget"],
        longest=options["longest"],
    )


def _read_scoring(options: dict[str, Any]) -> "tuple[ScoringConfig, str]":
    """Return the scorers, and the score that ranks. Raises UsageError: no such scorer."""
    from lake.judgements.scores import ENV_RETURN
    from pipelines.score.scoring import ScoringConfig

    scoring = ScoringConfig(targets=options["scorers"])
    names = [ENV_RETURN, *(scorer.make_scorer().name for scorer in scoring.scorers())]
    rank_by = options["rank_by"] or names[-1]
    if rank_by not in names:
        raise UsageError(f"--rank-by {rank_by}: no --score gives that score; valid: {', '.join(names)}")
    return scoring, rank_by


def _read_plan(options: dict[str, Any], reflection: "ReflectionConfig | None") -> "SearchPlan":
    """Return the plan of the search. Raises UsageError: no environment, or invalid prompts or starts."""
    from lake.settings import parse_pairs
    from pipelines.collect.manager.rounds import RunSettings
    from pipelines.prompts.candidates import Candidate, read_prompt_option
    from pipelines.prompts.search import SearchPlan

    if options["env"] is None:
        raise UsageError("give --env: the environment whose rewards prompts are ranked by")
    starts, held_out = _read_starts(options)
    RunSettings(run=options["run"], groups=1, group_size=1)  # refuses an invalid run name before the endpoint is called
    return SearchPlan(
        run=options["run"],
        first=Candidate(text=read_prompt_option(options["first"], "--first"), origin="first"),
        user_candidates=[
            Candidate(text=read_prompt_option(prompt, "--candidate"), origin="given")
            for prompt in options["user_candidates"]
        ],
        rounds=0 if reflection is None else options["rounds"],
        candidates=options["candidates"],
        beam=options["beam"],
        starts=starts,
        held_out=held_out,
        held_out_args=parse_pairs(options["held_out_args"]),
        seed=options["seed"],
    )


def _read_starts(options: dict[str, Any]) -> "tuple[TaskSet, TaskSet]":
    """Return the starts of the search, and the held-out ones. Raises UsageError: the file has too few tasks."""
    from pipelines.collect.tasks import build_task_set, draw_order, list_seed_tasks, read_tasks

    count, held_out, first = options["starts"], options["held_out"], options["first_seed"]
    if options["tasks"] is None:
        return list_seed_tasks(first, count), list_seed_tasks(first + count, held_out)
    rows = read_tasks(options["tasks"]).tasks
    if len(rows) < count + held_out:
        raise UsageError(
            f"{options['tasks']} has {count_noun(len(rows), 'task')}, and --starts {count} with --held-out {held_out} "
            f"are {count + held_out}; give fewer, or a file with more"
        )
    shuffled = [rows[index] for index in draw_order(len(rows), options["seed"], 0)]
    return build_task_set(shuffled[:count]), build_task_set(shuffled[count : count + held_out])


def _print_report(report: "SearchReport", plan: "SearchPlan") -> None:
    """Print the table of candidates, the comparison on held-out starts, and the best prompt."""
    import polars as pl

    rows = []
    for standing in report.standings:
        candidate = report.candidates[standing.candidate]
        rows.append(
            {
                "rank": standing.rank,
                "candidate": candidate.id,
                "made": candidate.origin if candidate.parent is None else f"from {candidate.parent}",
                "round": candidate.round,
                "return": standing.mean,
                "difference": standing.difference,
                "low": standing.low,
                "high": standing.high,
                "p": standing.p,
                "starts": standing.starts,
                "unknown": standing.unknown,
            }
        )
    echo_rows(pl.DataFrame(rows, infer_schema_length=None), "table")
    tested = count_noun(len(report.candidates), "prompt")
    click.echo(
        f"{tested} tested on the same {count_noun(len(plan.starts.tasks), 'start')}; the best of many is the best"
    )
    click.echo("partly by chance; held-out starts measure its real gain:")
    if report.held_out is None:
        click.echo(f"no candidate is better than the first prompt, {plan.first.id}; there is nothing to compare")
    else:
        click.echo(_format_comparison(report.held_out, report.looks))
    click.echo(f"the best prompt, {report.best.id}:")
    click.echo(
        "\n".join(format_cell(line) for line in report.best.text.splitlines()) or "(none: no system prompt at all)"
    )


def _format_comparison(held_out: "HeldOutComparison", looks: int) -> str:
    """Return the comparison on held-out starts as lines of text."""
    if held_out.difference is None:
        return "no held-out start has a return of both prompts"
    interval = "" if held_out.low is None else f", 95 % interval {held_out.low:+.4g} to {held_out.high:+.4g}"
    lines = [
        f"held out, {count_noun(held_out.starts, 'start')}: the best {held_out.value:.4g}, "
        f"the first {held_out.against:.4g}; difference {held_out.difference:+.4g}{interval}; "
        f"p = {held_out.p:.4g} ({held_out.test} sign-flip test)"
    ]
    if held_out.replayed:
        starts = count_noun(held_out.replayed, "held-out start")
        lines.append(f"{starts} left out: the search had played the same under another seed")
    if held_out.unknown:
        lines.append(f"{count_noun(held_out.unknown, 'rollout')} without a return")
    if looks > 1:
        lines.append(f"{looks} prompts were compared on these starts, one after the other: p is for one comparison")
    return "\n".join(lines)
