"""Level 2: the ranks that torchrun started, part by part.

Every rank runs a part and reports what it found through the `Meeting`; `judge` makes one finding of
the facts of all ranks, the same on every rank.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from ultraep.comm import Communicator
from ultraep.errors import CommunicationError
from ultraep.runtime.connect import connect, find_fast_links
from ultraep.runtime.hosts import Host, this_gpu_host
from ultraep_tools.check import links
from ultraep_tools.check.host import check_host, gpu_states, uuid_of, versions
from ultraep_tools.check.meeting import Meeting
from ultraep_tools.check.report import Finding, grouped, listed, one_line
from ultraep_tools.launch.processes import RankPlace
from ultraep_tools.report.words import counted

Facts = dict[str, Any]
SAME = ("ultraep", "python", "torch", "triton", "cuda", "rocm", "nccl", "device")
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
    started = ranks.meeting.gather("start", (socket.gethostname(), own))
    ranks.meeting.hosts = [name for name, _ in started]
    gpus = [uuid for _, uuid in started if uuid]
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
    named = [(f"rank {rank}", text) for rank, text in enumerate(causes) if text]
    if len(named) > 1 and len(set(causes)) == 1:
        named = [("all ranks", causes[0])]
    problems = [*grouped(named), *filter(None, dict.fromkeys(symptoms))]
    finding = Finding(part.name, "", problems) if problems else part.judge(own)
    for texts in (finding.problems, finding.warnings, finding.notes):
        texts[:] = map(ranks.meeting.with_hosts, texts)
    finding.seconds = time.perf_counter() - begin
    return finding


# -- hosts, versions and settings ----------------------------------------------------------------


def host(ranks: Ranks) -> Facts:
    """Check the host, on its first rank."""
    findings = [] if ranks.place.local else check_host(lambda _: None)
    host = ranks.meeting.hosts[ranks.place.rank]
    return {"host": host, "findings": [asdict(finding) for finding in findings]}


def judge_hosts(facts: Sequence[Facts]) -> Finding:
    hosts = {own["host"]: own["findings"] for own in facts if own["findings"]}
    parts = [(name, part) for name, findings in hosts.items() for part in findings]
    shown = [part["summary"] for _, part in parts if part["part"] in ("GPUs", "kernels")]
    finding = Finding("hosts", facts={"hosts": hosts})
    finding.summary = f"{counted(len(hosts), 'host')}: {'; '.join(shown[:2])}"
    for field in ("problems", "warnings", "notes"):
        texts = [(name, text) for name, part in parts for text in part[field]]
        setattr(finding, field, grouped(texts))
    return finding


def settings(ranks: Ranks) -> Facts:
    """Return the versions of this rank, and its variables that change how ranks communicate."""
    variables = {name: text for name, text in os.environ.items() if name.startswith(COMPARED)}
    own = versions().facts | {"device": ranks.device.type}
    return {"versions": own, "variables": variables}


def judge_settings(facts: Sequence[Facts]) -> Finding:
    finding = Finding("versions", f"equal on {counted(len(facts), 'rank')}")
    finding.facts = {"ranks": list(facts)}
    finding.problems = grouped(_differences(SAME, [own["versions"] for own in facts]))
    variables = [own["variables"] for own in facts]
    finding.warnings = grouped(_differences(sorted(set().union(*variables)), variables))
    return finding


def _differences(names: Iterable[str], facts: Sequence[Facts]) -> Iterator[tuple[str, str]]:
    """Yield every rank that has another value than most, with both values."""
    for name in names:
        values = [str(own.get(name)) for own in facts]
        usual = max(values, key=values.count)
        for rank, value in enumerate(values):
            if value != usual:
                yield f"rank {rank}", f"{name} {value}, the others {usual}"


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
    links = find_fast_links(ranks.comm)
    ranks.domain = links.domain
    hosts = ranks.comm.gather_objects(this_gpu_host())
    return {"reason": links.reason, "obstacles": obstacles(hosts), "shared": ranks.shared}


def obstacles(hosts: Sequence[Host]) -> list[str]:
    """Return why ranks that could share memory do not."""
    reasons = []
    systems: dict[str, Host] = {}
    for rank, own in enumerate(hosts):
        if own.obstacle:
            text = f"its GPU has an NVLink fabric, but {own.obstacle}"
            reasons.append((f"rank {rank}", text))
        first = systems.setdefault(own.place[0] if own.place else own.name, own)
        if first.place != own.place:
            text = (
                f"in another container than {first.name} of the same machine; start both with the "
                "same IPC and PID namespaces"
            )
            reasons.append((f"rank {rank}", text))
    return grouped(reasons)


def judge_domains(facts: Sequence[Facts]) -> Finding:
    finding = Finding("domains", facts[0]["reason"], notes=facts[0]["obstacles"], facts=facts[0])
    if facts[0]["shared"]:
        finding.notes.append("ranks share GPUs: times say nothing about as many GPUs")
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
        return Finding("mapped memory", "none: ranks on CPUs exchange messages", facts=facts[0])
    finding = links.judge_rates("mapped memory", "right, copies", facts)
    for rank, own in enumerate(facts):
        peers = [f"rank {own['first'] + peer}" for peer in own["wrong"]]
        if peers:
            text = f"rank {rank} reads wrong values from the memory of {listed(peers)}"
            finding.problems.append(text)
    finding.facts["mapped"] = True
    return finding


def messages(ranks: Ranks) -> Facts:
    """Time messages between ranks. gloo cannot send every tensor of a GPU, so it sends none."""
    device = torch.device("cpu") if ranks.shared else ranks.device
    return {"rates": links.message_rates(ranks.connected, device)}


# -- speed ---------------------------------------------------------------------------------------


def speed(ranks: Ranks) -> Facts:
    """Time one product, on all ranks at the same time."""
    device = ranks.device
    width, dtype = PRODUCT[device.type]
    left, right = (torch.randn(width, width, dtype=dtype, device=device) for _ in range(2))
    product = partial(torch.mm, left, right)
    seconds = links.seconds_of(product, ranks.connected, device, PRODUCTS)[PRODUCTS // 2 :]
    state = gpu_states().get(device.index, {}) if device.type == "cuda" else {}
    return {"flops": 2 * width**3 / median(seconds), "state": state, "device": device.type}


def judge_speed(facts: Sequence[Facts]) -> Finding:
    usual = median(own["flops"] for own in facts)
    finding = Finding("speed", f"median of the ranks {links.digits(usual / 1e9)} GFLOP/s")
    finding.facts = {"ranks": list(facts)}
    for rank, own in enumerate(facts):
        share, state = own["flops"] / usual, own["state"]
        if share < SLOW_RANK[own["device"]]:
            text = f"rank {rank} computes at {100 * share:.0f} % of the median speed"
            if state:
                text += f" ({state['clocks.sm']} of {state['clocks.max.sm']} MHz"
                text += f", {state['temperature.gpu']} C)"
            finding.warnings.append(text)
    return finding


PARTS = (
    Part("hosts", host, judge_hosts, COMPILING),
    Part("versions", settings, judge_settings),
    Part("domains", domains, judge_domains),
    Part("mapped memory", mapped_memory, judge_mapped_memory),
    Part("messages", messages, partial(links.judge_rates, "messages", "arrive")),
    Part("speed", speed, judge_speed),
)
