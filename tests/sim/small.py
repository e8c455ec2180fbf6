"""A small model."""

from dataclasses import replace

from ultraep_tools.sim.model import Model, load_model


def gpt_oss(layers: int) -> Model:
    model = load_model("gpt-oss-20b")
    attention = replace(model.attention, windowed_layers=layers // 2)
    return replace(model, layers=layers, attention=attention)
