"""Simulator: the stages of the runtime under a clock instead of on a GPU.

`simulate` takes a `Scenario` (cluster, model, workload, job) and returns the throughput of every
policy. The runtime's own policies make the plans. Seconds come from data sheets, measured points
and a few calibrated constants (`data/*.toml`, each with its source). `docs/simulator.md` states
what is modelled, what is not, and how accurate it is.

    cluster.py   devices, rates, links             workload.py  rows of every expert
    model.py     sizes of a model                  planning.py  replicas in every microbatch
    costs.py     seconds of single operations      layer.py     seconds of the stages of a layer
    runtime.py   costs of a policy's plans         training.py  pipeline, groups, steps
    scenario.py  what is simulated, its memory     serving.py   prefill in chunks
    crossing.py  tokens between domains            run.py       simulate
    advise.py    the best configuration
"""
