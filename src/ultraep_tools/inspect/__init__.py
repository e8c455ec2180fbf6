"""Inspect a model: run text through it on this machine, and plan its routing for many ranks.

options.py      options
library.py      import transformers, offline
checkpoint.py   saved models, one block in memory at a time; small random models
texts.py        windows of tokens
blocks.py       blocks and experts of a model; a forward pass over windows
run.py          all of it in order
findings.py     the loads planned for all numbers of ranks; the trace of such a group
preset.py       sizes for the simulator
"""
