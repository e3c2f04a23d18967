"""The trainer's commands but `train`: models, rescoring and evaluation; and what they share with `train`."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import click

from lake.cli.executor_options import executor_of, executor_options
from lake.cli.options import Lakes, as_of_option, echo_rows, format_option, lakes_option, opened, quiet
from lake.errors import UsageError
from lake.read.text_table import counted


@contextmanager
def file_faults() -> Iterator[None]:
    """A file of the run that cannot be read or written becomes a LakeAccessError of one line, with what to do."""
    from safetensors import SafetensorError

    from lake.errors import LakeAccessError, TrajlakeError

    try:
        yield
    except TrajlakeError:
        raise
    except (OSError, SafetensorError) as error:
        # safetensors has a full disk as an error of its own.
        place, reason = getattr(error, "filename", None), getattr(error, "strerror", None)
        advice = "free space, mend its permissions, or choose another --out; a run under way continues with --resume"
        raise LakeAccessError(f"{place or 'writing a file'}: {reason or error}; {advice}") from error


@contextmanager
def explain_interrupt(out: Path) -> Iterator[None]:
    """Ctrl-C says how the run goes on."""
    try:
        yield
    except KeyboardInterrupt:
        if any(out.glob("checkpoints/*")):
            click.echo(f"interrupted; --out {out} --resume continues from the last checkpoint", err=True)
        elif out.is_dir():
            click.echo(
                f"interrupted before the first checkpoint: --out {out} --resume starts over. --set checkpoint_every=N "
                "writes one every N updates",
                err=True,
            )
        raise


@click.command("init-model")
@lakes_option
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to write the model to.")
@click.option("--vocabulary", type=int, help="Token ids at most.  [default: 2048]")
@click.option("--hidden-size", type=int, help="Width, a multiple of 32.  [default: 64]")
@click.option("--layers", type=int, help="Transformer blocks.  [default: 2]")
@click.option("--seed", type=int, help="Seed of the weights.  [default: 0]")
def init_model(lake_uri: Lakes, out: Path, **flags: int | None) -> None:
    """Make a small random model with a tokenizer trained on the lake's own texts, for trying things."""
    import lake
    from lake.settings import validated
    from trainer.policy.tiny_model import TinyModelConfig, make_tiny_model

    quiet()
    config = validated(TinyModelConfig, {name: value for name, value in flags.items() if value is not None})
    with file_faults():
        made = make_tiny_model(lake.open(lake_uri).snapshot(), out, config)
    click.echo(
        f"{made.folder}: {made.parameters:,} parameters, {made.vocabulary:,} token ids from {made.texts:,} texts"
    )


@click.command("convert-model")
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to write the model to.")
def convert_model(source: Path, out: Path) -> None:
    """Write a GGUF model as a Hugging Face folder, in float32, with its tokenizer.

    `train --model` takes a .gguf file as it is; converting it once saves the time of reading it, and engines and other
    tools can load the folder. What quantisation lost stays lost.
    """
    from trainer.policy.model_files import convert_model as convert

    quiet()
    click.echo(f"{out}: {convert(source, out):,} parameters")


@click.command("eval")
@lakes_option
@click.option(
    "--by",
    type=click.Choice(["run_id", "policy_version", "policy"]),
    default="run_id",
    show_default=True,
    help="What attempts are grouped by.",
)
@click.option(
    "--score",
    help="Score of an attempt: env_return, or a scorer, @VERSION or not.  [default: the credit's, else env_return]",
)
@click.option("--threshold", type=float, default=1.0, show_default=True, help="Lowest score that is a success.")
@click.option("--k", "ks", default="1", show_default=True, metavar="K,...", help="Values of k in pass@k and pass^k.")
@click.option("--against", nargs=2, metavar="A B", help="Compare A with B, task by task.  [default: no comparison]")
@click.option("--run", "run_id", help="Only episodes of this run.  [default: all]")
@click.option("--where", help="SQL predicate over episodes.  [default: all]")
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Seed of the permutation test of --against. It samples if more than 32 tasks differ by no common multiple.",
)
@as_of_option
@format_option
def evaluate_success(
    lake_uri: Lakes,
    by: str,
    score: str | None,
    threshold: float,
    ks: str,
    against: tuple[str, str] | None,
    run_id: str | None,
    where: str | None,
    seed: int,
    as_of: str | None,
    output_format: str,
) -> None:
    """Count successes: share, pass@k, pass^k, each with a 95 % interval, and one policy against another.

    Intervals are over tasks: they say how much other tasks of the same kind may differ. Attempts without a score are
    left out, and counted on stderr. Names are those of --by: a run, a policy, or POLICY@VERSION.
    """
    from lake.judgements.scores import find_score
    from trainer.evaluation.success import against_rows, read_attempts, success_rows

    if not math.isfinite(threshold):
        raise UsageError(f"--threshold {threshold}: valid is a finite number")
    snapshot = opened(lake_uri, as_of)
    counting_score = find_score(snapshot, score)
    attempts = read_attempts(snapshot, by=by, score=counting_score.name, where=where, run_id=run_id)
    counting = partial(against_rows, one=against[0], other=against[1], seed=seed) if against else success_rows
    rows = counting(attempts, ks=_numbers(ks), threshold=threshold)
    nested, unscored = int(attempts["nested"].sum()), attempts.filter(~attempts["nested"])["score"].null_count()
    if nested:
        click.echo(f"not attempts, since they came out of another episode (sub-agents, forks): {nested}", err=True)
    if unscored:
        click.echo(f"attempts without a score, left out of every figure: {unscored}", err=True)
    scored = attempts.filter(~attempts["nested"] & attempts["score"].is_not_null())
    most = max(scored.group_by("name", "task").len()["len"].to_list(), default=0)
    if most and (unknown := [str(k) for k in _numbers(ks) if k > most]):
        has = f"no task has more than {counted(most, 'scored attempt')}, so pass@k and pass^k are unknown"
        click.echo(f"--k {','.join(unknown)}: {has}", err=True)
    click.echo(f"score: {counting_score.title}", err=True)
    echo_rows(rows, output_format)


def _numbers(text: str) -> list[int]:
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < 1:
        raise UsageError(f"--k {text!r}: give whole numbers from 1 on, with commas between them, for example 1,2,4")
    return found


@click.command()
@lakes_option
@click.option(
    "--target", required=True, metavar="CHECKPOINT", help="The policy to evaluate, by its name in the table ratios."
)
@click.option(
    "--behaviour",
    required=True,
    metavar="CHECKPOINT",
    help="The policy that acted, or `stored`: as the engine recorded.",
)
@click.option(
    "--score",
    help="Reward: env_return, env_reward (of steps), or a scorer.  [default: the credit's score, else env_return]",
)
@click.option("--where", help="SQL predicate over episodes.  [default: all]")
@click.option("--gamma", type=float, default=1.0, show_default=True, help="Discount per turn.")
@click.option("--clip", type=float, default=2.0, show_default=True, help="Largest ratio of a turn, for clipped.")
@click.option(
    "--ridge",
    type=float,
    default=0.01,
    show_default=True,
    help="Shrinkage of the state values of fqe, in visits that the mean of the turn counts as.",
)
@as_of_option
@format_option
def ope(
    lake_uri: Lakes, target: str, behaviour: str, as_of: str | None, output_format: str, **options: str | float | None
) -> None:
    """Off-policy evaluation: estimate what a policy is worth from episodes that another one played.

    Both are checkpoints that have scored the episodes (trajlake rescore), so that both log-probabilities come from the
    same arithmetic. A value that the episodes cannot support is not given; the row says why.
    """
    from trainer.evaluation.ope import evaluate

    found = evaluate(opened(lake_uri, as_of), target, behaviour, **options)  # type: ignore[arg-type]
    for note in found.notes:
        click.echo(note, err=True)
    for reason, count in found.left_out.items():
        click.echo(f"left out: {counted(count, 'episode')} ({reason})", err=True)
    echo_rows(found.rows, output_format)


@click.command("evaluate", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def former_evaluate() -> None:
    """`trajlake evaluate` is now `trajlake ope` (off-policy evaluation); `trajlake eval` counts successes."""
    raise UsageError("`trajlake evaluate` is now `trajlake ope` (off-policy evaluation); `eval` counts successes")


@click.command()
@click.argument("checkpoint")
@lakes_option
@click.option("--name", help="Name in the table ratios.  [default: the folder's, or RUN@STEP]")
@click.option("--where", help="SQL predicate over episodes.  [default: all]")
@click.option("--selection", help="Score only the episodes that this selection kept.  [default: all]")
@click.option(
    "--tokens",
    type=click.Choice(["auto", "engine", "rendered"]),
    help="Which token rows: as sampled (engine), as rendered from text, or the former first (auto).  [default: auto]",
)
@click.option("--token-budget", type=int, help="Tokens of one forward pass.  [default: 8192]")
@click.option("--max-length", type=int, help="Longest sequence in tokens.  [default: as the data needs]")
@click.option("--device", help="Torch device.  [default: cpu]")
@executor_options("Processes that hold the model,")
@format_option
def rescore(
    checkpoint: str,
    lake_uri: Lakes,
    name: str | None,
    executor: str,
    workers: int | None,
    output_format: str,
    **flags: str | int | None,
) -> None:
    """Score stored tokens with a checkpoint, at the temperature they were sampled at, into the table ratios.

    CHECKPOINT is a model's folder, a run's or a checkpoint's, a .gguf file, or a row of the table checkpoints as
    RUN[@STEP] or JOB[@STEP]. What it has scored already is left out, so a killed run goes on where it was. Prints how
    far its log-probabilities are from the recorded ones, by run and policy version (the view mismatch).
    """
    import lake
    from lake import ids
    from trainer.evaluation.rescore import rescore as run_rescore

    quiet()
    lk = lake.open(lake_uri)
    options = {option: value for option, value in flags.items() if value is not None}
    with _bar() as progress:
        there = executor_of(executor, workers)
        report = run_rescore(lk, checkpoint, name=name, options=options, progress=progress, executor=there)
    for note in report.notes:
        click.echo(note, err=True)
    drops = ", ".join(f"{reason} {steps}" for reason, steps in report.drops.items())
    click.echo(
        f"{report.checkpoint} (series {ids.to_text(report.series_id)}): {report.scored:,} actions scored, "
        f"{report.present:,} already there, {report.tokens:,} tokens in {report.seconds:.1f} s",
        err=True,
    )
    if report.overtaken:
        said = "actions scored by another run meanwhile, or removed from the lake"
        click.echo(f"{said}: {report.overtaken:,}", err=True)
    if drops:
        click.echo(f"steps that are not scored: {drops}", err=True)
    query = "SELECT * EXCLUDE (checkpoint, series_id) FROM mismatch WHERE series_id = ? ORDER BY ALL"
    echo_rows(lk.sql(query, [report.series_id]), output_format)


@contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    """A bar that follows the actions; silent where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("rescore", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
