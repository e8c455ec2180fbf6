"""The data plane of messages: any group of torch.distributed, and shared memory of CPU ranks."""
