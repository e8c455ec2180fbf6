"""A launch finds the compiled kernel by the specialisation of its arguments."""

from types import SimpleNamespace

import pytest
import torch
from triton import knobs
from triton.runtime import JITFunction

from ultraep.backends.triton import launch
from ultraep.backends.triton.kernels import rowwise as scale
from ultraep.backends.triton.launch import Quick, quick, require_resident
from ultraep.errors import ConfigError

STREAM = 77


class Compiled:
    def __init__(self, log):
        self.log = log

    function = packed_metadata = None

    def run(self, x, y, z, stream, function, metadata, launch, enter, exit_, *arguments):
        assert (stream, function, metadata, launch, enter, exit_) == (STREAM, *[None] * 5)
        self.log.append(((x, y, z), arguments))


class Kernel:
    arg_names = ("out", "number", "other", "WIDTH")

    def __init__(self):
        self.compiled, self.launched, self.pre_run_hooks = [], [], []

    def __getitem__(self, grid):
        def run(*arguments, **constants):
            self.compiled.append((grid, arguments, constants))
            return Compiled(self.launched)

        return run


@pytest.fixture
def kernel():
    return Kernel()


@pytest.fixture
def launched(kernel, monkeypatch):
    monkeypatch.setattr(launch, "current_stream_function", lambda: lambda device: STREAM)
    return Quick(kernel)


def memory(offset=0, dtype=torch.float32):
    return torch.zeros(64, dtype=dtype)[offset:]


def test_the_second_launch_looks_for_nothing(kernel, launched):
    out, again = memory(), memory()
    for tensor in (out, again):
        launched[(7,)](tensor, 3, None, WIDTH=32, num_warps=4)
    assert len(kernel.compiled) == 1
    [(grid, (tensor, number, other, width))] = kernel.launched
    assert (grid, number, other, width) == ((7, 1, 1), 3, None, 32)
    assert tensor == again.data_ptr()


SPECIALISATIONS = [
    (memory(), 3, None, 32, 4),
    (memory(1), 3, None, 32, 4),  # another alignment
    (memory(dtype=torch.bfloat16), 3, None, 32, 4),
    (memory(), 1, None, 32, 4),  # compiled into the kernel
    (memory(), 16, None, 32, 4),  # divides by 16
    (memory(), 1 << 31, None, 32, 4),  # 64 bits
    (memory(), 3, memory(), 32, 4),
    (memory(), 3, (memory(), 3), 32, 4),  # a group of arguments
    (memory(), 3, (memory(), 1), 32, 4),
    ((memory(), 3), 3, None, 32, 4),
    (memory(), 3, None, 64, 4),
    (memory(), 3, None, 32, 8),
]


def test_every_specialisation_is_compiled(kernel, launched):
    for _ in range(2):
        for out, number, other, width, warps in SPECIALISATIONS:
            launched[(1,)](out, number, other, WIDTH=width, num_warps=warps)
    assert len(kernel.compiled) == len(kernel.launched) == len(SPECIALISATIONS)
    for number in (5, 1000, -7, 48, 0):  # of a known specialisation
        launched[(1,)](memory(), number, None, WIDTH=32, num_warps=4)
    assert len(kernel.compiled) == len(SPECIALISATIONS)
    assert [arguments[1] for _, arguments in kernel.launched[-5:]] == [5, 1000, -7, 48, 0]


@pytest.mark.parametrize("hook", ["kernel", "profiler"])
def test_triton_itself_launches_where_hooks_want_to_see_arguments(
    kernel, launched, monkeypatch, hook
):
    if hook == "kernel":
        kernel.pre_run_hooks.append(print)
    else:
        monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [print])
    for number in (3, 5):
        launched[(2, 3)](memory(), number, None, WIDTH=32)
    assert [(grid, arguments[1]) for grid, arguments, _ in kernel.compiled] == [
        ((2, 3), 3),
        ((2, 3), 5),
    ]
    assert not kernel.launched


def test_what_the_interpreter_runs_stays_as_it_is(monkeypatch):
    assert isinstance(quick(scale.scale_rows), Quick) == isinstance(scale.scale_rows, JITFunction)
    plain = SimpleNamespace()
    monkeypatch.setattr(launch, "_known", {})
    assert quick(plain) is plain


def test_programs_that_cannot_wait_for_each_other_are_refused(monkeypatch):
    small = SimpleNamespace(
        name="small", multi_processor_count=2, max_threads_per_multi_processor=256, warp_size=32
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: small)
    require_resident(4, 4, torch.device("cuda", 7))
    with pytest.raises(
        ConfigError, match="5 programs of 4 warps wait for each other, but small runs 4 of"
    ):
        require_resident(5, 4, torch.device("cuda", 7))
    require_resident(1000, 4, torch.device("cpu"))
