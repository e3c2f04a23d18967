"""Options under which an estimator gives the numbers of other code, by the name of that code.

They stand beside the estimators and not in them: a preset decides nothing that the options of a job do not say.
"""

from collections.abc import Mapping
from typing import Any

PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "gigpo": {
        "verl-agent": {
            "gamma": 0.95,
            "omega": 1.0,
            "combination": "sum",
            "episode_norm": "mean_norm",
            "step_norm": "mean_norm",
            "baseline": "rows",
            "singleton": "raw",
            "invalid_action_penalty": 0.1,
            "revisits": "keep",
            "truncated": "keep",
            "episode_source": "sum_rewards",
            "anchors": {"kind": "exact"},
        }
    }
}
"""Estimator -> name -> options; what is given beside a preset wins. verl-agent: its defaults, but for the gamma of its
GiGPO scripts (its own default is 1)."""
