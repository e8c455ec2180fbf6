"""Inspect a model: run text through it on this machine, and replay its routing for many ranks.

options.py      options
library.py      import transformers, offline
checkpoint.py   saved models, one block in memory at a time; small random models
texts.py        windows of tokens
blocks.py       blocks and experts of a model; a forward pass over windows, recorded as a trace
run.py          all of it in order, with an estimate; sizes for the simulator
findings.py     the trace replayed at all EP sizes, slots and policies; result and report

transformers: pip install '.[transformers]' in the clone of ultraep.
"""
