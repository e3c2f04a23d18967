"""Break core logic on purpose, one line at a time, and look whether the tests of its subject notice.

    make mutants
    python tests/run_mutants.py [NAME ...] [--jobs 2]

`tests/mutants.toml` lists the mutants: a file, the text before and after, and the tests of its subject. Each is applied
in a copy of the checkout, where its tests run until the first fails. A mutant is killed if a test fails. Tests that run
out of time say nothing of it, because a busy machine does that, too. A mutant that cannot change what a caller sees is
marked `equivalent`, with the reason, and is not run.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parents[1]
MUTANTS = ROOT / "tests" / "mutants.toml"
_TIMEOUT = 180
"""Seconds for the tests of a mutant."""
_REQUIRED = 0.95


@dataclass(frozen=True)
class Mutant:
    """A change of one line.

    Attributes:
        name: short, unique.
        file: from the root of the checkout.
        before: text that the file holds exactly once.
        after: text in its stead.
        tests: arguments of pytest: files, or single tests.
        equivalent: why no test can notice it; empty if one must.
    """

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    equivalent: str = ""


def read_mutants(path: Path = MUTANTS) -> list[Mutant]:
    """The listed mutants, in the order of the file."""
    document = tomllib.loads(path.read_text("utf-8"))
    return [Mutant(**entry | {"tests": tuple(entry["tests"])}) for entry in document["mutant"]]


def faults(mutants: Sequence[Mutant], root: Path = ROOT) -> list[str]:
    """What is wrong with the list: a text that is not in its file exactly once, a missing test, a name used twice."""
    wrong = []
    for mutant in mutants:
        source = root / mutant.file
        times = source.read_text("utf-8").count(mutant.before) if source.exists() else 0
        if times != 1:
            wrong.append(f"{mutant.name}: {mutant.file} holds the text before {times} times, not once")
        if mutant.before == mutant.after:
            wrong.append(f"{mutant.name}: changes nothing")
        if not mutant.tests:
            wrong.append(f"{mutant.name}: names no tests")
        wrong += [
            f"{mutant.name}: {test} is missing"
            for test in mutant.tests
            if not (root / test.partition("::")[0]).exists()
        ]
    names = [mutant.name for mutant in mutants]
    wrong += [f"{name}: used twice" for name in sorted({name for name in names if names.count(name) > 1})]
    return wrong


def copy_checkout(folder: Path) -> None:
    """Copy what git tracks, or would, with what lies next to the checkout in reach."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def outcome(mutant: Mutant, checkout: Path) -> str:
    """Apply a mutant in a copy, run its tests, undo it: `killed`, `survived`, `timed out`, or `broken` if none ran."""
    source = checkout / mutant.file
    text = source.read_text("utf-8")
    source.write_text(text.replace(mutant.before, mutant.after), "utf-8")
    shared = os.environ.get("TRAJLAKE_SHARED") or str(ROOT.parent / "shared")
    environment = os.environ | {"PYTHONPATH": str(checkout), "TRAJLAKE_SHARED": shared, "PYTHONDONTWRITEBYTECODE": "1"}
    program = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:testkit.file_budgets",
        *mutant.tests,
    ]
    try:
        done = subprocess.run(
            program, cwd=checkout, env=environment, capture_output=True, text=True, timeout=_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return "timed out"
    finally:
        source.write_text(text, "utf-8")
    if done.returncode in (0, 1):
        return "killed" if done.returncode else "survived"
    sys.stderr.write(done.stdout[-3000:] + done.stderr[-1000:])
    return "broken"


def main() -> None:
    """Run the named mutants, or all, and fail if too many survive."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="names of mutants (default: all)")
    parser.add_argument("--file", type=Path, default=MUTANTS, help="list of mutants (default: tests/mutants.toml)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time (default: cores)")
    options = parser.parse_args()

    mutants = read_mutants(options.file)
    if wrong := faults(mutants):
        sys.exit("\n".join(wrong))
    if unknown := set(options.names) - {mutant.name for mutant in mutants}:
        sys.exit(f"no such mutant: {', '.join(sorted(unknown))}")
    selected = [mutant for mutant in mutants if not options.names or mutant.name in options.names]
    alive = [mutant for mutant in selected if not mutant.equivalent]
    began = time.monotonic()
    results: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="trajlake-mutants-") as folder:
        checkouts: Queue[Path] = Queue()
        for number in range(options.jobs):
            copy_checkout(Path(folder, str(number)))
            checkouts.put(Path(folder, str(number)))

        def judge(mutant: Mutant) -> None:
            checkout = checkouts.get()
            since = time.monotonic()
            try:
                results[mutant.name] = outcome(mutant, checkout)
            finally:
                checkouts.put(checkout)
            line = f"{results[mutant.name]:9}{time.monotonic() - since:6.1f} s  {mutant.name}  ({mutant.file})"
            print(f"{len(results):3}/{len(alive)} {line}", flush=True)

        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(judge, alive))
    killed = sum(result == "killed" for result in results.values())
    missed = [name for name, result in results.items() if result != "killed"]
    print(
        f"{killed} of {len(alive)} mutants killed, {len(selected) - len(alive)} equivalent, "
        f"{time.monotonic() - began:.0f} s{'; not killed: ' + ', '.join(missed) if missed else ''}"
    )
    sys.exit(killed < _REQUIRED * len(alive))


if __name__ == "__main__":
    main()
