"""Strict stand-ins of the compiled deep_ep, called by torchtitan's own dispatchers on CPU ranks.

They extend the stand-ins of tests/dispatchers by what torchtitan calls: compact rows of DeepEP 2,
constructors with a process group, and kernels for CPU tensors of its own operators.
"""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from torch._library import opaque_object

sys.path.insert(0, str(Path(__file__).parents[2] / "dispatchers"))

import stand_ins
from stand_ins import EPHandle, Links, check_rows, check_weights, local_ids, require

from ultraep.runtime.connect import connect

SMS = 20


class Waited:
    """The event of an asynchronous call, which must be waited for once."""

    def __init__(self):
        self.waits = 0

    def current_stream_wait(self):
        require(self.waits == 0, "one wait")
        self.waits += 1


class ElasticBuffer(stand_ins.StandIn):
    """deep_ep.ElasticBuffer with compact rows: each token arrives once."""

    def __init__(self, group, *, num_bytes, num_max_tokens_per_rank, hidden, num_topk, **flags):
        known = {"use_fp8_dispatch", "deterministic", "explicitly_destroy"}
        require(flags.keys() == known and not flags["use_fp8_dispatch"], "arguments")
        super().__init__(connect(group), wide=True)
        self.group, self.num_bytes = group, num_bytes
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self._hidden, self._top_k, self._pending = hidden, num_topk, []

    @staticmethod
    def get_buffer_size_hint(group, tokens, hidden, *, num_topk, use_fp8_dispatch):
        return tokens * (2 * hidden + 8 * num_topk)

    def get_theoretical_num_sms(self, num_experts, num_topk):
        require(num_topk == self._top_k and num_experts % self.comm.size == 0, "num_experts")
        return SMS

    def dispatch(
        self,
        x,
        topk_idx=None,
        topk_weights=None,
        num_experts=None,
        num_max_tokens_per_rank=None,
        num_sms=0,
        handle=None,
        do_expand=False,
        do_cpu_sync=None,
    ):
        require(num_sms == SMS and not do_expand, "compact rows, with the number of SMs")
        check_rows(x, self.wide)
        require(x.shape[1] == self._hidden, "hidden")
        if handle is not None:
            require(topk_idx is None and topk_weights is None and not do_cpu_sync, "with a handle")
            require(isinstance(handle, EPHandle) and handle.buffer is self, "own handle")
            return handle.links.there(x), None, None, handle, None
        require(do_cpu_sync and len(x) <= self.num_max_tokens_per_rank, "first call")
        tokens = self.comm.all_gather(torch.tensor([num_max_tokens_per_rank]))
        require(len(tokens.unique()) == 1 and len(x) <= int(tokens[0, 0]), "equal strides")
        check_weights(topk_weights, topk_idx.shape, wide=False)
        links = Links(self.comm, topk_idx, num_experts)
        local = local_ids(links, topk_idx, self.comm.rank)
        counts = torch.bincount(local[local >= 0], minlength=links.local).tolist()
        handle = EPHandle(
            buffer=self, links=links, num_recv_tokens_per_expert_list=counts, num_sms=num_sms
        )
        weights = links.there(topk_weights).masked_fill(local < 0, 0)
        return links.there(x), local, weights, handle, None

    def combine(self, x, handle, topk_weights=None, async_with_compute_stream=False):
        require(all(event.waits for event in self._pending), "wait for the combine before")
        check_rows(x, self.wide)
        require(isinstance(handle, EPHandle) and handle.buffer is self, "own handle")
        self._pending = [Waited()] if async_with_compute_stream else []
        weights = None
        if topk_weights is not None:
            check_weights(topk_weights, [len(x), self._top_k], wide=False)
            weights = handle.links.back(topk_weights).to(topk_weights.dtype)
        sums = handle.links.back(x).to(x.dtype)
        return sums, weights, self._pending[0] if self._pending else None


class HybridEPBuffer(stand_ins.HybridEPBuffer):
    """deep_ep.HybridEPBuffer with the constructor of the library."""

    def __init__(
        self, *, group, hidden_dim, max_num_of_tokens_per_rank, num_local_experts, use_fp8, **tuning
    ):
        known = {"num_sms_dispatch_api", "num_sms_combine_api", "load_cached_kernels"}
        known |= {"use_shared_buffer", "enable_custom_allgather"}
        require(tuning.keys() == known and not use_fp8, "arguments")
        super().__init__(connect(group), wide=True)
        sizes = SimpleNamespace(
            hidden_dim=hidden_dim,
            max_num_of_tokens_per_rank=max_num_of_tokens_per_rank,
            num_of_experts_per_rank=num_local_experts,
        )
        self.group, self.configurer = group, SimpleNamespace(buffer_config=sizes)

    def _layout(self, hidden, routing_map, per_rank):
        sizes = self.configurer.buffer_config
        require(per_rank <= sizes.num_of_experts_per_rank, "experts of the buffer")
        require(len(hidden) <= sizes.max_num_of_tokens_per_rank, "tokens of the buffer")
        return super()._layout(hidden, routing_map, per_rank)


def indices_to_map(topk_idx, topk_weights, num_tokens, num_experts):
    """deep_ep.hybrid_ep_buffer.indices_to_map."""
    require(bool((topk_idx >= 0).all()), "no padding")
    routing_map = torch.zeros(num_tokens, num_experts, dtype=torch.bool)
    probs = torch.zeros(num_tokens, num_experts, dtype=topk_weights.dtype)
    return routing_map.scatter_(1, topk_idx, True), probs.scatter_(1, topk_idx, topk_weights)


def install():
    """Make torchtitan import the stand-ins and run its operators on CPUs; idempotent."""
    if "deep_ep" not in sys.modules:
        sys.modules["deep_ep"], hybrid = ModuleType("deep_ep"), ModuleType("hybrid_ep_buffer")
        sys.modules["deep_ep"].ElasticBuffer = ElasticBuffer
        sys.modules["deep_ep"].HybridEPBuffer = HybridEPBuffer
        hybrid.indices_to_map = indices_to_map
        sys.modules["deep_ep.hybrid_ep_buffer"] = hybrid
        if not hasattr(opaque_object, "CustomClassBase"):  # its name before torch 2.14
            opaque_object.CustomClassBase = opaque_object.OpaqueBase
        from torchtitan.distributed.deepep import deepep, hybridep

        for name in ("dispatch", "combine"):
            function = getattr(deepep, f"_{name}_op_impl")
            deepep._lib.impl(name, function, "CPU")
        for name in ("dispatch", "combine", "dispatch_bwd", "combine_bwd"):
            operator = getattr(hybridep, f"_{name}_impl")
            operator.register_kernel("cpu", operator._init_fn)
    from torchtitan.distributed.deepep import deepep, hybridep

    deepep._buffer = hybridep._buffer = None  # of a group that is gone
    deepep._pending_combine_event = None
