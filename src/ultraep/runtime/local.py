"""Many ranks in one process, one thread each: for tests, notebooks and simulation.

    group = LocalGroup(4)
    outputs = group.run(lambda comm: layer_of(comm)(inputs[comm.rank]))

If a rank raises, the other ranks stop with a `CommunicationError`, and `run` raises the first
error. A rank that waits for a rank whose work has ended stops in the same way.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import Any, Self, TypeVar

import torch

from ultraep.comm import Communicator, Message, Peers
from ultraep.config import check_timeout
from ultraep.errors import CommunicationError, ConfigError
from ultraep.runtime.mapped.peers import OnePeer
from ultraep.runtime.speeds import count_optimizer_steps

T = TypeVar("T")


class LocalGroup:
    """The mailboxes that the ranks of one process share."""

    first_rank = 0  # number of rank 0 in the group that this one is part of, for errors

    def __init__(self, size: int, *, timeout: float = 60.0) -> None:
        if size < 1:
            raise ConfigError(f"a group needs at least one rank, got {size}")
        check_timeout(timeout)
        self.size = size
        self.timeout = timeout
        self._mail: dict[tuple[int, int], queue.SimpleQueue[Any]] = {  # by source and target
            key: queue.SimpleQueue() for key in product(range(size), range(size))
        }
        self._failed: tuple[int, BaseException] | None = None
        self._ended: set[int] = set()
        self._lock = threading.Lock()

    def run(self, work: Callable[[Communicator], T]) -> list[T]:
        """Run `work(communicator)` on every rank at once; return the results in rank order."""
        results: list[Any] = [None] * self.size
        self._ended.clear()
        count_optimizer_steps()  # while no other thread is using an optimizer

        def on_rank(rank: int) -> None:
            with ExitStack() as stack:
                stack.push(partial(self._end, rank))
                results[rank] = work(LocalCommunicator(self, rank))

        threads = [threading.Thread(target=on_rank, args=(r,)) for r in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failed is not None:
            raise self._failed[1]
        return results

    def _end(self, rank: int, _type: object, error: BaseException | None, _trace: object) -> bool:
        """Note the end of a rank's work, and the first error, which `run` raises."""
        with self._lock:
            if error is not None and self._failed is None:
                self._failed = (rank, error)
        self._ended.add(rank)
        return True

    def send(self, verb: str, source: int, target: int, value: Any) -> None:
        self._mail[source, target].put((verb, value))

    def receive(self, verb: str, source: int, target: int) -> Any:
        """Return the next value from a rank; raise once a rank failed or after the timeout."""
        mail, waited, step = self._mail[source, target], 0.0, 0.05
        while True:
            ended = source in self._ended  # read first: its last message may be in the queue
            try:
                sent, value = mail.get(timeout=step)
                break
            except queue.Empty:
                waited += step
            self.check_failed()
            if ended:
                raise self.error(source, target, "waits for {}, which has ended")
            if waited >= self.timeout:
                raise self.error(source, target, f"waited {self.timeout:g} s for {{}}")
        if sent != verb:
            raise self.error(source, target, f"is at {verb}, {{}} at {sent} instead")
        return value

    def check_failed(self) -> None:
        """Raise if a rank has failed."""
        if self._failed is not None:
            rank, error = self._failed
            raise CommunicationError(f"rank {rank} failed: {error!r}", ranks=[rank])

    def error(self, source: int, target: int, what: str) -> CommunicationError:
        """Return the error of the target about the source, which `what` names as {}."""
        source, target = self.first_rank + source, self.first_rank + target
        text = f"rank {target} {what.format(f'rank {source}')}"
        return CommunicationError(text, ranks=[source])


class LocalCommunicator:
    """One rank of a `LocalGroup`."""

    def __init__(self, group: LocalGroup, rank: int) -> None:
        self._group = group
        self.rank = rank
        self.size, self.timeout = group.size, group.timeout

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = self._swap("all_gather", [tensor.detach().clone()] * self.size)
        for peer, part in enumerate(parts):
            self._compare(peer, part.shape, tensor.shape)
        return torch.stack(parts)

    def all_to_all(
        self, rows: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> torch.Tensor:
        parts = self._swap("all_to_all", list(rows.detach().clone().split(list(send_counts))))
        for peer, (part, count) in enumerate(zip(parts, receive_counts, strict=True)):
            self._compare(peer, part.shape, (count, *rows.shape[1:]))
        return torch.cat(parts)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        for peer, tensor in sends:
            self._group.send("exchange", self.rank, peer, tensor.detach().clone())
        for peer, tensor in receives:
            sent = self._group.receive("exchange", peer, self.rank)
            self._compare(peer, sent.shape, tensor.shape)
            tensor.copy_(sent)

    def gather_objects(self, value: Any) -> list[Any]:
        return self._swap("gather_objects", [value] * self.size)

    def hosts(self) -> Self:
        """Return itself: its messages wait for no device."""
        return self

    def check_alive(self) -> None:
        self._group.check_failed()

    def peers(self, device: torch.device) -> Peers:
        """Return the memory of a single rank; several threads would wait on one stream."""
        if self.size > 1:
            raise ConfigError(f"{self.size} threads of one process cannot wait on one device")
        return OnePeer(device)

    def part(self, size: int) -> Self:
        """Return this rank of a new group; the first rank of the block creates it."""
        place = self.rank % size
        own = LocalGroup(size, timeout=self.timeout) if place == 0 else None
        group = self.gather_objects(own)[self.rank - place]
        group.first_rank = self._group.first_rank + self.rank - place
        return type(self)(group, place)

    def close(self) -> None:
        """Do nothing: nothing was allocated."""

    def _swap(self, verb: str, values: Sequence[Any]) -> list[Any]:
        if self.size == 1:
            return list(values)
        for peer, value in enumerate(values):
            self._group.send(verb, self.rank, peer, value)
        return [self._group.receive(verb, peer, self.rank) for peer in range(self.size)]

    def _compare(self, peer: int, sent: Sequence[int], expected: Sequence[int]) -> None:
        if list(sent) != list(expected):
            what = f"expects {list(expected)} from {{}}, got {list(sent)}"
            raise self._group.error(peer, self.rank, what)
