"""The process of one rank of a soak run, forked from a server that has imported this module.

A rank reports to its supervisor through a pipe: `Fired` when its fault happens, then `RankEnd`.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from shared_peers import FilePeers
from simulated_hosts import LINK
from soak.faults import PLANNER, Injector
from soak.jobs import FLIGHT, PRELOAD, SERVER, Fired, Job, Sample, shared_files
from soak.outcomes import RankEnd
from soak.schedule import DISKS, OF_KERNELS, Fault
from soak.training import RATES, Case, Training, Watch

from ultraep import Balancer, LocalGroup
from ultraep.runtime.connect import connect, warm_up
from ultraep.runtime.hosts import this_host
from ultraep.runtime.mapped.peers import SymmetricPeers

JOIN = 120.0  # seconds for all ranks to join; a busy machine is slow to start processes
ACKNOWLEDGED = 30.0  # seconds for the supervisor to act
FEW_STEPS, STEPS = 3, 4  # few: kernels run in Triton's interpreter

stores: Any = dist  # mypy does not see their names there
torch.set_num_threads(1)


def run_rank(job: Job, pipe: Connection) -> None:
    """Run the job and report its end."""
    os.setsid()  # so that the supervisor finds the children of this process
    torch.set_num_threads(1)  # renews the thread pool of the server, before threads race to do so
    log = (job.folder / f"rank{job.rank}.log").open("w")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.dump_traceback_later(job.limit - 15, file=log)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if job.host is None else LINK
    if job.host is not None:
        job.host.enter()
        this_host.cache_clear()  # the server may have asked
    os.environ["ULTRAEP_FLIGHT"] = str(job.folder / FLIGHT)
    warnings.simplefilter("ignore")
    if job.device == "cuda":
        torch.cuda.set_device(0)
    with ExitStack() as stack:
        stack.callback(_leave)
        if job.fault is None:
            _steady(job, pipe)
        elif job.fault.plane == "in-process":
            _threads(job, job.fault, pipe)
        else:
            stack.push(_Report(job.rank, pipe.send))
            _process(job, job.fault, pipe)


def _leave() -> None:
    """Leave the group as a program does that ends, whether by an error or not."""
    gc.collect()  # communicators in tracebacks
    if dist.is_initialized():
        dist.destroy_process_group()
    atexit._run_exitfuncs()  # forked processes do not run them


class _Report:
    """A context that reports how it ended, whatever the error is.

    ends: whether the error ends here; otherwise it is raised again.
    """

    def __init__(self, rank: int, send: Callable[[RankEnd], None], *, ends: bool = True) -> None:
        self.rank, self._send, self._ends = rank, send, ends

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if error is None:
            self._send(RankEnd(self.rank))
        else:
            sys.excepthook(type(error), error, trace)  # as at the end of a program
            message = " ".join(str(error).split())
            named = getattr(error, "ranks", ()), getattr(error, "place", "")
            self._send(RankEnd(self.rank, type(error).__name__, message, *named))
        return self._ends


def _process(job: Job, fault: Fault, pipe: Connection) -> None:
    """Train in this process, one rank of a group."""

    def fire() -> None:
        pipe.send(Fired(job.rank))
        pipe.poll(ACKNOWLEDGED)

    group = join(job)
    injector = Injector(fault, job.rank, fire, job.disk)
    with make_balancer(group, job, case_of(fault), fault.plane, fault) as balancer:
        injector.attach(balancer)
        Training(case_of(fault), balancer, injector, job.device).run()


def _threads(job: Job, fault: Fault, pipe: Connection) -> None:
    """Train with the ranks as threads of this process."""
    lock = threading.Lock()

    def send(message: Any) -> None:
        with lock:
            pipe.send(message)

    def work(comm: Any) -> None:
        with _Report(comm.rank, send, ends=False):  # the error stops the other threads
            case = case_of(fault)
            injector = Injector(fault, comm.rank, lambda: send(Fired(comm.rank)), job.disk)
            balancer = Balancer._with_settings(comm, **balancer_options(case))
            injector.attach(balancer)
            Training(case, balancer, injector).run()

    with ExitStack() as reported:
        reported.push(lambda *_: True)  # every thread has reported its error
        LocalGroup(fault.ranks, timeout=job.timeout).run(work)


# -- groups and balancers ------------------------------------------------------------------------


def join(job: Job) -> dist.ProcessGroup:
    """Join the group of all ranks; return when all ranks have joined."""
    limit = timedelta(seconds=JOIN)
    store: Any
    if job.host is None and job.seed % 2:
        store = stores.FileStore(str(job.folder / "store"), job.size)
    else:
        store = _store_of_rank_0(job, limit)
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.size, timeout=limit)
    if store.add("joined", 1) == job.size:
        store.set("all joined", "yes")
    store.wait(["all joined"], limit)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _store_of_rank_0(job: Job, limit: timedelta) -> Any:
    """Return a store that rank 0 hosts, as without a launcher; its port is in a file."""
    address = "127.0.0.1" if job.host is None else "10.77.0.1"
    announced = job.folder / "port"
    if job.rank == 0:
        store = stores.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=limit)
        announced.with_suffix(".new").write_text(str(store.port))
        announced.with_suffix(".new").rename(announced)
        return store
    until = time.monotonic() + JOIN
    while not announced.exists():
        if time.monotonic() > until:
            raise TimeoutError("rank 0 did not start its store")
        time.sleep(0.01)
    return stores.TCPStore(address, int(announced.read_text()), timeout=limit)


def case_of(fault: Fault) -> Case:
    """Return the model and sizes of the run that a fault hits."""
    steps = FEW_STEPS if fault.plane in OF_KERNELS else STEPS
    case = Case.drawn(fault.ranks, fault.seed, steps)
    if fault.kind == "planner":
        return replace(case, policy=PLANNER)
    if fault.kind == "device":  # recomputed ids would be right
        return replace(case, recompute=False)
    return replace(case, own_network=True) if fault.kind == "network" else case


def balancer_options(case: Case) -> dict[str, Any]:
    """Return the options of the balancer beside its group and data plane."""
    return {"experts": case.homes, "config": case.config, **case.options}


@contextmanager
def make_balancer(
    group: dist.ProcessGroup, job: Job, case: Case, plane: str, fault: Fault | None
) -> Iterator[Balancer]:
    """Yield a balancer of this plane; close it if nothing failed."""
    options = balancer_options(case) | {"timeout": job.timeout}
    with ExitStack() as closing:
        if plane == "messages":
            options |= {"data_plane": "messages"}
        elif plane == "hybrid":
            options |= {"data_plane": "hybrid", "domain": 2}
        elif plane == "kernels":
            options |= {"data_plane": "messages", "backend": "triton"}
        elif plane == "mapped":
            options |= {"data_plane": "mapped", "capacity": case.capacity}
            if job.device == "cuda":
                options["peers"] = SymmetricPeers(group, device="cuda:0")
            else:
                comm = connect(group, timeout=job.timeout)
                closing.callback(comm.close)
                options["peers"] = FilePeers(comm)
        if fault is not None and fault.kind in DISKS and fault.stage == "trace":
            options["record"] = job.disk / "trace"
        balancer = Balancer._with_settings(group, **options)
        closing.callback(balancer.close)
        undo = closing.pop_all()  # after an error nothing is closed, as in most programs
        yield balancer
        undo.close()


# -- runs without faults -------------------------------------------------------------------------


def _steady(job: Job, pipe: Connection) -> None:
    """Train one random case after the other on all planes, until the supervisor says stop."""
    with _Report(job.rank, pipe.send):
        group = join(job)
        number, begin, going = 0, time.monotonic(), True
        while going:
            number += 1
            plane = job.planes[number % len(job.planes)]
            steps = FEW_STEPS if plane in OF_KERNELS else STEPS
            case = Case.drawn(job.size, job.seed * 7919 + number, steps)
            if plane == "in-process":
                _all_threads(case, job.timeout)
            else:
                with make_balancer(group, job, case, plane, None) as balancer:
                    Training(case, balancer, Watch(), job.device).run()
                    balancer.stats()
            gc.collect()
            pipe.send(Sample(job.rank, time.monotonic() - begin, resources()))
            stopped = [None] * job.size
            dist.all_gather_object(stopped, pipe.poll(0))
            going = not any(stopped)


def _all_threads(case: Case, timeout: float) -> None:
    def work(comm: Any) -> None:
        balancer = Balancer._with_settings(comm, **balancer_options(case))
        Training(case, balancer, Watch()).run()
        balancer.close()

    LocalGroup(case.ranks, timeout=timeout).run(work)


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


def warm_server() -> None:
    """Import and load in the server what all ranks need. No backward: its threads cannot fork."""
    os.setsid()  # signals to the group of the supervisor must not end the server first
    os.environ.setdefault("ULTRAEP_RATES", RATES)
    os.environ["ULTRAEP_FLIGHT"] = "off"  # its thread would not survive a fork
    with warnings.catch_warnings(), suppress(ImportError):
        warnings.simplefilter("ignore")
        import_module("ultraep.runtime.torch_dist")
        import_module("ultraep.runtime.hybrid.plane")
        import_module("ultraep.runtime.mapped.plane")  # needs triton
    for name in filter(None, os.environ.get(PRELOAD, "").split(",")):
        module, _, function = name.partition(":")
        getattr(import_module(module), function)() if function else import_module(module)
    warm_up(None)
    case = Case.drawn(1, 0)
    training = Training(case, Balancer._with_settings("alone", **balancer_options(case)), Watch())
    with torch.no_grad():
        for layer in training.layers:
            layer(case.batch(0)[0][0])
    gc.collect()
    gc.freeze()  # ranks do not scan the modules
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # bindings of triton complain when it ends


if os.environ.get(SERVER):
    warm_server()
