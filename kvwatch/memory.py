"""What is left of a GPU's memory for the KV cache, before the engine has run: an estimate with stated bounds.

    available = ceil(total × gpu_memory_utilization) − weights − other allocations − activations − CUDA graphs

Source: vLLM 0.32.0, vllm/v1/worker/utils.py (request_memory), vllm/v1/worker/gpu_worker.py
(determine_available_memory). vLLM measures the subtrahends in a dummy run; here the weights are computed and the rest
is estimated, with constants fitted to published measurements (tests/data/startup_memory.csv; tests/test_memory.py
states the deviations). `--kv-cache-memory-bytes` replaces all of it and is exact.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvwatch.engine import EngineConfig, ResolvedEngine, Source
from kvwatch.errors import SettingError
from kvwatch.model.fields import Fields
from kvwatch.model.nested import text_section, with_defaults
from kvwatch.versions import Version, parse_version
from kvwatch.weights import Weights, stage_layers, weights_of

_GIB = 1 << 30
_MIB = 1 << 20
_ACTIVATION_BYTES = 2  # bfloat16 and float16; activations are not quantised

# The graph estimate is subtracted by default since this version; earlier ones capture the graphs outside the budget.
_GRAPHS_SUBTRACTED_SINCE: Version = (0, 20, 2)
# Until the Triton kernel (vLLM pull request 33538, February 2026) top-k and top-p sorted the logits of every request.
_SAMPLING_WITHOUT_SORT_SINCE: Version = (0, 17, 0)
# Peak bytes per logit of the profiled sampling step: logits, probabilities, noise, and with the sort its copies and
# indices. Fitted: 38.4-38.9 (vLLM 0.11, seven models), 14.9-15.5 (vLLM 0.19, nine architectures).
_SORTED_BYTES_PER_LOGIT = 38.5
_UNSORTED_BYTES_PER_LOGIT = 15.5
_MLA_WORKSPACE_TOKENS = 64 * 1024
_GRAPH_BYTES_PER_LAYER = _MIB // 4
_FIRST_GRAPH_BYTES = 128 * _MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTerm:
    """One part of a GPU's memory, in bytes on one rank, and the bounds between which it is expected."""

    name: str
    bytes_per_rank: int
    low_bytes: int
    high_bytes: int
    source: Source
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The memory for the KV cache on each pipeline stage, and how it came about.

    `available_kv_cache_bytes_per_rank` has one entry per stage and may be negative: then vLLM refuses to start. `low`
    and `high` are what the bounds of the terms make of it; for a given size all three are equal. `terms` are those of
    the stage with the least left.
    """

    available_kv_cache_bytes_per_rank: tuple[int, ...]
    low_bytes_per_rank: tuple[int, ...]
    high_bytes_per_rank: tuple[int, ...]
    source: Source
    device_memory_bytes: int | None
    requested_bytes: int | None
    terms: tuple[MemoryTerm, ...]
    assumptions: tuple[str, ...]

    @property
    def is_exact(self) -> bool:
        return self.low_bytes_per_rank == self.high_bytes_per_rank


def requested_memory_bytes(device_memory_bytes: int, gpu_memory_utilization: float) -> int:
    """What vLLM claims of a GPU: rounded up, of the total, whatever else runs there."""
    return math.ceil(device_memory_bytes * gpu_memory_utilization)


def available_kv_cache_bytes(
    *,
    device_memory_bytes: int,
    gpu_memory_utilization: float,
    weights_bytes: int,
    activation_bytes: int,
    graph_bytes: int,
    vllm_version: Version,
    other_bytes: int = 0,
) -> int:
    """Bytes per rank left for the KV cache; negative where the rest does not fit."""
    graphs = graph_bytes if vllm_version >= _GRAPHS_SUBTRACTED_SINCE else 0
    requested = requested_memory_bytes(device_memory_bytes, gpu_memory_utilization)
    return requested - weights_bytes - other_bytes - activation_bytes - graphs


def plan_memory(
    config: Mapping[str, Any],
    engine: EngineConfig,
    resolved: ResolvedEngine,
    *,
    name: str = "model",
    checkpoint_bytes: int | None = None,
) -> MemoryPlan:
    """The memory plan of a model (its parsed config.json) under these flags.

    `checkpoint_bytes` is the size of the safetensors files where known (kvwatch.weights.index_bytes).
    Raises SettingError without a GPU or --kv-cache-memory-bytes, UnsupportedModel where the weights are unknown.
    """
    stages = resolved.pipeline_parallel_size
    if resolved.kv_cache_memory_bytes is not None:
        given = (resolved.kv_cache_memory_bytes,) * stages
        return MemoryPlan(
            available_kv_cache_bytes_per_rank=given,
            low_bytes_per_rank=given,
            high_bytes_per_rank=given,
            source="given",
            device_memory_bytes=resolved.device.memory_bytes if resolved.device else None,
            requested_bytes=None,
            terms=(),
            assumptions=(),
        )
    device = resolved.device
    if device is not None and device.is_cpu:
        raise SettingError(
            "on a CPU vLLM takes the KV cache's memory from VLLM_CPU_KVCACHE_SPACE (GiB) or a share of the host's, "
            "which is not estimated here. Give --kv-cache-memory-bytes N."
        )
    if device is None:
        raise SettingError(
            "the memory for the KV cache is unknown without a GPU. Give --gpu NAME, --gpu-memory-gib X, or "
            "--kv-cache-memory-bytes N with the bytes per GPU that vLLM logs as 'Available KV cache memory'."
        )
    weights = weights_of(
        config,
        name=name,
        checkpoint_bytes=checkpoint_bytes,
        dtype=resolved.dtype,
        quantization=engine.quantization,
        tensor_parallel_size=resolved.tensor_parallel_size,
        pipeline_parallel_size=stages,
        data_parallel_size=resolved.data_parallel_size,
        loads_draft=resolved.has_draft_layers,
    )
    estimate = _Estimate(config, engine, resolved)
    per_stage = [estimate.terms(weights, stage) for stage in range(stages)]
    requested = requested_memory_bytes(device.memory_bytes, resolved.gpu_memory_utilization)
    available = tuple(requested - sum(term.bytes_per_rank for term in terms) for terms in per_stage)
    least = available.index(min(available))
    return MemoryPlan(
        available_kv_cache_bytes_per_rank=available,
        low_bytes_per_rank=tuple(requested - sum(term.high_bytes for term in terms) for terms in per_stage),
        high_bytes_per_rank=tuple(requested - sum(term.low_bytes for term in terms) for terms in per_stage),
        source="derived",
        device_memory_bytes=device.memory_bytes,
        requested_bytes=requested,
        terms=per_stage[least],
        assumptions=(*estimate.assumptions(), *filter(None, [weights.doubt])),
    )


class _Estimate:
    """The estimated terms for one model and one set of flags. Every formula states what it was fitted to."""

    def __init__(self, config: Mapping[str, Any], engine: EngineConfig, resolved: ResolvedEngine) -> None:
        found = text_section(config)
        self.text = Fields(with_defaults(found[0])[0] if found else config)
        self.is_multimodal = found is not None and config.get("vision_config") is not None
        self.engine, self.resolved = engine, resolved
        self.version = parse_version(resolved.vllm_version)
        self.hidden = self.text.count("hidden_size", "n_embd", "d_model")
        self.vocab = self.text.count("vocab_size")
        self.layers = self.text.count("num_hidden_layers", "n_layer", "num_layers")

    def terms(self, weights: Weights, stage: int) -> tuple[MemoryTerm, ...]:
        loaded = weights.loaded_bytes_per_rank[min(stage, len(weights.loaded_bytes_per_rank) - 1)]
        loaded = max(0, loaded - int(self.engine.cpu_offload_gb * _GIB))
        margin = int(loaded * weights.error_ratio)
        found = [
            MemoryTerm(
                name="weights",
                bytes_per_rank=loaded,
                low_bytes=loaded - margin,
                high_bytes=loaded + margin,
                source=weights.source,
                note="from the checkpoint's size" if weights.source == "given" else "counted from config.json",
            ),
            self._other(),
            self._activations(is_last=stage == self.resolved.pipeline_parallel_size - 1),
        ]
        if self.version >= _GRAPHS_SUBTRACTED_SINCE and not self.engine.enforce_eager:
            found.append(self._graphs(stage))
        return tuple(found)

    def assumptions(self) -> tuple[str, ...]:
        found = [
            "nothing else uses the GPU: vLLM refuses to start when less than its share is free",
            (
                "activations, CUDA graphs and other allocations are estimates; the engine logs the true figure as "
                "'Available KV cache memory', and --kv-cache-memory-bytes fixes it"
            ),
        ]
        if self.is_multimodal:
            found.append("the profiled images or videos of a multimodal model are not included in the activations")
        return tuple(found)

    def _other(self) -> MemoryTerm:
        """CUDA context growth, NCCL and communication buffers.

        Measured with vLLM 0.11: 0.13 GiB on one rank, 0.55 on two; with 0.19: 0.27 and 2.1.
        """
        ranks = self.resolved.tensor_parallel_size
        newer = self.version >= _SAMPLING_WITHOUT_SORT_SINCE
        gib = (2.1 if newer else 0.55) if ranks > 1 else (0.27 if newer else 0.15)
        low, high = (0.4, 2.6) if ranks > 1 else (0.1, 0.6)
        return MemoryTerm(
            name="other",
            bytes_per_rank=int(gib * _GIB),
            low_bytes=int(low * _GIB),
            high_bytes=int(high * _GIB),
            source="assumed",
            note="CUDA context, communication buffers",
        )

    def _activations(self, *, is_last: bool) -> MemoryTerm:
        """The peak of the dummy run: a full batch of tokens forward, then max_num_seqs rows of logits sampled.

        The two do not overlap; the workspace of the experts does with both, since it stays allocated. Versions up to
        0.19 were measured; the bounds of later ones are wider.
        """
        resolved = self.resolved
        workspace = self._expert_workspace()
        sampling = self._sampling() if is_last else 0
        kept = workspace if self.version >= _SAMPLING_WITHOUT_SORT_SINCE else 0
        peak = max(self._forward() + workspace, sampling + kept)
        low, high, extra = (0.85, 1.15, _GIB // 4) if self.version < _GRAPHS_SUBTRACTED_SINCE else (0.7, 1.4, _GIB // 2)
        return MemoryTerm(
            name="activations",
            bytes_per_rank=peak,
            low_bytes=int(low * peak),
            high_bytes=int(high * peak) + extra,
            source="derived",
            note=f"{resolved.max_num_batched_tokens} tokens forward, {resolved.max_num_seqs} requests sampled",
        )

    def _sampling(self) -> int:
        rows = min(self.resolved.max_num_seqs, self.resolved.max_num_batched_tokens)
        sorts = self.version < _SAMPLING_WITHOUT_SORT_SINCE
        return int(rows * self.vocab * (_SORTED_BYTES_PER_LOGIT if sorts else _UNSORTED_BYTES_PER_LOGIT))

    def _forward(self) -> int:
        """Gate, up and product of the widest feed-forward, or queries, keys, values and output; four hidden states."""
        ranks, tokens = self.resolved.tensor_parallel_size, self.resolved.max_num_batched_tokens
        heads = self.text.optional_count("num_attention_heads", "n_head", "num_heads") or 0
        kv_heads = self.text.optional_count("num_key_value_heads", "num_kv_heads") or heads
        head_dim = self.text.optional_count("head_dim", "v_head_dim") or (self.hidden // heads if heads else 0)
        dense = self.text.optional_count("intermediate_size_mlp", "intermediate_size") or 4 * self.hidden
        wide = 0 if self._experts() else 3 * dense
        wide = max(wide, 2 * (heads + kv_heads) * head_dim)
        forward = tokens * _ACTIVATION_BYTES * (wide // ranks + 4 * self.hidden)
        return max(forward, self._latent_context())

    def _latent_context(self) -> int:
        """MLA's profile run allocates the up-projected context of one chunk (mla_attention.py, forward_impl)."""
        if self.text.raw("kv_lora_rank") is None:
            return 0
        heads = self.text.count("num_attention_heads")
        width = self.text.count("qk_nope_head_dim") + self.text.count("v_head_dim")
        chunk = min(
            max(8 * self.resolved.max_model_len, 4 * self.resolved.max_num_seqs * (self.resolved.block_size or 16)),
            _MLA_WORKSPACE_TOKENS,
        )
        return chunk * heads // self.resolved.tensor_parallel_size * width * _ACTIVATION_BYTES

    def _experts(self) -> int:
        return self.text.optional_count("n_routed_experts", "num_local_experts", "num_experts") or 0

    def _expert_workspace(self) -> int:
        """Two buffers of the fused experts: tokens × experts per token × width (fused_moe/experts/triton_moe.py)."""
        per_token = self.text.optional_count("num_experts_per_tok", "num_experts_per_token", "top_k_experts")
        if not self._experts() or per_token is None:
            return 0
        width = self.text.optional_count("moe_intermediate_size", "intermediate_size") or 0
        width //= self.resolved.tensor_parallel_size
        rows = self.resolved.max_num_batched_tokens * per_token
        return rows * _ACTIVATION_BYTES * (max(2 * width, self.hidden) + width)

    def _graphs(self, stage: int) -> MemoryTerm:
        """What vLLM estimates: the first capture of each mode, and its second times the number of graphs.

        Its figure is a third to four times what the capture then takes (vLLM issue 45178); the bounds are that wide.
        """
        layers = len(stage_layers(self.layers, self.resolved.pipeline_parallel_size)[stage])
        graphs = _captured_sizes(2 * self.resolved.max_num_seqs) + _captured_sizes(self.resolved.max_num_seqs)
        value = _FIRST_GRAPH_BYTES + graphs * layers * _GRAPH_BYTES_PER_LAYER
        return MemoryTerm(
            name="cuda_graphs",
            bytes_per_rank=value,
            low_bytes=value // 4,
            high_bytes=3 * value,
            source="assumed",
            note=f"{graphs} graphs; VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0 leaves them out of the budget",
        )


def _captured_sizes(limit: int) -> int:
    """How many batch sizes are captured up to `limit`: 1, 2, 4, multiples of 8 below 256, multiples of 16 to 512.

    Source: vLLM 0.32.0, vllm/config/vllm.py, _set_cudagraph_sizes.
    """
    sizes = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
    return sum(1 for size in sizes if size <= limit)
