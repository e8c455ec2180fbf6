"""What runs on the GPU. `planner.py`, `counter.py`, `rerouter.py` and others own the buffers.

Layouts that several kernels share have names: `plan.py`, `state.py`, `schedule.py`, and for the
words on a board `signals.py`. Arguments that belong together are passed as records: `Problem` and
`Shape` in `state.py`, `SlotTensors` in `tiles.py`, `Sending` in `stream.py`.

Memory inside a program. Threads of a program hand numbers to each other through global memory. A
`tl.debug_barrier()` stands between the stores and the loads of others, and between these loads and
the next stores to the same place: it is a barrier of the program, and orders its accesses to global
memory. The caches of a multiprocessor need not agree with what atomics, or other programs, have
written: that is loaded with `cache_modifier=".cg"`, `volatile=True` or by an atomic. Between
programs of one launch, the last one to count itself with `acq_rel` sees what all others wrote
before their barrier; between ranks, see `signals.py`.

Kernels that are launched show an example: `example(kernel, programs, **arguments)` launches it and
prints what it has changed. `room` is memory in which nothing is written yet, shown as `_`;
`scratch` is memory of the kernel alone; `at` gives addresses, often one of every rank; `parts` puts
several lists into one piece of memory. The examples tell one story: rank 0 is home to experts 0
and 1, rank 1 to experts 2 and 3, each has one spare slot, and expert 0 is hot. What follows from
the story or from a tensor, as sizes, tables of homes and strides, they leave out.
`tests/backends/test_kernel_examples.py` runs them all.
"""
