"""How the ends of ranks are classified, and when resources count as leaking."""

from dataclasses import replace

import pytest

from ultraep.tools.soak.outcomes import (
    HANG,
    LEAK,
    NOT_INJECTED,
    STOPPED,
    SURVIVED,
    UNNAMED,
    WRONG,
    RankEnd,
    classify,
    growing,
)
from ultraep.tools.soak.schedule import Fault

FAULT = Fault(0, "kill", 1, "dispatch", 2, 0.0, "messages", 3, 5)
STAGE = "stage 'dispatch' of layer 0 (step 2)"
NAMED = f"at {STAGE}: all_to_all: rank 1 (process 7) died; noticed by"
GONE = RankEnd(1, killed=True)


def outcome(*ends, fault=FAULT, fired=True, left=()):
    return classify(fault, [RankEnd(0), GONE, *ends], fired=fired, left=left)[0]


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (RankEnd(2, "CommunicationError", NAMED, (1,), STAGE), STOPPED),
        (RankEnd(2, "CommunicationError", NAMED, (0, 1), STAGE), STOPPED),
        (RankEnd(2, "CommunicationError", NAMED, (1,)), UNNAMED),
        (RankEnd(2, "CommunicationError", NAMED, (0,), STAGE), UNNAMED),
        (RankEnd(2, "CommunicationError", NAMED, (), STAGE), UNNAMED),
        (RankEnd(2, "WrongNumber", "rank 2, step 0: loss is off by 1"), WRONG),
        (RankEnd(2, hung=True), HANG),
        (RankEnd(2, "ProcessEnded", "exit code -11"), UNNAMED),
    ],
)
def test_the_worst_end_counts(end, expected):
    assert outcome(end) == expected


def test_runs_without_errors():
    ends = [RankEnd(rank) for rank in range(3)]
    slow = replace(FAULT, kind="slow")
    assert classify(slow, ends, fired=True, left=[])[0] == SURVIVED
    assert classify(slow, ends, fired=False, left=[])[0] == NOT_INJECTED
    assert classify(slow, ends, fired=True, left=["/dev/shm/ultraep-7-control"])[0] == LEAK
    stopped = [*ends[:2], RankEnd(2, "CommunicationError", NAMED)]
    assert classify(slow, stopped, fired=False, left=[])[0] == UNNAMED


def test_the_error_of_the_user_needs_no_names():
    named = RankEnd(0, "CommunicationError", NAMED, (1,), STAGE)
    ends = [named, RankEnd(1, "InjectedError", "on purpose")]
    assert classify(replace(FAULT, kind="hook"), ends, fired=True, left=[])[0] == STOPPED


def samples(**slopes):
    return [
        (float(s), {name: 100 + slope * s + s % 7 for name, slope in slopes.items()})
        for s in range(0, 600, 3)
    ]


def test_a_slope_is_a_leak_and_noise_is_not():
    assert growing(samples(rss=0.0, threads=0.0, handles=0.0)) == {}
    assert set(growing(samples(rss=0.1, threads=0.0, handles=0.05))) == {"rss", "handles"}
    jump = [(s, {"rss": 100.0 + 50 * (s > 30)}) for s, _ in samples(rss=0.0)]
    assert growing(jump) == {}  # a cache that was filled once
