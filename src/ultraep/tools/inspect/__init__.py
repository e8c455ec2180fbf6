"""Inspecting a model: text goes through it on this machine, its routing becomes a trace.

    options.py      which model, texts, ranks and policies
    library.py      transformers, offline, imported when it is needed
    families.py     small random models of a family, to try it
    checkpoint.py   saved models, of which one block at a time has its weights
    anatomy.py      where in a model its blocks and its experts are
    texts.py        text -> windows of tokens
    windows.py      one forward pass, block by block and window by window, recorded as a trace
    run.py          all of that in order, and an estimate of its time
    findings.py     the trace planned again: EP sizes, slots, policies -> numbers
    preset.py       the model's sizes, for the simulator
    report.py       the page

transformers: pip install 'ultraep[transformers]'.
"""
