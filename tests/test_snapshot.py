"""From samples to one Snapshot per engine."""

import csv
import math
from dataclasses import replace
from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages import CAPTURES, DATA, EXPOSITION, engine_page, histogram, labels, read

from kvwatch import vllm_metrics as vm
from kvwatch.errors import ExpositionError
from kvwatch.exposition import Sample, read_samples
from kvwatch.snapshot import CacheConfig, EngineKey, Snapshot, snapshots

CONFIG = {"block_size": "16", "num_gpu_blocks": "1000", "enable_prefix_caching": "True", "engine": "0"}


def one(page: str) -> Snapshot:
    (snapshot,) = read(page)
    return snapshot


def recorded(name: str) -> tuple[Snapshot, ...]:
    return read((EXPOSITION / name).read_text())


def by_engine(page: str) -> dict[tuple[str, str, str], Snapshot]:
    return {(s.key.target, s.key.model_name, s.key.engine): s for s in read(page)}


# What makes an engine ------------------------------------------------------------------------------------------------


def test_every_data_parallel_engine_is_a_snapshot_of_its_own() -> None:
    found = by_engine((EXPOSITION / "dp2_engines.prom").read_text())
    model = "deepseek-v4-flash-w8a8-mtp"
    assert [found["t", model, e].get(vm.REQUESTS_RUNNING) for e in "01"] == [0, 31]
    assert [found["t", model, e].get(vm.KV_CACHE_USAGE) for e in "01"] == [0, 0.98]
    assert ("t", "/home/user/qwen3-8b", "1") in found


def test_a_page_without_engine_label_is_engine_0() -> None:
    snapshot = one('vllm:num_requests_running{model_name="m"} 3\n')
    assert snapshot.key == EngineKey(target="t", model_name="m", engine="0")


def test_a_series_without_engine_label_belongs_to_every_engine_of_its_server() -> None:
    refused = 'vllm:admission_rejections_total{model_name="m",reason="queue_full"} 7\n'
    found = read(engine_page(engine="0") + engine_page(engine="1", started=None, config={}) + refused)
    assert [s.get(vm.ADMISSION_REJECTIONS) for s in found] == [7, 7]
    assert [s.parts["admission_rejections_total"] for s in found] == [{"queue_full": 7}, {"queue_full": 7}]


def test_a_series_without_engine_label_does_not_replace_the_engines_own() -> None:
    found = read(engine_page(running=2) + 'vllm:num_requests_running{model_name="m"} 9\n')
    assert [s.get(vm.REQUESTS_RUNNING) for s in found] == [2]


def test_two_models_on_one_page_are_two_engines_and_their_settings_are_not_mixed_up() -> None:
    page = engine_page(model_name="a", config=CONFIG) + engine_page(model_name="b", started=None, config={})
    found = by_engine(page)
    assert set(found) == {("t", "a", "0"), ("t", "b", "0")}
    # the info series has no model label: it may be either's
    assert {s.cache_config for s in found.values()} == {CacheConfig()}


def test_servers_on_one_page_are_told_apart_by_their_instance_and_keep_their_own_facts() -> None:
    old = engine_page(running=1, started=100, config={**CONFIG, "num_gpu_blocks": "500"})
    new = engine_page(running=2, started=200, config={**CONFIG, "kv_cache_max_concurrency": "9.5"})
    page = "".join(
        line.replace("{", f'{{instance="{name}",') if "{" in line else line.replace(" ", f'{{instance="{name}"}} ')
        for name, text in (("old:8000", old), ("new:8000", new))
        for line in text.splitlines(keepends=True)
    )
    found = {s.key.target: s for s in read(page)}
    assert {t: s.get(vm.REQUESTS_RUNNING) for t, s in found.items()} == {"old:8000": 1, "new:8000": 2}
    assert {t: s.process_start_seconds for t, s in found.items()} == {"old:8000": 100, "new:8000": 200}
    assert {t: s.cache_config.num_gpu_blocks for t, s in found.items()} == {"old:8000": 500, "new:8000": 1000}
    assert {t: s.vllm_version_at_least for t, s in found.items()} == {"old:8000": "0.9.2", "new:8000": "0.23.1"}


def test_the_settings_of_another_server_are_not_taken() -> None:
    page = (
        'vllm:num_requests_running{instance="a",model_name="m",engine="0"} 1\n'
        'vllm:cache_config_info{instance="b",engine="0",block_size="16",num_gpu_blocks="10"} 1\n'
    )
    assert one(page).cache_config == CacheConfig()


def test_info_series_that_contradict_each_other_are_not_used() -> None:
    second = f"vllm:cache_config_info{{{labels(**{**CONFIG, 'num_gpu_blocks': '7'})}}} 1\n"
    assert one(engine_page(config=CONFIG) + second).cache_config == CacheConfig()


def test_a_page_with_nothing_but_settings_is_an_engine() -> None:
    (snapshot,) = recorded("v0.8_num_gpu_blocks_none.prom")
    assert snapshot.key.engine == "0"
    assert snapshot.cache_config.num_gpu_blocks is None
    assert snapshot.cache_config.gpu_memory_utilization == 0.85


# Names ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", vm.PREFIXES)
def test_every_prefix_is_understood(prefix: str) -> None:
    snapshot = one(engine_page(running=4, usage=0.5, prefix=prefix))
    assert (snapshot.get(vm.REQUESTS_RUNNING), snapshot.get(vm.KV_CACHE_USAGE)) == (4, 0.5)
    assert snapshot.cache_config.num_gpu_blocks == 1000


def test_the_current_name_wins_over_a_former_one_whatever_their_order() -> None:
    pair = ['vllm:kv_cache_usage_perc{engine="0"} 0.25\n', 'vllm:gpu_cache_usage_perc{engine="0"} 0.75\n']
    assert [one("".join(order)).get(vm.KV_CACHE_USAGE) for order in (pair, pair[::-1])] == [0.25, 0.25]


def test_a_former_name_counts_where_the_current_one_has_no_value() -> None:
    page = 'vllm:kv_cache_usage_perc{engine="0"} NaN\nvllm:gpu_cache_usage_perc{engine="0"} 0.75\n'
    assert one(page).get(vm.KV_CACHE_USAGE) == 0.75


def test_the_same_fact_under_two_prefixes_counts_once() -> None:
    assert one(engine_page(running=3, prefix="ray_vllm:") + engine_page(running=3)).get(vm.REQUESTS_RUNNING) == 3


def test_names_without_prefix_beside_vllms_own_are_another_librarys() -> None:
    found = read(engine_page(finished=5) + 'request_success_total{app="gateway"} 1000\n')
    assert [s.get(vm.REQUEST_SUCCESS) for s in found] == [5]


def test_a_generic_name_alone_is_no_engine() -> None:
    with pytest.raises(ExpositionError, match="has no vLLM metric"):
        read('request_success_total{app="gateway"} 1000\nprocess_start_time_seconds 5\n')


def test_nim_and_triton_pages_are_read_as_far_as_they_go() -> None:
    (nim,) = recorded("nim_llama31_8b.prom")
    assert nim.key.model_name == "meta/llama-3.1-8b-instruct"
    assert (nim.get(vm.MAX_NUM_SEQS), nim.get(vm.REQUESTS_RUNNING), nim.get(vm.PREEMPTIONS)) == (64, 1, None)
    (triton,) = recorded("triton_backend_readme.prom")
    assert triton.key.model_name == "vllm_model"
    assert (triton.get(vm.PROMPT_TOKENS), triton.get(vm.KV_CACHE_USAGE)) == (10, None)


def test_created_series_and_longer_names_are_not_taken_for_the_metric() -> None:
    created = 'vllm:num_preemptions_created{engine="0"} 1.7e9\n'
    snapshot = one(created + 'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 3\n')
    assert (snapshot.get(vm.PREEMPTIONS), snapshot.get(vm.REQUESTS_WAITING)) == (None, None)
    assert snapshot.parts["num_requests_waiting_by_reason"] == {"capacity": 3}


# Values --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-1", "-0.5"])
@pytest.mark.parametrize("name", ["num_requests_running", "kv_cache_usage_perc", "num_preemptions_total"])
def test_a_value_that_cannot_be_is_missing(name: str, value: str) -> None:
    snapshot = one(f'vllm:{name}{{engine="0"}} {value}\nvllm:num_requests_waiting{{engine="0"}} 0\n')
    assert name not in snapshot.values


@pytest.mark.parametrize("value", ["1.295", "98"])
def test_a_usage_above_1_is_no_usage(value: str) -> None:
    page = f'vllm:kv_cache_usage_perc{{engine="0"}} {value}\nvllm:num_requests_waiting{{engine="0"}} 0\n'
    assert one(page).get(vm.KV_CACHE_USAGE) is None


def test_infinite_histogram_parts_are_missing() -> None:
    bars = histogram("vllm:request_prompt_tokens", [1, math.inf], [5.0], math.inf, engine="0").replace("inf", "+Inf")
    (found,) = one(bars + "\n").histograms.values()
    assert (found.sum, found.count, found.counts[-1]) == (None, 1, 1)


@pytest.mark.parametrize("bound", ["NaN", "1e308"])
def test_a_bucket_bound_that_cannot_be_is_left_out(bound: str) -> None:
    page = "".join(
        f'vllm:request_prompt_tokens_bucket{{engine="0",le="{le}"}} {n}\n'
        for le, n in ((5, 1), (bound, 2), ("+Inf", 3))
    )
    (found,) = one(page).histograms.values()
    assert (found.bounds, found.counts) == ((5.0, math.inf), (1, 3))


def test_series_that_differ_in_other_labels_are_summed_and_usage_is_the_largest() -> None:
    page = "".join(
        f'vllm:request_success_total{{engine="0",finished_reason="{r}"}} {n}\n' for r, n in (("stop", 3), ("length", 4))
    ) + "".join(f'vllm:kv_cache_usage_perc{{engine="0",rank="{r}"}} {v}\n' for r, v in ((0, 0.2), (1, 0.6)))
    snapshot = one(page)
    assert snapshot.get(vm.REQUEST_SUCCESS) == 7
    assert snapshot.parts["request_success_total"] == {"stop": 3, "length": 4}
    assert snapshot.get(vm.KV_CACHE_USAGE) == 0.6


def test_of_a_file_to_which_pages_were_appended_the_last_page_counts() -> None:
    page = engine_page(running=1, preemptions=5) + engine_page(running=2, preemptions=8)
    snapshot = one(page)
    assert (snapshot.get(vm.REQUESTS_RUNNING), snapshot.get(vm.PREEMPTIONS)) == (2, 8)
    assert snapshot.cache_config.num_gpu_blocks == 1000


def test_pages_of_two_engines_with_the_same_labels_are_refused() -> None:
    page = engine_page(running=18, preemptions=25) + engine_page(running=2, preemptions=3)
    with pytest.raises(
        ExpositionError, match=r"num_preemptions_total is there twice .* as 25 and then as 3: these are"
    ):
        one(page)


def test_a_bucket_without_a_number_is_refused_with_what_to_do() -> None:
    with pytest.raises(ExpositionError, match=r"le label is 'many'.*scrape the vLLM server itself"):
        read('vllm:request_prompt_tokens_bucket{engine="0",le="many"} 1\n')


# cache_config_info ---------------------------------------------------------------------------------------------------


def test_labels_that_say_none_or_nonsense_are_missing() -> None:
    wrong = {"num_gpu_blocks": "None", "block_size": "-1", "kv_cache_memory_bytes": "1e999", "cache_dtype": "None"}
    assert one(engine_page(config={**wrong, "enable_prefix_caching": "maybe"})).cache_config == CacheConfig()


def test_the_blocks_of_data_parallel_engines_are_divided() -> None:
    pages = [engine_page(engine=e, started=None, config={**CONFIG, "engine": e}) for e in "0123"]
    assert [s.cache_config.num_gpu_blocks for s in read("".join(pages))] == [250] * 4


def test_blocks_that_this_exporter_did_not_sum_are_not_divided() -> None:
    assert [s.cache_config.num_gpu_blocks for s in recorded("vllm-0.32.0-all-families.prom")] == [20480, 20480]


def test_summed_blocks_are_divided_although_the_per_engine_labels_are_there() -> None:
    per_engine = {"kv_cache_size_tokens": "8000", "kv_cache_max_concurrency": "2.0", "num_gpu_blocks": "1000"}
    pages = [engine_page(engine=e, started=None, config={**CONFIG, **per_engine, "engine": e}) for e in "01"]
    assert [s.cache_config.num_gpu_blocks for s in read("".join(pages))] == [500, 500]


# Versions ------------------------------------------------------------------------------------------------------------


def test_the_releases_at_which_names_appear_are_those_read_from_vllms_sources() -> None:
    with (DATA / "vllm_metrics.csv").open() as file:
        first = {
            row["name"].removeprefix("vllm:"): row["first"] for row in csv.DictReader(file) if row["engine"] == "v1"
        }
    known = {metric.name: metric.since for metric in vm.ALL if metric.since}
    assert known == {name: first[name] for name in known}


def test_a_former_name_proves_no_release() -> None:
    assert one('vllm:gpu_cache_usage_perc{engine="0"} 0\n').vllm_version_at_least is None


# Laws ----------------------------------------------------------------------------------------------------------------

samples = st.builds(
    Sample,
    st.sampled_from([*sorted(vm.SERIES), vm.PROCESS_START_TIME]),
    st.dictionaries(
        st.sampled_from(
            [
                "engine",
                "model_name",
                "le",
                "instance",
                "reason",
                "num_gpu_blocks",
                "block_size",
                "kv_cache_size_tokens",
                "kv_cache_max_concurrency",
            ]
        ),
        st.sampled_from(["0", "1", "16", "", "None", "1e-320", "4.5", "+Inf", "a"]),
    ),
    st.floats(),
)


@given(st.lists(samples, max_size=30))
def test_any_samples_give_snapshots_of_finite_possible_values_or_an_error_that_says_why(page: list[Sample]) -> None:
    try:
        found = snapshots(page, at_seconds=1.0, target="t")
    except ExpositionError as error:
        assert str(error)
        return
    assert len({s.key for s in found}) == len(found) > 0
    for snapshot in found:
        assert all(math.isfinite(value) and value >= 0 for value in snapshot.values.values())
        for bars in snapshot.histograms.values():
            assert list(bars.bounds) == sorted(bars.bounds)
            assert math.isinf(bars.bounds[-1])
            assert len(bars.bounds) == len(bars.counts)


@given(st.permutations((CAPTURES / "thrash" / "1796006839266.prom").read_text().splitlines(keepends=True)[-120:]))
def test_the_order_of_lines_does_not_matter(lines: list[str]) -> None:
    kept = [line for line in lines if not line.startswith("#")]
    assert [replace(s, histograms={}) for s in read("".join(kept))] == [
        replace(s, histograms={}) for s in read("".join(sorted(kept)))
    ]


def test_the_work_of_a_page_grows_with_its_engines_and_not_with_their_square() -> None:
    def seconds(engines: int) -> float:
        page = "".join(
            engine_page(model_name=f"m{n % 7}", engine=str(n), started=None, without=("bucket",), config=config)
            + f'vllm:num_preemptions_total{{model_name="alone{n}"}} 1\n'
            for n in range(engines)
            for config in ({"engine": str(n), "num_gpu_blocks": "9"},)
        )
        samples = read_samples(page)
        started = process_time()
        assert len(snapshots(samples, at_seconds=0.0)) == 2 * engines
        return process_time() - started

    assert min(seconds(2000) for _ in range(3)) < 9 * min(seconds(500) for _ in range(3))


def test_a_value_whose_sums_would_overflow_is_missing() -> None:
    page = engine_page(
        preemptions=1e308, usage=0.5, config={"engine": "0", "num_gpu_blocks": "1e200", "block_size": "16"}
    )
    read_back = one(page)
    assert read_back.get(vm.PREEMPTIONS) is None
    assert (read_back.get(vm.KV_CACHE_USAGE), read_back.cache_config) == (0.5, CacheConfig(block_size=16))


def test_the_name_of_an_engine_is_one_printable_line() -> None:
    assert str(EngineKey(target="t", model_name="a\x1b[2J\nb", engine="0")) == "a\\u001b[2J b engine 0"
