"""The built-in workload `long-context-trap`: a full chat engine, and one long document.

Fifty chat users share a KV pool of 32 GB of Llama 3.1 70B in bfloat16: 80 layers x 8 KV heads x 128 x 2 (K and V) x 2
bytes = 327,680 bytes per token, so 6,103 blocks of 16 tokens. Their conversations fit with room to spare. Then one of
them sends a document of 64,000 tokens, two thirds of the pool.

The cost of a step is that of 4 x H100, roughly: 25 ms to read the weights and start, 0.12 ms of compute per token, and
327,680 bytes per cached token at 13.4 TB/s.
"""

import random

from kvwatch.simulation import CostModel, Request, SchedulerSettings, Workload

NAME = "long-context-trap"
KV_POOL_BYTES = 32_000_000_000
BYTES_PER_TOKEN = 327_680
BLOCK_SIZE = 16
DOCUMENT_TOKENS = 64_000


def long_context_trap() -> Workload:
    """The same requests each time."""
    rng = random.Random(70)
    chats = [Request(prompt_tokens=rng.randint(600, 1800), output_tokens=rng.randint(200, 700)) for _ in range(400)]
    document = Request(prompt_tokens=DOCUMENT_TOKENS, output_tokens=600)
    return Workload(
        engine=SchedulerSettings(
            num_gpu_blocks=KV_POOL_BYTES // (BYTES_PER_TOKEN * BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            max_model_len=131_072,
            max_num_batched_tokens=8192,
            max_num_seqs=256,
            enable_prefix_caching=False,
        ),
        cost=CostModel(step_seconds=0.025, per_token_seconds=1.2e-4, per_kv_token_seconds=2.4e-8),
        requests=(*chats[:100], document, *chats[100:]),
        clients=50,
    )
