"""The config facts shipped for offline look-ups."""

import json
from pathlib import Path
from typing import Any

import pytest

import kvwatch
from kvwatch.model import read_model
from kvwatch.model_names import match

PATH = Path(kvwatch.__file__).parent / "data" / "models.json"
MODELS: dict[str, dict[str, Any]] = json.loads(PATH.read_text(encoding="utf-8"))


def test_the_file_stays_small_because_every_budget_reads_it() -> None:
    assert PATH.stat().st_size < 150_000


def test_there_is_one_model_a_line_sorted_so_that_a_change_is_one_line() -> None:
    lines = PATH.read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(MODELS) + 2
    assert list(MODELS) == sorted(MODELS, key=str.lower)


@pytest.mark.parametrize("name", MODELS)
def test_an_entry_has_a_config_its_weights_or_null_and_a_source(name: str) -> None:
    entry = MODELS[name]
    assert set(entry) == {"config", "weights_bytes", "source"}
    assert entry["config"]["architectures"]
    assert entry["config"]["model_type"]
    assert entry["weights_bytes"] is None or entry["weights_bytes"] > 1 << 28
    assert "config" in entry["source"]


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_found_by_the_part_after_the_organisation(name: str) -> None:
    assert match(name.rpartition("/")[2].lower(), MODELS) == name


@pytest.mark.parametrize("name", MODELS)
def test_a_list_with_one_entry_per_layer_has_as_many_as_there_are_layers(name: str) -> None:
    config = MODELS[name]["config"]
    text = config.get("text_config", config)
    layers = text["num_hidden_layers"]
    for field in ("layer_types", "hybrid_override_pattern", "indexer_types", "mlp_layer_types", "attn_type_list"):
        if field in text:
            assert len(text[field]) == layers, field


@pytest.mark.parametrize("name", MODELS)
def test_every_config_is_read_as_a_model(name: str) -> None:
    config = MODELS[name]["config"]
    model = read_model(config, name=name)
    assert model.name == name
    assert len(model.layers) == config.get("text_config", config)["num_hidden_layers"]
    assert model.max_model_len >= 2048
