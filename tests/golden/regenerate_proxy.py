"""Write tests/golden/proxy again. Run by `make golden`; read the diff: each line is a change of what a call becomes."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from testkit.proxy_scenarios import GOLDEN, SCENARIOS, golden_text, play_all

GOLDEN.mkdir(exist_ok=True)
with TemporaryDirectory() as folder:
    recorded = play_all(Path(folder))
    for name in SCENARIOS:
        (GOLDEN / f"{name}.json").write_text(golden_text(recorded, name), "utf-8")
