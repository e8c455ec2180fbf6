"""All turns: of every variant, at every rate, in every round, in processes of this machine."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

from ultraep.errors import ConfigError
from ultraep.tools.launch.place import RankPlace
from ultraep.tools.launch.processes import run_ranks
from ultraep.tools.serving.asked import EngineAsked
from ultraep.tools.serving.measure import Turn

Tell = Callable[[Any], None]  # of `Calibrated`, then of every `Turn`


def run(asked: EngineAsked, tell: Tell) -> None:
    """Start the ranks, and pass on what they measure. On interruption they end."""
    run_ranks("ultraep.tools.serving.run:work", asked, asked.ranks, tell)


def check(asked: EngineAsked) -> Any:
    """The facts of the model, if it can be served and all prompts fit it."""
    from ultraep.tools.serving.model import facts_of
    from ultraep.tools.serving.variants import check_variants

    check_variants(asked.variants)
    facts = facts_of(asked.model)
    if asked.load.longest > facts.longest:
        raise ConfigError(
            f"prompts of up to {asked.load.longest} tokens, but {facts.name} takes "
            f"{facts.longest}: lower --longest, or the tokens of --arrivals"
        )
    if asked.ranks > facts.experts:
        raise ConfigError(f"--ranks {asked.ranks}, but {facts.name} has {facts.experts} experts")
    return facts


def turns(asked: EngineAsked, rates: tuple[float, ...]) -> Iterator[tuple[str, float, int]]:
    """Variant, rate and round of every turn; variants take turns at being first."""
    count = len(asked.variants)
    for number in range(asked.load.rounds):
        for place, rate in enumerate(rates):
            for index in range(count):
                yield asked.variants[(index + number + place) % count], rate, number


def work(place: RankPlace, asked: EngineAsked, tell: Tell) -> None:
    """One rank; `tell` hears rank 0 only."""
    import torch.distributed as dist

    from ultraep.tools.launch.group import process_group, settle
    from ultraep.tools.serving.calibrate import calibrate
    from ultraep.tools.serving.engine import Engine
    from ultraep.tools.serving.model import balanced_model, check_packing, encoder_of, facts_of

    settle(place, "cpu")
    heard: Tell = tell if place.rank == 0 else lambda _: None
    with process_group(place), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # slow then
        encode, bytes_per_token = encoder_of(asked.model)
        model = balanced_model(
            asked.model,
            dist.new_group(),  # its messages do not mix with those that tell what is next
            asked.load.seed,
            slots=asked.slots,
            policy="none",
            in_flight=facts_of(asked.model).layers,  # slots of its own for every layer: copies stay
        )
        check_packing(model)
        engine = Engine(model, encode, routing=asked.routing)
        found = calibrate(engine, asked, bytes_per_token)
        heard(found)
        for variant, rate, number in turns(asked, found.rates):
            prompts = asked.load.prompts(rate, number, bytes_per_token)
            measured: Turn = engine.serve(prompts, variant, rate, number)
            heard(measured)
        for owner in engine.owners:
            owner.close()
