"""kvwatch: KV-cache budget, diagnosis and settings for vLLM operators."""

__version__ = "0.1.0"
