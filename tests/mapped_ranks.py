"""Ranks whose memory the other ranks map, without a GPU: their kernels are interpreted."""

from contextlib import contextmanager

import torch.distributed as dist
from ranks import PATIENCE
from shared_peers import SharedPeers

from ultraep import Balancer


@contextmanager
def mapped_rank(group, **options):
    """Yield the balancer of a rank that maps the memory of its domain; check and close it."""
    inside, domain = group, options.get("domain")
    if domain:
        first = group.rank() - group.rank() % domain
        inside = dist.new_group(range(first, first + domain), use_local_synchronization=True)
    usual = {"data_plane": "mapped", "peers": SharedPeers(inside), "timeout": PATIENCE}
    balancer = Balancer._with_settings(group, **usual | options)
    yield balancer
    balancer.check()
    balancer.close()
