"""Looking into a model: text goes through it on this machine, its routing becomes a trace.

    asked.py        what is to be looked into, and how
    library.py      transformers, offline, and only when it is asked for
    families.py     small random models of a family, to try it
    checkpoint.py   saved models, of which one block at a time has its weights
    anatomy.py      where in a model its blocks and its experts are
    texts.py        text -> windows of tokens
    windows.py      one forward pass in which every block takes window after window
    catch.py        what routers decide -> records of a trace
    estimate.py     sizes and time, told before it starts
    run.py          all of that in order
    findings.py     the trace planned again: EP sizes, slots, policies -> numbers
    preset.py       the model's sizes, for the simulator
    report/         the page

transformers: pip install 'ultraep[transformers]'.
"""
