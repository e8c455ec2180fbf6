"""The demo: train a small MoE model on text of this machine, serve requests, measure its layers.

    sizes.py     the job, fitted to this machine
    ranks.py     all phases of one rank: training, requests, the speed of its layers
    result.py    `DemoResult` with its headline and table, and the HTML report

The model, text and requests come from `ultraep_tools.tiny`. `ultraep demo` starts the ranks.
"""
