"""Nothing in the package connects to another machine, at import or at run time."""

from __future__ import annotations

import subprocess
import sys

# Modules that need a framework which is not installed, or a GPU, cannot be imported everywhere.
CODE = """
import importlib, pkgutil, socket, sys

LOOPBACK = ("127.0.0.1", "::1", "localhost", "")
refused = []

def check(event, args):
    if event in ("socket.connect", "socket.sendto", "socket.bind"):
        address = args[1]
        outside = isinstance(address, tuple) and address[0] not in LOOPBACK
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        outside = args[0] not in (*LOOPBACK, None, socket.gethostname())
    else:
        return
    if outside:
        refused.append((event, args))
        raise PermissionError(f"{event}: {args}")

sys.addaudithook(check)

try:  # the hook works
    socket.create_connection(("192.0.2.1", 80), timeout=1)
except PermissionError:
    refused.clear()
else:
    sys.exit("a connection was not noticed")

import ultraep
missing = []
for module in pkgutil.walk_packages(ultraep.__path__, "ultraep."):
    try:
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    except ImportError as error:
        missing.append((module.name, str(error)))

import torch
group = ultraep.LocalGroup(2)
def work(comm):
    balancer = ultraep.Balancer(comm, experts=8, slots=1)
    torch.manual_seed(0)
    moe = ultraep.BalancedMoE.swiglu(16, 32, 8, 2, balancer=balancer)
    moe(torch.randn(64, 16, requires_grad=True)).sum().backward()
    assert moe.last_plan.to_host().num_replicas
group.run(work)

from ultraep_start import main
sys.argv = ["ultraep", "plan", sys.argv[1]]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
assert not refused, refused
names = [name for name, _ in missing]
assert all(".integrations." in n or ".tools." in n or ".metrics" in n for n in names), missing
print("imported", len(sys.modules), "refused", len(refused), "missing", len(names))
"""


def test_no_connection_leaves_this_machine(tmp_path):
    loads = tmp_path / "loads.json"
    loads.write_text("[[9, 0, 1, 2], [8, 1, 0, 3]]")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE, str(loads)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "refused 0" in done.stdout
