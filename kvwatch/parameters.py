"""How many parameters a model has, part by part, counted from its config.json.

A part is a set of parameters that are quantised and split over ranks alike. The count follows the checkpoint, so that
it can be compared with the published size; what vLLM adds on loading is not `is_stored`. Biases and norms are counted.
Source: the modules' shapes in vLLM 0.32.0, vllm/model_executor/models/*.py; checked against published sizes in
tests/test_weights.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvwatch.errors import UnsupportedModel
from kvwatch.model.dims import dims, layer_count
from kvwatch.model.fields import Fields
from kvwatch.model.nested import inner_architecture, text_section, with_defaults

# Over what a part is divided: all tensor-parallel ranks; at most as many as there are KV heads; all ranks of all
# data-parallel engines (experts); nothing.
Split = Literal["ranks", "kv_heads", "experts", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """`module` is a name as the checkpoint spells it, against which quantisation lists are matched.

    `is_linear` parameters may be quantised. One that is not `is_stored` exists in memory only.
    """

    module: str
    parameters: int
    split: Split = "ranks"
    is_linear: bool = True
    is_stored: bool = True


Layer = tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The parts of a model. `draft` layers (multi-token prediction) are loaded only for speculative decoding."""

    embedding: Layer
    layers: tuple[Layer, ...]
    head: Layer
    draft: tuple[Layer, ...]
    vision: Layer
    hidden_size: int
    vocab_size: int
    is_tied: bool
    kv_heads: int

    @property
    def total(self) -> int:
        """Parameters in the checkpoint."""
        every = (self.embedding, *self.layers, self.head, *self.draft, self.vision)
        return sum(part.parameters for parts in every for part in parts if part.is_stored)


# Architectures whose count agrees with a published size, or whose parts are all of the kinds that do.
COUNTED = frozenset(
    {
        *("FalconForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "GraniteForCausalLM", "LlamaForCausalLM"),
        *("MistralForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
        *("Glm4MoeForCausalLM", "GptOssForCausalLM", "Llama4ForCausalLM", "MiniMaxM2ForCausalLM"),
        *("MixtralForCausalLM", "Qwen3MoeForCausalLM"),
        *("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"),
        *("JambaForCausalLM", "Mamba2ForCausalLM", "NemotronHForCausalLM", "Qwen3NextForCausalLM"),
        *("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
    }
)

_TIED_BY_DEFAULT = frozenset({"falcon", "gemma2", "gemma3_text", "mamba2"})
_QKV_BIAS_BY_DEFAULT = frozenset({"qwen2"})
_NO_GATE = frozenset({"falcon", "nemotron_h"})
_QK_NORM = frozenset({"qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_5_text",
                      "qwen3_5_moe_text", "gemma3_text"})  # fmt: skip


def count_parameters(config: Mapping[str, Any], *, name: str = "model") -> Parameters:
    """The parts of the model that this config.json describes.

    Raises UnsupportedModel for an architecture whose parts are not known; its size has to come from the checkpoint.
    """
    outer = str((config.get("architectures") or ["?"])[0])
    found = text_section(config)
    values = with_defaults(found[0])[0] if found else dict(config)
    architecture = outer if outer in COUNTED else (inner_architecture(outer, values) if found else None) or outer
    if architecture not in COUNTED:
        raise UnsupportedModel(
            f"the weights of {name} ({outer}) cannot be computed from its config.json: kvwatch does not know its "
            "modules. Pass the folder that also holds its model.safetensors.index.json as --model, or give "
            "--kv-cache-memory-bytes."
        )
    text = Fields(values, architecture=architecture)
    return _Counter(text, Fields(config, architecture=outer)).count()


# Marks of Nemotron-H's hybrid_override_pattern, and the names of its layers_block_type.
_MIXERS = {
    "M": "mamba2",
    "*": "attention",
    "-": "mlp",
    "E": "experts",
    "mamba": "mamba2",
    "linear_attention": "mamba2",
    "attention": "attention",
    "full_attention": "attention",
    "mlp": "mlp",
    "moe": "experts",
}


class _Counter:
    """Counts one model; the fields that every part needs are read once."""

    def __init__(self, text: Fields, top: Fields) -> None:
        self.text, self.top = text, top
        self.model_type = str(text.raw("model_type") or "")
        self.hidden = text.count("hidden_size", "n_embd", "d_model")
        self.vocab = text.count("vocab_size")
        self.has_attention = text.raw("num_attention_heads", "n_head", "num_heads") is not None and (
            self.model_type != "mamba2"
        )
        self.dims = dims(text) if self.has_attention else None

    def count(self) -> Parameters:
        tied = bool(self._either("tie_word_embeddings", default=self.model_type in _TIED_BY_DEFAULT))
        layers = tuple(self._layer(index) for index in range(layer_count(self.text)))
        embedding = Part(module="model.embed_tokens", parameters=self.vocab * self.hidden, is_linear=False)
        head = Part(module="lm_head", parameters=0 if tied else self.vocab * self.hidden, is_linear=False)
        return Parameters(
            embedding=(embedding,),
            layers=layers,
            head=(head, self._norm(1)),
            draft=self._draft(layers, embedding),
            vision=self._vision(),
            hidden_size=self.hidden,
            vocab_size=self.vocab,
            is_tied=tied,
            kv_heads=self.dims.kv_heads if self.dims else 1,
        )

    def _either(self, field: str, *, default: object) -> object:
        """A field of the language model or, failing that, of the whole."""
        found = self.text.raw(field)
        found = self.top.raw(field) if found is None else found
        return default if found is None else found

    def _norm(self, norms: int) -> Part:
        return Part(module="norm", parameters=norms * self.hidden, split="none", is_linear=False)

    # One decoder layer --------------------------------------------------------------------------------------------

    def _layer(self, index: int) -> Layer:
        kind = self._mixer(index)
        if kind == "mlp":
            return (self._norm(1), *self._feed_forward(index))
        if kind == "experts":
            return (self._norm(1), *self._experts(index))
        mixer = {
            "attention": self._attention,
            "latent": self._latent,
            "delta_net": self._delta_net,
            "mamba1": self._mamba1,
            "mamba2": self._mamba2,
        }[kind](index)
        if self.model_type in {"nemotron_h", "mamba2"}:
            return (self._norm(1), *mixer)
        norms = self._norm(4 if self.model_type in {"gemma2", "gemma3_text"} else 2)
        if self._has_experts(index):
            return (norms, *mixer, *self._experts(index))
        return (norms, *mixer, *self._feed_forward(index))

    def _mixer(self, index: int) -> str:
        if self.text.raw("kv_lora_rank") is not None:
            return "latent"
        pattern = self.text.raw("hybrid_override_pattern")
        if pattern is None and self.model_type == "nemotron_h":
            pattern = self.text.items("layers_block_type", "layer_types")
        if pattern is not None:
            return _MIXERS[pattern[index]]
        if self.model_type == "mamba2":
            return "mamba2"
        if self.model_type == "jamba":
            period, offset = self.text.count("attn_layer_period"), self.text.count_or_zero("attn_layer_offset")
            return "attention" if index % period == offset else "mamba1"
        if self.text.raw("linear_num_value_heads") is not None:
            types = self.text.items("layer_types")
            every = self.text.count("full_attention_interval", default=4)
            linear = types[index] == "linear_attention" if types else (index + 1) % every != 0
            return "delta_net" if linear else "attention"
        return "attention"

    def _attention(self, index: int) -> Layer:
        assert self.dims is not None  # noqa: S101 -- a layer with attention has heads: dims() read them
        at, size = f"model.layers.{index}.self_attn", self.dims
        kv_heads = 1 if self.text.flag("multi_query") else size.kv_heads
        width = size.heads * size.head_dim
        gates = 2 if self.text.flag("attn_output_gate", default=self.model_type == "qwen3_next") else 1
        parts = [
            Part(module=f"{at}.q_proj", parameters=gates * self.hidden * width),
            Part(module=f"{at}.k_proj", parameters=2 * self.hidden * kv_heads * size.head_dim, split="kv_heads"),
            Part(module=f"{at}.o_proj", parameters=width * self.hidden),
        ]
        small = 2 * size.head_dim if self.model_type in _QK_NORM else 0
        if self.text.flag("attention_bias", default=self.model_type in _QKV_BIAS_BY_DEFAULT):
            small += width + 2 * kv_heads * size.head_dim
        if self.model_type == "gpt_oss":
            small += self.hidden + size.heads  # the output's bias; a sink per head
        if self.model_type == "minimax_m2":
            small += (size.heads + kv_heads) * size.head_dim
        return (*parts, Part(module=f"{at}.norm", parameters=small, is_linear=False))

    def _latent(self, index: int) -> Layer:
        assert self.dims is not None  # noqa: S101 -- as in _attention
        at, heads = f"model.layers.{index}.self_attn", self.dims.heads
        rank, rope = self.text.count("kv_lora_rank"), self.text.count("qk_rope_head_dim")
        nope, value = self.text.count("qk_nope_head_dim"), self.text.count("v_head_dim")
        q_rank = self.text.optional_count("q_lora_rank")
        up = rank * heads * (nope + value)
        parts = [
            Part(module=f"{at}.kv_a_proj_with_mqa", parameters=self.hidden * (rank + rope), split="none"),
            Part(module=f"{at}.kv_b_proj", parameters=up),
            # vLLM keeps the two halves of kv_b_proj unquantised as well, to absorb them into query and output.
            Part(module=f"{at}.absorbed", parameters=up, is_linear=False, is_stored=False),
            Part(module=f"{at}.q_b_proj", parameters=(q_rank or self.hidden) * heads * (nope + rope)),
            Part(module=f"{at}.o_proj", parameters=heads * value * self.hidden),
            Part(module=f"{at}.norm", parameters=rank + (q_rank or 0), split="none", is_linear=False),
        ]
        if q_rank:
            parts.append(Part(module=f"{at}.q_a_proj", parameters=self.hidden * q_rank, split="none"))
        index_dim = self.text.optional_count("index_head_dim")
        types = self.text.items("indexer_types")
        if index_dim and not (types and types[index] == "shared"):
            index_heads = self.text.count("index_n_heads")
            parts += [
                Part(module=f"{at}.indexer.wq_b", parameters=(q_rank or 0) * index_heads * index_dim, split="none"),
                Part(module=f"{at}.indexer.wk", parameters=self.hidden * index_dim, split="none"),
                Part(
                    module=f"{at}.indexer.weights_proj",
                    parameters=self.hidden * index_heads + 2 * index_dim,
                    split="none",
                    is_linear=False,
                ),
            ]
        return tuple(parts)

    def _delta_net(self, index: int) -> Layer:
        at = f"model.layers.{index}.linear_attn"
        values, value_dim = self.text.count("linear_num_value_heads"), self.text.count("linear_value_head_dim")
        keys, key_dim = self.text.count("linear_num_key_heads"), self.text.count("linear_key_head_dim")
        taps = self.text.count("linear_conv_kernel_dim")
        key, value = keys * key_dim, values * value_dim
        return (
            Part(module=f"{at}.in_proj_qkvz", parameters=self.hidden * (2 * key + 2 * value)),
            Part(module=f"{at}.in_proj_ba", parameters=self.hidden * 2 * values, is_linear=False),
            Part(module=f"{at}.conv1d", parameters=(2 * key + value) * taps + 2 * values + value_dim, is_linear=False),
            Part(module=f"{at}.out_proj", parameters=value * self.hidden),
        )

    def _mamba1(self, index: int) -> Layer:
        at = f"model.layers.{index}.mamba"
        inner = self.text.count("mamba_expand") * self.hidden
        state, taps, rank = (self.text.count(f"mamba_{what}") for what in ("d_state", "d_conv", "dt_rank"))
        small = inner * taps + inner + inner * (state + 1) + inner + rank + 2 * state
        return (
            Part(module=f"{at}.in_proj", parameters=self.hidden * 2 * inner),
            Part(module=f"{at}.x_proj", parameters=inner * (rank + 2 * state) + rank * inner),
            Part(module=f"{at}.conv1d", parameters=small, is_linear=False),
            Part(module=f"{at}.out_proj", parameters=inner * self.hidden),
        )

    def _mamba2(self, index: int) -> Layer:
        at = f"model.layers.{index}.mixer"
        heads = self.text.count("mamba_num_heads", "num_heads")
        inner = heads * self.text.count("mamba_head_dim", "head_dim")
        groups = self.text.count("n_groups") * self.text.count("ssm_state_size", "state_size")
        channels = inner + 2 * groups
        small = channels * (self.text.count("conv_kernel") + 1) + 3 * heads + inner
        return (
            Part(module=f"{at}.in_proj", parameters=self.hidden * (inner + channels + heads)),
            Part(module=f"{at}.conv1d", parameters=small, is_linear=False),
            Part(module=f"{at}.out_proj", parameters=inner * self.hidden),
        )

    # Feed-forward and experts -------------------------------------------------------------------------------------

    def _feed_forward(self, index: int) -> Layer:
        default = 4 * self.hidden if self.model_type == "falcon" else None
        inner = self.text.count("intermediate_size_mlp", "intermediate_size", default=default)
        matrices = 2 if self.model_type in _NO_GATE else 3
        return (Part(module=f"model.layers.{index}.mlp.gate_proj", parameters=matrices * self.hidden * inner),)

    def _has_experts(self, index: int) -> bool:
        if self._expert_count() == 0:
            return False
        if self.model_type == "jamba":
            period, offset = self.text.count("expert_layer_period"), self.text.count_or_zero("expert_layer_offset")
            return index % period == offset
        if self.text.raw("interleave_moe_layer_step") is not None:
            return (index + 1) % self.text.count("interleave_moe_layer_step") == 0
        if index in (self.text.items("mlp_only_layers") or ()):
            return False
        first = self.text.count_or_zero("first_k_dense_replace", default=0)
        every = self.text.count("moe_layer_freq", "decoder_sparse_step", default=1)
        return index >= first and (index + (1 if self.text.raw("decoder_sparse_step") else 0)) % every == 0

    def _expert_count(self) -> int:
        return self.text.count_or_zero("n_routed_experts", "num_local_experts", "num_experts", default=0)

    def _experts(self, index: int) -> Layer:
        at, experts = f"model.layers.{index}.mlp", self._expert_count()
        inner = self.text.count("moe_intermediate_size", "intermediate_size")
        matrices = 2 if self.model_type in _NO_GATE else 3
        latent = self.text.count("moe_latent_size", default=self.hidden)
        bias = experts * (2 * inner + self.hidden + 1) if self.model_type == "gpt_oss" else experts
        parts = [
            Part(module=f"{at}.gate", parameters=self.hidden * experts, split="none", is_linear=False),
            Part(module=f"{at}.experts.0.gate_proj", parameters=experts * matrices * latent * inner, split="experts"),
            Part(module=f"{at}.experts.bias", parameters=bias, split="experts", is_linear=False),
        ]
        shared = self._shared_expert_width(inner)
        if shared:
            gate = self.hidden if self.model_type.startswith("qwen3_") else 0
            parts.append(Part(module=f"{at}.shared_experts.gate_proj", parameters=matrices * self.hidden * shared))
            parts.append(Part(module=f"{at}.shared_expert_gate", parameters=gate, split="none", is_linear=False))
        return tuple(parts)

    def _shared_expert_width(self, inner: int) -> int:
        given = ("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size")
        if self.text.raw(*given) is not None:
            return self.text.count_or_zero(*given)
        if self.model_type == "llama4_text":
            return inner
        return inner * self.text.count_or_zero("n_shared_experts", default=0)

    # Beside the decoder -------------------------------------------------------------------------------------------

    def _draft(self, layers: tuple[Layer, ...], embedding: Part) -> tuple[Layer, ...]:
        """Multi-token-prediction modules of the checkpoint: a decoder layer and a projection.

        Some checkpoints store copies of the embedding and the head with them.
        """
        join = Part(module="model.mtp.eh_proj", parameters=2 * self.hidden * self.hidden, split="none", is_linear=False)
        modules = self.text.count_or_zero("num_nextn_predict_layers", default=0)
        if modules and layers:
            copies = Part(module="model.mtp.embed_tokens", parameters=2 * embedding.parameters, is_linear=False)
            has_copies = self.model_type in {"deepseek_v3", "deepseek_v32", "glm4_moe", "glm_moe_dsa"}
            extra = (join, copies) if has_copies else (join,)
            return tuple((*layers[-1], *extra) for _ in range(modules))
        modules = self.text.count_or_zero("mtp_num_hidden_layers", default=0)
        attention = next(
            (layer for layer in reversed(layers) if any(".self_attn." in part.module for part in layer)), ()
        )
        return tuple((*attention, join) for _ in range(modules))

    def _vision(self) -> Layer:
        """The encoder and projector of a vision-language model, counted for SigLIP and Qwen towers; else left out."""
        tower = self.top.section("vision_config")
        if tower is None or tower.raw("hidden_size") is None:
            return ()
        width, inner = tower.count("hidden_size"), tower.count("intermediate_size")
        depth = tower.count("depth", "num_hidden_layers")
        block = 4 * width * width + 2 * width * inner + 9 * width + inner
        patch = tower.count("in_channels", "num_channels", default=3) * tower.count("patch_size") ** 2
        patch *= tower.count("temporal_patch_size", default=1)
        merge = width * tower.count("spatial_merge_size", default=1) ** 2
        out = tower.count("out_hidden_size", default=self.hidden)
        image = tower.optional_count("image_size")
        positions = (
            (image // tower.count("patch_size")) ** 2 if image else tower.count("num_position_embeddings", default=0)
        )
        mergers = 1 + len(tower.items("deepstack_visual_indexes") or ())
        projector = (
            mergers * (merge * merge + merge * out + merge + out + 2 * width) if merge > width else width * out + width
        )
        total = depth * block + patch * width + width + positions * width + projector
        return (Part(module="visual", parameters=total, is_linear=False),)
