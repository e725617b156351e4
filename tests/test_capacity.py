"""The live pool of an engine, from its page and from what is given."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages import EXPOSITION, capture, read

from kvwatch.capacity import Capacity, EngineFacts, contradicted_max_model_len, live_capacity
from kvwatch.snapshot import CacheConfig

NOTHING = EngineFacts()


def recorded(name: str) -> Capacity:
    snapshot = read((EXPOSITION / name).read_text())[0]
    return live_capacity(snapshot.cache_config, NOTHING)


def test_the_pool_of_the_recorded_engine() -> None:
    found = live_capacity(capture("thrash").latest.cache_config, NOTHING)
    assert found == Capacity(
        num_gpu_blocks=256,
        usable_blocks=255,
        block_size_tokens=128,
        capacity_tokens=32768,
        max_concurrency=8.0,
        max_model_len=4096,
        blocks_per_max_len_request=32,
        tokens_per_block=128,
        source=(
            ("num_gpu_blocks", "observed"),
            ("max_concurrency", "observed"),
            ("capacity_tokens", "observed"),
            ("max_model_len", "derived"),
            ("tokens_per_block", "derived"),
        ),
    )


def test_decode_context_parallelism_shows_in_the_tokens_of_a_block() -> None:
    """GLM-5.2 with DCP 4: 6,253 blocks of 64 tokens hold 1,600,255 tokens (public page of vLLM 0.23.1rc)."""
    found = recorded("v0.23dev_glm52_dcp4_mtp_after.prom")
    assert (found.block_size_tokens, found.tokens_per_block) == (64, 256)
    assert (found.max_model_len, found.blocks_per_max_len_request) == (400_000, 1563)


def test_an_older_page_gives_blocks_and_the_length_must_be_given() -> None:
    found = recorded("v0.15ish_qwen3coder30b_live.prom")
    assert (found.num_gpu_blocks, found.usable_blocks, found.capacity_tokens) == (67026, 67025, 1_072_416)
    assert (found.max_model_len, found.max_concurrency, found.blocks_per_max_len_request) == (None, None, None)
    assert dict(found.source)["tokens_per_block"] == "assumed"
    given_length = live_capacity(CacheConfig(num_gpu_blocks=67026, block_size=16), EngineFacts(max_model_len=131072))
    assert given_length.max_concurrency == 67026 / 8192
    assert dict(given_length.source)["max_model_len"] == "given"
    assert dict(given_length.source)["max_concurrency"] == "derived"


def test_an_unknown_pool_is_unknown_and_not_zero() -> None:
    found = recorded("v0.8_num_gpu_blocks_none.prom")
    assert (found.num_gpu_blocks, found.usable_blocks, found.capacity_tokens) == (None, None, None)
    empty = live_capacity(CacheConfig(num_gpu_blocks=0, block_size=0, kv_cache_size_tokens=0), NOTHING)
    assert (empty.num_gpu_blocks, empty.block_size_tokens, empty.capacity_tokens) == (None, None, None)


def test_a_model_with_several_groups_has_no_tokens_per_block() -> None:
    """643 ids serve requests of 262,144 tokens 5.9 times: 109 blocks each, which no multiple of 64 tokens explains."""
    config = CacheConfig(
        num_gpu_blocks=643, block_size=64, kv_cache_size_tokens=1_553_140, kv_cache_max_concurrency=643 / 109
    )
    found = live_capacity(config, EngineFacts(max_model_len=263_286))
    assert (found.blocks_per_max_len_request, found.tokens_per_block, found.blocks_for(1000)) == (109, None, None)


def test_a_length_that_the_page_contradicts_is_not_used() -> None:
    config = CacheConfig(num_gpu_blocks=256, block_size=128, kv_cache_size_tokens=32768, kv_cache_max_concurrency=8.0)
    wrong = EngineFacts(max_model_len=2048)
    assert contradicted_max_model_len(config, wrong) == 4096
    assert live_capacity(config, wrong) == live_capacity(config, NOTHING)
    assert contradicted_max_model_len(config, EngineFacts(max_model_len=4096)) is None
    assert contradicted_max_model_len(CacheConfig(), wrong) is None


def test_a_concurrency_that_no_pool_can_have_is_not_used() -> None:
    config = CacheConfig(num_gpu_blocks=10, block_size=16, kv_cache_size_tokens=99, kv_cache_max_concurrency=50.0)
    found = live_capacity(config, NOTHING)
    assert (found.max_concurrency, found.blocks_per_max_len_request) == (None, None)


@pytest.mark.parametrize("tokens", [1, 16, 17, 160])
def test_a_request_holds_whole_blocks(tokens: int) -> None:
    found = live_capacity(CacheConfig(num_gpu_blocks=10, block_size=16), NOTHING)
    assert found.blocks_for(tokens) == math.ceil(tokens / 16)


@given(blocks=st.integers(2, 10**6), size=st.sampled_from([16, 32, 64, 128]), length=st.integers(1, 10**6))
def test_the_length_is_recovered_from_the_labels_that_vllm_derives_from_it(blocks: int, size: int, length: int) -> None:
    concurrency = blocks / math.ceil(length / size)
    tokens = int(concurrency * length)
    config = CacheConfig(
        num_gpu_blocks=blocks, block_size=size, kv_cache_size_tokens=tokens, kv_cache_max_concurrency=concurrency
    )
    found = live_capacity(config, NOTHING)
    if concurrency < 1:
        assert found.max_model_len is None
    else:
        assert found.max_model_len == length
        assert found.blocks_per_max_len_request == math.ceil(length / size)


@given(
    st.builds(
        CacheConfig,
        num_gpu_blocks=st.none() | st.integers(0, 10**9),
        block_size=st.none() | st.integers(0, 10**4),
        kv_cache_size_tokens=st.none() | st.integers(0, 10**18),
        kv_cache_max_concurrency=st.none() | st.floats(0, 1e300),
    ),
    st.none() | st.integers(1, 10**9),
)
def test_whatever_the_labels_say_capacity_is_positive_or_unknown(config: CacheConfig, length: int | None) -> None:
    found = live_capacity(config, EngineFacts(max_model_len=length))
    for value in (found.num_gpu_blocks, found.capacity_tokens, found.max_concurrency, found.max_model_len):
        assert value is None or value > 0
    assert found.blocks_per_max_len_request is None or found.blocks_per_max_len_request >= 1
