"""What runs on the GPU. `planner.py`, `counter.py` and `rerouter.py` own the buffers and launch."""
