"""config.json -> ModelSpec. One module per attention family; `FAMILIES` is the list of them.

    full         every layer alike: multi-head, grouped-query, multi-query; one window for all
    interleaved  sliding-window and full layers, shared caches (Gemma 2-4, gpt-oss, Cohere 2, EXAONE 4, OLMo 3, ...)
    chunked      chunked local and full layers (Llama 4)
    mla          latent attention, with or without a sparse indexer (DeepSeek V2-V3.2, Kimi K2, GLM with DSA)
    mamba        state-space layers only
    hybrid       attention with Mamba or short convolutions (Jamba, Nemotron-H, Falcon-H1, Granite 4, LFM2, Zamba 2)
    delta_net    gated delta net or linear attention with full or latent attention (Qwen3-Next, Qwen3.5, Kimi Linear)
    encoder      encoder-decoder, and encoders without a cache

An architecture in none of them is refused: sizing it by the plain formula would be a guess.
Beside them: spec (the result), fields and dims (reading), nested (multimodal wrappers), length, checkpoint.
"""

import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from kvwatch.errors import ModelError, UnsupportedModel
from kvwatch.model import chunked, delta_net, encoder, full, hybrid, interleaved, mamba, mla
from kvwatch.model.checkpoint import kv_cache_dtype, quantization_method, quantization_section
from kvwatch.model.dims import head_count
from kvwatch.model.fields import Fields, shown, words
from kvwatch.model.length import derived_max_model_len
from kvwatch.model.nested import WRAPPERS, inner_architecture, text_section, with_defaults
from kvwatch.model.spec import ModelSpec

__all__ = ["FAMILIES", "FAMILY_BY_ARCHITECTURE", "ModelSpec", "architectures", "read_model"]

FAMILIES: tuple[ModuleType, ...] = (full, interleaved, chunked, mla, mamba, hybrid, delta_net, encoder)
FAMILY_BY_ARCHITECTURE: dict[str, ModuleType] = {
    architecture: family for family in FAMILIES for architecture in family.ARCHITECTURES
}

# Architectures that vLLM serves and kvwatch knows it cannot size, with the reason a user should read.
REFUSED: dict[str, str] = {
    "DeepseekV4ForCausalLM": "compressed attention with several caches and compressor states per layer",
    "DeepseekV4ForConditionalGeneration": "compressed attention with several caches and compressor states per layer",
    "DeepseekV41ForCausalLM": "compressed attention with several caches and compressor states per layer",
    "Glm5NextForCausalLM": "pooled index keys, tail caches and recurrent states side by side",
    "KimiK3ForConditionalGeneration": "recurrent states and latent attention in layouts not verified here",
    "MiniMaxM3SparseForCausalLM": "sparse attention with its own index cache",
    "Qwen4ExpForCausalLM": "several recurrent state layouts next to sparse attention",
}

_DTYPES = frozenset({"bfloat16", "float16", "float32"})
_IDENTIFIER = re.compile(r"[\w.\-]{1,200}")


def architectures() -> tuple[str, ...]:
    """Every architecture that `read_model` accepts, in alphabetical order."""
    return tuple(sorted({*FAMILY_BY_ARCHITECTURE, *WRAPPERS}, key=lambda name: (name.lower(), name)))


def read_model(config: Mapping[str, Any], *, name: str = "model") -> ModelSpec:
    """A ModelSpec from the object in a config.json. `name` is what reports call the model.

    Raises UnsupportedModel for an architecture that is not known or a config that lacks what its family needs, and
    ModelError for a config that is broken; both name the field and its value.
    """
    if not isinstance(config, Mapping):
        raise ModelError(
            f"config.json of {name} is {type(config).__name__}, but has to be an object with the model's fields"
        )
    outer = _architecture(config, name)
    fields, architecture, assumed = _language_model(config, outer)
    family = FAMILY_BY_ARCHITECTURE.get(architecture)
    if family is None:
        raise _unknown(architecture, outer, fields)
    layout = family.layout(fields, architecture)
    has_attention = any(cache.kind != "state" for layer in layout.layers for cache in layer)
    top = Fields(config, architecture=architecture)
    quantization = quantization_section(top) or quantization_section(fields)
    return ModelSpec(
        name=name,
        architecture=outer,
        family=family.__name__.rpartition(".")[2],
        dtype=_dtype(top, fields),
        max_model_len=derived_max_model_len(fields, model_type=words(config.get("model_type"))),
        layers=layout.layers,
        draft_layers=layout.draft_layers,
        cacheless=layout.cacheless,
        attention_heads=head_count(fields) if has_attention else 0,
        expanded_head_elements=layout.expanded_head_elements,
        quantization=quantization_method(quantization) if quantization is not None else None,
        kv_cache_dtype=kv_cache_dtype(quantization) if quantization is not None else None,
        is_encoder_decoder=layout.is_encoder_decoder,
        assumed=assumed,
    )


def _architecture(config: Mapping[str, Any], name: str) -> str:
    named = config.get("architectures")
    if isinstance(named, (list, tuple)) and named and isinstance(named[0], str) and _IDENTIFIER.fullmatch(named[0]):
        return named[0]
    if named is None or named == []:
        raise UnsupportedModel(
            f"config.json of {name} names no architecture (the list `architectures` is missing or empty), so its "
            "layers cannot be told. Give the config.json that vLLM loads, complete."
        )
    raise ModelError(f"config.json of {name}: architectures is {shown(named)}, but has to be a list with a name")


def _language_model(config: Mapping[str, Any], outer: str) -> tuple[Fields, str, tuple[str, ...]]:
    """The fields of the language model, its architecture, and the names of fields filled from defaults."""
    found = text_section(config)
    if found is None:
        inner = WRAPPERS.get(outer, outer)
        return Fields(config, architecture=outer), inner or outer, ()
    nested, where = found
    values, assumed = with_defaults(nested)
    # `architectures` of a plain text model stays what it is, even where its fields lie nested.
    inner = (
        outer if outer in FAMILY_BY_ARCHITECTURE else inner_architecture(outer, nested) if outer in WRAPPERS else outer
    )
    return Fields(values, architecture=outer, where=f"config.json: {where}"), inner or outer, assumed


def _unknown(architecture: str, outer: str, fields: Fields) -> UnsupportedModel:
    label = outer if architecture == outer else f"{outer} (language model {architecture})"
    if architecture in REFUSED:
        return UnsupportedModel(
            f"{label} is not supported: {REFUSED[architecture]}. Its KV cache is not 2 × layers × heads × size. "
            "Read the capacity from a running engine instead: kvwatch check URL."
        )
    needed = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "layer_types")
    missing = ", ".join(field for field in needed if fields.raw(field) is None) or "none of the usual ones"
    return UnsupportedModel(
        f"{label} is not an architecture whose KV layout kvwatch knows. It is not sized by the plain formula, which "
        f"is wrong for windows, states and latent attention. Fields its config lacks: {missing}. Read the capacity "
        "from a running engine instead: kvwatch check URL."
    )


def _dtype(*levels: Fields) -> str:
    """The dtype vLLM's `auto` picks: what the config names, float32 reduced to bfloat16 (vllm/config/model.py)."""
    for fields in levels:
        given = fields.raw("torch_dtype", "dtype")
        if given is None:
            continue
        named = given.removeprefix("torch.") if isinstance(given, str) else None
        if named is not None and named in _DTYPES:
            return "bfloat16" if named == "float32" else named
        raise ModelError(f"{fields.where}: torch_dtype is {shown(given)}; known are {', '.join(sorted(_DTYPES))}")
    return "bfloat16"
