"""The demo: train a small MoE model on text of this machine, serve requests with it, measure it.

    model.py     the model, which the examples train as well
    text.py      its text: Python's own library
    prefill.py   the engine that serves prompts, and their time to first token
    even.py      forced even routing
    sizes.py     the job, fitted to this machine
    ranks.py     all phases of one rank: training, prefill, the speed of its layers
    result.py    `DemoResult` with its headline and table, and the HTML report

`ultraep demo` starts the ranks.
"""
