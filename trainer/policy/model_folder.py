"""What a model folder may hold, read from its JSON files alone, before transformers or torch opens anything in it.

A folder is data. What would run code on loading (`auto_map`, pickled weights), what leads out of the folder (a weights
index, links, the base model of an adapter), and what would only be found to fail in the middle (quantised weights, end
tokens that are none) is refused by name.
"""

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from lake.errors import UsageError
from lake.storage.atomic import check_whole

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
"""Endings of files whose loading runs what they say."""
_CONFIG = "config.json"
_LARGEST_HEADER = 100_000_000
"""Bytes of the header of a safetensors file, at most."""
_SHORTEST = 2
"""Tokens of a sequence that anything can be learned from."""
_OTHER_CODE = "only code that comes with transformers is run, and --model takes no folder that needs more"


def check_model_folder(folder: Path) -> None:
    """Whether a folder in Hugging Face layout may be loaded as a model with its tokenizer.

    A UsageError names the file, what is wrong with it, and what to do.
    """
    if not (folder / _CONFIG).is_file():
        msg = f"{folder} holds no model (no {_CONFIG}); name a Hugging Face folder, or make one: `trajlake init-model`"
        raise UsageError(msg)
    check_no_code(folder)
    if (adapter := folder / "adapter_config.json").exists():
        msg = f"{adapter}: the folder is an adapter on another model; merge the two, and name the folder of the result"
        raise UsageError(msg)
    config = _read(folder / _CONFIG)
    _check_unquantised(folder, config)
    _check_end_tokens(folder, config)
    _check_weights(folder, config)
    check_whole(folder)


def context_length(folder: Path) -> int | None:
    """Tokens that the model of a folder was made for; None where its configuration does not say, or there is none."""
    config = _read(folder / _CONFIG) if (folder / _CONFIG).is_file() else {}
    text = config.get("text_config")
    for found in (config, text if isinstance(text, Mapping) else {}):
        for name in ("max_position_embeddings", "n_positions"):
            if isinstance(length := found.get(name), int) and length >= _SHORTEST:
                return length
    return None


def stored_parameters(folder: Path) -> int | None:
    """Number of parameters of a model, by the headers of its safetensors; None where these do not say."""
    tensors = _stored(folder)
    return None if tensors is None else sum(prod(tensor.get("shape", ())) for tensor in tensors.values()) or None


def stored_names(folder: Path) -> set[str]:
    """Names of the weights in a folder's safetensors; empty where these cannot be read."""
    return set(_stored(folder) or ())


def _stored(folder: Path) -> dict[str, dict[str, Any]] | None:
    """What the headers of safetensors say of each tensor; None if one is no header."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = file.read(min(size, _LARGEST_HEADER))
        try:
            found |= msgspec.json.decode(header, type=dict[str, dict[str, Any]])
        except msgspec.DecodeError:
            return None
    found.pop("__metadata__", None)
    return found


def check_no_code(folder: Path) -> None:
    """Refuse (UsageError) configurations in a folder that name code of their own, or are no JSON."""
    for path in sorted(folder.glob(f"*{_CONFIG}")):
        where = next(_places_of("auto_map", _read(path)), None)
        if where is not None:
            msg = f"{path} has {where}: loading it would run code from the model's repository; {_OTHER_CODE}"
            raise UsageError(msg)


def _check_unquantised(folder: Path, config: Mapping[str, Any]) -> None:
    for name in ("quantization_config", "compression_config"):
        if where := next(_places_of(name, config), None):
            settings = config.get(name)
            method = settings.get("quant_method") if isinstance(settings, Mapping) else None
            what = f"quantised ({method})" if isinstance(method, str) else "quantised"
            raise UsageError(
                f"{folder / _CONFIG} has {where}: the weights are {what}, and only plain ones can be trained or "
                f"scored; name the folder of the unquantised model, or a .gguf file"
            )


def _check_end_tokens(folder: Path, config: Mapping[str, Any]) -> None:
    """The end tokens of a model are token ids that it knows."""
    text = config.get("text_config")
    vocabulary = config.get("vocab_size", text.get("vocab_size") if isinstance(text, Mapping) else None)
    limit = vocabulary if isinstance(vocabulary, int) else None
    for path in (folder / _CONFIG, folder / "generation_config.json"):
        found = (_read(path) if path.is_file() else {}).get("eos_token_id")
        for token in found if isinstance(found, list) else [found]:
            known = isinstance(token, int) and not isinstance(token, bool) and token >= 0
            if token is not None and not (known and (limit is None or token < limit)):
                valid = "a token id, or a list of them" + ("" if limit is None else f", from 0 to {limit - 1}")
                raise UsageError(f"{path}: `eos_token_id` is {found!r}; valid: {valid}")


def _check_weights(folder: Path, config: Mapping[str, Any]) -> None:
    """The weights are safetensors that lie in the folder."""
    named = config.get("transformers_weights")
    names = [name for name in (WHOLE, INDEX) if (folder / name).exists()] if named is None else [named]
    if not names:
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
        if pickles:
            raise UsageError(
                f"{folder / pickles[0]}: weights in a pickle run what they say when they are loaded, so only "
                f"safetensors are taken; convert them (save_pretrained of a current transformers writes {WHOLE})"
            )
        raise UsageError(f"{folder} holds no weights (no {WHOLE}, no {INDEX}); copy the whole model")
    for name in names:
        _check_inside(folder, name, f"{folder / _CONFIG}: `transformers_weights`")
        if isinstance(name, str) and name.endswith(".index.json"):
            for shard in _shards(folder / name):
                _check_inside(folder, shard, f"{folder / name}")


def _shards(index: Path) -> list[Any]:
    weights = _read(index).get("weight_map")
    if not isinstance(weights, Mapping):
        raise UsageError(f"{index}: `weight_map` is missing; copy the whole model again")
    return sorted(set(map(str, weights.values())))


def _check_inside(folder: Path, name: Any, place: str) -> None:
    """Refuse (UsageError) a file of weights with a path, or out of the folder when links are followed.

    A download of huggingface_hub keeps the files of a snapshot as links into its own folder of blobs.
    """
    bare = isinstance(name, str) and Path(name).name == name and "\\" not in name
    if not bare or not name.endswith((".safetensors", ".safetensors.index.json")):
        raise UsageError(f"{place} names {name!r}; valid: names of safetensors files in {folder}, without a path")
    home, target = folder.resolve(), (folder / name).resolve()
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    if target.parent not in (home, blobs):
        raise UsageError(f"{folder / name} is a link out of the folder, to {target}; put the file itself there")
    if not target.is_file():
        raise UsageError(f"{folder / name} is not there, and {place} names it; copy the whole model")


def _read(path: Path) -> dict[str, Any]:
    """A JSON object from a file; a UsageError where it cannot be read, or holds something else."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is damaged: {error}; copy the whole model again") from error


def _places_of(name: str, value: Any, inside: str = "") -> Iterator[str]:
    """Where a key with something in it stands in nested JSON, as `outer.inner`."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            path = f"{inside}.{key}" if inside else str(key)
            if key == name and inner:
                yield f"`{path}`"
            else:
                yield from _places_of(name, inner, path)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _places_of(name, inner, f"{inside}.{number}")
