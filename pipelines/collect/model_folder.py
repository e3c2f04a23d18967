"""The folder of a model that is served or played with: what can be wrong with the name of one."""

from pathlib import Path

from lake.errors import UsageError


def model_folder(given: str | Path) -> Path:
    """The folder of a model that somebody named.

    Raises:
        UsageError: there is none, or it is a training run's, which holds the model's.
    """
    folder = Path(given)
    if not folder.is_dir():
        raise UsageError(
            f"{folder}: no such folder; valid: a model's folder with config.json, weights and tokenizer, such as "
            "`trajlake train` writes; of a model hub, download it first"
        )
    trained = folder / "final"
    if not (folder / "config.json").exists() and (trained / "config.json").exists():
        raise UsageError(f"{folder} is the folder of a training run; its model is {trained}")
    return folder
