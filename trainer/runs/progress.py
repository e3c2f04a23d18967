"""A progress bar on stderr for training."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from trainer.runs.loop import StepReport
from trainer.runs.training_run import Progress as OnStep


@contextmanager
def training_bar() -> Iterator[OnStep]:
    """A bar that follows the optimizer steps; silent where stderr is no terminal."""
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"), TimeRemainingColumn())
    with Progress(TextColumn("train"), *columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("train", total=None, loss="")

        def on_step(report: StepReport, total: int) -> None:
            loss = f"loss {report.metrics['loss']:.4f}"
            for sentence in report.alarms:
                bar.console.print(f"update {report.step.index}: {sentence}", markup=False, highlight=False)
            bar.update(task, completed=report.step.index + 1, total=total, loss=loss)

        yield on_step
