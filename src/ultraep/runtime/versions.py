"""Whether weights are still the ones that were sent: a number that changes when they do.

Autograd counts in-place writes to a tensor, which covers optimizers, `load_state_dict` and plain
assignments. Writes through `.data` escape it; a hook on every optimizer's step catches those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

_optimizer_steps = [0]


def _count_step(*_: Any) -> None:
    _optimizer_steps[0] += 1


register_optimizer_step_post_hook(_count_step)


def weights_version(tensors: Sequence[torch.Tensor], salt: int) -> int:
    """A 62-bit number: equal as long as these are the same tensors with the same content.

    Tensors made in inference mode have no count; they can only be written there.
    """
    writes = (0 if tensor.is_inference() else tensor._version for tensor in tensors)
    state = (_optimizer_steps[0], salt, *(t.data_ptr() for t in tensors), *writes)
    return hash(state) & ((1 << 62) - 1)
