import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwatch.errors import ModelError
from kvwatch.model_names import match

KNOWN = (
    "meta-llama/Llama-3.1-8B-Instruct",
    "meta-llama/Llama-3.1-70B-Instruct",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-32B",
    "Qwen/Qwen3-32B-FP8",
    "someone/Qwen3-8B",
)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Llama-3.1-70B-Instruct"),
        ("META-LLAMA/llama-3.1-70b-instruct", "meta-llama/Llama-3.1-70B-Instruct"),
        ("Llama-3.1-70B-Instruct", "meta-llama/Llama-3.1-70B-Instruct"),
        (" llama-3.1-8b-instruct ", "meta-llama/Llama-3.1-8B-Instruct"),
        ("qwen3-32b", "Qwen/Qwen3-32B"),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
    ],
)
def test_a_name_is_found_in_any_case_and_by_its_unique_ending(name: str, found: str) -> None:
    assert match(name, KNOWN) == found


@given(st.sampled_from([name for name in KNOWN if not name.endswith("Qwen3-8B")]), st.data())
def test_every_known_name_is_found_by_its_ending_in_any_case(known: str, data: st.DataObject) -> None:
    case = data.draw(st.sampled_from([str.lower, str.upper, str.swapcase]))
    assert match(case(known.rpartition("/")[2]), KNOWN) == known


def test_an_ending_that_two_names_share_is_refused_with_both() -> None:
    with pytest.raises(ModelError) as raised:
        match("Qwen3-8B", KNOWN)
    assert str(raised.value) == "model 'Qwen3-8B' can be Qwen/Qwen3-8B, someone/Qwen3-8B. Give the whole name."


def test_an_unknown_name_says_to_pass_the_config_and_lists_close_ones() -> None:
    with pytest.raises(ModelError) as raised:
        match("Qwen/Qwen3-32B-AWQ", KNOWN)
    text = str(raised.value)
    assert text.startswith("model 'Qwen/Qwen3-32B-AWQ' is not among the 6 that kvwatch knows offline")
    assert "config.json" in text
    assert "Close names: Qwen/Qwen3-32B, Qwen/Qwen3-32B-FP8" in text


def test_part_of_a_word_is_no_ending() -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        match("3.1-70B-Instruct", KNOWN)


@pytest.mark.parametrize("name", ["", "/", "  "])
def test_an_empty_name_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        match(name, KNOWN)
