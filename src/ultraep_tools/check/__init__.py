"""`ultraep check`: whether balancing works on these machines, and what it gains.

`host.py` looks at one host, `group.py` at the ranks that torchrun started, `layer.py` runs one
layer of the user's size. Every part returns a `Finding`; `report.py` turns all of them into a
verdict. `meeting.py` gathers findings through the store of the launcher, so that a rank that never
comes is named instead of waited for.
"""
