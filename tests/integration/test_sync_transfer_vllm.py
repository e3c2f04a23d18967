"""vLLM 0.32's own trainer side, driven by our push: it accepts what it is given, and asks the servers as expected.

NCCL's communicator and the receiving servers are stood in for, since they want GPUs.
"""

import base64
import pickle
import sysconfig
from pathlib import Path

import pytest

from testkit.consumers import said_by
from testkit.vllm_server import vllm_python
from testkit.weight_transfer import weight_transfer_server

ROUND = ["/init_weight_transfer_engine", "/pause?mode=keep", "/start_weight_update", "/update_weights"]
ROUND += ["/finish_weight_update", "/reset_prefix_cache", "/resume"]


@pytest.mark.slow
def test_vllms_trainer_side_sends_every_parameter_once_to_all_servers() -> None:
    root = Path(__file__).parents[2]
    with weight_transfer_server(2) as first, weight_transfer_server(1) as second:
        printed = said_by(vllm_python(), "vllm_transfer", sysconfig.get_path("purelib"), root, first.url, second.url)
    assert printed["errors"] == []
    for server, offset in ((first, 1), (second, 3)):
        assert server.paths == [*ROUND, *ROUND]
        shared = dict(server.asked[len(ROUND) :])
        assert shared["/init_weight_transfer_engine"]["init_info"] == {"packed": False}
        handles = pickle.loads(base64.b64decode(shared["/update_weights"]["update_info"]["ipc_handles_pickled"]))
        assert handles == [{"GPU-0": (shape,)} for _, _, shape in printed["parameters"]]
        assert shared["/finish_weight_update"] == {"weight_version": "8"}
        bodies = dict(server.asked[: len(ROUND)])
        init_info = bodies["/init_weight_transfer_engine"]["init_info"]
        assert (init_info["rank_offset"], init_info["world_size"], init_info["packed"]) == (offset, 4, False)
        assert bodies["/finish_weight_update"] == {"weight_version": "7"}
        update = bodies["/update_weights"]["update_info"]
        listed = zip(update["names"], update["dtype_names"], update["shapes"], strict=True)
        assert [list(each) for each in listed] == printed["parameters"]
    # The tied head is sent once, as the embedding, under which engines look for it.
    names = [name for name, _, _ in printed["parameters"]]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert printed["sent"] == [[shape, dtype] for _, dtype, shape in printed["parameters"]]
