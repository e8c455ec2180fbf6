"""The main job: train a small MoE model on text of this machine, answer requests, measure layers.

    train.py     one rank's training loop
    measure.py   throughput of the MoE layers beside forced balance
    sizes.py     how much of it fits this machine
    job.py       what is to be done
    ranks.py     what one rank does, from the first step to the last
    run.py       starts the ranks, or joins those of torchrun
    result.py    what came out, as one `DemoResult`

Model, text and requests are those of `ultraep.tools.tiny`. `ultraep demo` shows it in the terminal.
"""
