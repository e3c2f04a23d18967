"""docs/guides/models.md: what it lists is what is tested, and its configuration is one."""

import re
import tomllib

from testkit.architectures import SERVED
from testkit.shared import CHECKOUT
from trainer.config import TrainConfig
from trainer.policy.model import EXACT, NARROW

PAGE = (CHECKOUT / "docs" / "guides" / "models.md").read_text("utf-8")


def test_the_architectures_of_the_page_are_those_that_are_tested() -> None:
    listed = re.search(r"train packed on any\s+device:\n\n(.+?)\.\n\n", PAGE, re.DOTALL)
    assert listed is not None
    assert [name.strip() for name in listed[1].replace("\n", " ").split(",")] == SERVED


def test_the_configuration_of_the_page_is_one() -> None:
    blocks = re.findall(r"```toml\n(.+?)```", PAGE, re.DOTALL)
    settings, half = (
        TrainConfig(**({"model": "m", "loss": "sft"} | tomllib.loads(block)["trainer"])) for block in blocks
    )
    assert half.optimizer.loss_scale.initial == 65536
    assert settings.lora is not None
    assert settings.lora.targets == ("q_proj", "v_proj")
    for kind in ("sdpa", "flash", "flex", "auto"):
        assert f"| `{kind}` |" in PAGE
        TrainConfig(model="m", loss="sft", attention=kind)  # type: ignore[arg-type]


def test_the_tolerances_of_the_page_are_those_of_the_check() -> None:
    assert f"above {EXACT:.0e} nats ({NARROW} in the mean".replace("1e-04", "1e-4") in PAGE
