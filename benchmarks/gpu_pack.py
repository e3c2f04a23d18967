"""Pack this project and what it imports for a machine with a GPU and without a package index.

    python benchmarks/gpu_pack.py [--out build/gpu-pack] [--python 3.12] [--torch]

Writes `part-00`, `part-01`, ... of at most 40 MB, `needs.txt` and `install.sh`. There, `bash install.sh FOLDER` checks
the parts, joins and unpacks them, and compares torch and transformers with `needs.txt`; `python3 FOLDER/benchmarks/gpu.py`
measures. Versions are those of constraints.txt, of PyPI's wheels for x86-64 Linux, whose torch is the one for CUDA. That
torch and NVIDIA's packages are gigabytes and mostly there already: they are left out, and named in needs.txt, unless
--torch is given.
"""

import argparse
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = "train,lora,gpu"
COMPARED = ("trl==1.16.0", "datasets==5.2.0")
"""Peers of `gpu.py`, in the versions of `peers.py`."""
SCRIPTS = ("gpu.py", "gpu_cases.py")
PART_BYTES = 40_000_000
PLATFORMS = tuple(f"manylinux_2_{minor}_x86_64" for minor in (35, 34, 31, 28, 27, 24, 17, 12, 5))
INSTALL = """#!/usr/bin/env bash
# Join and unpack the parts beside this script: bash install.sh FOLDER
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
folder="${1:?name the folder to unpack into}"
(cd "$here" && sha256sum --check --quiet parts.sha256)
mkdir -p "$folder"
cat "$here"/part-* | tar --extract --xz --directory "$folder"
cd "$folder"
PYTHONPATH="$PWD" python3 - "$here/needs.txt" <<'PYTHON'
import importlib.metadata, sys
import trainer.config
for line in open(sys.argv[1]):
    name, _, version = line.strip().partition("==")
    try:
        here = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        here = None
    if here != version:
        print(f"{name}: {here or 'missing'} here, tested with {version}")
PYTHON
echo "unpacked: python3 $PWD/benchmarks/gpu.py"
"""


def is_large(name: str) -> bool:
    """Whether a package is torch or comes with it."""
    return name in ("torch", "triton") or name.startswith(("nvidia-", "cuda-"))


def run_pip(*arguments: str | Path) -> str:
    """Run pip with the constraints of this project alone; return what it prints."""
    environment = os.environ | {"PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "PIP_FIND_LINKS": ""}
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"pip {arguments[0]} failed, see above")
    return done.stdout


def build_wheel(folder: Path) -> Path:
    """Build this project's wheel."""
    run_pip("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT)
    return next(folder.glob("trajlake-*.whl"))


def resolve(wheel: Path, target: Sequence[str]) -> list[str]:
    """Find the versions of all that the project and its peers need there: NAME==VERSION."""
    with tempfile.TemporaryDirectory() as empty:
        options = ("--dry-run", "--ignore-installed", "--quiet", "--report", "-", "--target", empty)
        report = run_pip("install", *options, *target, f"trajlake[{EXTRAS}] @ {wheel.as_uri()}", *COMPARED)
    packages = [entry["metadata"] for entry in json.loads(report)["install"]]
    return sorted(f"{package['name'].lower()}=={package['version']}" for package in packages)


class PartWriter(io.RawIOBase):
    """A stream that is cut into files `part-00`, `part-01`, ... of a folder.

    Args:
        folder: where they are written.
        size: bytes of a part, at most.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self._folder, self._size, self._written = folder, size, 0

    def writable(self) -> bool:
        return True

    def write(self, block: "bytes | memoryview") -> int:  # type: ignore[override]
        rest = memoryview(block)
        while rest:
            number, filled = divmod(self._written, self._size)
            portion = rest[: self._size - filled]
            with (self._folder / f"part-{number:02}").open("ab") as part:
                part.write(portion)
            self._written += len(portion)
            rest = rest[len(portion) :]
        return len(block)


def write_parts(site: Path, out: Path, needs: Sequence[str], size: int = PART_BYTES) -> list[Path]:
    """Write a folder's files as parts, with the script that unpacks them; return the parts."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with PartWriter(out, size) as stream, tarfile.open(fileobj=stream, mode="w|xz") as archive:  # type: ignore[call-overload]
        for path in sorted(site.iterdir()):
            archive.add(path, path.name)
    parts = sorted(out.glob("part-*"))
    sums = [f"{hashlib.sha256(part.read_bytes()).hexdigest()}  {part.name}\n" for part in parts]
    (out / "parts.sha256").write_text("".join(sums))
    (out / "needs.txt").write_text("".join(f"{line}\n" for line in needs))
    (out / "install.sh").write_text(INSTALL)
    return parts


def main() -> None:
    """Write the pack."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-pack")
    parser.add_argument("--python", default="3.12", help="version of Python there")
    parser.add_argument("--torch", action="store_true", help="pack torch for CUDA and NVIDIA's packages, too")
    options = parser.parse_args()
    target = ["--only-binary=:all:", "--implementation", "cp", "--python-version", options.python]
    for platform in PLATFORMS:
        target += ["--platform", platform]
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        wheel = build_wheel(folder)
        pins = [pin for pin in resolve(wheel, target) if not pin.startswith("trajlake==")]
        packed = pins if options.torch else [pin for pin in pins if not is_large(pin.partition("==")[0])]
        needs = [pin for pin in pins if pin.startswith(("torch==", "transformers==", "triton=="))]
        print(f"{len(packed)} packages; there: {', '.join(needs)}")
        site = folder / "site"
        run_pip("install", "--quiet", "--no-deps", "--no-compile", "--target", site, *target, *packed, wheel)
        (site / "benchmarks" / "results").mkdir(parents=True)
        for name in SCRIPTS:
            shutil.copy(ROOT / "benchmarks" / name, site / "benchmarks" / name)
        parts = write_parts(site, options.out, needs)
    print(f"{options.out}: {len(parts)} parts, {sum(part.stat().st_size for part in parts) / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
