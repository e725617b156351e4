"""Bits per parameter of a checkpoint, as its quantization_config stores them, scales and zero points included.

Sources: vLLM 0.32.0, vllm/model_executor/layers/quantization/{fp8,awq,gptq,mxfp4,modelopt,bitsandbytes}.py and
compressed_tensors/ (the tensors that create_weights registers); vllm/config/quantization.py (_ONLINE_SHORTHANDS).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from kvwatch.errors import UnsupportedModel
from kvwatch.model.checkpoint import quantization_method, quantization_section
from kvwatch.model.fields import Fields, shown, words
from kvwatch.parameters import Part

_DTYPE_BITS = {"float16": 16, "bfloat16": 16, "half": 16, "float32": 32, "float": 32}
_FP8 = frozenset({"fp8", "fbgemm_fp8", "ptpc_fp8"})
_GROUPED_INTEGERS = frozenset({"awq", "awq_marlin", "gptq", "gptq_marlin", "auto-round"})
_LISTS_OF_EXCEPTIONS = ("modules_to_not_convert", "ignore", "exclude_modules", "ignored_layers")
_PADDED_MULTIPLE = 256
# --quantization that quantises while loading -> bits per parameter, the scale of a block or group included.
_ONLINE_BITS = {
    "fp8": Fraction(8),
    "fp8_per_tensor": Fraction(8),
    "fp8_per_channel": Fraction(8),
    "fp8_per_block": 8 + Fraction(32, 128 * 128),
    "ptpc_fp8": Fraction(8),
    "mxfp8": 8 + Fraction(8, 32),
    "mxfp4": 4 + Fraction(8, 32),
    "bitsandbytes": 4 + Fraction(32, 64),
}
_ONLINE_EXPERT_BITS = {
    "experts_int8": Fraction(8),
    "int8_per_channel_weight_only": Fraction(8),
    "nvfp4_per_token": 4 + Fraction(8, 16),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """How parameters are stored: `linear_bits` each where a part is quantised, `plain_bits` elsewhere.

    `exceptions` are the modules that the quantization_config leaves alone; `only_experts`: all but experts are.
    """

    method: str
    plain_bits: int
    linear_bits: Fraction
    exceptions: tuple[str, ...] = ()
    only_experts: bool = False

    @property
    def is_quantised(self) -> bool:
        return self.method != ""

    def of(self, part: Part) -> Fraction:
        """Bits per parameter of this part."""
        is_left_alone = self.only_experts and ".experts." not in part.module
        if not part.is_linear or not self.is_quantised or is_left_alone or self._is_exception(part.module):
            return Fraction(self.plain_bits)
        return self.linear_bits

    def loaded(self, *, dtype: str, quantization: str | None, hidden_size: int) -> "Storage":
        """The same parameters in the GPU's memory, under --dtype and --quantization."""
        if self.method == "mxfp4":
            # The rows of MXFP4 experts are padded to a multiple of 256: 2880 to 3072, measured on both gpt-oss models.
            padded = -(-hidden_size // _PADDED_MULTIPLE) * _PADDED_MULTIPLE
            return replace(self, linear_bits=self.linear_bits * padded / hidden_size)
        if self.is_quantised:
            return self
        plain = replace(self, plain_bits=_DTYPE_BITS.get(dtype, 16))
        return plain if quantization is None else _online(quantization, plain.plain_bits)

    def _is_exception(self, module: str) -> bool:
        return any(_matches(pattern, module) for pattern in self.exceptions)


def storage_of(config: Mapping[str, Any]) -> Storage:
    """The storage that a config.json describes. Raises UnsupportedModel for a format whose size is not known."""
    levels = [Fields(config)]
    nested = levels[0].section("text_config")
    levels += [nested] if nested is not None else []
    plain_bits = 16
    for fields in reversed(levels):
        given = fields.raw("torch_dtype", "dtype")
        plain_bits = _DTYPE_BITS.get(words(given).removeprefix("torch."), 16) if given is not None else plain_bits
    for fields in levels:
        found = quantization_section(fields)
        if found is not None:
            return _storage(found, plain_bits)
    return Storage(method="", plain_bits=plain_bits, linear_bits=Fraction(plain_bits))


def _storage(fields: Fields, plain_bits: int) -> Storage:
    method = quantization_method(fields)
    exceptions = tuple(words(name) for field in _LISTS_OF_EXCEPTIONS for name in fields.items(field) or ())
    return Storage(
        method=method,
        plain_bits=plain_bits,
        linear_bits=_linear_bits(fields, method),
        exceptions=exceptions,
        only_experts=method == "mxfp4",
    )


def _online(flag: str, plain_bits: int) -> Storage:
    """What --quantization makes of weights that are not quantised. Raises UnsupportedModel."""
    method = flag.lower()
    bits = _ONLINE_BITS.get(method) or _ONLINE_EXPERT_BITS.get(method)
    if bits is None:
        raise UnsupportedModel(
            f"--quantization {flag}: the bytes that a parameter takes with it are not known to kvwatch. Give "
            "--kv-cache-memory-bytes N with the bytes per GPU that vLLM logs as 'Available KV cache memory'."
        )
    only_experts = method in _ONLINE_EXPERT_BITS
    return Storage(method=method, plain_bits=plain_bits, linear_bits=bits, only_experts=only_experts)


def _linear_bits(fields: Fields, method: str) -> Fraction:
    if method in _FP8:
        return 8 + _block_scale(fields.items("weight_block_size"))
    if method in _GROUPED_INTEGERS:
        bits, group = fields.count("bits", "w_bit", default=4), _group_size(fields)
        return bits + (Fraction(16 + bits, group) if group else Fraction(0))
    if method == "mxfp4":
        return 4 + Fraction(8, 32)
    if method == "bitsandbytes":
        return Fraction(8) if fields.flag("load_in_8bit") else 4 + Fraction(32, 64)
    if method.startswith("modelopt"):
        found = _modelopt_bits(fields, method)
    else:
        found = _compressed_tensors_bits(fields) if method == "compressed-tensors" else None
    if found is None:
        raise UnsupportedModel(
            f"quantization_config names {shown(method)} in a form whose bytes per parameter kvwatch does not know. "
            "Pass the folder that also holds model.safetensors.index.json as --model, or give --kv-cache-memory-bytes."
        )
    return found


def _group_size(fields: Fields) -> int:
    """Parameters that share a scale; 0 where a whole row does (-1 in the file)."""
    given = fields.raw("group_size", "q_group_size")
    return 128 if given is None else 0 if given == -1 else fields.count("group_size", "q_group_size")


def _block_scale(block: list[Any] | None) -> Fraction:
    """Bits per parameter of one fp32 scale for each block of this shape; none for a scale per tensor or channel."""
    match block:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return Fraction(32, rows * columns)
        case _:
            return Fraction(0)


def _modelopt_bits(fields: Fields, method: str) -> Fraction | None:
    inner = fields.section("quantization") or fields
    algorithm = inner.text("quant_algo", default="NVFP4" if "fp4" in method else "FP8").upper()
    if "NVFP4" in algorithm:
        return 4 + Fraction(8, 16)
    return Fraction(8) if "FP8" in algorithm else None


def _compressed_tensors_bits(fields: Fields) -> Fraction | None:
    """The first group with weights; checkpoints with several formats differ by what the others hold."""
    groups = fields.section("config_groups")
    for name in groups.values if groups is not None else ():
        group = groups.section(name) if groups is not None else None
        weights = group.section("weights") if group is not None else None
        if weights is None:
            continue
        bits = weights.count("num_bits", default=8)
        scale = 8 if bits == 4 and weights.raw("type") == "float" else 16
        zero_point = 0 if weights.flag("symmetric", default=True) else bits
        size = weights.raw("group_size")
        return bits + (Fraction(scale + zero_point, size) if isinstance(size, int) and size > 0 else Fraction(0))
    return None


def _matches(pattern: str, module: str) -> bool:
    """As vLLM matches them: `re:` is a regular expression, `*` a wildcard, anything else a whole part of the name."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    if "*" in pattern:
        return re.match(re.escape(pattern).replace(r"\*", ".*"), module) is not None
    return f".{pattern}." in f".{module}."
