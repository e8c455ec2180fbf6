"""The flex token dispatcher of Megatron-Core with slot ids, on stand-ins for its libraries."""

import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import pytest
import stand_ins
import te_on_cpu
from megatron_models import difference, forward_backward, make_layer, on_megatron, settings

from ultraep import BackendUnavailable, ConfigError

FLEX = {"moe_token_dispatcher_type": "flex", "moe_router_dtype": "fp32"}


class Buffer(stand_ins.Buffer):
    """deep_ep.Buffer with the calls by which the library sizes it."""

    num_nvl_bytes = num_rdma_bytes = 0

    def __init__(self, group, num_nvl_bytes, num_rdma_bytes):
        from ultraep.runtime.torch_dist import TorchDistCommunicator

        super().__init__(TorchDistCommunicator(group), wide=True)
        self.group = group

    @staticmethod
    def get_dispatch_config(ranks):
        hint = lambda nbytes, ranks: 0  # noqa: E731
        return SimpleNamespace(get_nvl_buffer_size_hint=hint, get_rdma_buffer_size_hint=hint)

    get_combine_config = get_dispatch_config

    def dispatch(self, x, previous_event=None, **options):
        assert previous_event is None or type(previous_event) is stand_ins.Event
        return super().dispatch(x, **options)

    @staticmethod
    def set_num_sms(number):
        assert number % 2 == 0


class HybridEPBuffer(stand_ins.HybridEPBuffer):
    def __init__(
        self, group, hidden_dim, max_num_of_tokens_per_rank, num_local_experts, use_fp8, **options
    ):
        from ultraep.runtime.torch_dist import TorchDistCommunicator

        super().__init__(TorchDistCommunicator(group), wide=True)


@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
@on_megatron(2, expert_model_parallel_size=2)
def test_outputs_and_gradients(backend):
    compare(backend)


@pytest.mark.skipif(not te_on_cpu.available(), reason="make build/transformer-engine/.ready")
@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
@on_megatron(2, te=True, expert_model_parallel_size=2)
def test_fused_permutations(backend):
    """DeepEP permutes rows by slot with the kernels of Transformer Engine."""
    import transformer_engine.pytorch.triton.permutation as kernels

    name = "permute_with_mask_map"
    with patch.object(kernels, name, wraps=getattr(kernels, name)) as permute:
        compare(backend, moe_permute_fusion=True)
    assert permute.called == (backend == "deepep")


@on_megatron(2, expert_model_parallel_size=2)
def test_slots_that_hybridep_cannot_serve():
    """Refused when the layer is built."""
    config = settings(**FLEX, moe_flex_dispatcher_backend="hybridep", num_moe_experts=6)
    with libraries(), pytest.raises(ConfigError, match=r"of 4 slots .*got 2 ranks x 5 slots"):
        make_layer(config, {"slots": 2})


@on_megatron(1)
def test_deepep_2_lacks_what_megatron_imports():
    library = ModuleType("deep_ep")
    library.__version__ = "2.1.0"
    config = settings(**FLEX, moe_flex_dispatcher_backend="deepep")
    message = r'back end "deepep": deep_ep 1.0 to 1.x is needed, but 2.1.0 is installed'
    refused = pytest.raises(BackendUnavailable, match=message)
    with patch.dict(sys.modules, {"deep_ep": library}), refused:
        make_layer(config, {"slots": 2})


def compare(backend, **changes):
    plain = make_layer(settings(moe_router_dtype="fp32"), None)
    with libraries():
        config = settings(**FLEX, moe_flex_dispatcher_backend=backend, **changes)
        ours = make_layer(config, {"slots": 2})
        expected, actual = (forward_backward(layer, microbatches=2) for layer in (plain, ours))
    differences = {name: difference(expected[name], actual[name]) for name in expected}
    assert ours.balancer.stats()["copies"] > 0
    assert max(differences.values()) < 1e-5, differences


@contextmanager
def libraries():
    """Let Megatron-Core use the stand-ins."""
    from megatron.core.transformer.moe import fused_a2a, token_dispatcher

    library = ModuleType("deep_ep")
    library.Buffer, library.HybridEPBuffer = Buffer, HybridEPBuffer
    with patch.dict(sys.modules, {"deep_ep": library, "deep_ep.utils": deep_ep_utils()}):
        a2a = reloaded(fused_a2a)
    names = ["fused_dispatch", "fused_combine", "set_deepep_num_sms"]
    names += ["hybrid_ep_dispatch", "hybrid_ep_combine"]
    present = {name: getattr(a2a, name) for name in names if hasattr(token_dispatcher, name)}
    with patch.multiple(token_dispatcher, **present):
        yield


def deep_ep_utils():
    utils = ModuleType("deep_ep.utils")
    utils.EventHandle = utils.EventOverlap = stand_ins.Event
    return utils


def reloaded(module):
    """Return the library's module, imported again with the stand-in."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("flex_fused_a2a", module.__file__)
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    return again
