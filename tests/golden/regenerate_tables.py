"""Write tests/golden/tables again. Run by `make golden`; read the diff: each line is a change of the stored format."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from testkit.table_renderings import GOLDEN, RENDERINGS, golden_text

for file_name in RENDERINGS:
    (GOLDEN / file_name).write_text(golden_text(file_name), "utf-8")
