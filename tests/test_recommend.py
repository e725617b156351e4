"""What is proposed, when nothing is, and that no answer is followed by its opposite."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import CAPTURES, EXPOSITION, capture, engine_page, read, window_of

from kvwatch.capacity import EngineFacts
from kvwatch.exposition import read_samples
from kvwatch.recommend import Recommendation
from kvwatch.report import EngineReport, report
from kvwatch.snapshot import snapshots
from kvwatch.window import Window, windows

NOTHING = EngineFacts()
Ways = pytest.mark.parametrize("simulate", [False, True], ids=["by formula", "simulated"])


def asked(window: Window, facts: EngineFacts = NOTHING, *, simulate: bool = False) -> EngineReport:
    (engine,) = report([window], facts={window.key.target: facts}, simulate=simulate).engines
    return engine


def proposed(engine: EngineReport) -> dict[str, Any]:
    return {made.setting: made.proposed for made in engine.recommendations}


def thrashing(
    *, per_page: int = 5, running: int = 30, waiting: int = 10, usage: float = 0.99, config: Any = None, **facts: Any
) -> Window:
    """Requests of 300 + 300 tokens, of which 63 blocks of 16 tokens carry fewer than run."""
    settings = config or {"block_size": "16", "num_gpu_blocks": "600", "engine": "0"}
    return window_of(
        [
            engine_page(
                running=running,
                waiting=waiting,
                usage=usage,
                preemptions=per_page * n,
                finished=20 * n,
                tokens=9000 * n,
                config=settings,
                **facts,
            )
            for n in range(6)
        ]
    )


# When nothing is proposed --------------------------------------------------------------------------------------------


@Ways
@pytest.mark.parametrize("name", ["healthy", "prefix"])
def test_nothing_is_proposed_for_an_engine_that_is_fine(name: str, *, simulate: bool) -> None:
    engine = asked(capture(name), simulate=simulate)
    assert (engine.recommendations, engine.withheld) == ((), ())


@Ways
@pytest.mark.parametrize("page", sorted(EXPOSITION.glob("*.prom")), ids=lambda path: path.stem)
def test_a_single_page_gives_no_proposal_but_the_reason(page: Any, *, simulate: bool) -> None:
    for window in windows(read(page.read_text())):
        engine = asked(window, simulate=simulate)
        assert engine.recommendations == ()
        assert engine.withheld
        assert all(held.reason for held in engine.withheld)


@Ways
@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"without": ["request_prompt_tokens"]}, "vllm:request_prompt_tokens is not exposed"),
        ({"without": ["request_generation_tokens"]}, "vllm:request_generation_tokens is not exposed"),
        ({"without": ["cache_config"]}, "num_gpu_blocks is not exposed"),
        ({"without": ["num_requests_running"]}, "num_requests_running"),
    ],
)
def test_a_missing_input_is_named(facts: dict[str, Any], says: str, *, simulate: bool) -> None:
    engine = asked(thrashing(**facts), simulate=simulate)
    assert engine.recommendations == ()
    assert any(says in held.reason for held in engine.withheld), engine.withheld


@Ways
def test_a_model_whose_blocks_are_not_one_number_needs_its_model(*, simulate: bool) -> None:
    several_groups = {
        "block_size": "64",
        "num_gpu_blocks": "643",
        "kv_cache_size_tokens": "1553140",
        "kv_cache_max_concurrency": str(643 / 109),
        "engine": "0",
    }
    engine = asked(thrashing(config=several_groups), simulate=simulate)
    assert engine.recommendations == ()
    assert any("--model" in held.reason for held in engine.withheld), engine.withheld


def test_lengths_that_do_not_explain_the_preemptions_give_no_cap() -> None:
    engine = asked(thrashing(running=4, waiting=0, usage=0.2))
    assert "gateway_max_in_flight" not in proposed(engine)
    assert any("do not explain the preemptions" in held.reason for held in engine.withheld)


# What is proposed ----------------------------------------------------------------------------------------------------


@Ways
def test_what_works_now_comes_first(*, simulate: bool) -> None:
    engine = asked(capture("thrash"), EngineFacts(vllm_version="0.32.0"), simulate=simulate)
    first = engine.recommendations[0]
    assert (first.setting, first.apply) == ("gateway_max_in_flight", "now")
    assert proposed(engine)["gateway_max_in_flight"] in {16, 17}  # the real engine: once at 17, never at 16


@Ways
@pytest.mark.parametrize("version", ["0.6.6", "0.8.5", "0.11.2", "0.23.0", "0.23.1rc1.dev5+g1a2b3c", "dev", None])
def test_a_flag_that_the_version_lacks_is_never_proposed(version: str | None, *, simulate: bool) -> None:
    newer = ("admission_rejections", "request_num_preemptions", "kv_cache_max_concurrency")
    info = 'vllm:cache_config_info{block_size="128",num_gpu_blocks="256",engine="0"} 1\n'
    older = [
        "".join(line for line in page.splitlines(keepends=True) if not any(name in line for name in newer)) + info
        for page in captured("thrash")
    ]
    engine = asked(window_of(older, every_seconds=2), EngineFacts(vllm_version=version), simulate=simulate)
    assert proposed(engine)
    assert "watermark" not in proposed(engine)


def test_a_development_build_before_0_24_may_lack_the_watermark() -> None:
    """Its page has a label that came with 0.24; the build is of the cycle before."""
    labels = {"kv_cache_size_tokens": "8192", "kv_cache_max_concurrency": "1.17", "engine": "0"}
    config = {"block_size": "16", "num_gpu_blocks": "600", **labels}
    assert "watermark" not in proposed(asked(thrashing(config=config)))


@pytest.mark.parametrize("version", ["0.24.0", "v0.32.0", "0.33.1.dev7"])
def test_the_watermark_is_proposed_where_it_exists(version: str) -> None:
    assert "watermark" in proposed(asked(capture("thrash"), EngineFacts(vllm_version=version)))


# Stability -----------------------------------------------------------------------------------------------------------


def captured(name: str) -> list[str]:
    return [path.read_text() for path in sorted((CAPTURES / name).glob("*.prom"))]


def opposes(made: Recommendation) -> bool:
    """Whether a proposal loosens what ends preemptions."""
    if made.current is None:
        return False
    now, then = float(made.current), float(made.proposed)
    return then <= now if made.setting == "watermark" else then >= now


@Ways
def test_with_the_answer_applied_nothing_opposite_is_proposed(*, simulate: bool) -> None:
    """The cap is in place, and preemptions go on all the same."""
    first = asked(capture("thrash"), EngineFacts(vllm_version="0.32.0"), simulate=simulate)
    cap = int(proposed(first)["gateway_max_in_flight"])
    capped = [
        replace(snapshot, values={**snapshot.values, "num_requests_running": cap, "num_requests_waiting": 0})
        for number, page in enumerate(captured("thrash"))
        for snapshot in snapshots(read_samples(page), at_seconds=number * 2.0, target="t")
    ]
    facts = EngineFacts(vllm_version="0.32.0", max_num_seqs=cap, watermark=proposed(first).get("watermark"))
    (window,) = windows(capped)
    again = asked(window, facts, simulate=simulate)
    assert not any(opposes(made) for made in again.recommendations), again.recommendations
    assert all(float(made.proposed) < cap for made in again.recommendations if made.setting == "gateway_max_in_flight")


@given(
    running=st.integers(1, 200),
    waiting=st.integers(0, 200),
    per_page=st.integers(1, 50),
    blocks=st.integers(20, 5000),
    version=st.sampled_from([None, "0.11.2", "0.32.0"]),
    max_num_seqs=st.none() | st.integers(1, 300),
    watermark=st.none() | st.floats(0, 0.3),
)
@settings(max_examples=40)
def test_no_formula_ever_loosens_what_ends_preemptions(
    *,
    running: int,
    waiting: int,
    per_page: int,
    blocks: int,
    version: str | None,
    max_num_seqs: int | None,
    watermark: float | None,
) -> None:
    config = {"block_size": "16", "num_gpu_blocks": str(blocks), "engine": "0"}
    facts = EngineFacts(vllm_version=version, max_num_seqs=max_num_seqs, watermark=watermark)
    window = thrashing(running=running, waiting=waiting, per_page=per_page, config=config)
    engine = asked(window, facts)
    for made in engine.recommendations:
        assert not opposes(made)
        if made.setting == "max_num_seqs":
            assert float(made.proposed) < running  # which the engine's own cap is at least
        if made.setting == "gateway_max_in_flight":
            assert 1 <= float(made.proposed) < running + waiting
