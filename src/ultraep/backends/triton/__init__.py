"""Triton kernels for GPUs, and their launches; plans are bit for bit equal to the reference.

Stages 1, 2 and 4 work on the buffers of `Counter`, `Planner` and `Rerouter`, which
`DevicePlanner` of the runtime calls; stages 3 and 5 to 8 on memory that ranks share.
"""
