"""Microbatches for tests that call only some verbs."""

from ultraep.microbatch import Layer


def counted(balancer, ids, bundle=None, *, layer=0, policy=None, **inputs):
    """Return a microbatch after stage 1."""
    own = Layer(layer, {} if bundle is None else bundle)
    microbatch = balancer.begin(own, ids, policy=policy, **inputs)
    microbatch.count()
    return microbatch


def planned(balancer, ids, bundle=None, **options):
    """Return a microbatch after stage 2, and its plan."""
    microbatch = counted(balancer, ids, bundle, **options)
    return microbatch, microbatch.plan()
