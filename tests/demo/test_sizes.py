"""Sizes follow the machine, with notes."""

import pytest

from ultraep.tools.demo import sizes as module
from ultraep.tools.demo.sizes import GIB, Machine, choose


@pytest.mark.parametrize(
    ("cores", "ranks", "slots"), [(1, 2, 2), (3, 2, 2), (4, 4, 1), (7, 4, 1), (96, 8, 1)]
)
def test_ranks_are_a_power_of_two_by_cores(cores, ranks, slots):
    sizes, _ = choose(Machine(cores, None))
    assert (sizes.ranks, sizes.slots) == (ranks, slots)


def test_little_memory_reduces_tokens_and_ranks_with_a_note():
    plenty = choose(Machine(8, 64 * GIB))
    assert plenty == choose(Machine(8, None))
    sizes, notes = choose(Machine(8, 5 * GIB))
    assert sizes.tokens < plenty[0].tokens
    assert sizes.memory() <= 5 * GIB
    assert "5.0 GiB of memory are free" in notes[0]
    least, notes = choose(Machine(8, 100_000_000))
    assert (least.ranks, least.tokens) == (2, module.FEWEST_TOKENS)
    assert "more than is free" in notes[0]
    assert choose(Machine(8, 100_000_000), ranks=8)[0].ranks == 8


def test_containers_limit_the_machine(monkeypatch):
    files = {
        "/sys/fs/cgroup/cpu.max": "150000 100000\n",
        "/sys/fs/cgroup/memory.max": "3000\n",
        "/sys/fs/cgroup/memory.current": "1000\n",
        "/proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 8 kB\n",
    }
    monkeypatch.setattr(module, "_text", lambda path: files.get(path, ""))
    assert (module._core_limit(), module._free_memory()) == (1, 2000)
    files |= {"/sys/fs/cgroup/cpu.max": "max 100000\n", "/sys/fs/cgroup/memory.max": "max\n"}
    assert (module._core_limit(), module._free_memory()) == (None, 8192)
    files.clear()
    assert module._free_memory() is None
