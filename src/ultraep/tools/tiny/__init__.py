"""A tiny model to train and serve: what the demo, the examples and the benchmarks have in common.

text.py      bytes that every machine has, by subject
model.py     a byte-level MoE transformer on `BalancedMoE` layers
prefill.py   requests, and the time to their first token
"""
