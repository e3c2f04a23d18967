"""Build sdist -> wheel, install the wheel in a clean environment elsewhere, and look at what a user gets.

Checked: the wheel holds every file of the four packages, SQL included, and nothing else; the command answers `-h` and
lists every layer's commands; a lake can be made and queried; importing lake loads neither torch nor streamlit nor
pandas. What is not checked: that the dependencies install. To be quick, the clean environment borrows those of the
environment that runs this script, through a .pth file; the four packages themselves come from the wheel alone, which
the second check proves.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from lake.care.doctor import LAYERS  # noqa: E402 - the path comes first

HEAVY = ("torch", "transformers", "streamlit", "pandas")
LOOK = f"""
import sys, lake
assert not set({HEAVY}) & set(sys.modules), "import lake is heavy"
rollouts = lake.open("made-here", create=True)
assert rollouts.sql("SELECT count(*) AS n FROM job_runs").item() == 0
assert rollouts.sql("SELECT id_text(1) AS id")["id"].to_list() == ["0000000000001"]
assert not set({HEAVY}) & set(sys.modules), "opening and querying a lake is heavy"
from importlib.util import find_spec
print("\\n".join(find_spec(layer).origin for layer in {LAYERS}))
"""


def main() -> None:
    """Run every check; a failure ends the process with a sentence."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        wheel = build(work / "dist")
        check_content(wheel)
        python = install(wheel, work / "elsewhere")
        check_use(python, work)
    say(f"{wheel.name}: {', '.join(LAYERS)} are complete, alone, light, and work from elsewhere")


def build(into: Path) -> Path:
    """The wheel, built from the sdist."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(into), str(ROOT), cwd=ROOT)
    (wheel,) = into.glob("*.whl")
    return wheel


def check_content(wheel: Path) -> None:
    """The wheel holds what git tracks (or would) in the four packages, its own metadata, and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *LAYERS, cwd=ROOT).splitlines()
    expected = {name for name in listed if (ROOT / name).is_file()}
    if missing := sorted(expected - packed):
        sys.exit(f"the wheel lacks {', '.join(missing)}")
    if extra := sorted(packed - expected):
        sys.exit(f"the wheel holds what it should not: {', '.join(extra)}")
    if not any(name.endswith(".sql") for name in packed):
        sys.exit("the wheel holds no SQL")
    say(f"{len(packed)} files in the wheel")


def install(wheel: Path, folder: Path) -> Path:
    """A new environment with the wheel and nothing else of ours; its Python."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        str(wheel),
    )
    site = run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # A path line in a .pth file does not process .pth files behind it: the editable install stays out.
    Path(site, "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n", "utf-8")
    return python


def check_use(python: Path, work: Path) -> None:
    """The installed packages work, from a folder that is not the repository."""
    origins = run(str(python), "-c", LOOK, cwd=work).split()
    for layer, origin in zip(LAYERS, origins, strict=True):
        if not Path(origin).is_relative_to(work):
            sys.exit(f"`{layer}` came from {origin}, not from the wheel")
    shown = run(str(python.with_name("trajlake")), "-h", cwd=work)
    for command in ("ingest", "credit", "train", "view"):
        if f"  {command} " not in shown:
            sys.exit(f"`trajlake -h` does not list `{command}`:\n{shown}")


def run(*command: str, cwd: Path | None = None) -> str:
    """Standard output of a command that must succeed, in an environment that points at no other code."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def say(line: str) -> None:
    """A line of progress."""
    sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    main()
