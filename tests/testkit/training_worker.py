"""The same for commands that train or score with a model, whose imports take seconds of processor time each."""

import importlib

from testkit.command_worker import main

__all__ = ["main"]

for _name in ("torch", "transformers.models.auto.modeling_auto", "trainer.runs.offline"):
    importlib.import_module(_name)
