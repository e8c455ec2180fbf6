"""Triton kernels. `planner.py`, `rerouter.py`, `products.py` and others allocate their buffers.

Layouts that several kernels share are in `plan.py`, `state.py`, `schedule.py` and `signals.py`.
Arguments that belong together are named tuples, such as `Matrix`, `SlotTensors`, `Plan` or `Lines`.

Memory inside a program. Threads of a program pass data through global memory. A
`tl.debug_barrier()` separates stores from the loads of other threads, and these loads from the next
stores to the same address: it synchronises the program and orders its accesses to global memory.
The caches of a multiprocessor need not agree with atomics or with stores of other programs; such
data is loaded with `cache_modifier=".cg"`, `volatile=True` or an atomic. Between programs of one
launch, the last one to increment a counter with `acq_rel` sees what all others wrote before their
barrier. Between ranks, see `signals.py`.

Functions of other modules are called through the module, but constants are imported by name: the
key of Triton's cache leaves out constants that are accessed through a module.

Kernels whose layouts need it have an example: `example(kernel, programs, **arguments)` launches the
kernel and prints what it has changed. `empty` is uninitialised memory, printed as `_`; `at` returns
addresses, often one per rank; `parts` joins several lists into one tensor. All examples use one
group: rank 0 is home to experts 0 and 1, rank 1 to experts 2 and 3, each has one spare slot, and
expert 0 is hot. Sizes, strides and tables of this group are left out.
`tests/backends/test_kernel_examples.py` runs them.
"""
