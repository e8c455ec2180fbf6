"""Prefill under load: prompts arrive when they do, and the time to their first token is measured.

    arrivals.py    when prompts arrive: drawn, or read from a file
    prompts.py     what they say: mixed subjects and lengths, in bursts
    asked.py       what is to be measured
    queue.py       which of the waiting prompts are one microbatch
    model.py       the model of the engine, random or from a checkpoint
    variants.py    what is compared: policies, EPLB with fixed homes, forced even routing
    engine.py      one rank that serves: microbatches in real time
    calibrate.py   how fast it is, how large microbatches shall be, from when on a copy pays
    run.py         all turns of all policies, as one rank, and in processes of this machine
    endpoint.py    the same load for servers of the OpenAI protocol
    counters.py    what such a server tells of its imbalance
    measure.py     waiting times -> percentiles, throughput, share within the objective
    numbers.py     numbers to keep; words.py: what they come to, in sentences
    report/        the figure, as one HTML file

`ultraep bench prefill` shows it in the terminal.
"""
