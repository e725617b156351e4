"""The first vLLM release that has each flag kvwatch may propose, simulate or be given.

Nothing is proposed that a version lacks, and a budget says where its version lacks a flag it was given.

SOURCE: vllm/engine/arg_utils.py of releases 0.6.6 to 0.33.0. 0.6 stands for "every release known here". A setting
without an entry is no flag of vLLM's (`gateway_max_in_flight`, `replicas`).
"""

from kvwatch.errors import SettingError
from kvwatch.versions import EARLIEST_KNOWN, Version, version_text

FIRST_RELEASE: dict[str, Version] = {
    "max_num_seqs": EARLIEST_KNOWN,
    "max_num_batched_tokens": EARLIEST_KNOWN,
    "gpu_memory_utilization": EARLIEST_KNOWN,
    "kv_cache_dtype": EARLIEST_KNOWN,
    "max_model_len": EARLIEST_KNOWN,
    "enable_prefix_caching": EARLIEST_KNOWN,
    "tensor_parallel_size": EARLIEST_KNOWN,
    "disable_hybrid_kv_cache_manager": (0, 9, 2),
    "kv_cache_memory_bytes": (0, 10, 2),
    "decode_context_parallel_size": (0, 10, 2),
    "async_scheduling": (0, 10, 2),
    "mamba_ssm_cache_dtype": (0, 10, 2),
    "mamba_cache_mode": (0, 15, 0),
    "performance_mode": (0, 17, 0),
    "kv_cache_dtype_skip_layers": (0, 19, 0),
    "scheduler_reserve_full_isl": (0, 19, 0),
    "watermark": (0, 24, 0),
    "max_num_queued_reqs": (0, 29, 0),
    "max_num_active_seqs": (0, 31, 0),
    "long_prefill_token_threshold_adaptive": (0, 31, 0),
}

# Not flags. The V1 scheduler is the default since this release; the one before it decides otherwise.
V1_SINCE: Version = (0, 8, 0)
# An order that changed: freed blocks that no prefix can hit are reused first (core/block_pool.py).
EVICT_UNHASHED_FIRST_SINCE: Version = (0, 23, 0)


def has_flag(setting: str, version: Version | None) -> bool:
    """Whether that release has the flag; an unknown version has only what every release has."""
    return FIRST_RELEASE[setting] <= (version or EARLIEST_KNOWN)


def check_supported(setting: str, version: Version | None, *, said: str, remedy: str) -> None:
    """Raise SettingError if this vLLM does not know the flag yet. `said`: how it was asked for.

    An unknown version refuses nothing.
    """
    if version is not None and setting in FIRST_RELEASE and not has_flag(setting, version):
        raise SettingError(
            f"{said}, and vLLM {version_text(version)} has no --{setting.replace('_', '-')}: it came with "
            f"{version_text(FIRST_RELEASE[setting])}. {remedy}"
        )
