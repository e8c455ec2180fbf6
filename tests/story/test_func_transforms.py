"""torch.func transforms over a layer are refused in one line, on both data planes."""

import pytest
import torch
from dense import Example, with_network

from ultraep import Balancer, ConfigError

TRANSFORMS = {
    "grad": lambda layer, x: torch.func.grad(lambda x: layer(x).sum())(x),
    "vjp": lambda layer, x: torch.func.vjp(layer, x),
    "jvp": lambda layer, x: torch.func.jvp(layer, (x,), (x,)),
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
