"""Routes are recorded, and replayed with gates and gradients of the current router."""

import pytest
import torch
from torch import nn

from ultraep import BalancedMoE, Balancer, ConfigError, LoadError
from ultraep.routes import (
    Replay,
    batch_routes,
    from_vllm,
    layer_numbers,
    packed_routes,
    record_routes,
)

HIDDEN, EXPERTS, TOP_K = 8, 6, 2


class Model(nn.Module):
    def __init__(self, balancer, **options):
        super().__init__()
        self.layers = nn.ModuleList(
            BalancedMoE.swiglu(
                *(HIDDEN, 16, EXPERTS, TOP_K),
                balancer=balancer,
                seed=seed,
                dtype=torch.float64,
                **options,
            )
            for seed in range(2)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def alone(**options):
    return Model(Balancer("alone", experts=EXPERTS), **options)


def inputs(rank=0, batch=3, length=5):
    draw = torch.Generator().manual_seed(rank)
    return torch.randn(batch, length, HIDDEN, generator=draw, dtype=torch.float64)


def other_routes(layers=2, tokens=15, seed=0):
    draw = torch.Generator().manual_seed(seed)
    drawn = torch.rand(layers, tokens, EXPERTS, generator=draw)
    return drawn.topk(TOP_K).indices


@pytest.mark.filterwarnings("ignore::ultraep.NothingToBalance")
class TestOneRank:
    def test_recorded_routes_are_compact_and_replay_bit_for_bit(self):
        model, x = alone(), inputs()
        with record_routes(model) as recorder:
            y = model(x)
        mask = torch.ones(3, 5)
        sequences = recorder.sequences(mask)
        assert [(s.dtype, list(s.shape)) for s in sequences] == [(torch.int8, [5, 2, 2])] * 3
        with Replay(model) as replay:
            replay.use(batch_routes(sequences, mask))
            assert torch.equal(model(x), y)
        assert not model.layers[0].router._forward_hooks

    @pytest.mark.parametrize("options", [{}, {"scores": "sigmoid"}, {"normalize_top_k": False}])
    def test_gates_are_those_of_the_current_router_and_gradients_reach_it(self, options):
        model, x, routes = alone(**options), inputs(), other_routes()
        with Replay(model) as replay:
            replay.use(routes)
            model(x).square().sum().backward()
            router = model.layers[0].router
            ids, gates, logits = router(x.reshape(-1, HIDDEN))
        assert torch.equal(ids, routes[0])
        scores = logits.sigmoid() if options.get("scores") else logits.softmax(-1)
        wanted = scores.gather(-1, routes[0])
        if options.get("normalize_top_k", True):
            wanted = wanted / wanted.sum(-1, keepdim=True)
        torch.testing.assert_close(gates, wanted)
        assert router.weight.grad.abs().sum() > 0

    def test_unknown_tokens_are_left_to_the_router_or_skipped(self):
        model, x, routes = alone(), inputs(), other_routes()
        routes[:, 3:6] = -1
        with record_routes(model) as recorder:
            model(x)
        own = recorder.routes().flatten(0, 1).transpose(0, 1)
        for unknown, wanted in (("router", own[0, 3:6].long()), ("skip", routes[0, 3:6])):
            with Replay(model, unknown=unknown) as replay:
                replay.use(routes)
                ids, *_ = model.layers[0].router(x.reshape(-1, HIDDEN))
            assert torch.equal(ids[3:6], wanted)
            assert torch.equal(ids[6:], routes[0, 6:])

    @pytest.mark.parametrize("experts", [EXPERTS, 128, 256, 300])
    def test_padding_is_recorded_as_no_expert(self, experts):
        layer = BalancedMoE.swiglu(
            *(HIDDEN, 16, experts, TOP_K), balancer=Balancer("alone", experts=experts)
        )
        ids = torch.tensor([[0, experts - 1], [-1, -1], [experts, experts]])  # transformers: E
        layer.router.forward = lambda x: (ids, x.new_ones(3, TOP_K), None)
        with record_routes(layer) as recorder:
            layer.router(torch.zeros(3, HIDDEN))
        assert recorder._ids[0][0].tolist() == [[0, experts - 1], [-1, -1], [-1, -1]]

    @pytest.mark.parametrize("backward", ["inside", "after the next use", "after the block"])
    @pytest.mark.parametrize("reentrant", [None, False, True])
    def test_a_recomputed_layer_chooses_the_same_experts(self, reentrant, backward):
        def gradients(reentrant, backward):
            model, x, routes = alone(), inputs().requires_grad_(), other_routes()
            with Replay(model) as replay:
                replay.use(other_routes(seed=2))
                with torch.no_grad():
                    run(model, inputs(3).requires_grad_(), reentrant)
                replay.use(routes)
                y = run(model, x, reentrant)
                if backward != "inside":
                    replay.use(other_routes(seed=1))
                    run(model, inputs(1).requires_grad_(), reentrant)  # without backward
                if backward != "after the block":
                    y.square().sum().backward()
            if backward == "after the block":
                y.square().sum().backward()
            return [x.grad, *(p.grad for p in model.parameters())]

        def run(model, x, reentrant):
            if reentrant is None:
                return model(x)
            return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant)

        assert all(map(torch.equal, gradients(reentrant, backward), gradients(None, "inside")))

    def test_an_unknown_pass_is_not_recomputed_with_the_routes_of_another(self):
        model, x = alone(), inputs().requires_grad_()
        before = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        with Replay(model) as replay:
            replay.use(other_routes())
            with pytest.raises(ConfigError, match=r"'layers\.0' whose routes Replay does no"):
                before.sum().backward()
        assert not model.layers[0].router._forward_hooks

    def test_an_error_leaves_no_mode_behind(self):
        model, x = alone(), inputs()
        with Replay(model) as replay:
            replay.use(other_routes())
            with pytest.raises(RuntimeError):
                model.layers[0].router(x[0, :, :3])
            assert torch.overrides._get_current_function_mode_stack() == []
            with pytest.raises(LoadError, match=r"routes \[10, 2\] .* replayed routes are \[15, 2"):
                model(x[:2])
            assert torch.overrides._get_current_function_mode_stack() == []

    def test_generation_step_by_step_with_padding(self):
        model, x = alone(), inputs(batch=2, length=6)
        mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0]])
        with record_routes(model) as recorder:
            whole = [model(x[:, :3])] + [model(x[:, n : n + 1]) for n in range(3, 6)]
        assert torch.cat(whole, 1).shape == x.shape
        short, long = recorder.sequences(mask)  # the seventh token was never an input
        assert (len(short), len(long)) == (4, 6)
        routes = batch_routes([short, long], mask).view(2, 2, 7, TOP_K)
        assert (routes[:, 0, :2] == -1).all()
        assert (routes[:, :, 6] == -1).all()
        assert torch.equal(routes[:, 0, 2:6], short.transpose(0, 1).int())
        packed = packed_routes([short, long], [5, 6])
        assert torch.equal(packed[:, :4], short.transpose(0, 1).int())
        assert (packed[:, 4] == -1).all()
        assert torch.equal(packed[:, 5:], long.transpose(0, 1).int())

    def test_routes_that_do_not_fit_are_refused(self):
        model, x = alone(), inputs()
        with record_routes(model) as recorder:
            model(x)
        sequences = recorder.sequences(torch.ones(3, 5))
        with pytest.raises(LoadError, match=r"mask is \[3, 9\], but 3 sequences of 5 tokens"):
            recorder.sequences(torch.ones(3, 9))
        with pytest.raises(LoadError, match=r"sequence 0 has 7 tokens, but the routes of 5"):
            batch_routes(sequences, torch.ones(3, 7))
        with pytest.raises(LoadError, match=r"3 sequences need a mask \[3, tokens\], got \[2, 5\]"):
            batch_routes(sequences, torch.ones(2, 5))
        with pytest.raises(LoadError, match="3 sequences, but 2 lengths"):
            packed_routes(sequences, [5, 5])
        with pytest.raises(LoadError, match=r"one model, got \[\(1, 2\), \(2, 2\)\]"):
            batch_routes([sequences[0], sequences[1][:, :1]], torch.ones(2, 5))
        replay = Replay(model)
        with pytest.raises(LoadError, match=r"\[2 layers, tokens, K\], got \[1, 15, 2\]"):
            replay.use(other_routes(layers=1))
        with pytest.raises(LoadError, match=r"ids lie in 0\.\.6, but must lie in -1\.\.5"):
            replay.use((other_routes() > 0) * EXPERTS)
        with pytest.raises(ConfigError, match="Linear has no routed layers"):
            Replay(nn.Linear(2, 2))
        with pytest.raises(ConfigError, match=r"'unknown'|unknown"):
            Replay(model, unknown="guess")
        with record_routes(model) as recorder:
            model(x)
            model(x[:1])
        with pytest.raises(LoadError, match=r"batches of \[1, 3\] sequences.*clear\(\)"):
            recorder.routes()
        recorder.clear()

    def test_a_router_without_topk_cannot_be_replayed(self):
        model = alone()
        model.layers[0].router.forward = lambda x: (
            torch.zeros(len(x), TOP_K, dtype=torch.int64),
            x.new_ones(len(x), TOP_K),
            None,
        )
        with Replay(model) as replay:
            replay.use(other_routes())
            with pytest.raises(ConfigError, match=r"'layers\.0' does not choose with torch.topk"):
                model(inputs())


def test_routes_of_vllm_skip_dense_layers():
    ids = other_routes(layers=3, tokens=4).transpose(0, 1).numpy().astype("uint8")
    assert torch.equal(from_vllm(ids, [1, 2]), torch.from_numpy(ids[:, 1:]))
    with pytest.raises(ConfigError, match="enable_return_routed_experts=True"):
        from_vllm(None, [1])
    with pytest.raises(LoadError, match=r"with layer 3, got \[4, 3, 2\]"):
        from_vllm(ids, [1, 3])


def test_layer_numbers_come_from_names():
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Identity(), nn.Module()])})
    model["layers"][1].experts = nn.Module()
    model["layers"][1].experts.is_concatenated = model["layers"][1].experts.has_gate = True
    model["layers"][1].experts.num_experts = 4
    assert layer_numbers(model) == [1]
    model.experts = model["layers"][1].experts
    model["other"] = nn.Module()
    model["other"].experts = nn.Module()
    model["other"].experts.is_concatenated = model["other"].experts.has_gate = True
    model["other"].experts.num_experts = 4
    with pytest.raises(ConfigError, match="not in the names"):
        layer_numbers(model)
