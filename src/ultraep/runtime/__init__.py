"""The runtime: the balancer, communicators between ranks, and the data planes.

`connect.connect(group)` returns the communicator of a process group.
`local.LocalGroup` runs many ranks in one process.
"""
