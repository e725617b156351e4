#!/usr/bin/env python3
"""Write a tiny Llama for tests: config.json and a tokenizer of bytes. vLLM serves it with --load-format dummy.

usage: tiny_model.py FOLDER      with the Python that has vLLM (needs tokenizers and transformers)

One character of a prompt is one token, so a load generator knows the length of what it sends. Random weights answer
with random bytes; a request with ignore_eos gets exactly max_tokens of them.
"""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def write_tiny_llama(folder: Path) -> None:
    """2 layers x 2 KV heads x 64 x bfloat16: 1,024 bytes of KV cache per token."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>", "</s>", "<unk>"]
    vocabulary = {token: number for number, token in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": len(vocabulary) + 5,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": vocabulary["<s>"],
        "eos_token_id": vocabulary["</s>"],
    }
    # written last: its presence says that the folder is complete
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    write_tiny_llama(Path(sys.argv[1]))
