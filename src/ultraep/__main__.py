"""Run the command line: `python -m ultraep`, and `torchrun -m ultraep` for a group of ranks."""

import runpy

if __name__ == "__main__":
    runpy.run_module("ultraep_tools", run_name="__main__", alter_sys=True)
