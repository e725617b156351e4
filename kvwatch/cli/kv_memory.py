"""The memory an engine has for its KV cache: given by a flag, or estimated from the GPU and the model's files."""

from kvwatch.budget_report import Memory, MemoryFigure
from kvwatch.engine import EngineConfig, resolve
from kvwatch.model import ModelSpec
from kvwatch.sources.model_files import ModelFiles


def kv_memory(engine: EngineConfig, files: ModelFiles, model: ModelSpec) -> Memory:
    """The memory for the KV cache: given, or what the GPU has left after an estimate of the rest."""
    if engine.num_gpu_blocks_override is not None:
        return Memory(available_kv_cache_bytes_per_rank=(), source="given", origin="--num-gpu-blocks-override")
    if engine.kv_cache_memory_bytes is not None:
        given = (engine.kv_cache_memory_bytes,) * engine.pipeline_parallel_size
        return Memory(available_kv_cache_bytes_per_rank=given, source="given", origin="--kv-cache-memory-bytes")
    if engine.device is None or engine.device.memory_bytes == 0:
        return Memory(available_kv_cache_bytes_per_rank=None, source="assumed", origin="no memory given")
    return _estimated(engine, files, model)


def _estimated(engine: EngineConfig, files: ModelFiles, model: ModelSpec) -> Memory:
    from kvwatch.memory import plan_memory

    resolved = resolve(engine, model)
    found = plan_memory(files.config, engine, resolved, name=files.name, checkpoint_bytes=files.weights_bytes)
    return Memory(
        available_kv_cache_bytes_per_rank=found.available_kv_cache_bytes_per_rank,
        source=found.source,
        origin=f"estimated, --gpu-memory-utilization {resolved.gpu_memory_utilization:g}",
        low_bytes_per_rank=found.low_bytes_per_rank,
        high_bytes_per_rank=found.high_bytes_per_rank,
        device_memory_bytes=found.device_memory_bytes,
        requested_bytes=found.requested_bytes,
        terms=tuple(
            MemoryFigure(
                name=term.name,
                bytes_per_rank=term.bytes_per_rank,
                low_bytes=term.low_bytes,
                high_bytes=term.high_bytes,
                source=term.source,
                note=term.note,
            )
            for term in found.terms
        ),
        assumptions=found.assumptions,
    )
