"""Triton kernels for the GPU: the bits of the reference.

These functions take and give what those of every backend do: arrays on the host, but ids and order
may be tensors of the device. They wait for the device. The kernels themselves do not:
`Counter`, `Planner` and `Rerouter` launch them over buffers that stay where they are, and
`ultraep.runtime.control.ControlPlane` is made of those.
"""

from ultraep.backends.triton.host import count, lower_bound, place, reroute, split, tally

__all__ = ["DEVICE", "count", "lower_bound", "place", "reroute", "split", "tally"]

DEVICE = "cuda"
