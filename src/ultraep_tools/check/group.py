"""Level 2: the ranks that torchrun started, part by part.

Every rank runs a part and reports what it found through the `Meeting`; `judge` makes one finding of
the facts of all ranks, the same on every rank.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from ultraep.comm import Communicator
from ultraep.errors import CommunicationError
from ultraep.runtime.connect import connect, find_fast_links
from ultraep.runtime.hosts import FastLinks, Host, this_gpu_host
from ultraep_tools.check import links
from ultraep_tools.check.host import check_host, gpu_states, uuid_of, versions
from ultraep_tools.check.meeting import Meeting
from ultraep_tools.check.report import Finding, listed_by_rank, named, one_line
from ultraep_tools.launch.processes import RankPlace
from ultraep_tools.report.words import counted

Facts = dict[str, Any]
SAME = ("ultraep", "python", "torch", "triton", "cuda", "rocm", "nccl")  # versions
COMPARED = ("NCCL_", "GLOO_", "TORCH_", "ULTRAEP_", "OMP_NUM_THREADS", "CUDA_LAUNCH_BLOCKING")
COMPILING = 5  # timeouts that ranks wait for a host that compiles
PRODUCT = {"cpu": (512, torch.float32), "cuda": (8192, torch.bfloat16)}  # width of a square product
PRODUCTS = 10  # the first half is not timed
SLOW_RANK = {"cpu": 0.6, "cuda": 0.87}  # of the median speed; cores are shared with other programs


@dataclass
class Ranks:
    """A rank in its group, as the parts find it.

    shared: ranks share a GPU, so messages go through the host.
    """

    place: RankPlace
    meeting: Meeting
    device: torch.device
    shared: bool = False
    group: dist.ProcessGroup | None = None
    comm: Communicator | None = None
    domain: int = 1

    @property
    def connected(self) -> Communicator:
        assert self.comm is not None, "the part that connects the ranks comes first"
        return self.comm


@contextmanager
def group_of(place: RankPlace, timeout: float) -> Iterator[Ranks]:
    """Yield a rank with its device and the store of the launcher; leave its group at the end."""
    ranks, own = Ranks(place, Meeting(place, timeout), torch.device("cpu")), ""
    if torch.cuda.is_available():
        ranks.device = torch.device("cuda", place.local % torch.cuda.device_count())
        torch.cuda.set_device(ranks.device)
        own = uuid_of(ranks.device.index)
    gpus = [uuid for uuid in ranks.meeting.gather("start", own) if uuid]
    ranks.shared = len(set(gpus)) < len(gpus)
    if ranks.shared:
        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    try:
        yield ranks
    finally:
        if ranks.comm is not None:
            ranks.comm.close()
        if ranks.group is not None:
            dist.destroy_process_group()


class Part(NamedTuple):
    """A part of the check: what a rank finds, and what follows from the facts of all ranks.

    patience: how many timeouts the fastest rank waits for the slowest one.
    """

    name: str
    run: Callable[[Ranks], Facts]
    judge: Callable[[Sequence[Facts]], Finding]
    patience: int = 1


def run_part(part: Part, ranks: Ranks) -> Finding:
    """Run a part on this rank, and return the finding of all ranks; collective.

    Raises if a rank does not come: then no further part is possible.
    """
    begin, facts, cause, symptom = time.perf_counter(), Facts(), "", ""
    try:
        facts = part.run(ranks)
    except CommunicationError as failure:  # names ranks; most often, another rank failed
        symptom = one_line(failure)
    except Exception as failure:  # noqa: BLE001  every error is a finding
        cause = one_line(failure)
    gathered = ranks.meeting.gather(part.name, (facts, cause, symptom), part.patience)
    own, causes, symptoms = zip(*gathered, strict=True)
    problems = [*listed_by_rank(causes), *filter(None, dict.fromkeys(symptoms))]
    finding = Finding(part.name, "failed", problems) if problems else part.judge(own)
    finding.seconds = time.perf_counter() - begin
    return finding


# -- hosts, versions and settings ----------------------------------------------------------------


def host(ranks: Ranks) -> Facts:
    """Check the host, on its first rank."""
    findings = [] if ranks.place.local else check_host(lambda _: None)
    return {"host": socket.gethostname(), "findings": [asdict(finding) for finding in findings]}


def judge_hosts(facts: Sequence[Facts]) -> Finding:
    hosts = {own["host"]: own["findings"] for own in facts if own["findings"]}
    parts = [(name, part) for name, findings in hosts.items() for part in findings]
    first = {part["part"]: part["summary"] for part in next(iter(hosts.values()))}
    finding = Finding(
        "hosts", f"{counted(len(hosts), 'host')}: {first['GPUs']}; {first['kernels']}"
    )
    for field in ("problems", "warnings", "notes"):
        setattr(finding, field, [f"{name}: {text}" for name, part in parts for text in part[field]])
    finding.facts = {"hosts": hosts}
    return finding


def settings(_: Ranks) -> Facts:
    """Return the versions of this rank, and its variables that change how ranks communicate."""
    variables = {name: text for name, text in os.environ.items() if name.startswith(COMPARED)}
    return {"versions": versions().facts, "variables": variables}


def judge_settings(facts: Sequence[Facts]) -> Finding:
    all_versions, variables = ([own[name] for own in facts] for name in ("versions", "variables"))
    finding = Finding("versions", f"equal on {counted(len(facts), 'rank')}")
    finding.facts = {"ranks": list(facts)}
    finding.problems += _differences(SAME, all_versions, "has")
    names = sorted({name for own in variables for name in own})
    finding.warnings += _differences(names, variables, "sets")
    return finding


def _differences(names: Sequence[str], values: Sequence[Facts], verb: str) -> Iterator[str]:
    """Yield which ranks have another value than most."""
    for name in names:
        own = [str(of_rank.get(name)) for of_rank in values]
        usual = max(own, key=own.count)
        for other in sorted(set(own) - {usual}):
            ranks = [rank for rank, value in enumerate(own) if value == other]
            yield f"{named(ranks)} {verb} {name} {other}, the others {usual}"


# -- domains, memory and messages ----------------------------------------------------------------


def domains(ranks: Ranks) -> Facts:
    """Connect the process group, and find out which ranks a fast link joins."""
    over_gpus = ranks.device.type == "cuda" and not ranks.shared
    place, timeout = ranks.place, ranks.meeting.timeout
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if over_gpus else "gloo",
        store=PrefixStore("group", ranks.meeting.store),
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=timeout),
    )
    ranks.group = dist.group.WORLD
    ranks.comm = connect(ranks.group, timeout=timeout)
    found: FastLinks = find_fast_links(ranks.comm)
    ranks.domain = found.domain
    hosts = ranks.comm.gather_objects(this_gpu_host())
    return {"reason": found.reason, "obstacles": obstacles(hosts), "shared": ranks.shared}


def obstacles(hosts: Sequence[Host]) -> list[str]:
    """Return why ranks that could share memory do not."""
    reasons = []
    systems: dict[str, Host] = {}
    for rank, own in enumerate(hosts):
        if own.obstacle:
            reasons.append(f"rank {rank}: its GPU has an NVLink fabric, but {own.obstacle}")
        first = systems.setdefault(own.place[0] if own.place else own.name, own)
        if first.place != own.place:
            reasons.append(
                f"rank {rank}: in another container than {first.name} of the same machine; start "
                "both with the same IPC and PID namespaces"
            )
    return reasons


def judge_domains(facts: Sequence[Facts]) -> Finding:
    finding = Finding("domains", facts[0]["reason"], notes=facts[0]["obstacles"], facts=facts[0])
    if facts[0]["shared"]:
        finding.notes.append(
            f"{counted(len(facts), 'rank')} share GPUs: times say nothing about as many GPUs"
        )
    return finding


def mapped_memory(ranks: Ranks) -> Facts:
    """Try the memory that the GPUs of a domain map."""
    comm = ranks.connected
    if ranks.device.type == "cpu":
        return {"mapped": False}
    domain = comm if ranks.domain == comm.size else comm.part(ranks.domain)
    first = comm.rank - domain.rank
    tried = links.try_mapped_memory(domain, ranks.device, first)
    return {"mapped": True, "first": first, **tried}


def judge_mapped_memory(facts: Sequence[Facts]) -> Finding:
    if not facts[0]["mapped"]:
        return Finding("mapped memory", "ranks on CPUs exchange messages", facts=facts[0])
    pairs = {
        (rank, own["first"] + peer): rate
        for rank, own in enumerate(facts)
        for peer, rate in enumerate(own["rates"])
    }
    finding = links.judge_pairs("mapped memory", "right, copies", pairs, len(facts))
    wrong = [[own["first"] + peer for peer in own["wrong"]] for own in facts]
    finding.problems = links.wrong_memory(wrong)
    finding.facts["mapped"] = True
    return finding


def messages(ranks: Ranks) -> Facts:
    """Time messages between ranks. gloo cannot send every tensor of a GPU, so it sends none."""
    device = torch.device("cpu") if ranks.shared else ranks.device
    return {"rates": links.time_messages(ranks.connected, device)}


def judge_messages(facts: Sequence[Facts]) -> Finding:
    rates = {
        (rank, peer): rate
        for rank, own in enumerate(facts)
        for peer, rate in enumerate(own["rates"])
    }
    return links.judge_pairs("messages", "arrive", rates, len(facts))


# -- speed ---------------------------------------------------------------------------------------


def speed(ranks: Ranks) -> Facts:
    """Time one product, on all ranks at the same time."""
    device = ranks.device
    width, dtype = PRODUCT[device.type]
    left, right = (torch.randn(width, width, dtype=dtype, device=device) for _ in range(2))
    product = lambda: torch.mm(left, right)  # noqa: E731
    seconds = links.seconds_of(product, ranks.connected, device, PRODUCTS)[PRODUCTS // 2 :]
    state = gpu_states().get(device.index, {}) if device.type == "cuda" else {}
    return {"flops": 2 * width**3 / median(seconds), "state": state, "device": device.type}


def judge_speed(facts: Sequence[Facts]) -> Finding:
    usual = median(own["flops"] for own in facts)
    finding = Finding("speed", f"{usual / 1e12:.3g} TFLOP/s on every rank")
    finding.facts = {"ranks": list(facts)}
    for rank, own in enumerate(facts):
        if own["flops"] < SLOW_RANK[own["device"]] * usual:
            share = own["flops"] / usual
            text = f"rank {rank} computes at {share:.0%} of the median speed"
            finding.warnings.append(text + _clock(own["state"]))
    return finding


def _clock(state: Mapping[str, str]) -> str:
    if not state:
        return ""
    clocks = f"{state['clocks.sm']} of {state['clocks.max.sm']} MHz"
    return f" ({clocks}, {state['temperature.gpu']} C)"


PARTS = (
    Part("hosts", host, judge_hosts, COMPILING),
    Part("versions", settings, judge_settings),
    Part("domains", domains, judge_domains),
    Part("mapped memory", mapped_memory, judge_mapped_memory),
    Part("messages", messages, judge_messages),
    Part("speed", speed, judge_speed),
)
