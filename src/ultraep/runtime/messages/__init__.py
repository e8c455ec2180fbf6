"""The data plane of messages: any group of torch.distributed."""
