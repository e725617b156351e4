"""One engine at one instant: what every source becomes before anything is judged."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from kvwatch.errors import ExpositionError, printable
from kvwatch.exposition import Sample, is_vllm_page
from kvwatch.vllm_metrics import (
    ALL,
    CACHE_CONFIG_INFO,
    CACHE_CONFIG_LABEL_SINCE,
    PROCESS_START_TIME,
    SERIES,
    Metric,
    Series,
)

# Labels under which servers and proxies name the model; the first present wins (Triton writes `model`).
MODEL_LABELS = ("model_name", "model")
ENGINE_LABEL = "engine"
DEFAULT_ENGINE = "0"
# No length in tokens and no time in seconds is larger; with such bounds sums overflow.
_HIGHEST_BOUND = 1e15
# No count and no sum of seconds is larger; with such values sums overflow.
_HIGHEST_VALUE = 1e18
_GROWING = frozenset(
    name
    for name, series in SERIES.items()
    if series.metric.kind == "counter" or (series.metric.kind == "histogram" and series.part != "sum")
)
# Ray Serve and Prometheus put several servers on one page or in one answer; these labels tell them apart.
INSTANCE_LABELS = ("instance", "namespace", "pod", "ReplicaId", "WorkerId")
# The production-stack router repeats engine metrics under the address of each backend.
ROUTER_LABEL = "server"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class EngineKey:
    """What identifies an engine: data-parallel engines of one server differ in `engine` only.

    Both names are empty for a target that never showed an engine.
    """

    target: str
    model_name: str
    engine: str

    def __str__(self) -> str:
        if not self.engine:
            return "no engine seen yet"
        model = self.model_name or "unnamed model"
        return " ".join(printable(f"{model} engine {self.engine}").split("\n"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Cumulative bucket counts. `bounds` ascend and end with +Inf; `counts[i]` observations are <= `bounds[i]`."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    sum: float | None
    count: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The labels of vllm:cache_config_info that matter, typed; None where absent, "None" or not a number.

    `num_gpu_blocks` is per engine: vLLM writes the sum over its data-parallel engines on every engine's series
    (v1/engine/core_client.py: _apply_ready_response), which `snapshots` undoes.
    """

    num_gpu_blocks: int | None = None
    block_size: int | None = None
    cache_dtype: str | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool | None = None
    sliding_window: int | None = None
    kv_cache_size_tokens: int | None = None
    kv_cache_max_concurrency: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One engine at one instant.

    `values` holds gauges and counters by metric name; `parts` the same kept apart by the label that `Metric.split`
    names; `histograms` by metric name. What the page lacks is absent, never zero.
    """

    at_seconds: float
    key: EngineKey
    values: Mapping[str, float] = field(default_factory=dict)
    parts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    process_start_seconds: float | None = None
    vllm_version_at_least: str | None = None  # inferred from which metrics and labels exist

    def get(self, metric: Metric) -> float | None:
        """The value of a gauge or counter, None where missing."""
        return self.values.get(metric.name)


def snapshots(samples: Iterable[Sample], *, at_seconds: float, target: str = "") -> tuple[Snapshot, ...]:
    """Samples of one page -> one Snapshot per engine, in the order of their keys.

    A series that stands twice, as in a file that pages were appended to, counts once, with its last value.
    Raises ExpositionError with what to do if the page is no vLLM engine's: empty, another exporter's, a router's, or
    that of several engines that have the same labels.
    """
    samples = _each_once(samples)
    _refuse_what_is_no_engine(samples)
    samples = _of_vllm(samples)
    collected: dict[EngineKey, _Collected] = {}
    configs: list[Mapping[str, str]] = []
    starts: dict[str, float | None] = {}
    keys: dict[int, EngineKey] = {}
    for sample in samples:
        key = keys.get(id(sample.labels))
        if key is None:
            key = keys[id(sample.labels)] = _key(sample.labels, target)
        if sample.name == PROCESS_START_TIME:
            starts[key.target] = sample.value if math.isfinite(sample.value) else None
        elif (series := SERIES[sample.name]).metric is CACHE_CONFIG_INFO:
            configs.append(sample.labels)
        else:
            collected.setdefault(key, _Collected()).add(series, sample)
    proofs = _proofs(collected)
    _settle_series_without_engine(collected)
    if not collected:  # nothing but cache_config_info, as some excerpts and very young servers show
        for labels in configs:
            key = _key(labels, target)
            collected.setdefault(replace(key, engine=key.engine or DEFAULT_ENGINE), _Collected())
    engines = Counter((key.target, key.model_name) for key in collected)
    models = Counter(target for target, _ in engines)
    config_of = _Configs(configs, target)
    return tuple(
        collected[key].snapshot(
            key=key,
            at_seconds=at_seconds,
            process_start=starts.get(key.target, starts.get(target)),
            proof=proofs.get((key.target, key.model_name)),
            config_labels=config_of(key, models[key.target]),
            engines=engines[key.target, key.model_name],
        )
        for key in sorted(collected)
    )


def _each_once(samples: Iterable[Sample]) -> list[Sample]:
    """The last of each series. A counter that is lower the second time is that of another process."""
    latest: dict[tuple[str, int], Sample] = {}
    for sample in samples:
        place = (sample.name, id(sample.labels))  # label sets are shared between samples, so this is a cheap key
        former = latest.get(place)
        if former is not None and sample.name in _GROWING and sample.value < former.value:
            raise ExpositionError(
                f"{sample.name} is there twice with the same labels, as {former.value:,.15g} and then as "
                f"{sample.value:,.15g}: these are pages of several engines, or from before and after a restart. Give "
                "each engine's page by itself, and pages of different times as a capture folder (kvwatch record)"
            )
        latest[place] = sample
    return list(latest.values())


def _of_vllm(samples: list[Sample]) -> list[Sample]:
    """Drop names without a prefix where others have one: they are another library's, of the same process."""
    if any(s.name != PROCESS_START_TIME and SERIES[s.name].prefix for s in samples):
        return [s for s in samples if s.name == PROCESS_START_TIME or SERIES[s.name].prefix]
    return samples


def _proofs(collected: "Mapping[EngineKey, _Collected]") -> dict[tuple[str, str], str | None]:
    """The newest release that any series of a server proves; another server on the page may be older."""
    proofs: dict[tuple[str, str], str | None] = {}
    for key, series in collected.items():
        server = (key.target, key.model_name)
        proofs[server] = max(proofs.get(server), series.proof, key=_version)
    return proofs


def _key(labels: Mapping[str, str], target: str) -> EngineKey:
    model = next((labels[name] for name in MODEL_LABELS if name in labels), "")
    instance = "/".join(labels[name] for name in INSTANCE_LABELS if labels.get(name))
    return EngineKey(target=instance or target, model_name=model, engine=labels.get(ENGINE_LABEL, ""))


def _settle_series_without_engine(collected: "dict[EngineKey, _Collected]") -> None:
    """Give series without an engine label to the engines of their server, or to engine 0 where there is no other.

    vLLM before 0.8 has no engine label; vLLM 0.32 counts admission rejections per server, beside labelled engines.
    """
    labelled: dict[tuple[str, str], list[EngineKey]] = {}
    for key in collected:
        if key.engine:
            labelled.setdefault((key.target, key.model_name), []).append(key)
    for key in [key for key in collected if not key.engine]:
        shared = collected.pop(key)
        same_server = labelled.get((key.target, key.model_name), [])
        for engine in same_server:
            collected[engine].fill_from(shared)
        if not same_server:
            collected[replace(key, engine=DEFAULT_ENGINE)] = shared


def _refuse_what_is_no_engine(samples: list[Sample]) -> None:
    if not is_vllm_page(samples):
        raise ExpositionError(
            "the page has no vLLM metric; is this the vLLM server's own /metrics? vLLM started with "
            "--disable-log-stats exports none: compare with `curl http://HOST:8000/metrics | grep vllm`"
        )
    routed = sorted({s.labels[ROUTER_LABEL] for s in samples if ROUTER_LABEL in s.labels})
    if routed and not any(ENGINE_LABEL in s.labels or MODEL_LABELS[0] in s.labels for s in samples):
        raise ExpositionError(
            f"this is a router's page (its series carry server={routed[0]!r}), not an engine's: it has no KV-cache "
            f"metrics. Give the engines themselves: {' '.join(routed[:8])}"
        )


class _Collected:
    """Series of one engine while a page is read."""

    __slots__ = ("buckets", "parts", "proof", "ranks", "scalars", "values")

    def __init__(self) -> None:
        self.ranks: dict[str, tuple[int, int]] = {}
        self.values: dict[str, float] = {}
        self.parts: dict[str, dict[str, float]] = {}
        self.buckets: dict[str, dict[float, float]] = {}
        self.scalars: dict[tuple[str, str], float] = {}
        self.proof: str | None = None

    def add(self, series: Series, sample: Sample) -> None:
        metric = series.metric
        if not _is_possible(series, sample.value):
            return
        rank = self.ranks.setdefault(metric.name, series.rank)
        if series.rank > rank:
            return  # the current name is there as well, or another prefix: the same fact, not another
        if series.rank < rank:
            self._forget(metric)
            self.ranks[metric.name] = series.rank
        if series.age == 0 and metric.since and _version(metric.since) > _version(self.proof):
            self.proof = metric.since
        if series.part == "value":
            self._add_value(metric, sample)
        elif series.part == "bucket":
            self._add_bucket(metric, sample)
        else:
            place = (metric.name, series.part)
            self.scalars[place] = self.scalars.get(place, 0.0) + sample.value

    def _add_value(self, metric: Metric, sample: Sample) -> None:
        self.values[metric.name] = _combine(metric, self.values.get(metric.name), sample.value)
        if metric.split and metric.split in sample.labels:
            parts = self.parts.setdefault(metric.name, {})
            part = sample.labels[metric.split]
            parts[part] = _combine(metric, parts.get(part), sample.value)

    def _add_bucket(self, metric: Metric, sample: Sample) -> None:
        try:
            bound = float(sample.labels["le"])
        except (KeyError, ValueError) as error:
            raise ExpositionError(
                f"{sample.name} has a bucket whose le label is {sample.labels.get('le')!r}, not a number; "
                "a proxy may rewrite labels: scrape the vLLM server itself"
            ) from error
        if math.isnan(bound) or _HIGHEST_BOUND < abs(bound) < math.inf:
            return  # observations beyond it are in the +Inf bucket as well
        buckets = self.buckets.setdefault(metric.name, {})
        buckets[bound] = buckets.get(bound, 0.0) + sample.value

    def _forget(self, metric: Metric) -> None:
        self.values.pop(metric.name, None)
        self.parts.pop(metric.name, None)
        self.buckets.pop(metric.name, None)
        for part in ("sum", "count"):
            self.scalars.pop((metric.name, part), None)

    def fill_from(self, shared: "_Collected") -> None:
        """Take what a server counts for all its engines, where this engine has no series of its own."""
        self.values = {**shared.values, **self.values}
        self.parts = {**shared.parts, **self.parts}
        self.buckets = {**shared.buckets, **self.buckets}
        self.scalars = {**shared.scalars, **self.scalars}

    def snapshot(
        self,
        *,
        key: EngineKey,
        at_seconds: float,
        process_start: float | None,
        proof: str | None,
        config_labels: Mapping[str, str],
        engines: int,
    ) -> Snapshot:
        proofs = [proof, *(since for label, since in CACHE_CONFIG_LABEL_SINCE if label in config_labels)]
        return Snapshot(
            at_seconds=at_seconds,
            key=key,
            values=self.values,
            parts=self.parts,
            histograms={m.name: h for m in ALL if m.kind == "histogram" and (h := self._histogram(m))},
            cache_config=_cache_config(config_labels, engines),
            process_start_seconds=process_start,
            vllm_version_at_least=max(proofs, key=_version),
        )

    def _histogram(self, metric: Metric) -> Histogram | None:
        buckets = sorted(self.buckets.get(metric.name, {}).items())
        total = self.scalars.get((metric.name, "count"))
        observed_sum = self.scalars.get((metric.name, "sum"))
        if total is None and buckets:
            total = buckets[-1][1]
        if total is None:
            return None
        if not buckets or not math.isinf(buckets[-1][0]):  # excerpts often drop +Inf; it equals the count
            buckets.append((math.inf, total))
        bounds, counts = zip(*buckets, strict=True)
        return Histogram(bounds=bounds, counts=counts, sum=observed_sum, count=total)


def _is_possible(series: Series, value: float) -> bool:
    """Whether the value can be the fact. Sentinels, NaN, infinities and impossible ratios are missing values."""
    metric = series.metric
    highest = min(metric.ceiling, _HIGHEST_VALUE) if series.part == "value" else _HIGHEST_VALUE
    return math.isfinite(value) and metric.floor <= value <= highest


def _combine(metric: Metric, known: float | None, value: float) -> float:
    if known is None:
        return value
    return max(known, value) if metric.combine == "max" else known + value


def _version(text: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")) if text else ()


class _Configs:
    """The info series of a page. They have no model label, and no engine label before vLLM 0.9."""

    def __init__(self, configs: Iterable[Mapping[str, str]], target: str) -> None:
        self._target = target
        self._places: set[str] = set()
        self._by_engine: dict[tuple[str, str | None], list[Mapping[str, str]]] = {}
        self._by_model: dict[tuple[str, str | None, str | None], list[Mapping[str, str]]] = {}
        for labels in configs:
            place, engine, model = _key(labels, target).target, labels.get(ENGINE_LABEL), labels.get(MODEL_LABELS[0])
            self._places.add(place)
            self._by_engine.setdefault((place, engine), []).append(labels)
            self._by_model.setdefault((place, engine, model), []).append(labels)

    def __call__(self, key: EngineKey, models: int) -> Mapping[str, str]:
        """The labels of this engine's series.

        Where several models share a place, or several series an engine, it cannot be told whose series it is: none.
        """
        place = key.target if key.target in self._places else self._target
        mine = self._by_model.get((place, key.engine, key.model_name))
        if not mine and models == 1:
            mine = self._by_engine.get((place, key.engine)) or self._by_engine.get((place, None))
        return mine[0] if mine and len(mine) == 1 else {}


def _cache_config(labels: Mapping[str, str], engines: int) -> CacheConfig:
    def number(name: str) -> float | None:
        try:
            value = float(labels[name])
        except (KeyError, ValueError):
            return None
        return value if 0 <= value <= _HIGHEST_VALUE else None

    def whole(name: str) -> int | None:
        value = number(name)
        return None if value is None else int(value)

    def boolean(name: str) -> bool | None:
        return {"True": True, "False": False, "true": True, "false": False}.get(labels.get(name, ""))

    config = CacheConfig(
        num_gpu_blocks=whole("num_gpu_blocks"),
        block_size=whole("block_size"),
        cache_dtype=None if labels.get("cache_dtype") == "None" else labels.get("cache_dtype"),
        gpu_memory_utilization=number("gpu_memory_utilization"),
        kv_cache_memory_bytes=whole("kv_cache_memory_bytes"),
        num_gpu_blocks_override=whole("num_gpu_blocks_override"),
        enable_prefix_caching=boolean("enable_prefix_caching"),
        sliding_window=whole("sliding_window"),
        kv_cache_size_tokens=whole("kv_cache_size_tokens"),
        kv_cache_max_concurrency=number("kv_cache_max_concurrency"),
    )
    return _per_engine(config, engines)


def _per_engine(config: CacheConfig, engines: int) -> CacheConfig:
    """Undo vLLM's sum over engines, unless the per-engine labels show that this exporter did not sum.

    kv_cache_size_tokens and kv_cache_max_concurrency are per engine. For a model with one kind of layer,
    blocks = concurrency x ceil(max_model_len / block_size), so the undivided figure can be recognised.
    """
    blocks = config.num_gpu_blocks
    if not blocks or engines < 2:
        return config
    tokens, concurrency, block_size = config.kv_cache_size_tokens, config.kv_cache_max_concurrency, config.block_size
    if tokens and concurrency and block_size and tokens / concurrency < math.inf:
        blocks_per_request = math.ceil(round(tokens / concurrency) / block_size)
        if abs(concurrency * blocks_per_request - blocks) < 0.5:
            return config
    return replace(config, num_gpu_blocks=blocks // engines)
