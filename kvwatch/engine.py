"""EngineConfig: the vLLM flags and the device that fix capacity, as given; `resolve` adds vLLM's own defaults.

A flag keeps vLLM's spelling. None means that the flag was not given and vLLM's default for version and GPU holds.
Source of the defaults: vLLM 0.32.0, vllm/engine/arg_utils.py (get_batch_defaults,
_set_default_max_num_seqs_and_batched_tokens_args), vllm/config/vllm.py (max_concurrent_batches).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from kvwatch.device import Device, batch_defaults
from kvwatch.errors import SettingError
from kvwatch.kv_dtypes import ELEMENT_BYTES, check_kv_cache_dtype, check_latent_dtype
from kvwatch.model.spec import ModelSpec
from kvwatch.quant_methods import check_quantization
from kvwatch.versions import EARLIEST_KNOWN, LATEST_KNOWN, Rules, Version, rules_of, version_text

__all__ = ["Device", "EngineConfig", "ResolvedEngine", "Source", "resolve"]

_SPARSE_DTYPES = {"fp8": "fp8_ds_mla", "fp8_e4m3": "fp8_ds_mla"}
_LOCAL = frozenset({"sliding_window", "chunked_local"})
_WITH_HEADS = frozenset({"full", "sliding_window", "chunked_local", "cross"})
_MTP = frozenset({None, "mtp", "deepseek_mtp", "qwen3_next_mtp", "glm4_moe_mtp", "mimo_mtp", "ernie_mtp"})
_SYNCHRONOUS = frozenset({"ngram", "suffix", "medusa", "mlp_speculator"})
_WITHOUT_LAYERS = frozenset({"ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"})
Source = Literal["given", "observed", "derived", "assumed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """vLLM flags. Sizes in bytes and tokens; `max_model_len` -1 means auto-fit, as `--max-model-len auto`."""

    vllm_version: Version = LATEST_KNOWN
    vllm_version_given: bool = False
    device: Device | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    kv_cache_dtype_skip_layers: tuple[str, ...] = ()
    block_size: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    watermark: float | None = None
    enable_prefix_caching: bool | None = None
    enable_chunked_prefill: bool | None = None
    disable_hybrid_kv_cache_manager: bool | None = None
    disable_sliding_window: bool = False
    async_scheduling: bool | None = None
    performance_mode: str | None = None
    mamba_cache_mode: str | None = None
    mamba_cache_dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    num_speculative_tokens: int = 0
    speculative_method: str | None = None
    max_concurrent_batches: int | None = None
    kv_connector: str | None = None
    cpu_offload_gb: float = 0.0
    enforce_eager: bool = False
    enable_expert_parallel: bool = False
    quantization: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedEngine:
    """Every setting the plan needs, none missing. `sources` says of each where it came from."""

    vllm_version: str
    rules: Rules
    device: Device | None
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    decode_context_parallel_size: int
    dtype: str
    kv_cache_dtype: str
    kv_cache_dtype_skip_layers: tuple[str, ...]
    block_size: int | None
    max_model_len: int
    auto_fit: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None
    num_gpu_blocks_override: int | None
    watermark: float
    enable_prefix_caching: bool
    disable_hybrid_kv_cache_manager: bool
    mamba_cache_mode: str
    mamba_cache_dtype: str
    mamba_ssm_cache_dtype: str
    num_speculative_tokens: int
    has_draft_layers: bool
    max_concurrent_batches: int
    in_flight_tokens: int
    sources: tuple[tuple[str, Source], ...]
    assumptions: tuple[str, ...]


def resolve(engine: EngineConfig, model: ModelSpec) -> ResolvedEngine:
    """The engine with vLLM's defaults filled in for this model, version and device. Raises SettingError."""
    _check(engine, model)
    _check_batch(engine, model)
    rules = rules_of(engine.vllm_version)
    max_model_len = _max_model_len(engine, model)
    max_num_seqs, max_num_batched_tokens = _batch_limits(engine, max_model_len)
    batches = _concurrent_batches(engine, rules)
    prefix_caching = _prefix_caching(engine, model, rules)
    loads_draft = engine.num_speculative_tokens > 0 and engine.speculative_method in _MTP and bool(model.draft_layers)
    return ResolvedEngine(
        vllm_version=version_text(engine.vllm_version),
        rules=rules,
        device=engine.device,
        tensor_parallel_size=engine.tensor_parallel_size,
        pipeline_parallel_size=engine.pipeline_parallel_size,
        data_parallel_size=engine.data_parallel_size,
        decode_context_parallel_size=engine.decode_context_parallel_size,
        dtype=model.dtype if engine.dtype == "auto" else engine.dtype,
        kv_cache_dtype=_kv_cache_dtype(engine, model),
        kv_cache_dtype_skip_layers=engine.kv_cache_dtype_skip_layers,
        block_size=engine.block_size,
        max_model_len=max_model_len,
        auto_fit=engine.max_model_len == -1,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        gpu_memory_utilization=_or(engine.gpu_memory_utilization, rules.gpu_memory_utilization),
        kv_cache_memory_bytes=engine.kv_cache_memory_bytes,
        num_gpu_blocks_override=engine.num_gpu_blocks_override,
        watermark=_or(engine.watermark, 0.0),
        enable_prefix_caching=prefix_caching,
        disable_hybrid_kv_cache_manager=_hybrid_manager_off(engine, model, rules),
        mamba_cache_mode=_mamba_cache_mode(engine, prefix_caching=prefix_caching and "state" in model.kinds),
        mamba_cache_dtype=engine.mamba_cache_dtype,
        mamba_ssm_cache_dtype=engine.mamba_ssm_cache_dtype,
        num_speculative_tokens=engine.num_speculative_tokens,
        has_draft_layers=loads_draft,
        max_concurrent_batches=batches,
        in_flight_tokens=max_num_batched_tokens * (batches if rules.in_flight_counts_batches else 1),
        sources=_sources(engine),
        assumptions=tuple(_assumptions(engine, model, rules, max_num_batched_tokens, loads_draft=loads_draft)),
    )


def _sources(engine: EngineConfig) -> tuple[tuple[str, Source], ...]:
    """Where each setting came from, those with a fixed default aside."""
    from_device: Source = "derived" if engine.device else "assumed"
    found: dict[str, Source] = {
        "max_model_len": "derived",
        "max_num_seqs": from_device,
        "max_num_batched_tokens": from_device,
        "max_concurrent_batches": "derived",
        "kv_cache_dtype": "derived",
        "gpu_memory_utilization": "derived",
        "enable_prefix_caching": "derived",
        "vllm_version": "given" if engine.vllm_version_given else "assumed",
    }
    changed = (name for name in EngineConfig.__dataclass_fields__ if getattr(engine, name) != getattr(_DEFAULTS, name))
    found.update(dict.fromkeys(changed, "given"))
    if engine.max_model_len == -1:
        found["max_model_len"] = "derived"
    return tuple(found.items())


def _assumptions(
    engine: EngineConfig, model: ModelSpec, rules: Rules, max_num_batched_tokens: int, *, loads_draft: bool
) -> Iterator[str]:
    """What the plan takes for granted, each with the flag that settles it."""
    version, stages = engine.vllm_version, engine.pipeline_parallel_size
    if not EARLIEST_KNOWN <= version < (LATEST_KNOWN[0], LATEST_KNOWN[1] + 1, 0):
        yield (
            f"vLLM {version_text(version)} is outside the versions read ({version_text(EARLIEST_KNOWN)} to "
            f"{version_text(LATEST_KNOWN)}); the nearest rules are used"
        )
    if engine.device is None and engine.max_num_batched_tokens is None and model.kinds & _LOCAL:
        yield (
            f"no GPU named: max_num_batched_tokens {max_num_batched_tokens} is vLLM's default for a small one, and "
            "window layers keep that many tokens more. Give --gpu or --max-num-batched-tokens"
        )
    if "state" in model.kinds and version < (0, 10):
        yield "vLLM before 0.10 kept recurrent states outside the KV cache; this plan has them inside"
    if engine.num_speculative_tokens > 0 and not loads_draft and engine.speculative_method not in _WITHOUT_LAYERS:
        yield "the KV cache of the draft model is not included: its layers are not known"
    if stages > 1 and _is_asynchronous(engine, rules) and rules.in_flight_counts_batches and model.kinds & _LOCAL:
        yield (
            f"{stages} batches in flight, one per stage (model runner V1). Model runner V2 keeps {stages + 1}: "
            "if the engine runs it, give --max-concurrent-batches"
        )
    if engine.kv_connector is not None and engine.disable_hybrid_kv_cache_manager is None and len(model.kinds) > 1:
        yield (
            f"the connector {engine.kv_connector} supports the hybrid KV cache manager; if vLLM logs that it turned it "
            "off, give --disable-hybrid-kv-cache-manager"
        )


def _or(given: float | None, default: float) -> float:
    return default if given is None else given


_DEFAULTS = EngineConfig()
_BLOCK_STEP = 16  # tokens; get_supported_kernel_block_sizes of vllm/v1/attention/backends/*.py
_STATE_DTYPES = ("auto", "float32", "float16", "bfloat16")
# vllm/config/cache.py (MambaDType, MambaCacheMode; `all` in earlier versions), vllm/config/vllm.py (PerformanceMode)
_CHOICES: dict[str, tuple[str, ...]] = {
    "performance_mode": ("balanced", "interactivity", "throughput"),
    "mamba_cache_mode": ("none", "align", "all"),
    "mamba_cache_dtype": _STATE_DTYPES,
    "mamba_ssm_cache_dtype": _STATE_DTYPES,
}

_AT_LEAST_ONE = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "decode_context_parallel_size",
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_memory_bytes",
    "num_gpu_blocks_override",
    "max_concurrent_batches",
)


def check_flags(engine: EngineConfig) -> None:
    """Refuse what vLLM would refuse whatever the model, naming the flag and the value. Raises SettingError."""
    for name in _AT_LEAST_ONE:
        value = getattr(engine, name)
        if value is not None and value < 1:
            raise SettingError(f"{_flag(name)} is {value}; vLLM needs at least 1")
    if engine.num_speculative_tokens < 0:
        raise SettingError(f"num_speculative_tokens is {engine.num_speculative_tokens}; it cannot be negative")
    if engine.max_model_len is not None and engine.max_model_len < 1 and engine.max_model_len != -1:
        raise SettingError(f"--max-model-len is {engine.max_model_len}; give tokens, or -1 to fit the memory")
    _check_choices(engine)
    _check_shares(engine)
    _check_seqs(engine)


def _check(engine: EngineConfig, model: ModelSpec) -> None:
    check_flags(engine)
    if engine.dtype not in {"auto", *ELEMENT_BYTES}:
        raise SettingError(f"--dtype {engine.dtype!r} is unknown; vLLM knows auto, {', '.join(ELEMENT_BYTES)}")
    check_quantization(engine.quantization, model.quantization, model_name=model.name)
    _check_kv_cache(engine, model)
    _check_parallelism(engine, model)


def _check_kv_cache(engine: EngineConfig, model: ModelSpec) -> None:
    check_kv_cache_dtype(engine.kv_cache_dtype, version=engine.vllm_version)
    # Backends that take these formats are the sparse ones (vllm/v1/attention/backends/mla/flashmla_sparse.py).
    if engine.kv_cache_dtype.endswith("_ds_mla") and "mla_indexer" not in model.kinds:
        raise SettingError(
            f"--kv-cache-dtype {engine.kv_cache_dtype} is for latent attention with a sparse indexer (DeepSeek-V3.2, "
            f"GLM with DSA), which {model.name} has not; vLLM would refuse to start. Try fp8."
        )
    if model.uses_mla:
        check_latent_dtype(_kv_cache_dtype(engine, model), engine.device)
    size, on_gpu = engine.block_size, engine.device is not None and not engine.device.is_cpu
    has_attention = bool(model.kinds - {"state"})
    if size is not None and size % _BLOCK_STEP and on_gpu and has_attention and engine.vllm_version >= (0, 18):
        raise SettingError(
            f"--block-size is {size}; every attention backend of vLLM's takes multiples of {_BLOCK_STEP}, and vLLM "
            "would refuse to start"
        )


def _check_choices(engine: EngineConfig) -> None:
    for name, choices in _CHOICES.items():
        value = getattr(engine, name)
        if value is not None and value not in choices:
            raise SettingError(f"{_flag(name)} {value!r} is unknown; vLLM knows {', '.join(choices)}")
    for layer in engine.kv_cache_dtype_skip_layers:
        if layer != "sliding_window" and not (layer.isascii() and layer.isdigit()):
            raise SettingError(
                f"--kv-cache-dtype-skip-layers names {layer!r}; vLLM knows layer numbers (0, 31) and sliding_window"
            )


def _check_seqs(engine: EngineConfig) -> None:
    """SchedulerConfig.verify_max_model_len (vllm/config/scheduler.py)."""
    tokens, seqs = engine.max_num_batched_tokens, engine.max_num_seqs
    if tokens is not None and seqs is not None and tokens < seqs:
        raise SettingError(
            f"--max-num-batched-tokens {tokens} is less than --max-num-seqs {seqs}: a step has to hold a token of each "
            "request, and vLLM would refuse to start"
        )


def _check_batch(engine: EngineConfig, model: ModelSpec) -> None:
    """SchedulerConfig.verify_max_model_len (vllm/config/scheduler.py)."""
    tokens = engine.max_num_batched_tokens
    if tokens is None:
        return
    longest = _max_model_len(engine, model)
    if engine.enable_chunked_prefill is False and tokens < longest and engine.max_model_len != -1:
        raise SettingError(
            f"--max-num-batched-tokens {tokens} is less than max_model_len {longest}, and --no-enable-chunked-prefill "
            "allows no prompt to be spread over several steps; vLLM would refuse to start"
        )


def _check_shares(engine: EngineConfig) -> None:
    utilization = engine.gpu_memory_utilization
    if utilization is not None and not 0 < utilization <= 1:
        raise SettingError(f"--gpu-memory-utilization is {utilization}; vLLM takes a share above 0 and up to 1")
    if engine.watermark is not None and not 0 <= engine.watermark < 1:
        raise SettingError(f"--watermark is {engine.watermark}; vLLM takes a share from 0 up to, not including, 1")


def _check_parallelism(engine: EngineConfig, model: ModelSpec) -> None:
    heads, ranks = model.attention_heads, engine.tensor_parallel_size
    if heads and heads % ranks:
        raise SettingError(
            f"--tensor-parallel-size {ranks} does not divide the model's {heads} attention heads; vLLM would refuse "
            "to start"
        )
    stages, layers = engine.pipeline_parallel_size, len(model.layers)
    if stages > max(1, layers):
        raise SettingError(f"--pipeline-parallel-size {stages} is more than the model's {layers} layers")
    for kv_heads in {cache.kv_heads for cache, _ in model.kind_counts if cache.kind in _WITH_HEADS}:
        if max(kv_heads, ranks) % min(kv_heads, ranks):
            raise SettingError(
                f"--tensor-parallel-size {ranks} and the model's {kv_heads} KV heads do not divide each other; vLLM "
                "would refuse to start"
            )
    if engine.decode_context_parallel_size > 1:
        _check_context_parallelism(engine, model)


def _check_context_parallelism(engine: EngineConfig, model: ModelSpec) -> None:
    """ModelConfig.verify_with_parallel_config and SlidingWindowSpec (vllm/v1/kv_cache_interface.py)."""
    shards, ranks = engine.decode_context_parallel_size, engine.tensor_parallel_size
    if ranks % shards:
        raise SettingError(
            f"--decode-context-parallel-size {shards} does not divide --tensor-parallel-size {ranks}; vLLM would "
            "refuse to start"
        )
    if model.kinds & _LOCAL:
        raise SettingError(
            f"--decode-context-parallel-size {shards} does not work with sliding windows or chunks; vLLM would refuse "
            "to start"
        )
    heads = max((cache.kv_heads for cache, _ in model.kind_counts if cache.kind == "full"), default=1)
    if ranks // heads < shards:
        raise SettingError(
            f"--decode-context-parallel-size {shards} needs {shards} ranks for each of the model's {heads} KV heads, "
            f"but --tensor-parallel-size is {ranks}; vLLM would refuse to start"
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _max_model_len(engine: EngineConfig, model: ModelSpec) -> int:
    return model.max_model_len if engine.max_model_len in {None, -1} else engine.max_model_len or 0


def _kv_cache_dtype(engine: EngineConfig, model: ModelSpec) -> str:
    """`auto` becomes what the checkpoint asks for; sparse MLA stores fp8 in its own layout (656 bytes a token)."""
    dtype = engine.kv_cache_dtype
    if dtype == "auto":
        dtype = model.kv_cache_dtype or "auto"
    if "mla_indexer" not in model.kinds:
        return dtype
    is_blackwell = engine.device is not None and engine.device.cuda_major == 10
    # vllm/model_executor/models/config.py: GLM with DSA takes fp8 on Blackwell unless told otherwise.
    if dtype == "auto" and model.architecture == "GlmMoeDsaForCausalLM" and is_blackwell:
        return "fp8_e4m3"
    if dtype == "bfloat16":
        return "auto"
    # On Blackwell the sparse kernel reads plain fp8; elsewhere vLLM repacks (vllm/models/deepseek_v32).
    return dtype if is_blackwell else _SPARSE_DTYPES.get(dtype, dtype)


def _batch_limits(engine: EngineConfig, max_model_len: int) -> tuple[int, int]:
    """max_num_seqs and max_num_batched_tokens of an API server."""
    world = engine.pipeline_parallel_size * engine.tensor_parallel_size
    tokens, seqs = batch_defaults(engine.device, engine.vllm_version, ranks=world, max_model_len=max_model_len)
    if engine.performance_mode == "throughput" and engine.vllm_version >= (0, 17):
        tokens, seqs = tokens * 2, seqs * 2
    seqs = engine.max_num_seqs if engine.max_num_seqs is not None else seqs
    if engine.max_num_batched_tokens is not None:
        tokens = engine.max_num_batched_tokens
    else:
        if engine.enable_chunked_prefill is False:
            tokens = max(tokens, max_model_len)
        tokens = min(tokens, seqs * max_model_len)
    if engine.max_num_seqs is None:
        seqs = min(seqs, tokens)
    return seqs, tokens


def _is_asynchronous(engine: EngineConfig, rules: Rules) -> bool:
    if engine.async_scheduling is not None:
        return engine.async_scheduling
    return rules.async_scheduling and engine.speculative_method not in _SYNCHRONOUS


def _concurrent_batches(engine: EngineConfig, rules: Rules) -> int:
    """Batches in flight: one per pipeline stage; two with asynchronous scheduling on one stage."""
    if engine.max_concurrent_batches is not None:
        return engine.max_concurrent_batches
    stages = engine.pipeline_parallel_size
    return 2 if stages == 1 and _is_asynchronous(engine, rules) else stages


def _prefix_caching(engine: EngineConfig, model: ModelSpec, rules: Rules) -> bool:
    if engine.enable_prefix_caching is not None:
        return engine.enable_prefix_caching
    if model.is_attention_free or model.is_encoder_decoder or not rules.prefix_caching:
        return False
    return rules.hybrid_prefix_caching if model.is_hybrid else True


def _mamba_cache_mode(engine: EngineConfig, *, prefix_caching: bool) -> str:
    """`align` keeps the running state and that at the last block boundary; without prefix caching only the first."""
    if not prefix_caching:
        return "none"
    given = engine.mamba_cache_mode
    return "align" if given in {None, "none"} else str(given)


def _hybrid_manager_off(engine: EngineConfig, model: ModelSpec, rules: Rules) -> bool:
    if not rules.hybrid_manager:
        return True
    if engine.disable_hybrid_kv_cache_manager is not None:
        return engine.disable_hybrid_kv_cache_manager
    return "chunked_local" in model.kinds and (engine.speculative_method or "").startswith("eagle")
