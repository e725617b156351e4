"""Encoder-decoder models, and models without a decoder cache.

A Whisper decoder layer holds its own tokens and, in a second cache, the encoder's output once per request.
Bidirectional encoders (BERT and kin) keep nothing between steps.
Source: vLLM 0.32.0, vllm/model_executor/models/whisper.py, vllm/model_executor/layers/attention/cross_attention.py,
vllm/v1/kv_cache_interface.py (CrossAttentionSpec, EncoderOnlyAttentionSpec).
"""

from kvwatch.model.dims import head_dim, layer_count
from kvwatch.model.fields import Fields
from kvwatch.model.spec import LayerCache, Layout, full

ENCODER_DECODER = ("BartForConditionalGeneration", "WhisperForConditionalGeneration")
ENCODER_ONLY = (
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "BertModel",
    "ModernBertForSequenceClassification",
    "ModernBertModel",
    "NomicBertModel",
    "RobertaForSequenceClassification",
    "RobertaModel",
    "XLMRobertaForSequenceClassification",
    "XLMRobertaModel",
)
ARCHITECTURES = (*ENCODER_DECODER, *ENCODER_ONLY)


def layout(fields: Fields, architecture: str) -> Layout:
    if architecture in ENCODER_ONLY:
        layers = layer_count(fields)
        return Layout(layers=((),) * layers, cacheless=(("none", layers),))
    layers = fields.count("decoder_layers", "num_hidden_layers")
    heads = fields.count("decoder_attention_heads", "num_attention_heads")
    size = head_dim(fields, heads)
    own = full(kv_heads=heads, head_dim=size)
    cross = LayerCache(kind="cross", kv_heads=heads, head_dim=size, value_head_dim=size)
    return Layout(layers=((own, cross),) * layers, is_encoder_decoder=True)
