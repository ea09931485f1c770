"""``generate`` of KerasHub's language models: each rank caches keys and values of the heads that it computes.

It owns which models' caches are known (:data:`CACHED`), and the two methods that a wrapped model gets.  KerasHub makes
a cache for the heads of the whole model, ``[batch, layers, 2, length, heads, features]``, and hands it to
``call_with_cache``, where this rank's takes its place.  Every rank generates the same tokens, because all have the same
logits bit for bit; prompts are compared, and samplers continue with rank 0's random numbers.  Models that are not known
are refused before anything runs.
"""

from __future__ import annotations

from typing import Any

from tpkernels.integrations.keras import backend
from tpkernels.integrations.keras.batches import check_same
from tpkernels.integrations.keras.plan import KerasPlan
from tpkernels.integrations.keras.shadow import Equation, equation_of, named_layers
from tpkernels.integrations.keras.start import same_generators, same_values
from tpkernels.integrations.keras.variables import Shards

__all__ = ["CACHED", "generating"]

CACHED = ("GPT2CausalLM", "GemmaCausalLM", "LlamaCausalLM", "MistralCausalLM", "OPTCausalLM")
"""Models whose ``generate`` is compared with that of the unsharded one by the tests."""


def generating(model: Any, plan: KerasPlan, shards: Shards) -> dict[str, Any]:
    """The methods of the class of a model that is about to be cut: none where it has no ``generate``."""
    kind: Any = type(model)
    if not hasattr(kind, "generate"):
        return {}
    heads = _heads(model, plan, shards.rank) if kind.__name__ in CACHED else set()
    if len(heads) != 1 or not kind.__module__.startswith("keras_hub."):
        return {"generate": _refuse}
    own = next(iter(heads))

    def generate(self: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        check_same({"inputs": inputs, "arguments": repr((args, sorted(kwargs.items())))}, shards.group, "prompts")
        same_generators(shards.pg)
        same_values(self.sampler.variables if getattr(self, "sampler", None) is not None else [], shards.pg)
        return kind.generate(self, inputs, *args, **kwargs)

    def call_with_cache(self: Any, token_ids: Any, cache: Any, cache_update_index: Any) -> Any:
        if cache.shape[-2] != own:
            if cache_update_index != 0:
                raise ValueError(f"the cache is for {cache.shape[-2]} heads, and this rank computes {own}")
            cache = cache.new_zeros((*cache.shape[:-2], own, cache.shape[-1]))
        return kind.call_with_cache(self, token_ids, cache, cache_update_index)

    return {"generate": generate, "call_with_cache": call_with_cache}


def _heads(model: Any, plan: KerasPlan, rank: int) -> set[int]:
    """How many key-value heads this rank computes, in each layer that makes keys or values."""
    entries = {entry.name: entry for entry in plan.layers}
    names = {id(layer): name for name, layer in named_layers(model).items()}
    found = set()
    for layer in named_layers(model).values():
        for made in backend.key_value_layers(layer):
            entry = entries[names[id(made)]]
            if entry.style == "column":
                found.add(entry.cuts[backend.kernel_of(made).path].sizes[rank])
            else:
                equation = equation_of(made)
                assert isinstance(equation, Equation), "a linear layer has one"
                found.add(len(entry.copied[rank]) if entry.copied else equation.sizes[equation.made[0]])
    return found


def _refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
    raise ValueError(
        f"generate of {type(self).__name__} keeps a cache that tpkernels does not know, of all heads, and each rank "
        f"computes some of them only (known are {', '.join(CACHED)} of KerasHub): save the model, and generate with "
        "what keras.models.load_model gives"
    )
