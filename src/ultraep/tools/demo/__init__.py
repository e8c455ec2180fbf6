"""The main job: train a small MoE model on text of this machine, answer requests, measure layers.

    sizes.py     the job: how much of it fits this machine, and how long it takes
    train.py     one rank's training loop
    measure.py   throughput of the MoE layers beside forced balance
    ranks.py     all phases of one rank
    run.py       starts the ranks, or joins those of torchrun
    result.py    one `DemoResult`, its headline and its table
    report.py    the page

Model, text and requests are those of `ultraep.tools.tiny`. `ultraep demo` shows it in the terminal.
"""
