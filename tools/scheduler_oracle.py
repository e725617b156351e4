#!/usr/bin/env python3
"""Drive vLLM's own V1 Scheduler without a model: what the simulator must decide, step for step.

Run it with the Python that has vLLM 0.32 (the CPU build will do). KVWATCH_TINY_MODEL names a folder with the
config.json of any small text model; its weights are not read.

    python tools/scheduler_oracle.py < cases.jsonl > traces.jsonl

One case a line, a mapping as in a workload file: `engine`, `cost`, `clients` (closed loop) or `at_seconds` (open loop),
`requests`. `engine.sliding_window` adds a second KV cache group with that window. One line comes back per case:
`steps`, a list of [[[request, tokens], ...], [preempted request, ...], free blocks after scheduling], and
`free_blocks_at_end`, `seconds` (time spent driving the scheduler), `end_seconds` (the simulated clock).
"""

import copy
import json
import os
import sys
import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

MODEL = os.environ.get("KVWATCH_TINY_MODEL", str(Path("~/.cache/kvwatch/tiny-llama").expanduser()))
FAR_APART = 10**7  # more tokens than any request has; keeps token ids of different requests different

_base: list[VllmConfig] = []


def base_config() -> VllmConfig:
    """One validated configuration; reading the model's takes a second, so every case starts from a copy."""
    if not _base:
        _base.append(
            VllmConfig(
                model_config=ModelConfig(model=MODEL, dtype="bfloat16", max_model_len=4096, seed=0),
                scheduler_config=SchedulerConfig(max_model_len=4096, is_encoder_decoder=False, async_scheduling=False),
                cache_config=CacheConfig(block_size=16, gpu_memory_utilization=0.9, cache_dtype="auto"),
                device_config=DeviceConfig("cpu"),
            )
        )
        init_none_hash(sha256)
    return _base[0]


def make_scheduler(engine: dict[str, Any]) -> Scheduler:
    """A scheduler for the `engine` part of a case."""
    config = copy.copy(base_config())
    block_size, blocks = engine.get("block_size", 16), engine["num_gpu_blocks"]
    length = engine.get("max_model_len", 4096)
    config.model_config = copy.copy(config.model_config)
    config.model_config.max_model_len = length
    config.scheduler_config = SchedulerConfig(
        max_model_len=length,
        is_encoder_decoder=False,
        async_scheduling=False,
        max_num_seqs=engine.get("max_num_seqs", 128),
        max_num_active_seqs=engine.get("max_num_active_seqs"),
        max_num_batched_tokens=engine.get("max_num_batched_tokens", 2048),
        watermark=engine.get("watermark", 0.0),
        scheduler_reserve_full_isl=engine.get("scheduler_reserve_full_isl", True),
        long_prefill_token_threshold=engine.get("long_prefill_token_threshold", 0),
        long_prefill_token_threshold_adaptive=engine.get("long_prefill_token_threshold_adaptive", False),
    )
    config.cache_config = CacheConfig(
        block_size=block_size,
        gpu_memory_utilization=0.9,
        cache_dtype="auto",
        enable_prefix_caching=engine.get("enable_prefix_caching", True),
    )
    config.cache_config.num_gpu_blocks = blocks
    shape = {"block_size": block_size, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    groups = [KVCacheGroupSpec(["layer.0"], FullAttentionSpec(**shape))]
    if engine.get("sliding_window"):
        spec = SlidingWindowSpec(**shape, sliding_window=engine["sliding_window"])
        groups.append(KVCacheGroupSpec(["layer.1"], spec))
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        hash_block_size=block_size,
        log_stats=True,
    )


def make_request(index: int, item: dict[str, Any], prefixes: list[str], hasher: Callable[[Request], Any]) -> Request:
    """Token ids are equal within a named prefix and nowhere else."""
    shared = item.get("prefix_tokens", 0)
    first = (len(prefixes) + index + 1) * FAR_APART
    prompt = [first + position for position in range(item["prompt_tokens"])]
    if shared:
        start = (prefixes.index(item["prefix"]) + 1) * FAR_APART
        prompt[:shared] = range(start, start + shared)
    params = SamplingParams(max_tokens=item["output_tokens"], ignore_eos=True)
    params.update_from_generation_config({}, None)
    return Request(
        request_id=str(index),
        prompt_token_ids=prompt,
        sampling_params=params,
        pooling_params=None,
        block_hasher=hasher,
    )


def step_outputs(scheduler: Scheduler, decision: SchedulerOutput) -> list[int]:
    """Pretend that the model ran: a new token for each request that is computed to its end. Returns who finished."""
    ids = list(decision.num_scheduled_tokens)
    requests = [scheduler.requests[i] for i in ids]
    sampled = [
        [FAR_APART * 10**6 + int(r.request_id) * FAR_APART + r.num_tokens]
        if r.num_computed_tokens >= r.num_tokens
        else []
        for r in requests
    ]
    outputs = scheduler.update_from_output(
        decision,
        ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={i: k for k, i in enumerate(ids)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        ),
    )
    return [int(o.request_id) for batch in outputs.values() for o in batch.outputs if o.finish_reason is not None]


def run(case: dict[str, Any], *, traced: bool = True) -> dict[str, Any]:
    """Play one case to its end."""
    engine, items, clients = case["engine"], case["requests"], case.get("clients")
    cost = {name: Decimal(repr(value)) for name, value in case.get("cost", {"step_seconds": 1}).items()}
    scheduler = make_scheduler(engine)
    pool = scheduler.kv_cache_manager.block_pool
    prefixes = sorted({item["prefix"] for item in items if item.get("prefix")})
    hasher = get_request_block_hasher(engine.get("block_size", 16), sha256)
    if not engine.get("enable_prefix_caching", True):
        hasher = None
    requests = [make_request(index, item, prefixes, hasher) for index, item in enumerate(items)]
    arrivals = [Decimal(repr(item.get("at_seconds", 0.0))) for item in items]
    unsent, now, done, steps = list(range(len(items))), Decimal(0), 0, []
    in_flight = 0
    started = time.perf_counter()
    while done < len(items):
        if clients is not None:
            due, unsent = unsent[: clients - in_flight], unsent[clients - in_flight :]
        else:
            if not in_flight:
                now = max(now, min(arrivals[index] for index in unsent))
            due = [index for index in unsent if arrivals[index] <= now]
            unsent = [index for index in unsent if arrivals[index] > now] if due else unsent
        for index in due:
            scheduler.add_request(requests[index])
        in_flight += len(due)
        decision = scheduler.schedule()
        scheduled = decision.num_scheduled_tokens
        if traced:
            held = sum(scheduler.requests[i].num_computed_tokens - n for i, n in scheduled.items())
            now += (
                cost["step_seconds"]
                + decision.total_num_scheduled_tokens * cost.get("per_token_seconds", 0)
                + held * cost.get("per_kv_token_seconds", 0)
            )
            preempted = sorted(int(i) for i in decision.preempted_req_ids or ())
            steps.append([[[int(i), n] for i, n in scheduled.items()], preempted, pool.get_num_free_blocks()])
        finished = len(step_outputs(scheduler, decision))
        done += finished
        in_flight -= finished
    return {
        "steps": steps,
        "free_blocks_at_end": pool.get_num_free_blocks(),
        "seconds": time.perf_counter() - started,
        "end_seconds": float(now),
    }


def main() -> None:
    for line in sys.stdin:
        if line.strip():
            sys.stdout.write(json.dumps(run(json.loads(line)), separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
