"""Make what the run starts from, or render its report; the run itself is `trajlake loop`.

    python -m benchmarks.proof_run start --out build/proof-run
    python -m benchmarks.proof_run report --out build/proof-run --page docs/proof-run.md

`report` writes the figures, read from the lake, into a JSON file beside the page and its tables between the markers of
the page; without `--out` it renders the tables from the JSON file again.
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["start", "report"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--page", type=Path)
    arguments = parser.parse_args()
    if arguments.what == "start":
        if arguments.out is None:
            parser.error("start needs --out: the folder of the run")
        from benchmarks.proof_run.start import start

        start(arguments.out, print)
        return
    if arguments.page is None:
        parser.error("report needs --page: Markdown with markers for the tables")
    from benchmarks.proof_run.report import write_report

    write_report(arguments.out, arguments.page)


if __name__ == "__main__":
    main()
