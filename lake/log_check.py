"""Whether the Delta logs are whole: a power cut may leave a commit's entry empty, or none at all.

delta-rs reads an empty entry as a commit that changed nothing, so what it committed is gone without a word. Vacuum asks
here before it deletes anything, the doctor whenever it is called.
"""

from collections.abc import Mapping

from lake.objects import Objects


def log_faults(objects: Objects, versions: Mapping[str, int]) -> list[str]:
    """Commits up to these versions of the tables whose entry is empty or missing, and in no checkpoint either."""
    faults = []
    for name, version in versions.items():
        entries = {found.path.rpartition("/")[2]: found.bytes for found in objects.list(f"{name}/_delta_log")}
        checkpoints = [int(entry[:20]) for entry in entries if ".checkpoint" in entry and entry[:20].isdecimal()]
        for number in range(max([-1, *checkpoints]) + 1, version + 1):
            if not entries.get(f"{number:020d}.json"):
                state = "empty" if f"{number:020d}.json" in entries else "missing"
                faults.append(f"commit {number} of `{name}` is {state}")
    return faults
