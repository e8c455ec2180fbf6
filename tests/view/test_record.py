"""One record: the paths of weights and the predicted time."""

import json

import pytest
from traces import arrived

import ultraep
from ultraep import BalanceConfig, FileError, Rates, Recorder
from ultraep.tools.view.table import numbers_of
from ultraep.trace.read import read_trace
from view.runs import CONFIG, TOPOLOGY, plans_of_run


def record_one(folder, *, config=CONFIG, **options):
    plan = ultraep.plan(plans_of_run(1, 1)[0, 0].loads, TOPOLOGY, config)
    for rank in range(TOPOLOGY.ranks):
        with Recorder(folder, TOPOLOGY, config, rank=rank, **options) as recorder:
            recorder.add(plan=plan, slot_rows=arrived(plan, rank), step=0)
    return plan


def test_a_trace_with_and_without_the_relay_mode(tmp_path):
    record_one(tmp_path / "new", relay="chain", chunks=8)
    copies = numbers_of(read_trace(tmp_path / "new"))["copies"]
    assert (copies["mode"], copies["relay"] in ("chain", "direct")) == ("chain", True)
    record_one(tmp_path / "run")
    file = tmp_path / "run" / "header.json"
    header = json.loads(file.read_text())
    assert (header.pop("relay"), header.pop("chunks")) == ("", 0)
    file.write_text(json.dumps(header))
    assert numbers_of(read_trace(tmp_path / "run"))["copies"]["mode"] == ""
    file.write_text(json.dumps(header | {"relay": "pigeon"}))
    with pytest.raises(FileError, match="got 'pigeon' with 0"):
        read_trace(tmp_path / "run")


def test_the_predicted_time_is_the_time_of_the_plan(tmp_path):
    config = BalanceConfig(rates=Rates(row=1000, copy=20_000, each=300, layer=5000))
    plan = record_one(tmp_path / "run", config=config)
    priced = numbers_of(read_trace(tmp_path / "run"))["priced"]
    assert priced["time"] == pytest.approx(plan.time / 1e12)
    assert priced["without"] == pytest.approx(plan.time_without_replicas / 1e12)
    assert priced["rates"] == str(config.rates)
    record_one(tmp_path / "other")
    assert numbers_of(read_trace(tmp_path / "other"))["priced"] is None
