"""The demo: train a small MoE model on text of this machine, serve requests, measure its layers.

    sizes.py     the job, fitted to this machine
    train.py     one rank's training loop, and the speed of its layers
    ranks.py     all phases of one rank
    result.py    `DemoResult` with its headline and table, and the HTML report

The model, text and requests come from `ultraep.tools.tiny`. `ultraep demo` starts the ranks.
"""
