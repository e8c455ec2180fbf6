"""A balancer that records: rows that arrived, each microbatch once, on all ranks or on none."""

import numpy as np
import pytest
import torch
from dense import Example, on_ranks
from microbatches import planned
from torch.utils.checkpoint import checkpoint

import ultraep
from ultraep import Balancer, FileError, LocalGroup, PlanMismatch, read_trace
from ultraep.reroute import reroute
from ultraep.runtime.recording import VARIABLE
from ultraep.trace.schema import BACKWARD, FORWARD
from ultraep_tools.replay import differing

EXPERTS, STEPS = 8, 4
FORWARD_STAGES, BACKWARD_STAGES = set(FORWARD), set(BACKWARD) - {"recompute"}


@pytest.fixture(autouse=True)
def not_by_the_environment(monkeypatch, one_thread):
    monkeypatch.delenv(VARIABLE, raising=False)


def ids_of(rank, step, tokens=40):
    generator = torch.Generator().manual_seed(100 * step + rank)
    popularity = torch.exp(-0.5 * torch.arange(EXPERTS))
    return torch.multinomial(popularity.expand(tokens, -1), 2, generator=generator)


def train(comm, folder, *, reentrant=None, layers=2, steps=STEPS, between=None, **options):
    example = Example(
        [40] * comm.size, experts=EXPERTS, ids=[ids_of(r, 0) for r in range(comm.size)]
    )
    balancer = Balancer._with_settings(comm, record=folder, **{"experts": EXPERTS} | options)
    stack = [example.layer(balancer) for _ in range(layers)]
    digests, sent = [], []
    for step in range(steps):
        if between is not None:
            between(balancer, step)
        x = example.inputs[comm.rank].clone().requires_grad_()
        for layer in stack:
            layer.router.ids = ids_of(comm.rank, step)
            y = layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant)
            digests.append(layer.last_plan.digest())
            sent.append(reroute(layer.router.ids, layer.last_plan, comm.rank).slots)
            x = x + y
        x.sum().backward()
    balancer.close()
    return digests, sent, balancer


def stages_of(trace):
    used = trace.seconds.sum(axis=(0, 1)) > 0
    return {name for name, there in zip(trace.header.stages, used, strict=True) if there}


@pytest.mark.parametrize("policy", ["ultraep", "registered"])
def test_the_trace_holds_planned_loads_and_counted_rows(tmp_path, policy):
    ranks = LocalGroup(4).run(lambda comm: train(comm, tmp_path / "run", policy=policy))
    trace = read_trace(tmp_path / "run")
    assert (len(trace), trace.dropped, trace.left_out) == (2 * STEPS, 0, 0)
    assert list(zip(trace.step.tolist(), trace.layer.tolist(), strict=True)) == [
        (step, layer) for step in range(STEPS) for layer in range(2)
    ]
    assert trace.microbatch.tolist() == [0] * len(trace)
    assert trace.policy.tolist() == [policy] * len(trace)
    slots = int(trace.topology.first_slot_of_rank[-1])
    for record in range(len(trace)):
        plan = trace.plan(record)
        assert plan.digest() == ranks[0][0][record]
        assert plan.num_replicas > 0
        plan.check(plan.loads)
        counted = sum(
            np.bincount(sent[record].reshape(-1), minlength=slots) for _, sent, _ in ranks
        )
        assert trace.slot_rows[record].tolist() == counted.tolist()
        assert trace.rank_loads[record].tolist() == plan.rank_loads.tolist()
        for rank in range(4):
            own = ultraep.count_loads(ids_of(rank, record // 2), EXPERTS)
            assert trace.loads[record, rank].tolist() == own.tolist()
    assert differing(trace) == []
    assert stages_of(trace) == FORWARD_STAGES | BACKWARD_STAGES
    assert (trace.seconds >= 0).all()
    assert (trace.back_began > trace.began).all()
    moved = [rank[2].stats() for rank in ranks]
    assert trace.bytes_moved.sum(axis=0).tolist() == [
        stats["weights_bytes_sent"] + stats["gradients_bytes_sent"] for stats in moved
    ]


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_recomputed_layers_count_once(tmp_path, reentrant):
    homes = [0, 1, 2] * 2 + [0, 1]
    once = LocalGroup(3).run(lambda comm: train(comm, tmp_path / "once", experts=homes))
    options = {"reentrant": reentrant, "experts": homes}
    LocalGroup(3).run(lambda comm: train(comm, tmp_path / "again", **options))
    trace = read_trace(tmp_path / "again")
    assert (len(trace), trace.dropped, trace.left_out) == (2 * STEPS, 0, 0)
    assert [trace.plan(n).digest() for n in range(len(trace))] == once[0][0]
    assert stages_of(trace) == FORWARD_STAGES | {"recompute"} | BACKWARD_STAGES
    again = trace.header.stages.index("recompute")
    assert (trace.seconds[:, :, again] > 0).all()
    assert not read_trace(tmp_path / "once").seconds[:, :, again].any()


def test_recording_does_not_change_outputs(tmp_path):
    example = Example([20, 5, 30, 10], dtype=torch.float32, bias=True)
    plain, recorded = (on_ranks(example, slots=2, **o) for o in ({}, {"record": tmp_path / "run"}))
    for actual, expected in zip(recorded, plain, strict=True):
        assert torch.equal(actual.output, expected.output)
        for name, gradient in expected.gradients.items():
            assert torch.equal(actual.gradients[name], gradient), name


@pytest.mark.parametrize("learns", ["nothing", "weights"])
def test_only_passes_that_run_are_recorded(tmp_path, learns):
    example = Example([20] * 2)

    def work(comm):
        balancer = Balancer(comm, experts=8, record=tmp_path / "run")
        layer = example.layer(balancer)
        layer.router.requires_grad_(False)
        with torch.inference_mode(learns == "nothing"):
            for _ in range(3):
                output = layer(example.inputs[comm.rank])
                if learns == "weights":
                    output.sum().backward()
        balancer.close()

    LocalGroup(2).run(work)
    trace, stages = read_trace(tmp_path / "run"), set(FORWARD_STAGES)
    if learns == "weights":
        stages |= BACKWARD_STAGES - {"dispatch back"}
    assert trace.step.tolist() == [0, 1, 2]
    assert stages_of(trace) == stages
    assert np.isnan(trace.back_began).all() == (learns == "nothing")


def test_record_step_sets_the_step(tmp_path):
    def set_step(balancer, step):
        balancer.record_step(10 + step // 2)

    LocalGroup(2).run(lambda comm: train(comm, tmp_path / "run", between=set_step))
    trace = read_trace(tmp_path / "run")
    assert trace.of_layer(0).step.tolist() == [10, 10, 11, 11]
    assert trace.of_layer(1).microbatch.tolist() == [0, 1, 0, 1]
    assert trace.by_layer().shape[:2] == (4, 2)
    assert differing(trace) == []


def test_a_caller_that_dispatches_rows_itself_adds_its_own_records(tmp_path):
    balancer = Balancer("alone", experts=8, record=tmp_path / "run")
    weights = {"w": torch.randn(8, 4)}
    microbatch, plan = planned(balancer, ids_of(0, 0), weights)
    replicas = microbatch.replicate()
    with replicas:
        microbatch.reroute()
    replicas.gradient_slots({"w": ((4,), torch.float32)})
    replicas.reduce({"w": torch.zeros(8, 4)})
    rows = [*plan.loads[0].tolist(), 0]
    balancer.recorder.add(step=0, plan=plan, slot_rows=rows, seconds={"experts": 0.1})
    balancer.close()
    trace = read_trace(tmp_path / "run")
    assert trace.slot_rows.tolist() == [rows]


def test_the_environment_turns_it_on_for_every_balancer(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "traces"))
    for _ in range(2):
        LocalGroup(2).run(lambda comm: train(comm, None, steps=1))
    LocalGroup(2).run(lambda comm: train(comm, tmp_path / "named", steps=2))
    names = sorted(path.name for path in (tmp_path / "traces").iterdir())
    assert names == ["0000", "0001"]
    assert [len(read_trace(tmp_path / "traces" / name)) for name in names] == [2, 2]
    assert len(read_trace(tmp_path / "named")) == 4


def test_recording_on_some_ranks_only_is_an_error_on_all(tmp_path):
    def work(comm):
        with pytest.raises(PlanMismatch, match=r"settings.*record nothing.*record in") as caught:
            Balancer(comm, experts=8, record=tmp_path if comm.rank == 1 else None)
        return str(caught.value)

    assert len(set(LocalGroup(4).run(work))) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["file", "held", "inside a file"])
def test_a_folder_that_cannot_be_used_is_an_error_on_all_before_the_run(
    tmp_path, monkeypatch, place
):
    folder = tmp_path / "run"
    if place == "held":
        LocalGroup(2).run(lambda comm: train(comm, folder, steps=1))
    else:
        folder.write_text("")
    if place == "inside a file":
        monkeypatch.setenv(VARIABLE, str(folder / "traces"))

    def work(comm):
        record = None if place == "inside a file" else folder
        with pytest.raises(FileError, match=r"rank 0: cannot record: .*run") as caught:
            Balancer(comm, experts=8, record=record)
        return str(caught.value)

    assert len(set(LocalGroup(2).run(work))) == 1
