"""Prefill under load: prompts arrive in real time, and the time to their first token is measured.

    load.py       when prompts arrive, what they say, and which of them become one microbatch
    variants.py   what is compared: policies, EPLB with fixed homes, forced even routing
    engine.py     one rank that serves: microbatches in real time
    model.py      a model of transformers in the engine, random or from a checkpoint
    run.py        calibration and all turns, in processes of this machine
    endpoint.py   the same load for servers of the OpenAI protocol
    measure.py    waiting times -> percentiles, throughput, share within the objective
    report.py     the page

`ultraep bench prefill` shows it in the terminal. The tiny model is served by the same engine.
"""
