"""eval-protocol reads exported rows: as lines with its model, and its log with its own store and logger.

Arguments: the lines, the log.
"""

import json
import os
import sys
from pathlib import Path

# What litellm says when it cannot fetch prices it says while its modules are being imported, which fails now and then.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

from eval_protocol.dataset_logger.sqlite_dataset_logger_adapter import SqliteDatasetLoggerAdapter
from eval_protocol.dataset_logger.sqlite_evaluation_row_store import SqliteEvaluationRowStore
from eval_protocol.models import EvaluationRow


def main():
    """Print what is found."""
    lines, log = sys.argv[1:]
    rows = [EvaluationRow.model_validate_json(line) for line in Path(lines).read_text("utf-8").splitlines()]
    stored = SqliteEvaluationRowStore(log).read_rows()
    logger = SqliteDatasetLoggerAdapter(store=SqliteEvaluationRowStore(log))
    logged = logger.read()
    logger.log(logged[0])
    print(
        json.dumps(
            {
                "rows": [row.model_dump(mode="json", exclude_none=True) for row in rows],
                "stored": len(stored),
                "logged": [row.model_dump(mode="json", exclude_none=True) for row in logged],
                "after": len(logger.read()),
            }
        )
    )


main()
