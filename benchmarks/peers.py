"""The packages that benchmarks compare with, each in a virtual environment of its own, so that none is a dependency.

    python benchmarks/peers.py [trl datasets litdata mosaicml-streaming]

An environment is made once, in `.peers/<name>` at the root of the repository, and again when its pins change. Needs a
package index; torch's CPU wheels come from where pip is told to look for them, as with the project's own set-up.
"""

import argparse
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

TORCH = "torch==2.13.0"
PEERS: dict[str, tuple[str, ...]] = {
    "trl": (TORCH, "transformers==5.19.0", "trl==1.16.0", "datasets==5.2.0", "accelerate==1.15.0"),
    "datasets": (TORCH, "datasets==5.2.0"),
    "litdata": (TORCH, "litdata==0.2.76"),
    "mosaicml-streaming": (TORCH, "mosaicml-streaming==0.13.0"),
}
"""Peer to pinned requirements: the newest releases of November 2026, torch and transformers as in constraints.txt."""


class PeerError(Exception):
    """A peer's environment could not be made."""


def python_of(name: str) -> Path:
    """The Python of a peer's environment, which is made if it is not there.

    Args:
        name: a key of `PEERS`.

    Raises:
        PeerError: there is no such peer, or it could not be installed; one line says why.
    """
    if name not in PEERS:
        msg = f"no peer is called {name!r}; there are {', '.join(PEERS)}"
        raise PeerError(msg)
    folder = ROOT / ".peers" / name
    python = folder / "bin" / "python"
    installed, wanted = folder / "installed.txt", "\n".join(PEERS[name])
    if installed.exists() and installed.read_text() == wanted and python.exists():
        return python
    print(f"Installing {name} into {folder} (minutes)", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PEERS[name]]
    made = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if made.returncode:
        lines = [line for line in made.stdout.splitlines() if line.strip()]
        why = next((line for line in lines if line.startswith("ERROR")), lines[-1] if lines else "pip said nothing")
        msg = f"{name} could not be installed: {why.strip()}"
        raise PeerError(msg)
    installed.write_text(wanted)
    return python


def environment() -> dict[str, str]:
    """The environment variables of a measured process: one intra-op thread, nothing fetched, nothing reported."""
    quiet = {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "WANDB_MODE": "disabled",
    }
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return inherited | quiet


def main() -> None:
    """Make environments and print their Pythons."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="*", help=f"of {', '.join(PEERS)}; all by default")
    for name in parser.parse_args().name or PEERS:
        try:
            print(python_of(name))
        except PeerError as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main()
