"""Credit: what every step of a trajectory contributed, as a table of advantages.

`GiGPO(...).advantages(steps)` is a pure function from a lazy frame of steps to a lazy frame of advantages; it knows no
lake. `summarise` says what a result looks like. `pipelines/sql/gigpo.sql` is the same estimator in DuckDB SQL.
"""

from pipelines.credit.anchors import Anchors, ExactText, SimilarText
from pipelines.credit.diagnostics import CreditSummary, summarise
from pipelines.credit.estimators.gigpo import GiGPO
from pipelines.credit.flags import Flag

__all__ = ["Anchors", "CreditSummary", "ExactText", "Flag", "GiGPO", "SimilarText", "summarise"]
