"""Built-in scorers: one small file each, formula and source in the docstring; `SCORERS` lists them by name.

docs/guides/scorers.md is the guide.
"""

from pipelines.score.scorers.answer_quality import AnswerQuality
from pipelines.score.scorers.coordination import Coordination
from pipelines.score.scorers.env_return import EnvReturn
from pipelines.score.scorers.exact_match import ExactMatch
from pipelines.score.scorers.format_validity import FormatValidity
from pipelines.score.scorers.fuzzy_match import FuzzyMatch
from pipelines.score.scorers.inputs import read_inputs
from pipelines.score.scorers.kl_in_reward import KlInReward
from pipelines.score.scorers.length import Length
from pipelines.score.scorers.protocol import SCORES, Columns, Scorer, ScorerInputs
from pipelines.score.scorers.restart import Restart
from pipelines.score.scorers.rubric_terms import RubricTerms
from pipelines.score.scorers.tool_success import ToolSuccess
from pipelines.score.scorers.voting import Voting

__all__ = [
    "SCORERS",
    "SCORES",
    "AnswerQuality",
    "Columns",
    "Coordination",
    "EnvReturn",
    "ExactMatch",
    "FormatValidity",
    "FuzzyMatch",
    "KlInReward",
    "Length",
    "Restart",
    "RubricTerms",
    "Scorer",
    "ScorerInputs",
    "ToolSuccess",
    "Voting",
    "read_inputs",
]

SCORERS: dict[str, type[Scorer]] = {
    scorer.name: scorer
    for scorer in (
        EnvReturn,
        ExactMatch,
        FuzzyMatch,
        ToolSuccess,
        AnswerQuality,
        Coordination,
        Voting,
        Restart,
        RubricTerms,
        FormatValidity,
        Length,
        KlInReward,
    )
}
"""Scorer classes by name."""
