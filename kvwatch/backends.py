"""Which block sizes the attention kernels accept: what decides vLLM's default --block-size.

Only the sizes matter here, so backends that accept the same sizes share a row.
Source: vLLM 0.32.0, vllm/platforms/cuda.py (_get_backend_priorities), get_supported_kernel_block_sizes of
vllm/v1/attention/backends/*.py, vllm/platforms/interface.py (update_block_size_for_backend). Before 0.18 the platform
forced 64 for FlashMLA on Hopper and 128 for CUTLASS MLA on Blackwell (vllm/platforms/cuda.py, check_and_update_config).
"""

from dataclasses import dataclass

from kvwatch.engine import ResolvedEngine
from kvwatch.model.spec import ModelSpec

DEFAULT_BLOCK_SIZE = 16
_UNQUANTISED = frozenset({"auto", "float16", "bfloat16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """`sizes` are exact block sizes, or multiples of the first where `multiples` is set. Tokens."""

    name: str
    sizes: tuple[int, ...]
    multiples: bool = True
    default: int = DEFAULT_BLOCK_SIZE

    @property
    def smallest(self) -> int:
        return self.sizes[0]

    def largest_within(self, block_size: int) -> int:
        """The largest size that a block of `block_size` tokens can hold; the smallest one if none fits."""
        if self.multiples:
            return max(self.smallest, block_size // self.smallest * self.smallest)
        return max((size for size in self.sizes if size <= block_size), default=self.smallest)


_ANY_16 = Kernels(name="FLASH_ATTN", sizes=(16,))
# vllm/v1/attention/backends/flash_attn.py, _get_sm90_fa4_fp8_kv_block_size (Gemma 4's full layers)
_FLASH_ATTN_4_FP8 = Kernels(name="FLASH_ATTN", sizes=(64,), default=64)
_ROCM = Kernels(name="ROCM_ATTN", sizes=(16,))
_FLASHINFER = Kernels(name="FLASHINFER", sizes=(16, 32, 64), multiples=False)
_CPU = Kernels(name="CPU_ATTN", sizes=(32,), default=128)
_CPU_MLA = Kernels(name="CPU_MLA", sizes=(16,), multiples=False)
_ULTRAQUANT = Kernels(name="ULTRAQUANT", sizes=(16,), default=64)
_SPARSE_MLA = Kernels(name="SPARSE_MLA", sizes=(64,), multiples=False, default=64)
_FLASHMLA = Kernels(name="FLASHMLA", sizes=(64,), multiples=False, default=64)
_FLASH_ATTN_MLA = Kernels(name="FLASH_ATTN_MLA", sizes=(16,))
_TRITON_MLA = Kernels(name="TRITON_MLA", sizes=(16,))
_FLASHINFER_MLA = Kernels(name="FLASHINFER_MLA", sizes=(32, 64), multiples=False, default=32)
_CUTLASS_MLA = Kernels(name="CUTLASS_MLA", sizes=(128,), multiples=False, default=128)


def kernels_for(model: ModelSpec, engine: ResolvedEngine) -> Kernels:
    """The kernels vLLM picks first for this model, KV dtype and GPU. Without a GPU: those of most GPUs."""
    device = engine.device
    if device is not None and device.is_cpu:
        return _CPU_MLA if model.uses_mla else _CPU
    if device is not None and device.is_amd:
        # vllm/platforms/rocm.py: every backend there, sparse MLA included, takes multiples of 16.
        return _ULTRAQUANT if engine.kv_cache_dtype == "ultraquant_4bit" else _ROCM
    major = device.cuda_major if device is not None else 0
    if "mla_indexer" in model.kinds:
        return _SPARSE_MLA
    return _latent(engine, major) if model.uses_mla else _heads(model, engine, major)


def _heads(model: ModelSpec, engine: ResolvedEngine, major: int) -> Kernels:
    """Attention with heads, on CUDA."""
    dtype = engine.kv_cache_dtype
    if dtype == "ultraquant_4bit":
        return _ULTRAQUANT
    if major == 9 and dtype in {"fp8", "fp8_e4m3"} and _has_head_dim(model, 512):
        return _FLASH_ATTN_4_FP8
    return _FLASHINFER if major == 10 and not dtype.startswith("turboquant") else _ANY_16


def _has_head_dim(model: ModelSpec, head_dim: int) -> bool:
    return any(cache.head_dim == head_dim for cache, _ in model.kind_counts)


def _latent(engine: ResolvedEngine, major: int) -> Kernels:
    before_priorities = _minor(engine) < (0, 18)
    if major == 10:
        return _CUTLASS_MLA if before_priorities else _FLASHINFER_MLA
    if major == 9:
        if before_priorities:
            return _FLASHMLA
        if engine.kv_cache_dtype in _UNQUANTISED:
            return _FLASH_ATTN_MLA
        return _FLASHMLA if engine.kv_cache_dtype.startswith("fp8") else _TRITON_MLA
    return _TRITON_MLA


def _minor(engine: ResolvedEngine) -> tuple[int, int]:
    major, minor, _ = engine.vllm_version.split(".")
    return int(major), int(minor)
