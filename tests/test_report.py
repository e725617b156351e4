"""The report: every engine, every check, the worst first."""

from dataclasses import replace
from time import process_time

from hypothesis import given, settings
from hypothesis import strategies as st
from pages import capture, engine_page, read, window_of

from kvwatch import checks
from kvwatch.capacity import EngineFacts
from kvwatch.finding import Status, worst
from kvwatch.report import MAX_SIMULATED_ENGINES, report
from kvwatch.snapshot import Snapshot
from kvwatch.vllm_metrics import PREEMPTIONS
from kvwatch.window import Window, windows


def test_the_worst_engine_comes_first() -> None:
    judged = report([capture("healthy"), capture("thrash"), capture("prefix")])
    assert [engine.key.target for engine in judged.engines] == ["thrash", "healthy", "prefix"]
    assert (judged.worst, judged.window_seconds) == (Status.CRITICAL, capture("thrash").duration_seconds)


def test_the_worst_of_nothing_is_unknown() -> None:
    assert report(()).worst is Status.UNKNOWN
    assert worst([Status.OK, Status.UNKNOWN]) is Status.UNKNOWN
    assert worst([Status.OK, Status.UNKNOWN, Status.WARNING]) is Status.WARNING


@given(st.integers(1, 6))
@settings(max_examples=6)
def test_a_report_answers_the_whole_grid(engines: int) -> None:
    page = "".join(engine_page(engine=str(n), started=None, config={}) for n in range(engines))
    judged = report(windows([*read(page, 0), *read(page, 10)]))
    assert [engine.key.engine for engine in judged.engines] == [str(n) for n in range(engines)]
    for engine in judged.engines:
        assert [finding.check for finding in engine.findings] == [check.id for check in checks.ALL]


def test_what_the_page_lacks_is_not_observed() -> None:
    (engine,) = report([window_of([engine_page(running=2)])]).engines
    assert engine.observed == {
        "running_requests": 2,
        "waiting_requests": 0,
        "kv_cache_usage_ratio": 0,
        "kv_cache_usage_ratio_minimum": 0,
        "kv_cache_usage_ratio_maximum": 0,
    }


def test_facts_are_those_of_the_target() -> None:
    facts = {"a": EngineFacts(vllm_version="0.31.0", sources=(("vllm_version", "observed"),))}
    made = [window_at(name) for name in "ab"]
    found = {e.key.target: (e.vllm_version, e.vllm_version_source) for e in report(made, facts=facts).engines}
    assert found == {"a": ("0.31.0", "observed"), "b": ("0.9.2", "at least")}


def window_at(name: str) -> Window:
    (window,) = windows(read(engine_page(), target=name))
    return window


def test_a_given_length_that_the_page_contradicts_is_noted() -> None:
    seen = capture("healthy")
    wrong = EngineFacts(max_model_len=2048, sources=(("max_model_len", "given"),))
    judged = report([seen], facts={"healthy": wrong}, notes=["first"])
    by_the_page = "is not used, for by the page of the engine it is 4096"
    assert judged.notes == ("first", f"tiny-llama engine 0 on healthy: max_model_len 2048 (given) {by_the_page}")
    assert judged.engines[0].capacity.max_model_len == 4096
    assert report([seen], facts={"healthy": replace(wrong, max_model_len=4096)}).notes == ()


def test_restarts_are_told() -> None:
    pages = [engine_page(finished=n, started=s) for n, s in ((5, 1), (6, 1), (0, 99), (1, 99))]
    (engine,) = report([window_of(pages)]).engines
    assert (engine.restarts, engine.observed["finished_requests_per_second"]) == (1, 2 / 20)


def test_the_work_of_a_report_grows_with_the_engines_and_not_with_their_square() -> None:
    def seconds(engines: int) -> float:
        page = "".join(
            engine_page(waiting=n % 2, usage=0.5, engine=str(n), started=None, without=("request_",))
            for n in range(engines)
        )
        made = windows([*read(page, 0), *read(page, 10)])
        started = process_time()
        assert len(report(made).engines) == engines
        return process_time() - started

    assert min(seconds(600) for _ in range(2)) < 9 * min(seconds(150) for _ in range(2))


def test_so_many_engines_in_trouble_are_simulated_and_those_that_preempt_most_first() -> None:
    one, count = capture("thrash"), MAX_SIMULATED_ENGINES + 2
    made = [
        Window(tuple(_renamed(snapshot, number, extra=step * number) for step, snapshot in enumerate(one.snapshots)))
        for number in range(count)
    ]
    judged = report(made, simulate=True)
    done = {int(engine.key.engine) for engine in judged.engines if engine.simulation is not None}
    assert done == set(range(2, count))
    left = next(engine for engine in judged.engines if engine.key.engine == "0")
    assert left.recommendations
    assert any("give this engine alone as SOURCE" in withheld.reason for withheld in left.withheld)


def _renamed(snapshot: Snapshot, number: int, extra: float) -> Snapshot:
    """The snapshot of engine `number`, with so many more preemptions."""
    values = {**snapshot.values, PREEMPTIONS.name: snapshot.values[PREEMPTIONS.name] + extra}
    return replace(snapshot, key=replace(snapshot.key, engine=str(number)), values=values)
