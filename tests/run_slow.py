"""Run the slow tests that were not run for the longest time, as many as fit, and write down how they ended.

    make test-slow MINUTES=30
    python tests/run_slow.py --minutes 30 [--commit] [-k EXPRESSION]
    python tests/run_slow.py --sync      # after a test became slow, or is no longer

`tests/slow.toml` lists every test of the slow suite: the promise it repeats, its number of cases, the date, result and
seconds of its last run. A test that was never run comes first. Each runs in its own pytest, so that one that hangs
or dies takes no other with it.
"""

import argparse
import datetime
import json
import subprocess
import sys
import time
import tomllib
from dataclasses import asdict, dataclass, replace
from pathlib import Path

TESTS = Path(__file__).resolve().parent
MANIFEST = TESTS / "slow.toml"
_UNKNOWN_SECONDS = 120.0
"""What a test that was never run is taken to need."""
_TIMEOUT = 1800
"""Seconds that one case may take."""


@dataclass(frozen=True)
class SlowTest:
    """A test function whose slow cases are run together.

    Attributes:
        promise: what the cases show.
        cases: how many of them are slow.
        last_run: ISO date; None before the first run.
        result: "passed", or how many cases failed or were skipped.
        seconds: wall time of the last run.
    """

    promise: str
    cases: int
    last_run: str | None = None
    result: str | None = None
    seconds: float | None = None


def read_manifest(path: Path = MANIFEST) -> dict[str, SlowTest]:
    """The tests of the manifest by their name, `folder/test_file.py::test_name`."""
    if not path.exists():
        return {}
    return {name: SlowTest(**entry) for name, entry in tomllib.loads(path.read_text("utf-8")).items()}


def write_manifest(tests: dict[str, SlowTest], path: Path = MANIFEST) -> None:
    """Write tests in the order of their names."""
    blocks = ["# Written by tests/run_slow.py: the slow tests, and how the last run of each ended.\n"]
    for name, test in sorted(tests.items()):
        lines = [
            f"{key} = {json.dumps(value, ensure_ascii=False)}"
            for key, value in asdict(test).items()
            if value is not None
        ]
        blocks.append("\n".join([f"[{json.dumps(name)}]", *lines]) + "\n")
    path.write_text("\n".join(blocks), "utf-8")


def collected() -> dict[str, SlowTest]:
    """Every test with slow cases, as pytest collects them."""
    program = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--collect-only",
        "-m",
        "slow",
        "-p",
        "testkit.slow_cases",
        "tests",
    ]
    done = subprocess.run(program, cwd=TESTS.parent, capture_output=True, text=True, check=False)
    tests: dict[str, SlowTest] = {}
    for line in done.stdout.splitlines():
        if line.startswith("slow-case\t"):
            _, name, promise = line.split("\t")
            cases = tests[name].cases if name in tests else 0
            tests[name] = SlowTest(promise, cases + 1)
    if done.returncode or not tests:
        sys.exit(f"the slow tests cannot be collected:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return tests


def synchronised(manifest: dict[str, SlowTest], tests: dict[str, SlowTest]) -> dict[str, SlowTest]:
    """The collected tests with what the manifest knows of their last runs."""
    return {
        name: replace(manifest[name], promise=test.promise, cases=test.cases) if name in manifest else test
        for name, test in tests.items()
    }


def planned(manifest: dict[str, SlowTest], minutes: float, keyword: str = "") -> list[str]:
    """Names of the tests that fit into the time, least recently run first, then the shortest."""
    waiting = [name for name in manifest if keyword in name]
    waiting.sort(key=lambda name: (manifest[name].last_run or "", manifest[name].seconds or _UNKNOWN_SECONDS, name))
    seconds_left, names = minutes * 60, []
    for name in waiting:
        seconds = manifest[name].seconds or _UNKNOWN_SECONDS
        if seconds <= seconds_left:
            names.append(name)
            seconds_left -= seconds
    return names


def run(name: str, test: SlowTest, limit: float) -> SlowTest:
    """Run a test's slow cases; what its entry is now.

    Args:
        name: as in the manifest.
        test: its entry.
        limit: seconds after which it is stopped.
    """
    began = time.monotonic()
    program = [sys.executable, "-m", "pytest", "-q", "-m", "slow", f"--timeout={_TIMEOUT}", f"tests/{name}"]
    try:
        done = subprocess.run(program, cwd=TESTS.parent, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        result = f"stopped after {limit:.0f} s"
    else:
        summary = done.stdout.strip().rpartition("\n")[2].partition(" in ")[0]
        result = (
            "passed"
            if done.returncode == 0 and "skipped" not in summary
            else summary or f"exit status {done.returncode}"
        )
        if done.returncode:
            print(done.stdout[-6000:], flush=True)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return replace(test, last_run=today, result=result, seconds=round(time.monotonic() - began, 1))


def main() -> None:
    """Run what fits, and write the manifest after each test."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30, help="time for the whole run, minutes (default 30)")
    parser.add_argument("-k", dest="keyword", default="", help="part of the names of the tests to run (default: all)")
    parser.add_argument("--commit", action="store_true", help="commit the manifest at the end")
    parser.add_argument("--sync", action="store_true", help="only bring the manifest in step with the tests")
    parser.add_argument("--check", action="store_true", help="only fail if the manifest is not in step with the tests")
    options = parser.parse_args()

    before = read_manifest()
    manifest = synchronised(before, collected())
    if options.check:
        if manifest != before:
            sys.exit("tests/slow.toml is not in step with the tests; run `python tests/run_slow.py --sync`")
        print(f"{len(manifest)} slow tests, each in the manifest")
        return
    write_manifest(manifest)
    if options.sync:
        return
    end = time.monotonic() + options.minutes * 60
    failed = []
    names = planned(manifest, options.minutes, options.keyword)
    for number, name in enumerate(names, 1):
        seconds_left = end - time.monotonic()
        if seconds_left < 10:
            break
        print(f"{number}/{len(names)} {name} ({seconds_left / 60:.0f} min left)", flush=True)
        manifest[name] = run(name, manifest[name], seconds_left)
        write_manifest(manifest)
        print(f"    {manifest[name].result}, {manifest[name].seconds} s", flush=True)
        if manifest[name].result != "passed":
            failed.append(name)
    if options.commit:
        subprocess.run(
            ["git", "commit", "--quiet", "-m", f"Slow tests: {len(names)} run", "--", str(MANIFEST)], check=True
        )
    never = sum(test.last_run is None for test in manifest.values())
    print(f"{len(names)} of {len(manifest)} slow tests run, {len(failed)} did not pass, {never} never run")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
