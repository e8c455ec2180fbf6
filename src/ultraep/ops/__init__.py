"""Tensor operations that need no group: activations, number formats, products, and autograd."""
