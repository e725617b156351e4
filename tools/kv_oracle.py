#!/usr/bin/env python3
"""Ask vLLM's own planning code what the KV cache of a model is, without a GPU, and compare with the stored answers.

Run it with the Python that has vLLM (the CPU build will do):

    python tools/kv_oracle.py                       every case of tests/data/budget/kv_truth.json; exit 1 on drift
    python tools/kv_oracle.py --only DeepSeek       the cases whose id holds this text
    python tools/kv_oracle.py --cases FILE          other cases: {"configs": {...}, "gpus": {...}, "cases": [...]}
    python tools/kv_oracle.py ... --write FILE      store the answers in a file of the same shape

A case is what `EngineArgs` takes: name (of a config), tp, pp, dcp, kv_dtype, block_size, max_model_len, prefix, avail
(KV-cache bytes per rank), extra (further arguments). Each GPU runs in a process of its own, because vLLM settles its
platform once. What is compared: blocks, bytes per block, blocks per request, concurrency, tokens, vLLM's defaults.
"""

# ruff: noqa: PLC0415, SLF001 -- vLLM may only be imported after the platform is set; its planning is not public

import argparse
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fake_cuda

ROOT = Path(__file__).resolve().parents[1]
TRUTH = ROOT / "tests" / "data" / "budget" / "kv_truth.json"
MODELS = fake_cuda.CACHE / "models"
DEFAULT_AVAILABLE_BYTES = 40 << 30
COMPARED = (
    "num_blocks",
    "bytes_per_block",
    "blocks_per_request_at_max_model_len",
    "max_concurrency",
    "kv_cache_size_tokens",
    "block_size_after_platform",
    "max_num_batched_tokens",
    "max_num_seqs",
    "max_concurrent_batches",
    "resolved_cache_dtype",
)


# --- in the parent: distribute, compare ---


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, default=TRUTH)
    parser.add_argument("--only", default="", help="cases whose id holds this text")
    parser.add_argument("--write", type=Path, help="store the answers here")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    document = json.loads(options.cases.read_text(encoding="utf-8"))
    if options.worker:
        return work(document, options.worker, options.only)
    answers: list[dict[str, Any]] = []
    for gpu in document["gpus"]:
        if any(row["gpu"] == gpu and options.only in row["id"] for row in document["cases"]):
            answers += ask(options, gpu)
    if options.write:
        options.write.write_text(json.dumps({**document, "cases": answers}, indent=1), encoding="utf-8")
    return report(document, answers, options.only)


def ask(options: argparse.Namespace, gpu: str) -> list[dict[str, Any]]:
    """The answers for one GPU, from a process that believes to have it. They come as JSON lines on stdout."""
    command = [sys.executable, __file__, "--cases", str(options.cases), "--only", options.only, "--worker", gpu]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        lines = [json.loads(line) for line in process.stdout if line.startswith('{"id"')]
    if process.returncode:
        raise SystemExit(f"the process for {gpu} ended with {process.returncode}; run it alone to see why: {command}")
    return lines


def report(document: dict[str, Any], answers: list[dict[str, Any]], only: str) -> int:
    stored = {row["id"]: row for row in document["cases"] if only in row["id"]}
    drift = 0
    for answer in answers:
        known = stored.pop(answer["id"])
        if "error" in answer:
            print(f"FAILED {answer['id']}: {answer['error']}")
            drift += 1
            continue
        changed = {key: (known[key], answer[key]) for key in COMPARED if key in known and known[key] != answer[key]}
        if changed:
            drift += 1
            print(
                f"DRIFT  {answer['id']}: " + ", ".join(f"{key} {old} -> {new}" for key, (old, new) in changed.items())
            )
    for missing in stored:
        print(f"MISSING {missing}")
    print(f"{len(answers)} cases, {drift} drifted or failed, {len(stored)} missing")
    return 1 if drift or stored else 0


# --- in the worker: vLLM's own code ---


def work(document: dict[str, Any], gpu: str, only: str) -> int:
    facts = document["gpus"][gpu]
    fake_cuda.install(facts["name"], tuple(facts["capability"]), facts["memory_bytes"])
    fake_cuda.stub_absent_packages()
    for row in document["cases"]:
        if row["gpu"] != gpu or only not in row["id"]:
            continue
        try:
            answer = plan(document["configs"][row["case"]["name"]], **row["case"])
        except Exception as error:  # noqa: BLE001 -- one case that vLLM refuses must not hide the others
            answer = {"error": repr(error)[:800], "trace": traceback.format_exc()[-1500:]}
        print(json.dumps({"id": row["id"], "gpu": gpu, "case": row["case"], **answer}), flush=True)
    return 0


def plan(
    config: dict[str, Any],
    *,
    name: str,
    tp: int = 1,
    pp: int = 1,
    dcp: int = 1,
    kv_dtype: str = "auto",
    avail: int | None = None,
    max_model_len: int | None = None,
    block_size: int | None = None,
    prefix: bool | None = None,
    extra: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What vLLM would plan for one model and one set of flags."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.core import kv_cache_utils as planning
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

    engine = engine_config(
        write_config(name, config),
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        decode_context_parallel_size=dcp,
        kv_cache_dtype=kv_dtype,
        max_model_len=max_model_len,
        block_size=block_size,
        enable_prefix_caching=prefix,
        distributed_executor_backend="mp" if tp * pp > 1 else "uni",
        **(extra or {}),
    )
    initialise_groups()
    specs, backends = layer_specs(engine, tp, pp)
    with ranks(1, 1, 0):
        register_all_kvcache_specs(engine)
        resolve_layout(engine, backends, specs)
        available = [avail or DEFAULT_AVAILABLE_BYTES] * len(specs)
        with set_current_vllm_config(engine):
            configs = planning.get_kv_cache_configs(engine, [dict(stage) for stage in specs], available)
            tokens, concurrency = planning.get_kv_cache_capacity(
                engine, planning.generate_scheduler_kv_cache_config(configs)
            )
            groups = [
                {
                    "type": type(group.kv_cache_spec).__name__,
                    "num_layers": len(group.layer_names),
                    "blocks": blocks_of(group.kv_cache_spec, engine),
                }
                for group in configs[0].kv_cache_groups
            ]
            block_bytes = [planning._pool_bytes_per_block(engine, found.kv_cache_groups) for found in configs]
    return {
        "resolved_cache_dtype": engine.cache_config.cache_dtype,
        "block_size_after_platform": engine.cache_config.block_size,
        "available_kv_cache_memory_bytes_per_worker": available[0],
        "max_model_len": engine.model_config.max_model_len,
        "max_num_batched_tokens": engine.scheduler_config.max_num_batched_tokens,
        "max_num_seqs": engine.scheduler_config.max_num_seqs,
        "max_concurrent_batches": engine.max_concurrent_batches,
        "attn_backends": [backend.get_name() for backend in backends],
        "bytes_per_block": block_bytes,
        "num_blocks": configs[0].num_blocks,
        "blocks_per_request_at_max_model_len": sum(group["blocks"] for group in groups),
        "max_concurrency": concurrency,
        "kv_cache_size_tokens": tokens,
        "groups": groups,
    }


def blocks_of(spec: Any, engine: Any) -> int:
    return -(-int(spec.max_memory_usage_bytes(engine)) // int(spec.page_size_bytes))


def write_config(name: str, config: dict[str, Any]) -> str:
    folder = MODELS / name.replace("(", "_").replace(")", "").replace("/", "_")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def engine_config(folder: str, **arguments: Any) -> Any:
    """VllmConfig as an API server makes it, without CUDA graphs and without weights."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    given = {key: value for key, value in arguments.items() if value is not None}
    fixed = {
        "model": folder,
        "tokenizer": folder,
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "enforce_eager": True,
        "dtype": "bfloat16",
    }
    return EngineArgs(**fixed, **given).create_engine_config(UsageContext.OPENAI_API_SERVER)


def initialise_groups() -> None:
    """One process, whose groups are told how many ranks they have."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    if torch.distributed.is_initialized():
        return
    address = f"tcp://127.0.0.1:{20000 + os.getpid() % 20000}"
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, address, 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1, backend="gloo")


@contextmanager
def ranks(tensor_parallel: int, stages: int, stage: int) -> Iterator[None]:
    """The tensor- and pipeline-parallel groups as rank 0 of a stage sees them."""
    from vllm.distributed import parallel_state

    sizes = ((parallel_state._TP, tensor_parallel, 0), (parallel_state._PP, stages, stage))
    before = [(group.world_size, group.rank_in_group, group.ranks) for group, _, _ in sizes]
    for group, size, rank in sizes:
        group.world_size, group.rank_in_group, group.ranks = size, rank, list(range(size))
    try:
        yield
    finally:
        for (group, _, _), (size, rank, members) in zip(sizes, before, strict=True):
            group.world_size, group.rank_in_group, group.ranks = size, rank, members


def layer_specs(engine: Any, tensor_parallel: int, stages: int) -> tuple[list[dict[str, Any]], list[Any]]:
    """Each stage's KV-cache specs by layer name, as the model runner collects them, and the attention backends."""
    from vllm.platforms import current_platform
    from vllm.v1.worker.worker_base import get_current_attn_backends

    found: list[dict[str, Any]] = []
    backends: list[Any] = []
    for stage in range(stages):
        with ranks(tensor_parallel, stages, stage):
            engine.compilation_config.static_forward_context.clear()
            build_model(engine)
            if stage == 0:
                current_platform.update_block_size_for_backend(engine)
                backends = get_current_attn_backends(engine)
            found.append(specs_of_layers(engine))
    return found, backends


def build_model(engine: Any) -> None:
    """The model on the meta device; its layers register themselves with the engine."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers import sparse_attn_indexer as indexer
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils import deep_gemm
    from vllm.v1.attention.backends.mla import flashmla_sparse
    from vllm.v1.worker import workspace

    indexer.has_deep_gemm = deep_gemm.is_deep_gemm_supported = lambda *_arguments, **_options: True
    workspace.current_workspace_manager = flashmla_sparse.current_workspace_manager = fake_cuda.Nothing
    with set_current_vllm_config(engine), torch.device("meta"), fake_cuda.on_meta_device(torch):
        torch.set_default_dtype(engine.model_config.dtype)
        fake_cuda.building["now"] = True
        try:
            initialize_model(engine)
        finally:
            torch.set_default_dtype(torch.float32)
            fake_cuda.building["now"] = False


def specs_of_layers(engine: Any) -> dict[str, Any]:
    """GPUModelRunner.get_kv_cache_spec: layers that share another's cache have none of their own."""
    from vllm.config import set_current_vllm_config
    from vllm.config.vllm import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.kv_cache_interface import AttentionSpec
    from vllm.v1.worker.utils import customize_attention_spec

    specs: dict[str, Any] = {}
    with set_current_vllm_config(engine):
        for name, layer in get_layers_from_vllm_config(engine, AttentionLayerBase).items():
            if isinstance(layer, Attention) and layer.kv_sharing_target_layer_name:
                continue
            spec = layer.get_kv_cache_spec(engine)
            if spec is None:
                continue
            if isinstance(spec, AttentionSpec):
                spec = customize_attention_spec(layer.get_attn_backend(), spec)
            specs[name] = spec
    return specs


def resolve_layout(engine: Any, backends: list[Any], specs: list[dict[str, Any]]) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout

    with set_current_vllm_config(engine):
        layouts = [layout.name for layout in get_supported_kv_cache_layouts(backends)]
        resolve_kv_cache_layout(engine, [layouts], [spec for stage in specs for spec in stage.values()])


if __name__ == "__main__":
    sys.exit(main())
