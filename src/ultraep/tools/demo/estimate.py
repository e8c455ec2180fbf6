"""How long a demo will take here, roughly: operations of the model, by the speed of one core.

The speed is that of small products in NumPy, in a few milliseconds; the share of it that a training
on CPU ranks reaches was found on two ARM cores. Other programs make it longer.
"""

from __future__ import annotations

import time

import numpy as np

from ultraep.tools.demo.sizes import Sizes

REACHED = 0.53  # of the speed of products alone, by whole steps
START, REPORT = 12.0, 5.0  # seconds
SUBJECTS = 3  # of the text
WARMUP = 1  # rounds of the layers
LESS, MORE = 0.8, 1.4  # what an estimate is worth


def core_speed(dtype: str, tries: int = 40) -> float:
    """Operations that one core does in a second, in products too small for several threads."""
    left, right = np.ones((32, 64), dtype), np.ones((64, 128), dtype)
    fastest = float("inf")
    for _ in range(tries):
        begin = time.perf_counter()
        left @ right
        fastest = min(fastest, time.perf_counter() - begin)
    return 2 * 32 * 64 * 128 / fastest


def seconds(sizes: Sizes, policies: int, cores: int, speed: float) -> dict[str, float]:
    """Seconds of every phase, by the operations that a rank has to do in it.

    >>> found = seconds(Sizes(ranks=2), policies=2, cores=2, speed=13.4e9)
    >>> {phase: round(value) for phase, value in found.items()}
    {'training': 110, 'requests': 43, 'layers': 86, 'start and report': 17}
    """
    speed = REACHED * speed * min(1.0, cores / sizes.ranks)
    experts = 6 * sizes.layers * sizes.top_k * sizes.hidden * sizes.ffn  # of a token, forward
    attention = sizes.layers * (8 * sizes.hidden**2 + 4 * sizes.length * sizes.hidden)
    step = 3 * sizes.tokens * (experts + attention) / speed
    training = policies * step * sizes.steps
    asked = sizes.requests * (min(32, sizes.longest) + sizes.longest) / 2 / sizes.ranks
    answered = asked * (experts + attention) / speed
    layers = 3 * sizes.tokens * experts * SUBJECTS / speed
    return {
        "training": training if sizes.seconds is None else min(training, sizes.seconds),
        "requests": policies * sizes.rounds * answered,
        "layers": (policies + 1) * (WARMUP + sizes.layer_rounds) * layers,
        "start and report": START + REPORT,
    }


def in_words(total: float) -> str:
    """A span of time, in words that promise no more than they can.

    >>> in_words(250.0), in_words(40.0)
    ('about 3 to 6 minutes', 'about 30 to 60 seconds')
    """
    low, high = LESS * total, MORE * total
    if high <= 90:
        return f"about {round(low, -1):.0f} to {-(-high // 10) * 10:.0f} seconds"
    return f"about {max(1, int(low // 60))} to {-int(-high // 60)} minutes"
