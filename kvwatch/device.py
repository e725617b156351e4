"""Device: the GPU as vLLM sees it, and the batch limits vLLM derives from it.

Source: vLLM 0.6.6 to 0.33.0, vllm/engine/arg_utils.py (get_batch_defaults and its forerunners).
"""

from dataclasses import dataclass

from kvwatch.versions import Version

_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The GPU as vLLM sees it: name and total memory as the driver reports them, compute capability (major, minor)."""

    name: str
    memory_bytes: int
    capability: tuple[int, int] | None = None

    @property
    def is_cpu(self) -> bool:
        return self.name.lower() == "cpu"

    @property
    def is_amd(self) -> bool:
        """On ROCm vLLM has other kernels, and `capability` is not CUDA's."""
        return self.name.upper().startswith("AMD")

    @property
    def cuda_major(self) -> int:
        """The major compute capability, 0 where there is none or it is not known."""
        return 0 if self.capability is None or self.is_amd else self.capability[0]


def batch_defaults(device: Device | None, version: Version, *, ranks: int, max_model_len: int) -> tuple[int, int]:
    """(max_num_batched_tokens, max_num_seqs) of an API server, by version, memory and name of the device.

    Without a device vLLM takes the values of a small one.
    """
    if device is not None and device.is_cpu:
        return 2048 * ranks, 128 * ranks
    name = device.name.lower() if device else ""
    memory = device.memory_bytes if device else 0
    small, large = (2048, 256), (8192, 1024)
    if version < (0, 7):
        return max(max_model_len, 2048), 256
    if version < (0, 8):
        return (8192, 256) if "h100" in name or "h200" in name else small
    if version >= (0, 29) and memory >= 160 * _GIB:
        return 16384, 1024
    # A100s got slower with the large values (0.9); a GB10's memory is the CPU's too (0.33).
    is_small = (version >= (0, 9) and "a100" in name) or (version >= (0, 33) and "gb10" in name)
    return large if memory >= 70 * _GIB and not is_small else small
