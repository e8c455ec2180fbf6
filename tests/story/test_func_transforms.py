"""torch.func transforms and forward mode are refused in one line, on both data planes."""

import pytest
import torch
from dense import Example, with_network
from torch.autograd.forward_ad import dual_level, make_dual

from ultraep import Balancer, ConfigError


def forward_mode(layer, x):
    """Refused with and without a tangent, so that all ranks raise the same error."""
    with dual_level():
        with pytest.raises(ConfigError, match=r"forward_ad\.dual_level\(\)"):
            layer(x)
        return layer(make_dual(x, torch.ones_like(x)))


TRANSFORMS = {
    "grad": lambda layer, x: torch.func.grad(lambda x: layer(x).sum())(x),
    "vjp": lambda layer, x: torch.func.vjp(layer, x),
    "jvp": lambda layer, x: torch.func.jvp(layer, (x,), (x,)),
    "dual level": forward_mode,
    "vmap": lambda layer, x: torch.vmap(layer)(x[None]),
    "parameters": lambda layer, x: torch.func.grad(
        lambda own: torch.func.functional_call(layer, own, (x,)).sum()
    )(dict(layer.named_parameters())),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # jvp, by itself
@pytest.mark.parametrize("own_network", [False, True], ids=["experts", "network"])
@pytest.mark.parametrize("data_plane", ["messages", "mapped"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_refused(name, data_plane, own_network):
    example = Example([5], dtype=torch.float32)
    balancer = Balancer("alone", experts=example.experts, data_plane=data_plane)
    layer = example.layer(balancer)
    if own_network:
        layer = with_network(layer)
    x = example.inputs[0]
    with pytest.raises(ConfigError, match=r"inside a torch\.func transform.*backward\(\)"):
        TRANSFORMS[name](layer, x)
    assert torch.func.functional_call(layer, {}, (x,)).shape == x.shape
