"""Train a tiny Qwen3-MoE with torchtitan on CPU ranks, unmodified and balanced.

    torchrun --nproc-per-node 2 examples/torchtitan_train.py --steps 20

Runs the same Trainer, model and text twice: unmodified, then with entries of `override.imports`, as
`--override.imports` passes them on torchtitan's command line. Prints the logged losses.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from pathlib import Path

import torch.distributed as dist

LOSS, BEFORE, AFTER = (
    "loss_metrics/global_avg_loss",
    "ultraep/imbalance_before",
    "ultraep/imbalance_after",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--slots", type=int, default=1, help="spare slots per rank")
    parser.add_argument("--json", type=Path, help="also write the metrics to this file")
    options = parser.parse_args()
    from torchtitan_tiny import OVERRIDES, tiny, train  # takes seconds: after parsing the options

    logging.getLogger().setLevel(logging.ERROR)
    dist.init_process_group()
    balanced = (f"{OVERRIDES}.balanced", {"slots": options.slots}), f"{OVERRIDES}.metrics"
    with tempfile.TemporaryDirectory() as folder:
        runs = [train(tiny(*o, steps=options.steps, folder=folder)) for o in ((), balanced)]
    if dist.get_rank() == 0:
        show(*runs)
        if options.json is not None:
            options.json.write_text(json.dumps(runs))
    dist.destroy_process_group()


def show(plain: list[dict[str, float]], balanced: list[dict[str, float]]) -> None:
    """Print both runs, step by step."""
    print("step   unmodified     balanced   difference   imbalance")
    for before, after in zip(plain, balanced, strict=True):
        losses = before[LOSS], after[LOSS]
        imbalance = f"{after[BEFORE]:.2f} -> {after[AFTER]:.2f}"
        difference = f"{abs(losses[0] - losses[1]):.1e}"
        shown = f"{losses[0]:10.5f}   {losses[1]:10.5f}   {difference:>10}   {imbalance}"
        print(f"{before['step']:4}   {shown}")


if __name__ == "__main__":
    main()
