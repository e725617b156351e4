"""Bytes of a model's weights: read from the checkpoint's index where there is one, else computed from its config.json.

On a GPU lie the parts of its pipeline stage, divided over the tensor-parallel ranks where vLLM divides them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from kvwatch.errors import ModelError, UnsupportedModel
from kvwatch.model.fields import shown
from kvwatch.parameters import Parameters, Part, count_parameters
from kvwatch.quantization import Storage, storage_of

# Largest deviation from the published sizes in tests/test_weights.py: unquantised, and quantised (whose scales, zero
# points and exceptions are stored in more ways than are computed here).
COMPUTED_ERROR_RATIO = 0.01
QUANTISED_ERROR_RATIO = 0.05
# A stated size further than this from the computed one is a mistake: of the file, or of an index of other files.
_BELIEVED_FACTOR = 10
_MOST_BYTES = 1 << 50  # more than any model has


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The weights of one model. `checkpoint_bytes` is the size of its safetensors files.

    `loaded_bytes_per_rank` has one entry per pipeline stage: what a tensor-parallel rank of that stage holds.
    `error_ratio` bounds the deviation of the sizes from what vLLM loads, as far as compared. `doubt` says why the size
    that the checkpoint states was not taken.
    """

    checkpoint_bytes: int
    loaded_bytes_per_rank: tuple[int, ...]
    source: Literal["given", "derived"]
    error_ratio: float
    doubt: str | None = None


def index_bytes(index: Mapping[str, Any]) -> int | None:
    """`metadata.total_size` of a model.safetensors.index.json, None where it states none. Raises ModelError for what is
    no number; whether the number can be, `weights_of` judges.
    """
    metadata = index.get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, Mapping) else metadata
    if size is None:
        return None
    if isinstance(size, float) and size.is_integer():
        size = int(size)
    if not isinstance(size, int) or isinstance(size, bool):
        raise ModelError(
            f"model.safetensors.index.json: metadata.total_size is {shown(size)}, not the checkpoint's size in bytes. "
            "Repair the file or take it away: the size is then computed from config.json."
        )
    return size


def header_bytes(headers: Iterable[Mapping[str, Any]]) -> int:
    """Bytes of the tensors that safetensors file headers describe (one parsed header per file).

    A header maps each tensor to {"dtype", "shape", "data_offsets": [begin, end]}; see
    https://huggingface.co/docs/safetensors. Raises ModelError for a header of another form, or none at all.
    """
    total = 0
    for header in headers:
        for tensor, facts in header.items():
            if tensor == "__metadata__":
                continue
            match facts:
                case {"data_offsets": [int(begin), int(end)]} if 0 <= begin <= end:
                    total += end - begin
                case _:
                    raise ModelError(
                        f"safetensors header: {tensor} has no data_offsets of the form [begin, end]: {shown(facts)}"
                    )
    if total == 0:
        raise ModelError("the safetensors headers describe no tensor, so the size of the weights is unknown")
    return total


def stage_layers(layers: int, stages: int) -> tuple[range, ...]:
    """The layers of each pipeline stage. A remainder goes to the stages before the last, from the back.

    Source: vLLM 0.32.0, vllm/distributed/utils.py, get_pp_indices; VLLM_PP_LAYER_PARTITION overrides it there.
    """
    sizes = [layers // stages] * stages
    for place in range(2, layers % stages + 2):
        sizes[-place] += 1
    begins = [sum(sizes[:stage]) for stage in range(stages)]
    return tuple(range(begin, begin + size) for begin, size in zip(begins, sizes, strict=True))


def weights_of(
    config: Mapping[str, Any],
    *,
    name: str = "model",
    checkpoint_bytes: int | None = None,
    dtype: str = "bfloat16",
    quantization: str | None = None,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    data_parallel_size: int = 1,
    loads_draft: bool = False,
) -> Weights:
    """The weights of the model that `config` (a parsed config.json) describes.

    `checkpoint_bytes` (from `index_bytes` or `header_bytes`) is exact and decides, unless the config rules it out; the
    config then only says how it is divided. `quantization` is --quantization, for a checkpoint that vLLM quantises on
    loading. `loads_draft`: the multi-token-prediction layers are loaded for speculative decoding. Raises
    UnsupportedModel where neither settles it.
    """
    try:
        parameters, stored = count_parameters(config, name=name), storage_of(config)
    except UnsupportedModel:
        if checkpoint_bytes is None or quantization is not None:
            raise
        return _divided_evenly(checkpoint_bytes, tensor_parallel_size * pipeline_parallel_size, name)
    loaded = stored.loaded(dtype=dtype, quantization=quantization, hidden_size=parameters.hidden_size)
    computed = _bytes(_every_part(parameters), stored)
    doubt = _doubt(checkpoint_bytes, computed) if checkpoint_bytes is not None else None
    checkpoint_bytes = None if doubt is not None else checkpoint_bytes
    scale = Fraction(checkpoint_bytes, computed) if checkpoint_bytes is not None else Fraction(1)
    split = _Split(parameters, tensor_parallel_size, tensor_parallel_size * data_parallel_size)
    per_rank = tuple(
        int(split.bytes_per_rank(parts, loaded) * scale)
        for parts in _stage_parts(parameters, pipeline_parallel_size, loads_draft=loads_draft)
    )
    computed_error = QUANTISED_ERROR_RATIO if loaded.is_quantised else COMPUTED_ERROR_RATIO
    return Weights(
        checkpoint_bytes=computed if checkpoint_bytes is None else checkpoint_bytes,
        loaded_bytes_per_rank=per_rank,
        source="derived" if checkpoint_bytes is None else "given",
        error_ratio=computed_error if checkpoint_bytes is None else COMPUTED_ERROR_RATIO,
        doubt=doubt,
    )


def _doubt(stated: int, computed: int) -> str | None:
    """Why a checkpoint does not have the size that it states; None where it can."""
    if computed / _BELIEVED_FACTOR <= stated <= computed * _BELIEVED_FACTOR:
        return None
    return (
        f"model.safetensors.index.json says {_grouped(stated)} bytes, but the parameters of config.json take "
        f"{computed / (1 << 30):,.2f} GiB: these are used. Does the index belong to this config.json?"
    )


def _grouped(number: int) -> str:
    """Digits in groups of three; what is longer than a line is cut short."""
    return f"{number:,}" if abs(number) < 10**45 else shown(number)


def _divided_evenly(checkpoint_bytes: int, ranks: int, name: str) -> Weights:
    """Modules of unknown shape: an even share each. What is replicated makes the real share larger."""
    if not 0 < checkpoint_bytes <= _MOST_BYTES:
        raise ModelError(
            f"the checkpoint of {name} states {_grouped(checkpoint_bytes)} bytes of weights (metadata.total_size of "
            "model.safetensors.index.json), which cannot be. Repair the file, or give --kv-cache-memory-bytes N."
        )
    return Weights(
        checkpoint_bytes=checkpoint_bytes,
        loaded_bytes_per_rank=(checkpoint_bytes // ranks,),
        source="given",
        error_ratio=COMPUTED_ERROR_RATIO if ranks == 1 else QUANTISED_ERROR_RATIO,
    )


# Parts of a stage and their division -----------------------------------------------------------------------------


def _every_part(parameters: Parameters) -> list[Part]:
    layers = (parameters.embedding, *parameters.layers, parameters.head, *parameters.draft, parameters.vision)
    return [part for parts in layers for part in parts if part.is_stored]


def _stage_parts(parameters: Parameters, stages: int, *, loads_draft: bool) -> list[list[Part]]:
    """The parts that each pipeline stage loads: embedding and vision on the first, head and draft on the last."""
    split = stage_layers(len(parameters.layers), stages)
    found = [[part for index in indices for part in parameters.layers[index]] for indices in split]
    found[0] += [*parameters.embedding, *parameters.vision]
    found[-1] += parameters.head
    if parameters.is_tied and stages > 1:
        found[-1] += parameters.embedding
    if loads_draft:
        found[-1] += [part for layer in parameters.draft for part in layer]
    return found


@dataclass(frozen=True, slots=True)
class _Split:
    parameters: Parameters
    ranks: int
    expert_ranks: int

    def bytes_per_rank(self, parts: list[Part], bits: Storage) -> Fraction:
        divisors = {
            "ranks": self.ranks,
            "kv_heads": min(self.ranks, self.parameters.kv_heads),
            "experts": self.expert_ranks,
            "none": 1,
        }
        return sum((bits.of(part) * part.parameters / (8 * divisors[part.split]) for part in parts), Fraction(0))


def _bytes(parts: list[Part], bits: Storage) -> int:
    return int(sum((bits.of(part) * part.parameters for part in parts), Fraction(0)) / 8)
