"""Engines that serve the same model are configured differently.

## Meaning

This engine's cache settings differ from those of most engines of the same model, or it has clearly fewer or more blocks
with the same settings. Where no setting has a majority, every engine is named.

## Impact

Equal shares of the load are unequal parts of what each engine carries: the smallest pool preempts first, and what one
replica shows does not hold for the others.

## Diagnosis

- The labels of `vllm:cache_config_info`, engine by engine; the evidence names those that differ.
- A rollout in progress, a pod that kept an old command line, or nodes with different GPUs.
- The same settings and fewer blocks: another process on that GPU, see `capacity_below_budget`.

## Mitigation

- Finish or undo the rollout, and restart the engines that differ.
- Where the difference is meant, give the pools their own model names or jobs, and weigh the load by their size.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from kvwatch.checks.check import ENGINE, AlertRule, Check, EngineView, reported, warning
from kvwatch.errors import printable
from kvwatch.finding import Status, Verdict
from kvwatch.recording import CONFIG_LABELS, config_labels, indented, signals
from kvwatch.snapshot import CacheConfig
from kvwatch.thresholds import Thresholds
from kvwatch.window import Window


def evaluate(view: EngineView, limits: Thresholds) -> Verdict:
    own = view.window.latest.cache_config
    configs = view.fleet.derived(_Configs)
    if own == CacheConfig() or configs.count < 2:
        return Verdict(status=Status.OK, summary="no other engine of this model to compare with")
    settings = _settings(own)
    if len(configs.first) > 1 and configs.alike[settings] * 2 <= configs.count:
        other = next(config for other, config in configs.first.items() if other != settings)
        return _differs({name: f"{_text(own, name)} here, {_text(other, name)} elsewhere" for name in _odd(own, other)})
    blocks = configs.blocks[settings]
    if own.num_gpu_blocks and blocks:
        usual = blocks[len(blocks) // 2]
        if abs(own.num_gpu_blocks / usual - 1) > limits.capacity_deviation_ratio:
            return _differs({"num_gpu_blocks": f"{own.num_gpu_blocks} here, {usual} elsewhere"})
    return Verdict(status=Status.OK, summary=f"configured as the other engines of this model ({configs.count - 1})")


class _Configs:
    """The configurations of all engines that tell theirs: by settings, how many, the first, the pools ascending."""

    def __init__(self, windows: Iterable[Window]) -> None:
        told = [w.latest.cache_config for w in windows if w.latest.cache_config != CacheConfig()]
        self.count = len(told)
        self.alike: Counter[tuple[object, ...]] = Counter()
        self.first: dict[tuple[object, ...], CacheConfig] = {}
        self.blocks: dict[tuple[object, ...], list[int]] = {}
        for config in told:
            settings = _settings(config)
            self.alike[settings] += 1
            self.first.setdefault(settings, config)
            self.blocks.setdefault(settings, []).extend([config.num_gpu_blocks] if config.num_gpu_blocks else [])
        for pools in self.blocks.values():
            pools.sort()


def _settings(config: CacheConfig) -> tuple[object, ...]:
    return tuple(getattr(config, name) for name in CONFIG_LABELS)


def _odd(own: CacheConfig, other: CacheConfig) -> list[str]:
    return [name for name in CONFIG_LABELS if getattr(own, name) != getattr(other, name)]


def _text(config: CacheConfig, name: str) -> str:
    value = getattr(config, name)
    return "unset" if value is None else " ".join(printable(str(value)).split())


def _differs(evidence: Mapping[str, str]) -> Verdict:
    what = "; ".join(f"{name} is {text}" for name, text in evidence.items())
    return Verdict(status=Status.WARNING, summary=f"configured differently: {what}", evidence=evidence)


def alert(limits: Thresholds) -> tuple[AlertRule, ...]:
    config = signals(limits).cache_config
    fleet = "cluster, namespace, job, model_name"
    alike = indented(config_labels(fleet))
    return (
        warning(
            limits,
            expr=f"{config}\nand on (\n{alike}\n) (\n"
            f"  count by (\n{indented(alike)}\n  ) ({config}) * 2\n"
            f"  <= on ({fleet}) group_left ()\n  count by ({fleet}) ({config})\n)\n"
            f"or {reported('config_drift', Status.WARNING)}",
            summary=f"{ENGINE} is configured differently from other engines of its model",
        ),
    )


CHECK = Check(id="config_drift", docs=__doc__, evaluate=evaluate, alert=alert)
