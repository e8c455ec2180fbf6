"""Text of Python's library: its subjects, held-out part and shifts."""

import numpy as np
import pytest
import torch

from ultraep.errors import FileError
from ultraep.tools.tiny import text as texts
from ultraep.tools.tiny.text import SUBJECTS, Text


def test_most_sequences_have_the_main_subject():
    text, rng = Text(), np.random.default_rng(0)
    main = [max(s, key=s.count) for s in (text.shifting(rng, i, 99, 2) for i in range(6))]
    assert main == [i // 2 % len(text.names) for i in range(6)]


def test_held_out_text_is_never_trained_on():
    data = SUBJECTS["prose"]()
    rest, text = len(data) // texts.HELD_OUT, Text({"prose": lambda: data})
    training = text.sequences(np.random.default_rng(0), [0], len(data) - rest)[0]
    held_out = text.sequences(np.random.default_rng(0), [0], rest, held_out=True)[0]
    assert bytes(torch.cat([training, held_out]).tolist()) == data


def test_a_missing_library_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(texts.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(FileError, match="no text in Python's library"):
        Text({"code": SUBJECTS["code"]})
