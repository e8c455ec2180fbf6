"""Tensor operations without communication: activations, number formats, products, autograd."""
