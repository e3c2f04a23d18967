"""Harbor's models validate the files of an exported tree, and spell them again.

Argument: the folder.
"""

import json
import sys
import typing
from pathlib import Path

if sys.version_info < (3, 12):
    import typing_extensions

    for name in ("TypedDict", "override"):
        setattr(typing, name, getattr(typing_extensions, name))

from harbor.models.trajectories import Trajectory
from harbor.models.trial.result import TrialResult


def main():
    """Print what is found."""
    parsed = {"trajectories": {}, "results": {}}
    root = Path(sys.argv[1])
    for path in sorted(root.rglob("trajectory*.json")):
        trajectory = Trajectory.model_validate_json(path.read_text("utf-8"))
        parsed["trajectories"][path.relative_to(root).as_posix()] = trajectory.to_json_dict()
    for path in sorted(root.rglob("result.json")):
        result = TrialResult.model_validate_json(path.read_text("utf-8"))
        parsed["results"][path.relative_to(root).as_posix()] = result.model_dump(mode="json")
    print(json.dumps(parsed))


main()
