"""The eight stages under a clock instead of a GPU: would balancing pay on this cluster?

A cluster, a model, a workload and a job make a `Scenario`; `simulate` returns what every policy
would bring. The runtime's own policies make the plans. Seconds come from data sheets, measured
points and a few calibrated constants (`data/*.toml`, each with its source). `docs/simulator.md`
says what is modelled, what is not, and how well it predicts.

    cluster.py   devices, rates, links                workload.py  rows of every expert
    model.py     sizes of a model                     planning.py  who copies what
    costs.py     seconds of single things, rates      layer.py     one layer under the clock
    runtime.py   what a policy's plans cost           training.py  pipeline, groups, steps
    memory.py    bytes of the fullest device          serving.py   requests that arrive and wait
    run.py       all of it together                   published.py the paper's settings
    advise.py    does it pay, with which settings     gain.py      range of the gain, break-even
"""
