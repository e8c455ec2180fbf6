"""Routes of transformers models: recorded in generation, replayed in training."""

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("ultraep.integrations.transformers", exc_type=ImportError)

import torch
from equality import all_batches, assert_same_gradients, quiet, under_torchrun
from families import FAMILIES, VOCABULARY, batch, build, loss, outputs, samples, training_arguments
from ranks import on_ranks
from transformers import TrainerCallback

from ultraep import BalanceConfig, ConfigError, LoadError
from ultraep.integrations.transformers import BalancedTrainer, ImbalanceCallback, balance, balancers
from ultraep.routes import Replay, batch_routes, layer_numbers, record_routes, routed_layers

# Hash routing, experts that only images reach, and routers without top-k.
REFUSED = {"deepseek_v4", "ernie4_5_vl_moe", "phimoe", "zaya"}
USUAL = ["qwen3_moe", "deepseek_v3", "gpt_oss"]
OTHERS = sorted(FAMILIES.keys() - REFUSED - set(USUAL))


def drawn_like(routes, experts):
    layers, tokens, top_k = routes.shape
    draw = torch.Generator().manual_seed(5)
    return torch.rand(layers, tokens, experts, generator=draw).topk(top_k).indices


@pytest.mark.parametrize(
    "family", [*USUAL, *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)]
)
def test_routes_of_a_family_are_recorded_and_replayed(family):
    with quiet():
        model, ids = build(family).eval(), batch(0)
        with torch.no_grad():
            with record_routes(model) as recorder:
                expected = outputs(model, ids)
            routes = batch_routes(recorder.sequences(torch.ones_like(ids)), torch.ones_like(ids))
            with Replay(model) as replay:
                replay.use(routes)
                assert torch.equal(outputs(model, ids), expected)
                others = drawn_like(routes, routed_layers(model)[0].num_experts)
                replay.use(others)
                with record_routes(model) as recorder:
                    assert not torch.equal(outputs(model, ids), expected)
    assert torch.equal(recorder.routes().flatten(0, 1).transpose(0, 1).long(), others)


def recorded(model, ids):
    with record_routes(model) as recorder:
        outputs(model, ids)
    return recorder.routes()


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(REFUSED & FAMILIES.keys()))
def test_families_whose_routes_cannot_be_replayed_are_refused_by_name(family):
    with quiet():
        model, ids = build(family).eval(), batch(0)
        with torch.no_grad(), Replay(model) as replay:
            layers = len(routed_layers(model))
            replay.use(torch.zeros(layers, ids.numel(), 2, dtype=torch.int64))
            with pytest.raises((ConfigError, LoadError), match=r"layers\.\d"):
                recorded(model, ids)


@on_ranks(2)
def test_generation_records_the_routes_of_the_plain_model(rank, group):
    with quiet():
        plain, balanced = build("qwen3_moe").eval(), build("qwen3_moe").eval()
        balance(balanced, group)
        prompts, results = batch(rank), []
        for model in (plain, balanced):
            with record_routes(model) as recorder:
                tokens = model.generate(
                    prompts,
                    attention_mask=torch.ones_like(prompts),
                    max_new_tokens=4 + 3 * rank,
                    do_sample=False,
                    pad_token_id=0,
                    eos_token_id=VOCABULARY + 1,
                )
            results.append((tokens, recorder.sequences(torch.ones_like(tokens))))
        assert layer_numbers(plain) == [0, 1]
    (tokens, routes), (other_tokens, other_routes) = results
    assert torch.equal(tokens, other_tokens)
    length = tokens.shape[1] - 1  # a rank that waits for the other passes its last token, too
    assert all(len(sequence) == length for sequence in routes)
    assert all(torch.equal(a, b[:length]) for a, b in zip(routes, other_routes, strict=True))


@on_ranks(2)
def test_a_replay_has_the_gradients_of_the_plain_model(rank, group):
    with quiet():
        plain, balanced = (build("qwen3_moe", dtype=torch.float64) for _ in range(2))
        config = BalanceConfig(objective="balance")
        balancer = balance(balanced, group, policy=None, config=config)
        batches = all_batches(group)
        experts = balancer.topology.experts
        every = [drawn_like(torch.empty(2, ids.numel(), 2), experts) for ids in batches]
        for routes in every:
            routes[:, :, 0] = 0  # one hot expert
            routes[:, :, 1] = routes[:, :, 1].clamp(min=1)
        with Replay(plain) as replay:
            for ids, routes in zip(batches, every, strict=True):
                replay.use(routes)
                loss(outputs(plain, ids)).backward()
        with Replay(balanced, unknown="skip") as replay:
            replay.use(every[rank])
            loss(outputs(balanced, batches[rank])).backward()
        for plan in [e.last_plan for e in balanced.modules() if hasattr(e, "last_plan")]:
            assert plan.num_replicas > 0
        assert_same_gradients(balanced, plain, 1e-12)


@on_ranks(2)
def test_the_callback_logs_imbalance(rank, group, tmp_path):
    class Reporter(TrainerCallback):
        def __init__(self):
            self.logs = []

        def on_log(self, args, state, control, logs=None, **others):
            self.logs.append(dict(logs))

    with under_torchrun(rank, 2):
        model = build("qwen3_moe")
        with pytest.raises(ConfigError, match="is not balanced"):
            ImbalanceCallback(model)
        balance(model, group, policy=None, config=BalanceConfig(objective="balance"))
        arguments = training_arguments(tmp_path, 2, max_steps=4, logging_steps=2)
        trainer = BalancedTrainer(model=model, args=arguments, train_dataset=samples())
        reporter = Reporter()
        trainer.add_callback(reporter)
        ImbalanceCallback(model).add_to(trainer)
        trainer.train()
        (balancer,) = balancers(model)
        total = balancer.stats()["copies"]
    own = [logs for logs in reporter.logs if "loss" in logs]
    assert len(own) == 2
    for logs in own:
        assert logs["ultraep/imbalance_before"] > logs["ultraep/imbalance_after"] >= 1
    assert 2 * sum(logs["ultraep/replicas"] for logs in own) == total
    history = [logs for logs in trainer.state.log_history if "loss" in logs]
    assert [logs["ultraep/replicas"] for logs in history] == [x["ultraep/replicas"] for x in own]
