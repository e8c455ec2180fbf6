"""The data plane of mapped memory: one GPU per rank, all of which map each other's memory."""
