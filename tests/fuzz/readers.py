"""Every reader of the project as a fuzz target: files, settings, texts and requests.

A target gets bytes. Those of files are written to their place, those of settings are JSON with
keyword arguments, those of command lines are JSON lists of words.
"""

from __future__ import annotations

import io
import json
import os
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from damage import CONFUSED, json_value
from hostile_child import SIMULATE, draw, outcome_of_command, read_words, write_all
from safetensors.torch import save_file

import ultraep
from fuzz.guided import Mutate, Target
from ultraep import (
    BalanceConfig,
    BalancedMoE,
    Balancer,
    CommunicationError,
    LoadError,
    LocalGroup,
    Rates,
    Topology,
    UltraEPError,
    read_trace,
    workload,
)
from ultraep.config import speeds_from_text
from ultraep.integrations.vllm.settings import read_settings
from ultraep.microbatch import MicrobatchInfo
from ultraep.plan import plan_from_replicas
from ultraep.routes import batch_routes, from_vllm, packed_routes
from ultraep.runtime.cost import VARIABLE, from_environment
from ultraep.runtime.flight import VARIABLE as FLIGHTS
from ultraep.runtime.flight import Flight
from ultraep.runtime.settings import Settings
from ultraep.tools.cli.options import split_names, split_numbers, split_ranges
from ultraep.tools.crash import read_crash
from ultraep.tools.demo.result import DemoResult
from ultraep.tools.export import timeline_of, write_csv
from ultraep.tools.inspect.checkpoint import keys_in, read_config, weight_files
from ultraep.tools.inspect.run import claim_folder
from ultraep.tools.launch.processes import RankPlace
from ultraep.tools.replay import differing
from ultraep.tools.serving.endpoint import InvalidAnswer, _has_token, endpoint_of, sums_of
from ultraep.tools.serving.load import read_arrivals
from ultraep.tools.sim.cluster import load_cluster
from ultraep.tools.sim.model import load_model
from ultraep.tools.sim.serving import load_requests
from ultraep.tools.sim.workload import read_microbatches, read_workload
from ultraep.tools.soak.schedule import (
    PLANES,
    Fault,
    draw_fault,
    possible_kinds,
    read_schedule,
    write_schedule,
)
from ultraep.tools.view.api import Api, case_of
from ultraep.tools.view.catalogue import Catalogue
from ultraep.tools.view.server import Handler

WORDS = (
    "",
    "-1",
    "0",
    "1",
    "2",
    "3",
    "0.5",
    "nan",
    "inf",
    "1e9",
    "x",
    "none,,eplb",
    "\x00",
    "ä" * 9,
)
LARGE = ("4294967296", "9" * 30, "1e400", "-9223372036854775809")
SMALL = Topology(ranks=2, experts=4, slots=1)
PLACED = [[0, 1, 2], [3, 0, 12], [3, 2, 7]]  # expert, host, quota
WIDE = Topology(ranks=4, experts=4, slots=1)


def targets(folder: Path) -> list[Target]:
    """Return all targets; valid files are written into the folder."""
    write_all(folder)
    os.chdir(folder)  # relative outputs of command lines stay here
    return [
        *of_files(folder),
        *of_settings(),
        *of_texts(),
        *of_arrays(),
        of_state(),
        *of_requests(folder / "run"),
        *of_commands(folder),
    ]


# -- files ---------------------------------------------------------------------------------------


def of_files(folder: Path) -> list[Target]:
    out = folder / "fuzz-out"
    out.mkdir()
    loads = ("loads.npy", "columns.npy", "loads.npz", "packed.npz", "loads.csv", "loads.json")
    save_file({"a": torch.zeros(3, 4), "b": torch.zeros(2)}, folder / "small.safetensors")
    write_schedule(folder / "schedule.json", 7, faults())
    flight = write_flights(folder).relative_to(folder)
    readers: dict[str, Callable[[Path], Any]] = {
        **dict.fromkeys(loads, plan_file),
        "routing.npz": partial(read_microbatches, ranks=2, window=8),
        "trace.npz": partial(use_trace, out=out),
        "clusters.toml": lambda path: load_cluster(str(path)),
        "models.toml": lambda path: load_model(str(path)),
        "requests.toml": lambda path: load_requests(str(path)),
        "arrivals.txt": read_arrivals,
        "prose.txt": read_words,
        "demo/result.json": lambda path: DemoResult.load(path.parent),
        "out/.ultraep-inspection": lambda path: claim_folder(path.parent).close(),
        "model/config.json": lambda path: read_config(path.parent),
        "small.safetensors": keys_in,
        "schedule.json": read_schedule,
        str(flight): lambda path: read_crash(path.parent).explain(),
        "model/model.safetensors.index.json": lambda path: weight_files(path.parent),
    }
    pieces = ("run/header.json", "run/rank-00000/000000.npz", "run/rank-00001/000000.npz")
    for name in (*pieces, "old/rank-00000/000000.npz"):
        readers[name] = partial(use_folder, folder=folder / name.partition("/")[0], out=out)
    slow = ("trace.npz", "model/config.json", *pieces, "old/rank-00000/000000.npz")
    return [
        Target(
            f"file {name}",
            [(folder / name).read_bytes()],
            InPlace(folder / name, read),
            share=2 if name in slow else 6,
        )
        for name, read in readers.items()
    ]


def faults() -> list[Fault]:
    kinds, planes = possible_kinds(tuple(PLANES)), tuple(PLANES)
    return [draw_fault(7, number, 6.0, planes, kinds) for number in range(len(kinds))]


def write_flights(folder: Path) -> Path:
    """Write the flight files of three ranks, one of which has failed; return its file."""
    os.environ[FLIGHTS] = str(folder / "flights")
    flights = [Flight("a1", rank, 3) for rank in range(3)]
    for step in range(1, 4):
        for flight in flights:
            info = MicrobatchInfo(0, step)
            flight.begin("loads", info)
            flight.end("loads", info)
            flight.begin("dispatch", info)
    flights[0].failed(CommunicationError("dispatch: rank 2 did not answer within 6.0 s"))
    paths = [flight.write("signal", "at line 1") for flight in flights[1:]]
    for flight in flights:
        flight.close()
    del os.environ[FLIGHTS]
    assert paths[0] is not None
    return paths[0].with_name("rank-00000.json")


class InPlace:
    """Writes the content to the place of a file, reads it, and restores the valid file."""

    def __init__(self, path: Path, read: Callable[[Path], Any]) -> None:
        self._path, self._read, self._valid = path, read, path.read_bytes()

    def __call__(self, content: bytes) -> None:
        self._path.write_bytes(content)
        try:
            self._read(self._path)
        finally:
            self._path.write_bytes(self._valid)


def plan_file(path: Path) -> None:
    loads_SRE = workload.read_loads(path)
    ranks, experts = loads_SRE.shape[1:]
    for loads_RE in loads_SRE[:3]:
        ultraep.plan(loads_RE, Topology(ranks=ranks, experts=experts, slots=min(1, experts)))


def use_folder(path: Path, *, folder: Path, out: Path) -> None:
    del path  # one of the files of the folder
    use_trace(folder, out=out)


def use_trace(path: Path, *, out: Path) -> None:
    """Read, replay, export and draw a trace, and save it in one file."""
    draw(path)
    trace = read_trace(path)
    differing(trace)
    write_csv(trace, out / "trace.csv")
    json.dumps(timeline_of(trace))
    trace.save(out / "trace.npz")
    read_workload(path, experts=4, top_k=2)


# -- settings ------------------------------------------------------------------------------------


def of_settings() -> list[Target]:
    comm = LocalGroup(1).run(lambda comm: comm)[0]
    config = {"policy": "ultraep", "tolerance": 0.01, "min_tokens_per_replica": 2}
    config |= {"max_replicas": 3, "locality": True, "objective": "time", "speeds": [900, 1000]}
    balancer = {"experts": [0, 0, 0, 0], "slots": 1, "policy": "ultraep", "relay": "chain"}
    balancer |= {"in_flight": 1, "timeout": 5.0, "capacity": "auto"}
    balancer |= {"domain": 1, "data_plane": "auto"}
    settings = {"backend": "cpu", "relay": "auto", "in_flight": 1}
    settings |= {"capacity": 8, "timeout": 1.5}
    draws = {"ranks": 4, "experts": 8, "top_k": 2, "tokens": 16, "seed": 3}
    vllm = {"slots": 2, "policy": "ultraep", "tolerance": 0.1, "min_rows": 4}
    variables = {"ULTRAEP_SLOTS": "2", "ULTRAEP_POLICY": "ultraep"}

    def make_balancer(**options: Any) -> None:
        Balancer._with_settings(comm, **options).close()

    builders: dict[str, tuple[Callable[..., Any], list[dict[str, Any]]]] = {
        "topology": (
            Topology,
            [
                {"ranks": 4, "experts": 8, "slots": 1, "domain": 2},
                {"ranks": 2, "experts": 3, "slots": 1, "homes": [0, 0, 1]},
            ],
        ),
        "config": (BalanceConfig, [config]),
        "rates": (Rates, [{"row": 5, "copy": 4, "each": 3, "layer": 2}]),
        "balancer": (make_balancer, [balancer]),
        "settings": (Settings, [settings]),
        "zipf": (workload.zipf, [draws | {"ratio": 2.0, "shuffled": True}]),
        "lognormal": (workload.lognormal, [draws | {"sigma": 1.0}]),
        "uniform": (workload.uniform, [draws]),
        "one_hot": (workload.one_hot, [{"ranks": 4, "experts": 8, "tokens": 16, "expert": 3}]),
        "vllm": (lambda **given: read_settings(given, None), [variables]),
        "vllm additional": (lambda **given: read_settings({}, {"ultraep": given}), [vllm]),
    }
    numbers = ("zipf", "lognormal", "uniform", "one_hot")  # of annotated type
    mutators: dict[str, Mutate] = {"vllm": other_texts, **dict.fromkeys(numbers, other_numbers)}
    return [
        Target(
            f"settings {name}",
            [json.dumps(options).encode() for options in valid],
            partial(call_with_json, build),
            mutators.get(name, other_values),
        )
        for name, (build, valid) in builders.items()
    ]


def call_with_json(build: Callable[..., Any], content: bytes) -> None:
    build(**json.loads(content))


def other_values(content: bytes, rng: random.Random) -> bytes:
    """Change one to three values of a JSON object to values of any type."""
    options = json.loads(content)
    for name in rng.sample(sorted(options), min(len(options), rng.choice((1, 1, 2, 3)))):
        near = [-1, 0, 1, 2, 3, 7, 1 << 16, 0.25, "auto", "none", "static", [0, 1], [5, 900]]
        options[name] = rng.choice((*CONFUSED, *near))
    return json.dumps(options).encode()


def other_numbers(content: bytes, rng: random.Random) -> bytes:
    """Change one or two numbers of a JSON object, and keep their types."""
    options = json.loads(content)
    for name in rng.sample(sorted(options), rng.choice((1, 1, 2))):
        if isinstance(options[name], float):
            options[name] = rng.choice((-1.0, 0.0, 0.5, 1.0, 1e-300, 1e400, float("nan")))
        elif not isinstance(options[name], bool):
            options[name] = rng.choice((-1, 0, 1, 2, 3, 100, 2**32, 2**63, 10**20))
    return json.dumps(options).encode()


def other_texts(content: bytes, rng: random.Random) -> bytes:
    """Change a value of a JSON object to another text."""
    options = json.loads(content)
    options[rng.choice(sorted(options))] = rng.choice((*WORDS, *LARGE, "quota"))
    return json.dumps(options).encode()


# -- texts ---------------------------------------------------------------------------------------


def of_texts() -> list[Target]:
    page = 'ultraep_imbalance_before_sum{policy="a"} 2.5\nultraep_imbalance_after_count 3\n'
    token = '{"choices": [{"text": "a"}]}'
    readers: dict[str, tuple[Callable[[str], Any], list[str]]] = {
        "rates": (Rates.from_text, ["row=5300,copy=41000000", "row=1 each=2 layer=3"]),
        "rates of the environment": (read_variable, ["row=5300,copy=41000000", "off"]),
        "speeds": (speeds_from_text, ["1000,900"]),
        "names": (lambda text: split_names(text, "--policy"), ["none, eplb"]),
        "numbers": (lambda text: split_numbers(text, "--rate", float), ["0.5, 2"]),
        "ranges": (lambda text: split_ranges(text, "--layers"), ["7,0-2"]),
        "endpoint": (endpoint_of, ["eplb=http://127.0.0.1:8000/v1/", "https://[::1]:80"]),
        "metrics page": (sums_of, [page]),
        "token": (read_token, [token, "[DONE]"]),
        "place": (read_place, ["1 2 0", "0 1 0"]),
    }
    return [
        Target(
            f"text {name}",
            [text.encode() for text in texts],
            lambda data, read=read: read(words(data)),
        )
        for name, (read, texts) in readers.items()
    ]


def words(content: bytes) -> str:
    return content.decode("utf-8", "replace")


def read_variable(text: str) -> None:
    _with_variables({VARIABLE: text}, lambda: from_environment(BalanceConfig()))


def read_place(text: str) -> None:
    values = dict(zip(("RANK", "WORLD_SIZE", "LOCAL_RANK"), text.split(" "), strict=False))
    _with_variables(values, RankPlace.of_torchrun)


def _with_variables(values: Mapping[str, str], read: Callable[[], Any]) -> None:
    before = {name: os.environ.pop(name, None) for name in values}
    try:
        os.environ.update({name: text.replace("\x00", "") for name, text in values.items()})
        read()
    finally:
        for name, text in before.items():
            os.environ.pop(name, None)
            if text is not None:
                os.environ[name] = text


def read_token(text: str) -> None:
    try:
        _has_token(text)
    except InvalidAnswer:
        raise LoadError("not an event of a stream") from None  # the engine counts it


# -- arrays --------------------------------------------------------------------------------------


def of_arrays() -> list[Target]:
    loads = [[3, 1, 0, 9], [2, 0, 5, 40]]
    valid: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "ids": (
            lambda ids, experts: ultraep.count_loads(ids, experts),
            {"ids": [[0, 1], [3, -1]], "experts": 4},
        ),
        "loads": (plan_loads, {"loads": loads, "history": [[1, 2, 3, 4]], "policy": "eplb"}),
        "replicas": (use_replicas, {"loads": loads + loads, "placed": PLACED}),
        "routes": (
            use_routes,
            {
                "routes": [[[[0, 1]], [[2, 3]]], [[[1, 1]]]],
                "mask": [[1, 1], [0, 1]],
                "lengths": [2, 1],
            },
        ),
        "routes of vLLM": (routes_of_vllm, {"routes": [[[0, 1], [2, 3]]], "layers": [0, 1]}),
    }
    return [
        Target(
            f"arrays {name}",
            [json.dumps(values).encode()],
            partial(call_with_json, use),
            json_in_place,
        )
        for name, (use, values) in valid.items()
    ]


def json_in_place(content: bytes, rng: random.Random) -> bytes:
    """Change values inside of a JSON object, and keep its keys."""
    before = json.loads(content)
    after = json.loads(json_value(content, rng))
    return json.dumps(before | after).encode()


def plan_loads(loads: Any, history: Any, policy: Any) -> None:
    ultraep.plan(loads, SMALL, BalanceConfig(policy=policy), history=history)


def use_replicas(loads: Any, placed: Any) -> None:
    try:
        placed_C3 = np.array(placed, dtype=np.int64).reshape(-1, 3)
    except (ValueError, TypeError, OverflowError):
        raise LoadError("not an array of integers") from None  # the type of the argument
    plan = plan_from_replicas(loads, WIDE, BalanceConfig(), placed_C3)
    plan.check(plan.loads)


def use_routes(routes: Any, mask: Any, lengths: Any) -> None:
    sequences = [_tensor(own) for own in (routes if isinstance(routes, list) else [routes])]
    batch_routes(sequences, _tensor(mask))
    packed_routes(sequences, _tensor(lengths).flatten().tolist())


def routes_of_vllm(routes: Any, layers: Any) -> None:
    from_vllm(_tensor(routes).numpy(), _tensor(layers).flatten().tolist())


def _tensor(values: Any) -> torch.Tensor:
    try:
        return torch.tensor(values).long()
    except (ValueError, TypeError, RuntimeError, OverflowError):
        raise LoadError("not a tensor of integers") from None  # the type of the argument


def of_state() -> Target:
    """The state of a layer, as shapes by name."""
    comm = LocalGroup(1).run(lambda comm: comm)[0]
    balancer = Balancer(comm, experts=4, slots=0, policy="none")
    layer = BalancedMoE.swiglu(8, 4, 4, 2, balancer=balancer, shared_ffn=4)
    shapes = {name: list(tensor.shape) for name, tensor in layer.full_state_dict().items()}

    def load(content: bytes) -> None:
        state = {}
        for name, shape in json.loads(content).items():
            try:
                state[name] = torch.zeros([min(size, 99) for size in shape])
            except (ValueError, TypeError, RuntimeError):
                raise LoadError("not a shape") from None
        layer.load_full_state_dict(state)

    return Target("state of a layer", [json.dumps(shapes).encode()], load, json_value)


# -- requests ------------------------------------------------------------------------------------


def of_requests(run: Path) -> list[Target]:
    catalogue = Catalogue([run])
    catalogue.read_all()
    api, name = Api(catalogue), catalogue.items[0].name
    server = SimpleNamespace(api=api, token=None, names=set(), stopped=False)
    head = "HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nAccept: */*\r\n\r\n"
    paths = [
        *(f"/api/{verb}?trace={name}&from=0&to=9" for verb in ("overview", "heat", "worst")),
        f"/api/record?trace={name}&step=1&layer=0&microbatch=0",
        *("/", "/api/state", "/api/stop?number=1", f"/api/training?trace={name}", "/report?name=x"),
    ]
    requests = [f"GET {path} {head}".encode() for path in paths]
    query = {"policy": "eplb", "slots": "1", "ranks": "2", "history": "3", "tolerance": "0.1"}
    trace_header = read_trace(run).header
    return [
        Target("request", requests, lambda data: answer(server, data)),
        Target(
            "request replay",
            [json.dumps(query).encode()],
            lambda data: case_of(json.loads(data), trace_header),
            other_texts,
        ),
    ]


def answer(server: Any, content: bytes) -> None:
    """Answer the requests of one connection."""
    Handler(Connection(content), ("127.0.0.1", 1), server)


class Connection:
    """A socket that has received some bytes and discards what is sent."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def makefile(self, *_: Any) -> io.BytesIO:
        return io.BytesIO(self._content)

    def sendall(self, data: bytes) -> None:
        """Discard the data."""

    def setsockopt(self, *_: Any) -> None:
        """Ignore options."""

    settimeout = setsockopt


# -- command lines -------------------------------------------------------------------------------


def of_commands(folder: Path) -> list[Target]:
    plan = ["plan", "loads.npy", "--slots", "1", "--policy", "none,ultraep", "--tolerance", "0.1"]
    lines = {
        "plan": [
            [*plan, "--domain", "2", "--speeds", "1000,900", "--json"],
            ["plan", "routing.npz", "--ranks", "2", "--window", "8"],
        ],
        "trace": [
            ["trace", "info", "run", "--json"],
            ["trace", "replay", "run", "--policy", "ultraep", "--slots", "1,2"],
        ],
        "simulate": [[str(word) for word in SIMULATE]],
        "env": [["env", "--json"]],
    }
    return [
        Target(
            f"command {name}",
            [json.dumps(line).encode() for line in valid],
            run_command,
            partial(other_words, pool=WORDS if name == "simulate" else (*WORDS, *LARGE)),
            share=1,
        )
        for name, valid in lines.items()
    ]


def run_command(content: bytes) -> None:
    command = tuple(json.loads(content))
    ended = outcome_of_command(command)
    usage = "Usage: " in ended and "Traceback" not in ended
    if ended == "refused" or usage:  # typer explains wrong options in several lines
        raise UltraEPError("refused")
    if ended != "fine":
        raise AssertionError(ended)


def other_words(content: bytes, rng: random.Random, *, pool: Sequence[str]) -> bytes:
    """Replace, delete or repeat words of a command line, but keep the command."""
    line = json.loads(content)
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(1, len(line)) if len(line) > 1 else 1
        how = rng.randrange(5)
        if how < 3 and at < len(line):
            line[at] = rng.choice(pool)
        elif how == 3:
            line = line[:at] + line[at + 1 :]
        else:
            line.insert(at, rng.choice((*pool, *line[1:])))
    return json.dumps(line).encode()
