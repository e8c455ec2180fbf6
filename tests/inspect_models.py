"""Small models of transformers and their routing; a checkpoint and texts."""

from contextlib import ExitStack, contextmanager
from functools import partial

import pytest
import torch

from ultraep_tools.inspect.library import transformers
from ultraep_tools.inspect.model import small_config

TEXTS = {
    "letters": "the quick brown fox jumps over the lazy dog and runs away from it again " * 60,
    "numbers": "1 2 3 5 8 13 21 34 55 89 144 233 , " * 90,
}
NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def smaller_config(family):
    config = small_config(family)
    for name in NUMBERS_OF_EXPERTS:
        if getattr(config, name, None):
            setattr(config, name, min(16, getattr(config, name)))
    return config


def save_model(family, folder, *, seed=0):
    """Save a small model with its head, in several files."""
    torch.manual_seed(seed)
    model = transformers().AutoModelForCausalLM.from_config(smaller_config(family))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.1)
    model.save_pretrained(folder, max_shard_size="2MB")
    return folder


def save_tokenizer(folder):
    """Save a tokenizer with a token for every word of the texts; return the vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = sorted({word for text in TEXTS.values() for word in text.split()})
    vocabulary = {"[unknown]": 0} | {word: 3 + number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[unknown]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers().PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[unknown]")
    fast.save_pretrained(folder)
    return vocabulary


@contextmanager
def routing_of(model):
    """Yield a dict that holds expert ids [tokens, choices] by name of the experts at the end."""
    calls, routing = {}, {}

    def record(name, _, args, kwargs):
        calls.setdefault(name, []).append((*args, *kwargs.values())[1].clone())

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name.endswith("experts") and hasattr(module, "is_concatenated"):
                hook = partial(record, name)
                stack.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
        yield routing
    routing.update({name: torch.cat(parts) for name, parts in calls.items()})


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A small qwen3_moe with a tokenizer; copy it before you change it."""
    folder = save_model("qwen3_moe", tmp_path_factory.mktemp("models") / "small")
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def text_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for name, text in TEXTS.items():
        (folder / f"{name}.txt").write_text(text)
    return [folder / f"{name}.txt" for name in TEXTS]
