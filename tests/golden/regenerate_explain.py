"""Write tests/golden/explain again. Run by `make golden`; read the diff: each line is what a user is told."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from test_lake_explain import EXPLAINED, GOLDEN, explain_files  # noqa: E402 - the path has to be set before

for file_name in EXPLAINED:
    (GOLDEN / file_name).write_text(explain_files(file_name), "utf-8")
