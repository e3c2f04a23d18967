"""eval-protocol rolls rows out with its own processor and retries, recorded by the hook; prints its rows.

Arguments: the checkout, the lake, the folder of the spool, the address of an engine, how many rows.
"""

import asyncio
import json
import os
import sys

checkout, lake_folder, spool, base_url, count = sys.argv[1:]
sys.path.insert(0, checkout)
os.environ["OPENAI_API_KEY"] = "not-to-be-stored"
# What it says when it cannot fetch prices it says while its modules are being imported, which fails now and then.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

from eval_protocol.models import EvaluationRow, InputMetadata, Message  # noqa: E402
from eval_protocol.pytest import SingleTurnRolloutProcessor  # noqa: E402
from eval_protocol.pytest.evaluation_test_utils import rollout_processor_with_retry  # noqa: E402
from eval_protocol.pytest.exception_config import BackoffConfig, ExceptionHandlerConfig  # noqa: E402
from eval_protocol.pytest.rollout_processor import RolloutProcessor  # noqa: E402
from eval_protocol.pytest.types import RolloutProcessorConfig  # noqa: E402

import lake  # noqa: E402
from lake.live.rollouts import RolloutHook  # noqa: E402


def config(model: str) -> RolloutProcessorConfig:
    """What the tool gives a processor; calls are tried twice, without a pause."""
    return RolloutProcessorConfig(
        completion_params={"model": f"openai/{model}", "api_base": base_url, "max_retries": 0},
        mcp_config_path="",
        semaphore=asyncio.Semaphore(4),
        exception_handler_config=ExceptionHandlerConfig(
            retryable_exceptions={Exception}, backoff_config=BackoffConfig(max_tries=2, base_delay=0.01, jitter=None)
        ),
    )


async def rolled_out(hook: RolloutHook, model: str) -> list[EvaluationRow]:
    """Rows after the tool's own loop has rolled them out."""
    processor = hook.around(SingleTurnRolloutProcessor())
    assert isinstance(processor, RolloutProcessor)
    processor.setup()
    rows = [
        EvaluationRow(
            messages=[Message(role="user", content=f"Question {number} to {model}")],
            input_metadata=InputMetadata(row_id=f"{model}-{number}"),
            ground_truth=str(number),
        )
        for number in range(int(count))
    ]
    done = [row async for row in rollout_processor_with_retry(processor, rows, config(model), disable_tqdm=True)]
    await processor.acleanup()
    processor.cleanup()
    return done


def main() -> None:
    """Print what is found."""
    printed_rows = {}
    with lake.recorder(lake_folder, run="agent", spool=spool) as recorder:
        hook = RolloutHook(recorder)
        for model in ("policy", "flaky", "error-500"):
            rows = asyncio.run(rolled_out(hook, model))
            printed_rows[model] = [row.model_dump(mode="json", exclude_none=True) for row in rows]
        recorder.flush()
        stats = recorder.stats()
    print(json.dumps({"rows": printed_rows, "delivered": stats.delivered, "troubles": stats.troubles}))


main()
