"""Strict stand-ins for the compiled dispatchers of other libraries, on CPU ranks.

Each class has the documented row semantics of its library and the arguments that callers should
use. It fails on any other call: wrong dtypes, tensors that are not contiguous, other arguments,
handles of another buffer or microbatch. Undefined memory is NaN. A token is sent once to each rank;
`tokens_sent` counts these messages. Rows of an expert arrive in a shuffled order where the library
promises none.

wide: also accept float32 and float64, which the libraries do not, to compare results exactly.

Signatures: DeepEP 2.1.0 and its branch hybrid-ep (1.2.1), torch 2.15.
"""

import sys
from types import ModuleType, SimpleNamespace

import torch

BF16, FLOAT, WIDE = torch.bfloat16, torch.float32, torch.float64


def library(monkeypatch, name, version):
    """Pretend that a version of a library is installed."""
    module = ModuleType(name)
    module.__version__ = version
    monkeypatch.setitem(sys.modules, name, module)


def require(condition, what):
    if not condition:
        raise AssertionError(f"outside of the documented call: {what}")


def check_defaults(options, *names):
    """Check that only these further arguments are passed, with their defaults."""
    require(options.keys() <= set(names) and not any(options.values()), f"options {options}")


class Links:
    """Which tokens of this rank go to which ranks, and back. One message for a token and rank."""

    def __init__(self, comm, topk_idx, experts):
        self.comm, self.tokens = comm, len(topk_idx)
        require(experts % comm.size == 0, "num_experts divides by the ranks")
        ids = getattr(sys.modules.get("deep_ep"), "topk_idx_t", torch.int64)
        require(topk_idx.dtype == ids and topk_idx.is_contiguous(), f"topk_idx {ids}")
        require(bool(((topk_idx >= -1) & (topk_idx < experts)).all()), "topk_idx in -1..E-1")
        self.local = experts // comm.size
        rank_of = topk_idx.div(self.local, rounding_mode="floor")
        self.sent = [(rank_of == rank).any(dim=1).nonzero()[:, 0] for rank in range(comm.size)]
        counts = torch.tensor([len(tokens) for tokens in self.sent])
        self.counts, self.received = counts.tolist(), comm.all_gather(counts)[:, comm.rank].tolist()

    def there(self, values):
        """Return [U, ...] the values of the tokens that other ranks send to this one."""
        require(len(values) == self.tokens, f"{self.tokens} tokens, as in the handle")
        return self.comm.all_to_all(values[torch.cat(self.sent)], self.counts, self.received)

    def back(self, values):
        """Return [T, ...] the sums over ranks, in double precision."""
        require(len(values) == sum(self.received), "one value for each received token")
        returned = self.comm.all_to_all(values.contiguous(), self.received, self.counts)
        sums = torch.zeros(self.tokens, *values.shape[1:], dtype=WIDE)
        for tokens, part in zip(self.sent, returned.split(self.counts), strict=True):
            sums[tokens] += part.to(WIDE)
        return sums

    def back_summed(self, rows, token):
        """Return [T, D] the sums of rows; `token`: received token of each row."""
        sums = torch.zeros(sum(self.received), rows.shape[1], dtype=WIDE)
        sums.index_add_(0, token, rows.to(WIDE))
        return self.back(sums.to(rows.dtype)).to(rows.dtype)

    def back_spread(self, scalars, token, column, columns):
        """Return [T, columns] scalars; `token`, `column`: place of each."""
        spread = torch.zeros(sum(self.received), columns, dtype=scalars.dtype)
        spread[token, column] = scalars
        return self.back(spread).to(scalars.dtype)


def by_expert(local_UK, shuffle=None):
    """Return (token, choice) of each row of the local experts, in expert order, and counts."""
    token, choice = (local_UK >= 0).nonzero(as_tuple=True)
    expert = local_UK[token, choice]
    order = torch.arange(len(expert)) if shuffle is None else shuffle(len(expert))
    order = order[expert[order].argsort(stable=True)]
    return token[order], choice[order], expert


def check_rows(rows, wide):
    require(rows.ndim == 2 and rows.is_contiguous(), "x is [num_tokens, hidden], contiguous")
    require(rows.shape[1] * rows.itemsize % 16 == 0, "rows of a multiple of 16 bytes")
    require(rows.dtype == BF16 or (wide and rows.is_floating_point()), "x is bfloat16")


def check_weights(weights, shape, wide):
    require(tuple(weights.shape) == tuple(shape), f"weights {list(shape)}")
    allowed = (FLOAT, WIDE) if wide else (FLOAT,)
    require(weights.dtype in allowed and weights.is_contiguous(), "weights float32, contiguous")


class Event:
    """The event of a call that was not asynchronous: nothing may wait for it."""

    def __getattr__(self, name):
        raise AssertionError(f"outside of the documented call: event.{name} without async")


class StandIn:
    """Common parts: the communicator, the shuffled order of rows, and a count of messages."""

    def __init__(self, comm, *, wide=False):
        self.comm, self.wide, self.tokens_sent = comm, wide, 0
        self._generator = torch.Generator().manual_seed(comm.rank)

    def _shuffle(self, length):
        return torch.randperm(length, generator=self._generator)


# --- DeepEP 2 ---


class EPHandle:
    """The documented fields that a caller may read, and private ones."""

    def __init__(self, **fields):
        self.__dict__.update(fields)


class ElasticBuffer(StandIn):
    """deep_ep.ElasticBuffer: received rows are expanded, one for each local expert."""

    __module__ = "deep_ep.buffers.elastic"

    def __init__(
        self,
        comm,
        *,
        num_max_tokens_per_rank=64,
        deterministic=False,
        allow_multiple_reduction=True,
        nvlink_gbs=450,
        wide=False,
    ):
        super().__init__(comm, wide=wide)
        self.num_max_tokens_per_rank, self.nvlink_gbs = num_max_tokens_per_rank, nvlink_gbs
        self.deterministic, self.allow_multiple_reduction = deterministic, allow_multiple_reduction

    def get_theoretical_num_sms(self, num_experts, num_topk):
        return 4 + num_topk * num_experts // self.nvlink_gbs

    def dispatch(
        self,
        x,
        topk_idx=None,
        topk_weights=None,
        num_experts=None,
        handle=None,
        do_expand=False,
        num_sms=0,
    ):
        require(do_expand and num_experts is not None, "do_expand and num_experts")
        require(num_sms or self.get_theoretical_num_sms(num_experts, 1), "num_sms")
        check_rows(x, self.wide)
        require(len(x) <= self.num_max_tokens_per_rank, "num_max_tokens_per_rank")
        if handle is None:
            handle = self._layout(topk_idx, num_experts)
        else:
            require(topk_idx is None, "topk_idx is None with a handle")
            require(isinstance(handle, EPHandle) and handle._buffer is self, "own handle")
            require(handle.num_experts == num_experts, "as in the handle")
        self.tokens_sent += sum(handle._links.counts)
        received = handle._links.there(x)[handle._token]
        weights = None
        if topk_weights is not None:
            check_weights(topk_weights, handle.topk_idx.shape, self.wide)
            weights = handle._links.there(topk_weights)[handle._token, handle._choice]
        return received, None, weights, handle, Event()

    def _layout(self, topk_idx, num_experts):
        links = Links(self.comm, topk_idx, num_experts)
        local = local_ids(links, topk_idx, self.comm.rank)
        token, choice, expert = by_expert(local, None if self.deterministic else self._shuffle)
        return EPHandle(
            num_experts=num_experts,
            topk_idx=topk_idx.clone(),
            num_recv_tokens_per_expert_list=torch.bincount(expert, minlength=links.local).tolist(),
            _buffer=self,
            _links=links,
            _token=token,
            _choice=choice,
        )

    def combine(self, x, handle, topk_weights=None):
        check_rows(x, self.wide)
        require(isinstance(handle, EPHandle) and handle._buffer is self, "own handle")
        token, weights = handle._token, None
        require(len(x) == len(token), f"{len(token)} rows of the handle")
        if topk_weights is not None:
            require(self.allow_multiple_reduction, "expanded rows carry no weights back")
            check_weights(topk_weights, [len(x)], self.wide)
            top_k = handle.topk_idx.shape[1]
            weights = handle._links.back_spread(topk_weights, token, handle._choice, top_k)
            weights[handle.topk_idx < 0] = torch.nan
        return handle._links.back_summed(x, token), weights, Event()


def local_ids(links, topk_idx, rank):
    """Return [U, K] the local expert of each choice of the received tokens; -1: elsewhere."""
    local = links.there(topk_idx) - rank * links.local
    return local.masked_fill((local < 0) | (local >= links.local), -1)


# --- DeepEP 1 ---


STREAMS = ("previous_event", "async_finish", "allocate_on_comm_stream")


class Buffer(StandIn):
    """deep_ep.Buffer: each token arrives once, with the local experts among its choices."""

    __module__ = "deep_ep.buffers.legacy"

    def get_dispatch_layout(self, topk_idx, num_experts, **options):
        check_defaults(options, *STREAMS)
        links = Links(self.comm, topk_idx, num_experts)
        in_rank = torch.zeros(len(topk_idx), self.comm.size, dtype=torch.bool)
        for rank, tokens in enumerate(links.sent):
            in_rank[tokens, rank] = True
        chosen = topk_idx[topk_idx >= 0]
        per_expert = torch.bincount(chosen, minlength=num_experts).to(torch.int32)
        return in_rank.sum(dim=0).to(torch.int32), None, per_expert, in_rank, Event()

    def dispatch(
        self,
        x,
        handle=None,
        num_tokens_per_rank=None,
        num_tokens_per_rdma_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        topk_idx=None,
        topk_weights=None,
        **options,
    ):
        check_defaults(options, *STREAMS)
        check_rows(x, self.wide)
        if handle is not None:
            require(topk_idx is None and topk_weights is None, "no topk with a handle")
            links = opened(handle, self).links
            self.tokens_sent += sum(links.counts)
            return links.there(x), None, None, None, None, Event()
        require(num_tokens_per_rdma_rank is None, "one node")
        expected = self.get_dispatch_layout(topk_idx, len(num_tokens_per_expert))
        given = num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank
        for ours, theirs in zip((expected[0], expected[2], expected[3]), given, strict=True):
            require(theirs.dtype == ours.dtype and torch.equal(theirs, ours), "the layout")
        check_weights(topk_weights, topk_idx.shape, self.wide)
        links = Links(self.comm, topk_idx, len(num_tokens_per_expert))
        self.tokens_sent += sum(links.counts)
        local = local_ids(links, topk_idx, self.comm.rank)
        counts = torch.bincount(local[local >= 0], minlength=links.local)
        weights = links.there(topk_weights).masked_fill(local < 0, 0)
        handle = sealed(self, links=links, ids=topk_idx)
        return links.there(x), local, weights, counts.tolist(), handle, Event()

    def combine(self, x, handle, topk_weights=None, **options):
        check_defaults(options, *STREAMS)
        check_rows(x, self.wide)
        content = opened(handle, self)
        weights = None
        if topk_weights is not None:
            check_weights(topk_weights, [len(x), content.ids.shape[1]], self.wide)
            weights = content.links.back(topk_weights).to(topk_weights.dtype)
            weights[content.ids < 0] = torch.nan
        return content.links.back(x).to(x.dtype), weights, Event()


class SealedHandle(tuple):
    """A handle, a tuple as in the library. Reading its fields fails: they differ by version."""

    def __getitem__(self, index):
        raise AssertionError("a handle was indexed")

    def __iter__(self):
        raise AssertionError("a handle was unpacked")

    def __len__(self):
        raise AssertionError("a handle was measured")


def sealed(owner, **fields):
    handle = SealedHandle()
    handle.owner, handle.content = owner, type("Content", (), fields)
    return handle


def opened(handle, owner):
    require(isinstance(handle, SealedHandle) and handle.owner is owner, "a handle of this buffer")
    return handle.content


# --- HybridEP ---


class HybridEPBuffer(StandIn):
    """deep_ep.HybridEPBuffer: dense routing maps, equal numbers of tokens on all ranks."""

    __module__ = "deep_ep.hybrid_ep_buffer"

    def __init__(self, comm, *, use_fp8=False, wide=False):
        super().__init__(comm, wide=wide)
        self.num_of_hybrid_ep_ranks_per_nvlink_domain = comm.size
        config = SimpleNamespace(token_data_type=f"APP_TOKEN_DATA_TYPE.UINT{16 >> use_fp8}")
        self.configurer = SimpleNamespace(buffer_config=config)

    def dispatch_with_permute(
        self,
        *,
        hidden,
        num_of_experts_per_rank=None,
        routing_map=None,
        probs=None,
        num_permuted_tokens=None,
        handle=None,
        use_fp8=None,
        scaling_factor=None,
        **options,
    ):
        unused = ("topk_idx", "topk_weights", "num_of_experts", "num_dispatched_tokens")
        unused += ("use_host_meta", "non_blocking", "pad_multiple", "fuse_permute_dispatch")
        check_defaults(options, *unused)
        require(not use_fp8 and scaling_factor is None, "bfloat16 rows")
        require(hidden.is_contiguous() and hidden.ndim == 2, "hidden [T, D], contiguous")
        if handle is None:
            require(num_permuted_tokens is None, "blocking mode counts by itself")
            handle = self._layout(hidden, routing_map, num_of_experts_per_rank)
        content = opened(handle, self)
        require(content.shape == tuple(hidden.shape), f"rows {content.shape} of the handle")
        require(hidden.shape[1] % 16 == 0, "rows % 16")
        check_rows(hidden, self.wide)
        count = len(content.token)
        require(num_permuted_tokens in (None, count), f"{count} rows of the handle")
        self.tokens_sent += sum(content.links.counts)
        rows, weights = content.links.there(hidden)[content.token], None
        if probs is not None:
            check_weights(probs, content.routing_map.shape, self.wide)
            weights = content.links.there(probs)[content.token, content.column]
        return rows, weights, None, content.counts.clone(), handle

    def _layout(self, hidden, routing_map, per_rank):
        experts = per_rank * self.comm.size
        require(routing_map.dtype == torch.bool and routing_map.is_contiguous(), "routing_map")
        require(tuple(routing_map.shape) == (len(hidden), experts), "routing_map [T, E]")
        tokens = self.comm.all_gather(torch.tensor([len(hidden)]))[:, 0]
        require(len(tokens.unique()) == 1, f"equal numbers of tokens, got {tokens.tolist()}")
        require(len(hidden) % 4 == 0 and experts % 4 == 0, "aligned tokens and experts")
        ids = torch.arange(experts).expand_as(routing_map).masked_fill(~routing_map, -1)
        links = Links(self.comm, ids.contiguous(), experts)
        local = local_ids(links, ids.contiguous(), self.comm.rank)
        token, column, expert = by_expert(local)
        return sealed(
            self,
            links=links,
            shape=tuple(hidden.shape),
            routing_map=routing_map.clone(),
            token=token,
            column=column,
            counts=torch.bincount(expert, minlength=per_rank),
        )

    def combine_with_unpermute(self, *, hidden, probs=None, handle=None, **options):
        check_defaults(options, "pad_multiple", "fuse_unpermute_combine", "num_dispatched_tokens")
        check_rows(hidden, self.wide)
        content, dense = opened(handle, self), None
        require(len(hidden) == len(content.token), f"{len(content.token)} rows of the handle")
        if probs is not None:
            check_weights(probs, [len(hidden)], self.wide)
            columns = content.routing_map.shape[1]
            dense = content.links.back_spread(probs, content.token, content.column, columns)
            dense[~content.routing_map] = torch.nan
        return content.links.back_summed(hidden, content.token), dense
