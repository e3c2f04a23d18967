"""The picture of the learning study, from the runs in docs/learning.json."""

from pathlib import Path
from statistics import fmean

from curve_chart import Curve, Panel, draw_curves

from benchmarks.learning.arms import BY_NAME
from benchmarks.learning.report import EnvironmentReport, Report, list_curve_points, read_success

_RUNS = Path(__file__).resolve().parents[1] / "learning.json"


def learning_picture() -> str:
    """Return the curves of every environment that has whole seeds."""
    report = Report.model_validate_json(_RUNS.read_text("utf-8"))
    panels = [_draw_environment(environment) for environment in report.environments if environment.whole_seeds]
    return draw_curves(panels, "Success of the collected rollouts by collected tokens, mean over seeds")


def _draw_environment(environment: EnvironmentReport) -> Panel:
    curves = [
        Curve(
            BY_NAME[arm].label,
            [
                (at, fmean(read_success(run, at) for run in environment.list_results(arm)))
                for at in list_curve_points(environment)
            ],
        )
        for arm in environment.arms
    ]
    return Panel(f"{environment.label}, {len(environment.whole_seeds)} seeds", curves, environment.budget)
