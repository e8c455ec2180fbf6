"""What runs on the GPU. `planner.py`, `counter.py`, `rerouter.py` and others own the buffers.

Layouts that several kernels share have names: `plan.py`, `state.py`, `schedule.py`, `rows.py`, and
for the words on a board `signals.py`.

Kernels that are launched show an example: `example(kernel, programs, **arguments)` launches it and
prints what it has changed. `room` is memory in which nothing is written yet, shown as `_`;
`scratch` is memory of the kernel alone; `at` gives addresses, often one of every rank; `parts` puts
several lists into one piece of memory. The examples tell one story: rank 0 is home to experts 0
and 1, rank 1 to experts 2 and 3, each has one spare slot, and expert 0 is hot.
`tests/backends/test_kernel_examples.py` runs them all.
"""
