"""What a person sees of a training run while it goes on, on stderr: what is trained on and what is not, then progress.

On a terminal a bar follows the updates. Elsewhere lines do, none more than half a minute after the one before, also
while a single update takes longer than that.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from trainer.data.plan.preparation import Prepared
    from trainer.runs.loop import StepReport

LINE_SECONDS = 20.0
"""Between two lines of progress."""


class Reminder:
    """Says what is being done, once nothing was said for a while.

    Args:
        say: takes the line.
        seconds: for which nothing was said.
    """

    def __init__(self, say: Callable[[str], None], seconds: float = LINE_SECONDS) -> None:
        self._say, self._seconds = say, seconds
        self._began = self._heard = time.monotonic()
        self.subject = ""
        """What the work is for: a round, a stage."""
        self.doing = ""
        """The work."""

    def begin(self, subject: str, doing: str) -> None:
        """Take note of work that begins now."""
        self.subject, self.doing, self._began = subject, doing, time.monotonic()

    def hear(self) -> None:
        """Take note that something was said."""
        self._heard = time.monotonic()

    def remind(self) -> None:
        """Say what is being done, and for how long."""
        self.hear()
        what = ": ".join(filter(None, (self.subject, self.doing)))
        self._say(f"{what}, {time.monotonic() - self._began:.0f} s")

    @contextmanager
    def running(self) -> Iterator[None]:
        """While the block lasts, say every so often what is being done, if nothing else is said."""
        stop = threading.Event()

        def watch() -> None:
            while not stop.wait(max(0.0, self._heard + self._seconds - time.monotonic())):
                if time.monotonic() - self._heard >= self._seconds:
                    self.remind()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


class ProgressReporter:
    """Says what a run does, stage by stage.

    Args:
        say: takes a line.
        show: takes updates done, all updates, and how the last one went, after each; None says it in lines.
        seconds: between two lines of progress.
        reminder: says them; one of its own unless given.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        show: Callable[[int, int, str], None] | None = None,
        seconds: float = LINE_SECONDS,
        reminder: Reminder | None = None,
    ) -> None:
        self._say = say
        self._show = show
        self._reminder = reminder or Reminder(say, seconds)
        self._reminder.doing = "looking at the data"
        self._losses: list[tuple[int, str]] = []

    def on_plan(self, prepared: "Prepared") -> None:
        """Say what will be trained on; see `trainer.runs.offline.OnPlan`."""
        self.summarise()
        for line in plan_lines(prepared):
            self._report(line)
        prepared.notes.clear()
        self._reminder.doing = "loading the model"

    def on_step(self, report: "StepReport", total: int) -> None:
        """Say how an update went; see `trainer.runs.training_run.Progress`."""
        done, went = report.step.index + 1, outcome(report)
        for sentence in report.alarms:
            self._report(f"update {report.step.index}: {sentence}")
        is_first = not self._losses
        self._losses = [*self._losses[:1], (report.step.index, went)]
        self._reminder.doing = f"{done} of {total} updates: {went}"
        if self._show is not None:
            self._show(done, total, went)
        elif is_first:
            self._reminder.remind()

    def summarise(self) -> None:
        """Say from where to where the loss went."""
        if self._losses:
            (first, before), (last, after) = self._losses[0], self._losses[-1]
            self._report(f"first: update {first}, {before}")
            self._report(f"last: update {last}, {after}")
        self._losses = []

    @contextmanager
    def reminding(self) -> Iterator[None]:
        """While the block lasts, say every so often what is being done, if nothing else is said."""
        with nullcontext() if self._show is not None else self._reminder.running():
            yield

    def _report(self, line: str) -> None:
        self._reminder.hear()
        self._say(line)


def outcome(report: "StepReport") -> str:
    """How an update went."""
    went = f"loss {report.metrics['loss']:.4f}"
    if "logprob" in report.metrics:
        went += f", log-probability {report.metrics['logprob']:.3f} per trained token"
    return went


def counted(number: int, noun: str) -> str:
    """A number with its noun: 1 episode, 2,000 episodes."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def plan_lines(prepared: "Prepared") -> list[str]:
    """What will be trained on and what will not, line by line; a limit that does not fit the data comes first."""
    plan, selection = prepared.plan, prepared.selection
    lines = [] if selection.too_long is None else [selection.too_long.describe(selection.max_length)]
    lines += prepared.notes
    what = f"{counted(int(plan.trained_M.sum()), 'step')} of {counted(plan.episodes, 'episode')}"
    updates = counted(len(plan.steps), "update")
    lines.append(f"trained: {what}, {counted(plan.loss_tokens, 'action token')}; {updates}")
    if selection.drops.height:
        drops = ", ".join(f"{row['reason']} {row['steps']:,}" for row in selection.drops.iter_rows(named=True))
        lines.append(f"steps left out: {drops}")
    return lines


@contextmanager
def progress_reporter() -> Iterator[ProgressReporter]:
    """Progress of a run on stderr: a bar on a terminal, lines elsewhere, nothing on ranks other than 0."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from trainer.backends.ranks import is_first_rank

    console = Console(stderr=True)
    if not (console.is_terminal and is_first_rank()):
        reporter = ProgressReporter(lambda line: click.echo(line, err=True) if is_first_rank() else None)
        with reporter.reminding():
            yield reporter
            reporter.summarise()
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[went]}"), TimeRemainingColumn())
    with Progress(TextColumn("train"), *columns, console=console) as bar:
        task = bar.add_task("train", total=None, went="")
        reporter = ProgressReporter(
            lambda line: bar.console.print(line, markup=False, highlight=False, soft_wrap=True),
            lambda done, total, went: bar.update(task, completed=done, total=total, went=went),
        )
        yield reporter
        reporter.summarise()
