"""A tiny model to train and serve, for the demo, the examples and the benchmarks.

text.py      text of Python's library, by subject
model.py     a byte-level MoE transformer on `BalancedMoE` layers
prefill.py   requests, and their time to first token
"""
