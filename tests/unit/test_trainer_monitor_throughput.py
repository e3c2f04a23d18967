"""Operations of an update, against counts by hand."""

import pytest

from testkit.training import random_model
from trainer.monitor import ModelShape, find_peak_operations, measure_shape
from trainer.policy.model import PackedPolicy


def test_operations_of_two_sequences() -> None:
    shape = ModelShape(body=100, head=50, layers=2, width=8)
    operations = shape.update_operations(tokens=30, squared_lengths=10 * 10 + 20 * 20, loss_tokens=5)
    assert operations == 6 * 100 * 30 + 6 * 2 * 8 * 500 + 6 * 50 * 5


def test_the_shape_of_a_model_counts_matrices_once() -> None:
    shape = measure_shape(PackedPolicy(random_model()))
    attention = 32 * 32 + 2 * 32 * 16 + 32 * 32
    feed_forward = 3 * 32 * 48
    assert shape == ModelShape(body=2 * (attention + feed_forward), head=40 * 32, layers=2, width=32)


def test_an_untied_head_is_no_part_of_the_body() -> None:
    untied = measure_shape(PackedPolicy(random_model(tie_word_embeddings=False)))
    assert untied == measure_shape(PackedPolicy(random_model()))


@pytest.mark.parametrize(
    ("name", "peak"), [("NVIDIA H200", 989e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("cpu", None), ("", None)]
)
def test_peaks_of_known_devices(name: str, peak: float | None) -> None:
    assert find_peak_operations(name) == peak
