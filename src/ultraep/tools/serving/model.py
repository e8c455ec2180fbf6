"""A model of transformers in the engine: a checkpoint, or random, small and mostly experts.

Shapes: n prompts, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ultraep.backends import wait_until_compiled
from ultraep.errors import ConfigError, FileError
from ultraep.tools.inspect.library import transformers
from ultraep.tools.inspect.texts import Encode, hashed_words, tokenizer_of
from ultraep.tools.serving.load import Prompt
from ultraep.tools.serving.variants import EvenChoices

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ultraep.runtime.balancer import Balancer

RANDOM = {
    "vocab_size": 256,  # bytes
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
}
BYTES_PER_TOKEN = 8  # of text that a checkpoint's tokenizer is sure to make a token of
ALIKE = 1e-3  # relative: how far logits of a prompt may differ beside another one


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model before it is built."""

    name: str
    parameters: int
    layers: int  # with experts
    experts: int
    top_k: int
    longest: int  # prompt, in tokens

    @property
    def nbytes(self) -> int:
        """Bytes of its weights in float32."""
        return 4 * self.parameters


def config_of(folder: str | None) -> Any:
    """The configuration of the random model, or of a checkpoint."""
    library = transformers()
    if folder is None:
        return library.Qwen3MoeConfig(**RANDOM, experts_implementation="grouped_mm")
    if not (Path(folder) / "config.json").is_file():
        raise FileError(f"{folder}: no folder of a checkpoint: it has no config.json")
    try:
        return library.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, KeyError, OSError, TypeError) as error:
        said = " ".join(str(error).split())[:300]
        raise FileError(f"{folder}: its config.json cannot be read: {said}") from None


def facts_of(folder: str | None) -> ModelFacts:
    """The facts, by a model without memory; one without experts is refused."""
    from ultraep.integrations.transformers.balance import registered_experts

    config = config_of(folder)
    with torch.device("meta"):
        model = transformers().AutoModelForCausalLM.from_config(config)
    modules = list(registered_experts(model).values())
    text = config.get_text_config()
    return ModelFacts(
        name="random Qwen3-MoE" if folder is None else Path(folder).resolve().name,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        layers=len(modules),
        experts=max(module.num_experts for module in modules),
        top_k=int(getattr(text, "num_experts_per_tok", 0)),
        longest=int(getattr(text, "max_position_embeddings", 1 << 30)),
    )


class TransformersModel:
    """The model with its home experts of this rank, as the engine serves it; collective.

    Its outputs are tokens.   bytes_per_token: bytes of text that are enough for one token.
    """

    def __init__(
        self, folder: str | None, group: ProcessGroup, seed: int, **balancing: Any
    ) -> None:
        from ultraep.integrations.transformers import balanced_experts, balancers

        self.model = balanced_model(folder, group, seed, **balancing)
        self._encode, self.bytes_per_token = encoder_of(folder)
        self.balancers: list[Balancer] = balancers(self.model)
        even = {id(b): EvenChoices(b.topology, group.rank()) for b in self.balancers}
        self.even_choices = list(even.values())
        for module in balanced_experts(self.model).values():
            module.register_forward_pre_hook(even[id(module.balancer)], with_kwargs=True)

    def encode(self, prompt: Prompt) -> torch.Tensor:
        """[T] token ids, no more than wanted."""
        ids = self._encode(prompt.text.decode("utf-8", "replace"))[: prompt.tokens]
        return torch.tensor(ids, dtype=torch.int64)

    def first_outputs(self, texts: Sequence[torch.Tensor]) -> list[int]:
        """[n] the first new token of every text."""
        return self.last_logits(texts).argmax(dim=-1).tolist()[: len(texts)]

    @torch.no_grad()
    def last_logits(self, texts: Sequence[torch.Tensor]) -> torch.Tensor:
        """[n, V] of texts that stand one after the other in a single sequence.

        A rank without texts takes part with one token, as attention needs one.
        """
        texts = texts or [torch.zeros(1, dtype=torch.int64)]
        positions = torch.cat([torch.arange(len(text)) for text in texts])
        ends = torch.tensor([len(text) for text in texts]).cumsum(0) - 1
        inputs = {"input_ids": torch.cat(list(texts))[None], "position_ids": positions[None]}
        logits: torch.Tensor = self.model(**inputs, use_cache=False, logits_to_keep=ends).logits[0]
        return logits

    def check_packing(self) -> None:
        """Refuse a model in which texts of one sequence see each other; collective."""
        before, text = torch.arange(3, 12), torch.arange(20, 25)
        alone, beside = self.last_logits([text])[0], self.last_logits([before, text])[1]
        off = ((alone - beside).abs().max() / alone.abs().max()).item()
        if not off <= ALIKE:
            raise ConfigError(
                f"{type(self.model).__name__} lets prompts of one sequence see each other (logits "
                f"differ by {off:.2g}, allowed are {ALIKE}): it cannot be served here"
            )


def balanced_model(
    folder: str | None, group: ProcessGroup, seed: int, **balancing: Any
) -> torch.nn.Module:
    """The model with its home experts of this rank; collective."""
    from ultraep.integrations.transformers import balance, balanced_from_pretrained

    wait_until_compiled()
    library: Any = transformers()
    if folder is not None:
        slots, policy = balancing.pop("slots"), balancing.pop("policy")
        loaded: torch.nn.Module = balanced_from_pretrained(
            folder, group, slots=slots, policy=policy, balancing=balancing
        )
        return loaded.eval()
    torch.manual_seed(seed)  # all ranks draw the same
    model: torch.nn.Module = library.Qwen3MoeForCausalLM(config_of(None)).eval()
    balance(model, group, **balancing)
    return model


def encoder_of(folder: str | None) -> tuple[Encode, int]:
    """How text becomes tokens, and bytes of text that are enough for one."""
    if folder is None:
        return lambda text: list(text.encode()), 1
    tokenizer = tokenizer_of(Path(folder))
    vocabulary = config_of(folder).get_text_config().vocab_size
    return tokenizer or hashed_words(vocabulary), BYTES_PER_TOKEN
