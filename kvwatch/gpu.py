"""GPUs that people run vLLM on, and the memory their driver reports.

vLLM sizes the KV cache from `torch.accelerator.get_memory_info()[1]`, that is CUDA's (or HIP's) total (vLLM 0.32.0,
vllm/utils/mem_utils.py, MemorySnapshot.measure). That figure is smaller than the one `nvidia-smi` prints, because the
driver keeps a part for itself (an H100: 81,559 MiB against 81,090 MiB), and smaller again than the one on the box.
The table holds CUDA's figure. It moves with the driver version and with ECC: by 0.03 % between the H100s seen, by
1.2 % between the T4s. Where it matters, give `--gpu-memory-gib` what the engine at hand reports.
"""

import re
from dataclasses import dataclass

from kvwatch.errors import SettingError

_MIB = 1 << 20
_GIB = 1 << 30
_VENDOR_WORDS = frozenset({"nvidia", "amd", "geforce", "tesla", "instinct", "radeon", "gpu", "generation", "edition"})
# Two cards whose memory differs by less are one card to a budget; H100 SXM and PCIe, A100 SXM and PCIe.
_SAME_MEMORY_RATIO = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU. `name` is the driver's; vLLM derives defaults from it ("a100", "gb10") and from `memory_bytes`.

    `capability` is the CUDA compute capability, (9, 4) and (9, 5) are what torch reports for gfx942 and gfx950.
    `source` says who printed the memory figure. `words` are further words by which people call the card; one of those
    in `must_say`, if any, has to be typed, because the name without it means another card.
    """

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    source: str
    words: tuple[str, ...] = ()
    must_say: frozenset[str] = frozenset()


def _torch(mebibytes: int) -> tuple[int, str]:
    return mebibytes * _MIB, f"torch.cuda.get_device_properties: total_memory={mebibytes}MB"


def _device_query(total_bytes: int) -> tuple[int, str]:
    return total_bytes, f"CUDA deviceQuery: {total_bytes} bytes"


def _capacity(gibibytes: float) -> tuple[int, str]:
    # Two decimals of a GiB: exact to 5 MiB.
    return round(gibibytes * _GIB), f"torch OutOfMemoryError: total capacity of {gibibytes:.2f} GiB"


def _gpu(
    name: str, capability: tuple[int, int], memory: tuple[int, str], words: str = "", *, must_say: str = ""
) -> Gpu:
    memory_bytes, source = memory
    return Gpu(
        name=name,
        memory_bytes=memory_bytes,
        capability=capability,
        source=source,
        words=tuple(words.split()),
        must_say=frozenset(must_say.split()),
    )


# Every figure was printed by that call on a machine with that card and published in a log, an issue or a readme. Those
# with an address: A100-SXM4-40GB github.com/bottlerocket-os/bottlerocket/pull/3873, A100 80GB PCIe
# github.com/ekondis/mixbench/issues/47, RTX 5090 github.com/aikitoria/open-gpu-kernel-modules/issues/1,
# A30 github.com/google/RB-Modulation/issues/5. Of several figures the one under the newest driver was taken.
GPUS: tuple[Gpu, ...] = (
    _gpu("NVIDIA B300 SXM6 AC", (10, 3), _capacity(267.69), "288gb 275gb 270gb sxm"),
    _gpu("NVIDIA GB300", (10, 3), _capacity(276.50), "288gb 279gb nvl72 grace"),
    _gpu("NVIDIA B200", (10, 0), _torch(182642), "192gb 180gb 183gb sxm"),
    _gpu("NVIDIA GB200", (10, 0), _capacity(184.31), "192gb 186gb 189gb nvl72 grace"),
    _gpu("NVIDIA H200", (9, 0), _torch(143156), "141gb sxm hbm3e nvl"),
    _gpu("NVIDIA H100 80GB HBM3", (9, 0), _device_query(85028896768), "sxm sxm5 mega"),
    _gpu("NVIDIA H100 PCIe", (9, 0), _torch(81008), "80gb hbm2e"),
    _gpu("NVIDIA H100 NVL", (9, 0), _capacity(93.10), "94gb 96gb hbm3", must_say="nvl 94gb"),
    _gpu("NVIDIA GH200 480GB", (9, 0), _device_query(102005473280), "96gb hbm3 grace hopper"),
    _gpu("NVIDIA GH200 120GB", (9, 0), _device_query(101468602368), "96gb hbm3 grace hopper"),
    _gpu("NVIDIA H20", (9, 0), _torch(97285), "96gb hbm3 sxm"),
    _gpu("NVIDIA A100-SXM4-80GB", (8, 0), _device_query(85100068864), "sxm hbm2e"),
    _gpu("NVIDIA A100 80GB PCIe", (8, 0), _torch(81049), "hbm2e"),
    _gpu("NVIDIA A100-SXM4-40GB", (8, 0), _device_query(42298834944), "sxm hbm2"),
    _gpu("NVIDIA A100-PCIE-40GB", (8, 0), _torch(40326), "hbm2"),
    _gpu("NVIDIA A30", (8, 0), _capacity(23.53), "24gb pcie"),
    _gpu("NVIDIA A10", (8, 6), _device_query(23696375808), "24gb pcie"),
    _gpu("NVIDIA A10G", (8, 6), _torch(22587), "24gb"),
    _gpu("NVIDIA A40", (8, 6), _torch(45416), "48gb pcie"),
    _gpu("NVIDIA L4", (8, 9), _device_query(23612293120), "24gb"),
    _gpu("NVIDIA L40", (8, 9), _capacity(44.40), "48gb"),
    _gpu("NVIDIA L40S", (8, 9), _capacity(44.40), "48gb"),
    _gpu("NVIDIA RTX A6000", (8, 6), _torch(48676), "48gb ampere"),
    _gpu("NVIDIA RTX 6000 Ada Generation", (8, 9), _torch(48622), "48gb"),
    _gpu("NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0), _capacity(94.97), "96gb workstation max q"),
    _gpu("NVIDIA GeForce RTX 5090", (12, 0), _device_query(33677180928), "32gb"),
    _gpu("NVIDIA GeForce RTX 4090", (8, 9), _device_query(25250627584), "24gb"),
    _gpu("NVIDIA GeForce RTX 3090", (8, 6), _torch(24259), "24gb"),
    _gpu("NVIDIA GB10", (12, 1), _capacity(121.69), "128gb dgx spark"),
    _gpu("Tesla T4", (7, 5), _torch(15095), "16gb"),
    _gpu("Tesla V100-SXM2-32GB", (7, 0), _device_query(34072559616), "sxm hbm2"),
    _gpu("Tesla V100-SXM2-16GB", (7, 0), _torch(16160), "sxm hbm2"),
    _gpu("AMD Instinct MI300X", (9, 4), _torch(196592), "192gb oam gfx942"),
    _gpu("AMD Instinct MI325X", (9, 4), _capacity(255.98), "256gb oam gfx942"),
    _gpu("AMD Instinct MI355X", (9, 5), _capacity(287.98), "288gb oam gfx950"),
)


def find_gpu(text: str) -> Gpu:
    """The one GPU of the table that `text` means: a driver's name, a node label, or what people type.

    Every word typed has to be a word of the card ("h100-80gb", "NVIDIA-H100-80GB-HBM3", "L4"); vendor words and case
    do not count. Cards that differ by less than 1 % in memory are one answer, the first.
    Raises SettingError with the choices when the name leaves the memory open (`A100`, `V100`) or is not in the table.
    """
    typed = _words(text)
    if "mig" in typed:
        raise SettingError(
            f"--gpu {text!r} is a MIG slice, which has only a part of the card's memory. "
            "Give --gpu-memory-gib with the slice's memory as `nvidia-smi` shows it."
        )
    found = [gpu for gpu in GPUS if typed and typed <= _names_of(gpu) and (not gpu.must_say or gpu.must_say & typed)]
    if not found:
        raise SettingError(_unknown(text, typed))
    if not _same_memory(found):
        choices = ", ".join(f"{gpu.name} ({gpu.memory_bytes / _GIB:.1f} GiB)" for gpu in found)
        raise SettingError(
            f"--gpu {text!r} can mean {choices}; the KV cache depends on which. Give one of these names, "
            "or --gpu-memory-gib."
        )
    return found[0]


def _words(text: str) -> frozenset[str]:
    """Lower-case words, "80 GB", "80g" and "80GiB" all as "80gb", without the vendor's."""
    spaced = re.sub(r"[^a-z0-9]+", " ", text.lower())
    sized = re.sub(r"\b(\d+) ?(?:g|gb|gib)\b", r"\1gb", spaced)
    return frozenset(sized.split()) - _VENDOR_WORDS


def _names_of(gpu: Gpu) -> frozenset[str]:
    return _words(gpu.name) | frozenset(gpu.words)


def _same_memory(gpus: list[Gpu]) -> bool:
    sizes = [gpu.memory_bytes for gpu in gpus]
    return max(sizes) - min(sizes) <= _SAME_MEMORY_RATIO * max(sizes)


def _unknown(text: str, typed: frozenset[str]) -> str:
    close = [gpu.name for gpu in GPUS if _resembles(typed, _names_of(gpu))]
    hint = f" Close to it: {', '.join(close)}." if close else ""
    return (
        f"--gpu {text!r} is not a GPU kvwatch knows.{hint} "
        "Give --gpu-memory-gib with the total that the driver reports (`nvidia-smi --query-gpu=memory.total`, which is "
        f"up to 2 % more than vLLM sees), or one of: {', '.join(gpu.name for gpu in GPUS)}."
    )


def _resembles(typed: frozenset[str], names: frozenset[str]) -> bool:
    """True when a typed model word starts like one of the card's, or is one of its own."""
    models = {word for word in typed if any(c.isdigit() for c in word) and not word.endswith("gb")}
    own = {word for word in names if any(c.isdigit() for c in word) and not word.endswith("gb")}
    return any(a.startswith(b) or b.startswith(a) for a in models for b in own if min(len(a), len(b)) > 1)
