"""Bytes of one cached token, by KV-cache dtype.

A head's token is a key of `head_dim` and a value of `value_head_dim` elements, plus whatever scales the format stores
in the page. Scales of plain fp8 are per layer and lie outside.
Source: vLLM 0.32.0, vllm/v1/kv_cache_interface.py (AttentionSpec), vllm/v1/attention/backends/{triton_attn,flashinfer,
turboquant_attn,ultraquant_attn}.py (customize_spec), vllm/model_executor/layers/attention/mla_attention.py. Which
dtypes a latent can have: supported_kv_cache_dtypes, supports_combination and constructors of the backends in
vllm/v1/attention/backends/mla.
"""

from functools import lru_cache

from kvwatch.device import Device
from kvwatch.errors import SettingError
from kvwatch.versions import Version, version_text

# Value of --kv-cache-dtype -> first version read that accepts it.
KV_CACHE_DTYPES: dict[str, Version] = {
    "auto": (0, 0, 0),
    "float16": (0, 18, 0),
    "bfloat16": (0, 11, 0),
    "fp8": (0, 0, 0),
    "fp8_e4m3": (0, 6, 0),
    "fp8_e5m2": (0, 6, 0),
    "fp8_inc": (0, 11, 0),
    "fp8_ds_mla": (0, 11, 0),
    "nvfp4_ds_mla": (0, 30, 0),
    "nvfp4": (0, 20, 0),
    "nvfp4_4over6": (0, 28, 0),
    "int4_per_token_head": (0, 26, 0),
    "int8_per_token_head": (0, 20, 0),
    "fp8_per_token_head": (0, 20, 0),
    "turboquant_k8v4": (0, 20, 0),
    "turboquant_4bit_nc": (0, 20, 0),
    "turboquant_k3v4_nc": (0, 20, 0),
    "turboquant_3bit_nc": (0, 20, 0),
    "ultraquant_4bit": (0, 32, 0),
}
# Known to vLLM 0.33, for ROCm alone; their slots are not verified here.
_UNSIZED = frozenset({"octave_k3v4", "octave_k3v3", "octave_k3v3_compact"})

ELEMENT_BYTES = {"float16": 2, "half": 2, "bfloat16": 2, "float32": 4, "float": 4}
_SCALE_PAIR_BYTES = 8  # one fp32 scale for the key, one for the value
# bits of key and value elements; bytes of the key's norm (fp16) and of the value's scale and zero point (2 × fp16)
_TURBOQUANT = {
    "turboquant_k8v4": (8, 4),
    "turboquant_4bit_nc": (4, 4),
    "turboquant_k3v4_nc": (3, 4),
    "turboquant_3bit_nc": (3, 3),
}
_MLA_SLOT_BYTES = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
_ULTRAQUANT_GROUP = 32  # elements per one-byte scale
# What some backend for latents takes, on one GPU or another.
_LATENT_DTYPES = frozenset({"auto", *ELEMENT_BYTES, "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", *_MLA_SLOT_BYTES})
_FIRST_WITH_FP8 = (8, 9)


def check_kv_cache_dtype(dtype: str, *, version: Version) -> None:
    """Raises SettingError for a dtype that vLLM of this version does not accept, or whose size is not known."""
    if dtype in _UNSIZED:
        raise SettingError(
            f"--kv-cache-dtype {dtype} exists (ROCm, vLLM 0.33), but its bytes per token are not known to kvwatch. "
            "Read the capacity from the running engine: kvwatch check URL."
        )
    since = KV_CACHE_DTYPES.get(dtype)
    if since is None:
        raise SettingError(f"--kv-cache-dtype {dtype!r} is unknown; vLLM knows {', '.join(KV_CACHE_DTYPES)}")
    if version < since:
        raise SettingError(
            f"--kv-cache-dtype {dtype} needs vLLM {version_text(since)} or newer, but --vllm-version is "
            f"{version_text(version)}; that vLLM would refuse to start."
        )


def check_latent_dtype(dtype: str, device: Device | None) -> None:
    """Raises SettingError for a dtype in which no attention backend of vLLM's stores a latent (MLA) on this device."""
    capability = device.capability if device is not None and device.cuda_major else None
    lacks_fp8 = capability is not None and capability < _FIRST_WITH_FP8
    where = ""
    if dtype in _LATENT_DTYPES:
        is_of_another_device = (
            (dtype == "fp8_e5m2" and not (device is not None and device.is_amd))
            or (dtype == "fp8_inc" and capability is not None)  # Gaudi
            or (dtype in {"fp8", "fp8_e4m3"} and lacks_fp8)
            or (dtype == "nvfp4_ds_mla" and capability is not None and capability[0] != 10)
        )
        if not is_of_another_device:
            return
        where = f" on compute capability {capability[0]}.{capability[1]}" if capability is not None else " on CUDA"
    raise SettingError(
        f"--kv-cache-dtype {dtype} does not work with latent attention (MLA): no attention backend of vLLM's takes "
        f"it{where}, and vLLM would refuse to start. Try {'auto' if lacks_fp8 else 'fp8'}."
    )


def is_packed(dtype: str) -> bool:
    """TurboQuant and UltraQuant pack key and value into one slot and leave boundary layers unquantised."""
    return dtype in _TURBOQUANT or dtype == "ultraquant_4bit"


def element_bytes(dtype: str, *, model_dtype: str) -> int:
    """Bytes of one stored element: the model's for `auto`, one for every quantised format."""
    return ELEMENT_BYTES.get(model_dtype if dtype == "auto" else dtype, 1)


@lru_cache(maxsize=1024)
def token_bytes(dtype: str, head_dim: int, value_head_dim: int, model_dtype: str) -> int:
    """Bytes of one token and KV head. Raises SettingError where the format cannot hold these sizes."""
    if dtype in _TURBOQUANT:
        key_bits, value_bits = _TURBOQUANT[dtype]
        key = head_dim if key_bits == 8 else -(-head_dim * key_bits // 8) + 2
        slot = key + -(-value_head_dim * value_bits // 8) + 4
        return slot + slot % 2
    if dtype == "ultraquant_4bit":
        if head_dim % _ULTRAQUANT_GROUP:
            raise SettingError(f"--kv-cache-dtype ultraquant_4bit needs a head size that 32 divides, not {head_dim}")
        return 2 * (head_dim // 2 + head_dim // _ULTRAQUANT_GROUP)
    if dtype in {"nvfp4", "nvfp4_4over6"}:
        return head_dim // 2 + head_dim // 16 + value_head_dim // 2 + value_head_dim // 16
    if dtype == "int4_per_token_head":
        return head_dim // 2 + value_head_dim // 2 + _SCALE_PAIR_BYTES
    if dtype in {"int8_per_token_head", "fp8_per_token_head"}:
        return head_dim + value_head_dim + _SCALE_PAIR_BYTES
    return (head_dim + value_head_dim) * element_bytes(dtype, model_dtype=model_dtype)


@lru_cache(maxsize=256)
def latent_token_bytes(dtype: str, size: int, model_dtype: str) -> int:
    """Bytes of one token's latent vector of `size` elements (MLA), in a dtype that `check_latent_dtype` lets pass."""
    slot = _MLA_SLOT_BYTES.get(dtype)
    return size * element_bytes(dtype, model_dtype=model_dtype) if slot is None else slot
