"""Models and tokenizers on disk: a Hugging Face folder, or a GGUF file, whose quantised weights become float32.

A folder is data: nothing is downloaded, and none of its code runs. Before transformers or torch opens a folder, its
JSON files are checked. Refused by name are files that run code on loading (`auto_map`, pickled weights), paths that
lead out of the folder (a weights index, links), adapters, quantised weights, and end tokens that are not token ids.
"""

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from struct import error as StructError  # noqa: N812 - a class, whatever its name
from typing import TYPE_CHECKING, Any

import msgspec

from lake.errors import UsageError
from lake.storage.atomic import atomic_folder, check_complete, find_settled, read_unreplaced

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
"""Suffixes of files that run code when they are loaded."""
_CONFIG = "config.json"
_LARGEST_HEADER = 100_000_000
"""Largest header of a safetensors file that is read, in bytes."""
_SHORTEST = 2
"""Fewest tokens of a sequence that has something to train on."""
_OTHER_CODE = "only code that comes with transformers is run, and --model takes no folder that needs more"
_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""Options of transformers: fetch nothing, and run no code of a folder."""
_TIED = "tied.safetensors"
"""File of the weights that `add_tied` writes."""


def check_model_folder(folder: Path) -> None:
    """Check that a folder in Hugging Face layout may be loaded as a model with its tokenizer.

    Raises:
        UsageError: names the file, the fault, and what to do.
    """
    if not (folder / _CONFIG).is_file():
        msg = f"{folder} holds no model (no {_CONFIG}); name a Hugging Face folder, or make one: `trajlake init-model`"
        raise UsageError(msg)
    check_no_code(folder)
    if (adapter := folder / "adapter_config.json").exists():
        msg = f"{adapter}: the folder is an adapter on another model; merge the two, and name the folder of the result"
        raise UsageError(msg)
    config = _read_json(folder / _CONFIG)
    _check_unquantised(folder, config)
    _check_end_tokens(folder, config)
    _check_weights(folder, config)
    check_complete(folder)


def read_context_length(folder: Path) -> int | None:
    """Return the number of tokens that the model of a folder was made for; None where its configuration has none."""
    config = _read_json(folder / _CONFIG) if (folder / _CONFIG).is_file() else {}
    text = config.get("text_config")
    for section in (config, text if isinstance(text, Mapping) else {}):
        for name in ("max_position_embeddings", "n_positions"):
            if isinstance(length := section.get(name), int) and length >= _SHORTEST:
                return length
    return None


def count_parameters(folder: Path) -> int | None:
    """Return a model's number of parameters from the headers of its safetensors; None where a header is unreadable."""
    tensors = _read_headers(folder)
    return None if tensors is None else sum(prod(tensor.get("shape", ())) for tensor in tensors.values()) or None


def read_weight_names(folder: Path) -> set[str]:
    """Return the names of the weights in a folder's safetensors; empty where a header is unreadable."""
    return set(_read_headers(folder) or ())


def _read_headers(folder: Path) -> dict[str, dict[str, Any]] | None:
    """Return the header entry of each tensor in a folder's safetensors; None if one of the headers is unreadable."""
    tensors: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = file.read(min(size, _LARGEST_HEADER))
        try:
            tensors |= msgspec.json.decode(header, type=dict[str, dict[str, Any]])
        except msgspec.DecodeError:
            return None
    tensors.pop("__metadata__", None)
    return tensors


def check_no_code(folder: Path) -> None:
    """Refuse (UsageError) configurations in a folder that name code of the model, or are not JSON."""
    for path in sorted(folder.glob(f"*{_CONFIG}")):
        key = next(_find_keys("auto_map", _read_json(path)), None)
        if key is not None:
            msg = f"{path} has {key}: loading it would run code from the model's repository; {_OTHER_CODE}"
            raise UsageError(msg)


def _check_unquantised(folder: Path, config: Mapping[str, Any]) -> None:
    for name in ("quantization_config", "compression_config"):
        if key := next(_find_keys(name, config), None):
            settings = config.get(name)
            method = settings.get("quant_method") if isinstance(settings, Mapping) else None
            kind = f"quantised ({method})" if isinstance(method, str) else "quantised"
            raise UsageError(
                f"{folder / _CONFIG} has {key}: the weights are {kind}, and only plain ones can be trained or "
                f"scored; name the folder of the unquantised model, or a .gguf file"
            )


def _check_end_tokens(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse (UsageError) end tokens that are not token ids of the model."""
    text = config.get("text_config")
    vocabulary = config.get("vocab_size", text.get("vocab_size") if isinstance(text, Mapping) else None)
    limit = vocabulary if isinstance(vocabulary, int) else None
    for path in (folder / _CONFIG, folder / "generation_config.json"):
        tokens = (_read_json(path) if path.is_file() else {}).get("eos_token_id")
        for token in tokens if isinstance(tokens, list) else [tokens]:
            is_id = isinstance(token, int) and not isinstance(token, bool) and token >= 0
            if token is not None and not (is_id and (limit is None or token < limit)):
                valid = "a token id, or a list of them" + ("" if limit is None else f", from 0 to {limit - 1}")
                raise UsageError(f"{path}: `eos_token_id` is {tokens!r}; valid: {valid}")


def _check_weights(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse (UsageError) weights that are not safetensors inside the folder."""
    named = config.get("transformers_weights")
    names = [name for name in (WEIGHTS, INDEX) if (folder / name).exists()] if named is None else [named]
    if not names:
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
        if pickles:
            raise UsageError(
                f"{folder / pickles[0]}: weights in a pickle run code when they are loaded, so only safetensors are "
                f"taken; convert them (save_pretrained of a current transformers writes {WEIGHTS})"
            )
        raise UsageError(f"{folder} holds no weights (no {WEIGHTS}, no {INDEX}); copy the whole model")
    for name in names:
        _check_inside(folder, name, f"{folder / _CONFIG}: `transformers_weights`")
        if isinstance(name, str) and name.endswith(".index.json"):
            weights = _read_json(folder / name).get("weight_map")
            if not isinstance(weights, Mapping):
                raise UsageError(f"{folder / name}: `weight_map` is missing; copy the whole model again")
            for shard in sorted(set(map(str, weights.values()))):
                _check_inside(folder, shard, f"{folder / name}")


def _check_inside(folder: Path, name: Any, source: str) -> None:
    """Refuse (UsageError) a file of weights with a path, or outside the folder after its links are followed.

    A download of huggingface_hub keeps the files of a snapshot as links into its folder of blobs.
    """
    bare = isinstance(name, str) and Path(name).name == name and "\\" not in name
    if not bare or not name.endswith((".safetensors", ".safetensors.index.json")):
        raise UsageError(f"{source} names {name!r}; valid: names of safetensors files in {folder}, without a path")
    home, target = folder.resolve(), (folder / name).resolve()
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    if target.parent not in (home, blobs):
        raise UsageError(f"{folder / name} is a link out of the folder, to {target}; put the file itself there")
    if not target.is_file():
        raise UsageError(f"{folder / name} is missing, and {source} names it; copy the whole model")


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; a UsageError where that fails."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is damaged: {error}; copy the whole model again") from error


def _find_keys(name: str, document: Any, inside: str = "") -> Iterator[str]:
    """Yield the path `outer.inner` of each key of that name in nested JSON, unless its value is empty."""
    if isinstance(document, Mapping):
        for key, inner in document.items():
            path = f"{inside}.{key}" if inside else str(key)
            if key == name and inner:
                yield f"`{path}`"
            else:
                yield from _find_keys(name, inner, path)
    elif isinstance(document, list):
        for number, inner in enumerate(document):
            yield from _find_keys(name, inner, f"{inside}.{number}")


def _list_read_faults() -> tuple[type[Exception], ...]:
    """Return what transformers raises for a configuration of an unknown type, version or package."""
    from huggingface_hub.errors import StrictDataclassError

    builtin = (OSError, ArithmeticError, ValueError, TypeError, LookupError, AttributeError, ImportError, StructError)
    return (*builtin, StrictDataclassError)


def load_model(source: str | Path) -> Any:
    """Load a causal language model with float32 weights on the CPU.

    Args:
        source: Hugging Face folder, or a .gguf file.

    Raises:
        UsageError: no such model, not a causal language model, damaged or missing weights (transformers would draw
            random ones), faults of `check_model_folder`, or a GGUF file without the package gguf.
    """
    return read_unreplaced(Path(source), _load_model)


def _load_model(path: Path) -> Any:
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    folder, options = check_source(path)
    faults: tuple[type[Exception], ...] = (*_list_read_faults(), RuntimeError, SafetensorError)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            output_loading_info=True,
            use_safetensors=None if options else True,
            **_LOCAL,
            **options,
        )
    except faults as error:
        raise UsageError(f"{path} cannot be loaded as a causal language model: {error}") from error
    model, report = loaded
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        msg = f"{path} lacks {len(missing)} of the model's weights, for example {missing[0]}; copy the whole model"
        raise UsageError(msg)
    if not options:
        return model
    # transformers refuses to save a model with the mark of its quantisation.
    settings = model.config.to_dict()
    settings.pop("quantization_config", None)
    plain = type(model)(type(model.config)(**settings))
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    return plain.eval()


def build_empty_model(source: str | Path) -> Any:
    """Return the model of `load_model` without weights, on the meta device, for a rank that receives its shard."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    path = Path(source)
    if path.suffix == ".gguf":
        return load_model(path)
    config = read_unreplaced(path, lambda folder: AutoConfig.from_pretrained(check_source(folder)[0], **_LOCAL))
    factory: Any = AutoModelForCausalLM
    with torch.device("meta"):
        return factory.from_config(config, dtype=torch.float32, trust_remote_code=False).eval()


def load_tokenizer(source: str | Path) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a model; a UsageError where it is missing or slow, or the folder is refused."""
    return read_unreplaced(Path(source), _load_tokenizer)


def _load_tokenizer(source: Path) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder, options = check_source(source)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), **_LOCAL, **options)
    except _list_read_faults() as error:
        msg = f"{source} holds no tokenizer: {error}; name a Hugging Face folder, or make one: `trajlake init-model`"
        raise UsageError(msg) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        msg = f"the tokenizer in {source} is {type(tokenizer).__name__}; only fast ones (tokenizer.json) will do"
        raise UsageError(msg)
    return tokenizer


def convert_model(source: Path, folder: Path) -> int:
    """Write a GGUF model as a Hugging Face folder in float32 with its tokenizer; return its number of parameters.

    Raises:
        UsageError: the folder exists, or the file cannot be read.
    """
    if folder.exists():
        raise UsageError(f"{folder} exists already; choose another --out")
    return write_model(source, folder)


def write_model(source: Path, folder: Path, *, tied: bool = False) -> int:
    """Write a model as a Hugging Face folder, replacing an earlier one; see `convert_model` and `add_tied`."""
    model = load_model(source)
    with atomic_folder(folder) as partial:
        model.save_pretrained(partial)
        load_tokenizer(source).save_pretrained(partial)
        if tied:
            add_tied(partial, model.state_dict())
    return int(model.num_parameters())


def add_tied(folder: Path, weights: Mapping[str, "Tensor"]) -> None:
    """Write the weights that a model's files lack because they are tied to others, such as a head.

    transformers leaves them out and restores them on loading. vLLM does so when it starts. When it loads new weights on
    a CPU, it keeps the old head, in its own layout, unless the files have the new one by name (vLLM 0.32).
    """
    from safetensors.torch import save_file

    if missing := sorted(weights.keys() - read_weight_names(folder)):
        save_file({name: weights[name].contiguous().clone() for name in missing}, folder / _TIED)
    if missing and (path := folder / INDEX).exists():
        index = msgspec.json.decode(path.read_bytes())
        index["weight_map"] |= dict.fromkeys(missing, _TIED)
        path.write_bytes(msgspec.json.encode(index))


def lacks_tied(folder: Path) -> bool:
    """Return whether the files of a model folder lack weights that are tied to others."""
    return not build_empty_model(folder).state_dict().keys() <= read_weight_names(find_settled(folder))


def check_source(path: Path) -> tuple[Path, dict[str, str]]:
    """Check the source of a model; return its folder, and the options with which transformers reads a GGUF file in it.

    Raises:
        UsageError: faults of `check_model_folder`; a GGUF file that is missing, has a configuration with code next to
            it, or needs the missing package gguf.
    """
    if path.suffix != ".gguf":
        check_model_folder(path)
        return path, {}
    if not path.is_file():
        raise UsageError(f"there is no {path}; name a .gguf file, or a Hugging Face folder")
    try:
        import gguf
    except ImportError as error:
        raise UsageError(f'{path} needs the package gguf: pip install "trajlake[gguf]"') from error
    del gguf
    check_no_code(path.parent)
    return path.parent, {"gguf_file": path.name}
