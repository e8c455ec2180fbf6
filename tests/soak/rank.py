"""The process of one rank of a soak run.

A rank reports to its supervisor through a pipe: `Fired` when its fault happens, then `RankEnd`.
"""

import ctypes
import faulthandler
import gc
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from shared_peers import FilePeers
from simulated_hosts import LINK
from soak.inject import PLANNER, Injector
from soak.jobs import FLIGHT, Fired, Job, Sample, shared_files, time_limit
from soak.outcomes import RankEnd
from soak.schedule import OF_KERNELS, Fault
from soak.training import Case, Training, Watch

from ultraep import Balancer, LocalGroup
from ultraep.runtime.connect import connect
from ultraep.runtime.hosts import this_host
from ultraep.runtime.mapped.peers import SymmetricPeers

JOIN = 120.0  # seconds for all ranks to join; a busy machine is slow to start processes
ACKNOWLEDGED = 30.0  # seconds for the supervisor to act
FEW_STEPS, STEPS = 3, 4  # few: kernels run in Triton's interpreter
STORE = ("10.77.0.1", 29500)  # on the first simulated host
DIE_WITH_PARENT = 1  # option of prctl
OPTIONS = {  # of the balancers, by data plane
    "messages": {"data_plane": "messages"},
    "kernels": {"data_plane": "messages", "kernels": True},
    "mapped": {"data_plane": "mapped"},
    "hybrid": {"data_plane": "hybrid", "domain": 2},
    "hosts": {},
}


def run_rank(job: Job, pipe: Connection) -> None:
    os.setsid()  # so that the supervisor finds the children of this process
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    torch.set_num_threads(1)  # renews the thread pool of the server, before threads race to do so
    log = (job.folder / f"rank{job.rank}.log").open("w")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    if job.fault is not None:
        faulthandler.dump_traceback_later(time_limit(job.device) - 15, file=log)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if job.host is None else LINK
    os.environ["ULTRAEP_FLIGHT"] = str(job.folder / FLIGHT)
    if job.host is not None:
        job.host.enter()
        this_host.cache_clear()  # the server may have asked
    if job.device == "cuda":
        torch.cuda.set_device(0)
    warnings.simplefilter("ignore")
    with suppress(BaseException):  # every rank has reported its error
        if job.fault is not None and job.fault.plane == "in-process":
            _threads(job, job.fault, pipe)
        else:
            with _reported(job.rank, pipe.send):
                _process(job, job.fault, pipe) if job.fault else _steady(job, pipe)
    gc.collect()  # communicators in tracebacks
    if dist.is_initialized():
        dist.destroy_process_group()  # as a program does that ends, whether by an error or not


@contextmanager
def _reported(rank: int, send: Callable[[RankEnd], None]) -> Iterator[None]:
    """Report how the block ended, whatever the error is."""
    try:
        yield
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)  # as at the end of a program
        message = " ".join(str(error).split())
        named = tuple(getattr(error, "ranks", ())), getattr(error, "place", "")
        send(RankEnd(rank, type(error).__name__, message, *named))
        raise
    send(RankEnd(rank))


def _process(job: Job, fault: Fault, pipe: Connection) -> None:

    def fire() -> None:
        pipe.send(Fired(job.rank))
        pipe.poll(ACKNOWLEDGED)

    group = join(job)
    injector, case = Injector(fault, job.rank, fault.delay * job.timeout, fire), case_of(fault)
    with balancer_of(fault.plane, group, job, case) as balancer:
        injector.attach(balancer)
        Training(case, balancer, injector, job.device).run()


def _threads(job: Job, fault: Fault, pipe: Connection) -> None:
    lock, case = threading.Lock(), case_of(fault)
    record = job.folder / "trace" if fault.kind == "full disk" else None

    def send(message: Any) -> None:
        with lock:
            pipe.send(message)

    def work(comm: Any) -> None:
        with _reported(comm.rank, send):
            delay = fault.delay * job.timeout
            injector = Injector(fault, comm.rank, delay, lambda: send(Fired(comm.rank)))
            balancer = make_balancer(comm, case, record=record)
            injector.attach(balancer)
            Training(case, balancer, injector).run()

    LocalGroup(fault.ranks, timeout=job.timeout).run(work)


# -- groups and balancers ------------------------------------------------------------------------


def join(job: Job) -> dist.ProcessGroup:
    """Join the group of all ranks; return when all ranks have joined."""
    limit = timedelta(seconds=JOIN)
    if job.host is None:
        store = dist.FileStore(str(job.folder / "store"), job.size)
    else:  # rank 0 hosts the store, and may die with it
        store = dist.TCPStore(
            *STORE, is_master=job.rank == 0, wait_for_workers=False, timeout=limit
        )
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.size, timeout=limit)
    if store.add("joined", 1) == job.size:
        store.set("all joined", "yes")
    store.wait(["all joined"], limit)
    return dist.group.WORLD


def case_of(fault: Fault) -> Case:
    """Return the model and sizes of the run that a fault hits."""
    case = Case(fault.ranks, fault.seed, FEW_STEPS if fault.plane in OF_KERNELS else STEPS)
    if fault.kind == "planner":
        case.policy = PLANNER
    case.recompute &= fault.kind != "device"  # recomputed ids would be right
    case.own_network |= fault.kind == "network"
    return case


def make_balancer(comm: Any, case: Case, **options: Any) -> Balancer:
    return Balancer._with_settings(comm, config=case.config, **case.options, **options)


@contextmanager
def balancer_of(plane: str, group: dist.ProcessGroup, job: Job, case: Case) -> Iterator[Balancer]:
    """Yield a balancer of this plane; after an error it is not closed, as in most programs."""
    comm, options = None, dict(OPTIONS[plane])
    if plane == "mapped":
        options["capacity"] = case.capacity
        if job.device == "cuda":
            options["peers"] = SymmetricPeers(group, device="cuda:0")
        else:
            comm = connect(group, timeout=job.timeout)
            options["peers"] = FilePeers(comm)
    balancer = make_balancer(group, case, timeout=job.timeout, **options)
    yield balancer
    balancer.close()
    if comm is not None:
        comm.close()


# -- runs without faults -------------------------------------------------------------------------


def _steady(job: Job, pipe: Connection) -> None:
    """Train one random case after the other, on all planes, until the supervisor says stop."""
    group = join(job)
    for number in count():
        plane = job.planes[number % len(job.planes)]
        steps = FEW_STEPS if plane in OF_KERNELS else STEPS
        case = Case(job.size, job.seed * 7919 + number, steps)
        with balancer_of(plane, group, job, case) as balancer:
            Training(case, balancer, Watch(), job.device).run()
            balancer.stats()
        gc.collect()
        pipe.send(Sample(job.rank, resources()))
        stopped = [None] * job.size
        dist.all_gather_object(stopped, pipe.poll(0))
        if any(stopped):
            return


def resources() -> dict[str, float]:
    """Return what this process holds: memory in MiB, and numbers of things."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    pid = os.getpid()
    children = Path(f"/proc/self/task/{pid}/children").read_text().split()
    held = {
        "rss": int(status["VmRSS"].split()[0]) / 1024,
        "handles": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
        "shared memory": len(shared_files([pid])),
        "children": len(children),
    }
    if torch.cuda.is_initialized():
        held["gpu"] = torch.cuda.memory_reserved() / (1 << 20)
    return held
