"""The longest context a model's config allows: vLLM's max_model_len when no flag sets one.

Source: vLLM 0.32.0, vllm/config/model.py (_get_and_verify_max_len) and
vllm/transformers_utils/model_arch_config_convertor.py (derive_max_model_len_and_key).
"""

from kvwatch.errors import ModelError
from kvwatch.model.fields import Fields, words

_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
_MOST_TOKENS = 1 << 31
_DEFAULT_TOKENS = 2048  # vLLM's, when the config names none
# For these rope types the config's length already is the scaled one.
_SCALED = frozenset({"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "default", "mrope"})


def derived_max_model_len(fields: Fields, *, model_type: str) -> int:
    """Tokens. YaRN before vLLM 0.11 multiplied the length by `factor`; configs that rely on it need --max-model-len."""
    lengths = [fields.count(key) for key in _KEYS if fields.raw(key) is not None]
    if fields.raw("model_max_length") is not None:
        lengths = [fields.count("model_max_length")]
    length = min(lengths, default=_DEFAULT_TOKENS)
    rope = fields.section("rope_scaling", "rope_parameters")
    if rope is None:
        return length
    kind = words(rope.raw("rope_type", "type"))
    if kind == "longrope":
        return fields.count("original_max_position_embeddings", default=length)
    if "gemma3" in model_type or not kind or kind in _SCALED:
        return length
    factor = rope.number("factor", default=1.0)
    if not 1 <= length * factor < _MOST_TOKENS:
        raise ModelError(
            f"{rope.where}: factor is {factor:g}, which makes {length} tokens {length * factor:g}; it has to leave a "
            "context of at least one token"
        )
    return int(length * factor)
