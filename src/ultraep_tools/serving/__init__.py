"""Prefill under load: the time to first token while prompts arrive in real time.

load.py       arrivals, prompts, microbatches
engine.py     one rank that serves prompts, and the variants to compare
run.py        a transformers model in the engine, calibration, all turns
endpoint.py   the same load for servers with the OpenAI protocol
measure.py    percentiles, throughput, gains; sentence, table, notes, rows of numbers, page

`ultraep bench prefill` runs it. The tiny model is served by the same engine.
"""
