"""Which of the waiting prompts are one microbatch, and which rank serves each of them."""

from __future__ import annotations

from collections.abc import Sequence

from ultraep.tools.serving.prompts import Prompt


def next_microbatch(waiting: Sequence[Prompt], ranks: int, budget: int) -> list[list[Prompt]]:
    """The first prompts that fit, in order, each on the rank with the fewest tokens.

    budget: most tokens of a rank. A prompt that is longer than that is served alone on its rank.
    """
    batch: list[list[Prompt]] = [[] for _ in range(ranks)]
    used = [0] * ranks
    for prompt in waiting:
        rank = used.index(min(used))
        if used[rank] and used[rank] + prompt.tokens > budget:
            break
        batch[rank].append(prompt)
        used[rank] += prompt.tokens
    return batch
