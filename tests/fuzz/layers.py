"""Random layers against a dense layer without ranks: on threads, in processes, in shared memory.

Extends the layers of `tests/runtime/test_random_layers.py` by domains, speeds, tolerances, rates
and the relays of messages.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from ranks import everywhere, shared_pool

from ultraep import BalanceConfig, Balancer, Rates

sys.path.insert(0, str(Path(__file__).parent.parent / "runtime"))
from test_random_layers import assert_dense, drawn, mapped, one_pass, over_messages

PROCESSES, MAPPED = 25, 200  # one of so many layers runs in processes, in shared memory


def drawn_layer(seed: int, number: int, most_ranks: int) -> tuple[Any, dict[str, Any], bool]:
    """Draw an example, options of its balancer, and whether backward recomputes the layer."""
    example, options, again = drawn(seed * 1_000_003 + number, most_ranks)
    rng = np.random.default_rng([seed, number, 1])
    rates = Rates(row=int(rng.choice([1, 10**6])), copy=int(rng.choice([0, 10, 10**7])))
    speeds = [int(speed) for speed in rng.choice([500, 900, 1000], example.ranks)]
    policy = options.pop("policy")
    options["config"] = BalanceConfig(
        policy=policy,
        tolerance=float(rng.choice([0.0, 0.0, 0.1, 1.0])),
        min_tokens_per_replica=int(rng.choice([1, 1, 3])),
        max_replicas=[None, None, 1][rng.integers(3)] if policy == "ultraep" else None,
        locality=bool(rng.integers(2)),
        objective="time",
        rates=rates,
        speeds=speeds if rng.random() < 0.3 else None,
    )
    divisors = [size for size in range(1, example.ranks + 1) if example.ranks % size == 0]
    options["domain"] = int(rng.choice(divisors)) if rng.random() < 0.3 else example.ranks
    return example, options, again


def check_layer(seed: int, number: int, counts: Counter[str]) -> None:
    """Run one random layer; raise `AssertionError` if it differs from the dense layer."""
    plane = "threads"
    if number % MAPPED == MAPPED - 1:
        plane = "mapped memory"
    elif number % PROCESSES == PROCESSES - 1:
        plane = "processes"
    example, options, again = drawn_layer(seed, number, 3 if plane == "mapped memory" else 4)
    if plane == "mapped memory":
        options["domain"] = example.ranks  # its ranks map each other's memory
        results = shared_pool().run(example.ranks, mapped, example, options, again)
    elif plane == "processes":
        results = everywhere("gloo", example.ranks, in_process, example, options, again)
    else:
        results = over_messages(example, options, again)
    assert_dense(example, options, results)
    counts[plane] += 1


def in_process(comm: Any, example: Any, options: dict[str, Any], again: bool) -> Any:
    balancer = Balancer._with_settings(comm, **options)
    return one_pass(balancer, example, again)
