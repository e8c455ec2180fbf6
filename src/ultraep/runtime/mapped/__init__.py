"""The data plane of mapped memory: GPUs that read each other's memory, and no host between."""
