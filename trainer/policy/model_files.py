"""Models and tokenizers from disk: a Hugging Face folder, or a GGUF file, whose quantised weights become float32.

Nothing is downloaded, and no code of a model's own is run: `trainer.policy.model_folder` refuses it first.
"""

from collections.abc import Mapping
from pathlib import Path
from struct import error as StructError  # noqa: N812 - a class, whatever its name
from typing import TYPE_CHECKING, Any

import msgspec
import torch  # noqa: TID253 - loaded by commands only when they train
from huggingface_hub.errors import StrictDataclassError

from lake.errors import UsageError
from lake.storage.atomic import atomic_folder, read_whole, settled
from trainer.policy.model_folder import INDEX, check_model_folder, check_no_code, stored_names

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""Whatever a folder asks for, nothing is fetched and no code in it is run."""
_TIED = "tied.safetensors"
"""Weights that `add_tied` writes."""
_UNREADABLE = (
    OSError,
    ArithmeticError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ImportError,
    StrictDataclassError,
)
"""What transformers raises for configurations of another type, version or package than it knows."""


def load_model(source: str | Path) -> Any:
    """A causal language model with float32 weights, on the CPU.

    Args:
        source: Hugging Face folder, or a .gguf file.

    Raises:
        UsageError: no such model, no causal language model in it, damaged or missing weights (transformers would draw
            random ones), what `check_model_folder` refuses, or a GGUF file without the package gguf.
    """
    return read_whole(Path(source), _load_model)


def _load_model(path: Path) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    place, options = checked_place(path)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            place,
            dtype=torch.float32,
            output_loading_info=True,
            use_safetensors=None if options else True,
            **_LOCAL,
            **options,
        )
    except (*_UNREADABLE, RuntimeError, SafetensorError, StructError) as error:
        raise UsageError(f"{path} cannot be loaded as a causal language model: {error}") from error
    model, found = loaded
    if found["missing_keys"]:
        missing = sorted(found["missing_keys"])
        msg = f"{path} lacks {len(missing)} of the model's weights, for example {missing[0]}; copy the whole model"
        raise UsageError(msg)
    return _unquantised(model) if options else model


def empty_model(source: str | Path) -> Any:
    """The model that `load_model` takes, without weights, on the meta device: for a rank that is sent its part."""
    from transformers import AutoConfig, AutoModelForCausalLM

    path = Path(source)
    if path.suffix == ".gguf":
        return load_model(path)
    config = read_whole(path, lambda folder: AutoConfig.from_pretrained(checked_place(folder)[0], **_LOCAL))
    factory: Any = AutoModelForCausalLM
    with torch.device("meta"):
        return factory.from_config(config, dtype=torch.float32, trust_remote_code=False).eval()


def load_tokenizer(source: str | Path) -> "PreTrainedTokenizerBase":
    """The tokenizer of a model; a UsageError where there is none, a slow one, or a folder that is refused."""
    return read_whole(Path(source), _load_tokenizer)


def _load_tokenizer(source: Path) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    place, options = checked_place(source)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(place), **_LOCAL, **options)
    except (*_UNREADABLE, StructError) as error:
        msg = f"{source} holds no tokenizer: {error}; name a Hugging Face folder, or make one: `trajlake init-model`"
        raise UsageError(msg) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        msg = f"the tokenizer in {source} is {type(tokenizer).__name__}; only fast ones (tokenizer.json) will do"
        raise UsageError(msg)
    return tokenizer


def convert_model(source: Path, folder: Path) -> int:
    """Write a GGUF model as a Hugging Face folder, float32, with its tokenizer; the number of parameters.

    Raises:
        UsageError: the folder exists, or the file cannot be read.
    """
    if folder.exists():
        raise UsageError(f"{folder} exists already; choose another --out")
    return write_model(source, folder)


def write_model(source: Path, folder: Path, *, tied: bool = False) -> int:
    """Write a model as a Hugging Face folder, in place of what is there; see `convert_model` and `add_tied`."""
    model = load_model(source)
    with atomic_folder(folder) as partial:
        model.save_pretrained(partial)
        load_tokenizer(source).save_pretrained(partial)
        if tied:
            add_tied(partial, model.state_dict())
    return int(model.num_parameters())


def add_tied(folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Write what a model's files lack of its weights, by every name: those that are tied to others, as a head may be.

    transformers leaves them out and finds them by itself. vLLM does so when it starts; when it loads other weights on a
    CPU, it keeps the old head, which it has in a form of its own, unless it reads the new one by name (seen with 0.32).
    """
    from safetensors.torch import save_file

    if missing := sorted(weights.keys() - stored_names(folder)):
        save_file({name: weights[name].contiguous().clone() for name in missing}, folder / _TIED)
    if missing and (path := folder / INDEX).exists():
        index = msgspec.json.decode(path.read_bytes())
        index["weight_map"] |= dict.fromkeys(missing, _TIED)
        path.write_bytes(msgspec.json.encode(index))


def lacks_tied(folder: Path) -> bool:
    """Whether the files of a model folder lack weights that are tied to others."""
    return not empty_model(folder).state_dict().keys() <= stored_names(settled(folder))


def checked_place(path: Path) -> tuple[Path, dict[str, str]]:
    """The folder of a model, and what transformers needs to find a GGUF file in it.

    Raises:
        UsageError: what `check_model_folder` refuses; a GGUF file that is missing, lies beside a configuration with
            code, or cannot be read for want of the package gguf.
    """
    if path.suffix != ".gguf":
        check_model_folder(path)
        return path, {}
    if not path.is_file():
        raise UsageError(f"{path} is not there; name a .gguf file, or a Hugging Face folder")
    try:
        import gguf
    except ImportError as error:
        raise UsageError(f'{path} needs the package gguf: pip install "trajlake[gguf]"') from error
    del gguf
    check_no_code(path.parent)
    return path.parent, {"gguf_file": path.name}


def _unquantised(model: Any) -> Any:
    """The same model without the mark of its quantisation, with which transformers would refuse to save it."""
    settings = model.config.to_dict()
    settings.pop("quantization_config", None)
    plain = type(model)(type(model.config)(**settings))
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    return plain.eval()
