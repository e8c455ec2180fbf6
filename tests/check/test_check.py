"""`ultraep check` on one host and on two real ranks; injected faults are named in its verdict."""

import json
import os
import re
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import simulated_hosts
import torch
import warm
from cli.commands import invoke
from dispatchers import stand_ins
from permuting import Shuffling
from shared_peers import FilePeers

from ultraep.errors import FileError
from ultraep.runtime.connect import connect
from ultraep_tools.check import group, host, layer, links, size
from ultraep_tools.check import run as run_module
from ultraep_tools.check.report import Finding, Report
from ultraep_tools.check.size import LayerSize

TIMEOUT = 8.0  # seconds that ranks wait for each other
LIMIT = 240.0  # of a run on a busy machine
SMALL = ("--hidden", "32", "--ffn", "64", "--experts", "8", "--top-k", "2", "--tokens", "64")


def check(folder, options=(), fault=None, start=warm.start_ranks, act=lambda _: None):
    """Run the command on two ranks; return what the first one did, and its JSON.

    act: is called with the running programs.
    """
    path = folder / "check.json"
    words = ["--timeout", f"{TIMEOUT:g}", "--json", str(path), *options]
    programs = start(2, run, words, fault, FOLDER=str(folder))
    act(programs)
    first = programs[0].finish(LIMIT)
    for other in programs[1:]:
        other.finish(0.0 if first.returncode else LIMIT)
    assert path.exists(), first.stdout + first.stderr
    return first, json.loads(path.read_text())


def without_rank_1(count, work, *args, **environment):
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": warm.free_port(), "WORLD_SIZE": str(count)}
    return [warm.Program(work, *args, **environment, **own, RANK="0", LOCAL_RANK="0")]


@contextmanager
def two_hosts(mbit):
    """Yield two simulated hosts, and a function that starts two ranks on each of them."""
    if reason := simulated_hosts.obstacle():
        pytest.skip(reason)
    with simulated_hosts.hosts(2, mbit, "c") as hosts:
        group = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29400", "WORLD_SIZE": "4"}
        group["GLOO_SOCKET_IFNAME"] = simulated_hosts.LINK

        def start(_, *args, **environment):
            return [
                warm.Program(
                    *(on_host, hosts[rank // 2], *args),
                    **(group | environment),
                    RANK=str(rank),
                    LOCAL_RANK=str(rank % 2),
                )
                for rank in range(4)
            ]

        yield hosts, start


def on_host(host, work, *args):
    host.enter()
    work(*args)


def run(words, fault):
    from ultraep_tools.__main__ import main

    if fault is not None and (os.environ.get("RANK") == "1" or fault in EVERYWHERE):
        FAULTS[fault]()
    sys.argv = ["ultraep", "check", *words]
    main()


# -- faults --------------------------------------------------------------------------------------


def replace_part(name, run_instead):
    group.PARTS = tuple(
        part._replace(run=run_instead) if part.name == name else part for part in group.PARTS
    )


def hang():
    replace_part("messages", lambda _: time.sleep(4 * TIMEOUT))


def die():
    replace_part("messages", lambda _: os._exit(3))


def unplugged():
    """Wait until the test has unplugged a cable."""

    def run_part(ranks):
        while not Path(os.environ["FOLDER"], "unplugged").exists():
            time.sleep(0.05)
        return group.messages(ranks)

    replace_part("messages", run_part)


def other_version():
    versions = group.versions

    def older():
        finding = versions()
        finding.facts["torch"] = "2.0.0"
        return finding

    group.versions = older


def slow():
    product = torch.mm

    def eight_times(*factors):
        return [product(*factors) for _ in range(8)]

    torch.mm = eight_times


def unmapped():
    replace_part("mapped memory", lambda ranks: mapped(ranks, broken=ranks.place.rank == 1))


def stale():
    replace_part("mapped memory", lambda ranks: mapped(ranks, stale=ranks.place.rank == 1))


def mapped(ranks, *, broken=False, stale=False):
    """Try memory that processes map through files, in place of the memory of GPUs."""

    class Peers(FilePeers):
        def allocate(self, name, nbytes):
            region = super().allocate(name, nbytes)

            def get_buffer(rank, sizes, dtype):
                if broken:
                    raise RuntimeError(f"no access to rank {rank}")
                memory = region.handle[rank]
                return (memory.clone() if stale else memory).view(dtype)[: sizes[0]]

            return replace(region, handle=SimpleNamespace(get_buffer=get_buffer))

    comm = ranks.connected
    comm.peers = lambda _: Peers(comm)
    return {"mapped": True, "first": 0, **links.try_mapped_memory(comm, ranks.device)}


def good_memory():
    replace_part("mapped memory", mapped)


def broken_host():
    name = f"node{os.environ['SLURM_PROCID']}"
    run_module.socket.gethostname = lambda: name
    host.kernels = lambda: Finding("kernels", problems=["no kernel image"])
    os.chdir(os.environ["FOLDER"])


def deep_ep(buffer=stand_ins.ElasticBuffer):
    """Pretend that DeepEP is installed, and serves CPU ranks."""
    module = sys.modules["deep_ep"] = ModuleType("deep_ep")
    module.__version__ = "2.1.0"
    module.ElasticBuffer = lambda process_group, hidden, num_topk, **options: buffer(
        connect(process_group), **options
    )
    layer.DTYPES["cpu"], layer.LIMITS["cpu"] = torch.bfloat16, layer.LIMITS["cuda"]


def mixing_deep_ep():
    class Mixing(stand_ins.ElasticBuffer):
        __module__ = stand_ins.ElasticBuffer.__module__

        def _layout(self, *args):
            handle = super()._layout(*args)
            handle._token = handle._token.flip(0)
            return handle

    deep_ep(Mixing)


PARTS = unmapped, stale, good_memory, unplugged, broken_host, deep_ep, mixing_deep_ep
EVERYWHERE = {f.__name__: f for f in PARTS}
FAULTS = EVERYWHERE | {f.__name__: f for f in (hang, die, other_version, slow)}


def mixing(process_group, _):
    """A dispatcher that reverses the rows that arrive."""

    class Mixing(Shuffling):
        def begin(self, routes):
            rows = super().begin(routes)
            rows.sort = rows.sort.flip(0)
            return rows

    return Mixing(connect(process_group))


# -- tests ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        pytest.param(
            "hang", "rank 1 did not come to 'messages' within 8 s", marks=pytest.mark.slow
        ),
        pytest.param("die", "rank 1", marks=pytest.mark.slow),
        ("other_version", "rank 1: torch 2.0.0, the others 2."),
        ("unmapped", "rank 1: cannot map memory with its peers: no access to rank 0"),
        pytest.param("stale", "reads wrong values from the memory of", marks=pytest.mark.slow),
    ],
)
def test_a_fault_is_named_in_the_verdict(fault, named, tmp_path):
    done, found = check(tmp_path, fault=fault)
    assert done.returncode == 1, done.stdout + done.stderr
    assert found["verdict"].startswith("Not ready: ")
    assert named in found["verdict"]
    assert "Not ready: " in done.stdout


@pytest.mark.slow
def test_a_slow_rank_is_named_in_the_verdict(tmp_path):
    done, found = check(tmp_path, fault="slow")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 1 computes at " in found["verdict"]


def test_a_rank_that_never_starts_is_named(tmp_path):
    done, found = check(tmp_path, start=without_rank_1)
    assert done.returncode == 1
    assert "rank 1 did not come to 'start' within 8 s" in found["verdict"]


@pytest.mark.slow
def test_the_slow_link_between_two_hosts_is_named(tmp_path):
    with two_hosts(mbit=400) as (hosts, start):
        hosts[1].limit(40)
        done, found = check(tmp_path, start=start)
    assert done.returncode == 0, done.stdout + done.stderr
    names = [host.name for host in hosts]
    verdict = found["verdict"]
    assert verdict.startswith(f"Ready: messages between 4 CPU ranks on {', '.join(names)}")
    one, other = re.search(
        r"messages from rank . \((.*?)\) to rank . \((.*?)\): 0.0", verdict
    ).groups()
    assert {one, other} == set(names)
    assert f"2 domains of 2 ranks: {'; '.join(names)}" in done.stdout


@pytest.mark.slow
def test_a_host_that_cannot_be_reached_is_named(tmp_path):
    with two_hosts(mbit=400) as (hosts, start):

        def unplug(programs):
            programs[0].wait_for("mapped memory")
            hosts[1].connect(False)
            (tmp_path / "unplugged").touch()

        done, found = check(tmp_path, fault="unplugged", start=start, act=unplug)
    assert done.returncode == 1
    name = hosts[1].name
    assert f"rank 2 ({name}), rank 3 ({name}) did not come to 'messages'" in found["verdict"]


def test_all_levels_run_on_two_ranks(tmp_path):
    done, found = check(tmp_path, ["--level", "3", *SMALL], "good_memory")
    assert done.returncode == 0, done.stdout + done.stderr
    assert found["ready"]
    assert found["verdict"].startswith("Ready: mapped memory on 2 CPU ranks, gain ")
    parts = {finding["part"]: finding for finding in found["findings"]}
    assert list(parts) == [part.name for part in group.PARTS] + ["equal results", "times"]
    assert parts["equal results"]["facts"]["ranks"][0]["replicas"]["one hot expert"] > 0
    times = parts["times"]["facts"]
    assert set(times["gains"]) == {"1.0", "1.5", "2.0"}
    assert times["ranks"][0]["replicas"]["1.0"] == 0
    assert "idle cost " in found["verdict"]
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "Next: " in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dispatcher", "fault", "verdict"),
    [
        ("check.test_check:mixing", None, "Mixing returned wrong sums"),
        ("deepep", "mixing_deep_ep", "rank 0: DeepEP "),
        ("deepep", "deep_ep", "Ready: messages between 2 CPU ranks, gain"),
        ("deepep", None, "Not ready: all ranks: --dispatcher deepep: No module named 'deep_ep'"),
    ],
)
def test_a_dispatcher_that_mixes_up_rows_is_named(dispatcher, fault, verdict, tmp_path):
    options = ["--level", "3", *SMALL, "--hidden", "256", "--dispatcher", dispatcher]
    done, found = check(tmp_path, options, fault)
    assert done.returncode == (not found["verdict"].startswith("Ready: ")), done.stdout
    assert verdict in found["verdict"]


def test_one_host_alone(tmp_path, monkeypatch):
    path, failed = tmp_path / "check.json", tmp_path / "failed"
    done = invoke("check", "--json", str(path), "--failed-hosts", str(failed))
    assert done.exit_code == 0, done.output
    assert f"Ready: host {os.uname().nodename} can run ultraep" in done.stdout
    names = [finding["part"] for finding in json.loads(path.read_text())["findings"]]
    assert names == ["versions", "GPUs", "memory", "kernels", "frameworks"]
    assert not failed.exists()
    broken = Finding("kernels", problems=["a layer on cuda does not run: no kernel image"])
    monkeypatch.setattr(host, "kernels", lambda: broken)
    done = invoke("check", "--failed-hosts", str(failed))
    assert done.exit_code == 1
    assert "Not ready: a layer on cuda does not run: no kernel image" in done.stdout
    assert failed.read_text() == os.uname().nodename + "\n"


def test_failing_hosts_of_a_slurm_job_share_a_file(tmp_path):
    job = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4", "FOLDER": str(tmp_path)}
    programs = [
        warm.Program(run, [], "broken_host", **job, SLURM_PROCID=str(rank)) for rank in range(4)
    ]
    assert [program.finish(LIMIT).returncode for program in programs] == [1] * 4
    lines = (tmp_path / "ultraep-failed-hosts-77.txt").read_text().splitlines()
    assert sorted(lines) == ["node0", "node1", "node2", "node3"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--level 4", "--level must be 1, 2 or 3, got 4"),
        ("--level 2", "torchrun --nproc-per-node 2 -m ultraep check"),
        ("--timeout 0", "--timeout must be positive"),
        ("--tokens 8 --top-k 2", "level 1 runs no layer of your size; remove --top-k and --tokens"),
        ("--from .", "level 1 runs no layer of your size; remove --from"),
    ],
)
def test_wrong_options_are_refused(words, message):
    done = invoke("check", *words.split())
    assert done.exit_code == 2
    assert message in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tokens 0", "tokens must be at least 1, got 0"),
        ("--experts 4 --top-k 5", "top_k 5 is more than the 4 experts"),
        ("--experts 9", "9 experts do not divide evenly over 2 ranks"),
        ("--failed-hosts f", "only level 1 writes failing hosts; remove --failed-hosts"),
    ],
)
def test_wrong_sizes_are_refused_before_ranks_meet(words, message, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    done = invoke("check", "--level", "3", *words.split())
    assert done.exit_code == 2
    assert message in done.stderr


def test_sizes_of_a_checkpoint(tmp_path):
    config = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 16}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config}))
    with pytest.raises(FileError, match=r"has no num_experts_per_tok .*pass --top-k"):
        size.sizes_in(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 4}))
    assert size.sizes_in(tmp_path) == {"hidden": 64, "ffn": 32, "experts": 16, "top_k": 4}


@pytest.mark.parametrize("imbalance", [1.0, 1.5, 2.0, 3.0])
def test_loads_have_the_requested_imbalance(imbalance):
    small = LayerSize(32, 64, 32, 4, 4096)
    ids = torch.cat([layer.ids_of(small, rank, 4, imbalance) for rank in range(4)])
    rows = torch.bincount(ids.flatten() // 8, minlength=4)
    assert float(rows.max() / rows.float().mean()) == pytest.approx(imbalance, rel=0.01)
    assert ids.sort(dim=1).values.diff(dim=1).min() > 0
    loads = torch.bincount(ids.flatten(), minlength=32)
    assert (loads.max() == loads.min()) == (imbalance == 1)


def test_an_imbalance_that_two_ranks_cannot_reach_is_the_largest_one():
    ids = layer.ids_of(LayerSize(32, 64, 8, 2, 64), 0, 2, 2.5)
    assert int(ids.max()) < 4


@pytest.mark.parametrize(
    ("slower", "cost"),
    [(1.01, "below what this run can tell (2.0 %)"), (1.1, "10.0 % (2.0 % either way)")],
)
def test_the_idle_cost_comes_with_a_resolution(slower, cost):
    """A machine that slows down does not change it: rounds are compared with themselves."""
    none = [1.0 + 0.1 * turn for turn in range(12)]
    seconds = {
        layer.NONE: none,
        layer.BALANCED: [slower * second for second in none],
        layer.AGAIN: [0.98 * second for second in none],
    }
    times = dict(zip(("idle_cost", "resolution"), layer.idle_cost(seconds), strict=True))
    assert run_module.idle_text(**times) == f"idle cost {cost}"


def test_the_slowest_pair_is_named():
    rates = [[0.0, 4e9, 4e9], [4e9, 0.0, 4e9], [1e9, 4e9, 0.0]]
    finding = links.judge_rates("messages", "arrive", [{"rates": own} for own in rates])
    assert finding.warnings == ["messages from rank 0 to rank 2: 1 GB/s, median of all pairs 4"]
    assert finding.table[3] == ["rank 2", "1", "4", "-"]


def test_a_throttled_gpu_and_memory_errors_are_named():
    state = dict.fromkeys(host.SMI_FIELDS, "0") | {"clocks.sm": "345"}
    throttled, finding = state | {host.SMI_FIELDS[-1]: "Active"}, Finding("GPUs")
    host._add_state(finding, 3, throttled)
    assert finding.warnings == ["GPU 3 is throttled: 345 of 0 MHz at 0 C"]
    host._add_state(finding, 3, state | {"ecc.errors.uncorrected.volatile.total": "2"})
    assert finding.problems == ["GPU 3 has uncorrected memory errors: reset or replace it"]
    report = Report(1, [finding], "this host can run ultraep")
    assert report.verdict == "Not ready: GPU 3 has uncorrected memory errors: reset or replace it"
