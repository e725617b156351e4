"""A model for a budget: a folder, a config.json, the name of a downloaded or of a known model. Nothing is fetched.

Beside config.json the folder's model.safetensors.index.json (the weights' size) is read where it exists, and what the
quantiser wrote (hf_quant_config.json and others) where config.json does not say how the weights are quantised.
"""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvwatch.errors import ModelError, SourceError
from kvwatch.files import bounded_text
from kvwatch.model_names import match

# A config.json has kilobytes; an index lists every tensor and has a few megabytes.
_CONFIG_LIMIT_BYTES = 8 << 20
_INDEX_LIMIT_BYTES = 64 << 20
# vLLM 0.32.0, get_config_filenames of vllm/model_executor/layers/quantization/{modelopt,auto_gptq,auto_awq}.py
_QUANTISATION_FILES = (
    ("hf_quant_config.json", "modelopt"),
    ("quantize_config.json", "gptq"),
    ("quant_config.json", "awq"),
)
_KNOWN_FILE = Path(__file__).parents[1] / "data" / "models.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """`config` is the parsed config.json; `weights_bytes` the checkpoint's size, None where not known."""

    name: str
    config: dict[str, Any]
    weights_bytes: int | None
    origin: str


def load_model(text: str) -> ModelFiles:
    """The model that `text` means. Raises SourceError for a file that cannot be read, ModelError for what is in it."""
    try:
        path = Path(text).expanduser()
        is_folder, is_there = path.is_dir(), path.exists()
    except (OSError, RuntimeError) as error:  # a name too long for a file; ~user of no user
        reason = getattr(error, "strerror", None) or error
        raise SourceError(
            f"--model {text[:80]}: {reason}. Give a config.json, its folder, or a model's name."
        ) from error
    if is_folder:
        return _folder(path)
    if is_there:  # a pipe as well: --model <(jq .text_config config.json)
        return ModelFiles(name=_name(path), config=_object(path), weights_bytes=None, origin=str(path))
    if path.suffix == ".json" or text.startswith((".", "/", "~")):
        raise SourceError(f"--model {text}: no such file or folder. Give a config.json, its folder, or a model's name.")
    return _downloaded(text) or _known(text)


def _downloaded(name: str) -> ModelFiles | None:
    """A model that the Hugging Face cache of this machine holds (`org/name`), newest snapshot first."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")) / "hub"
    repository = f"models--{name.replace('/', '--')}"
    folder = Path(os.environ.get("HF_HUB_CACHE", home)).expanduser() / repository / "snapshots"
    if "/" not in name or not folder.is_dir():
        return None
    snapshots = sorted(folder.glob("*/config.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    if not snapshots:
        return None
    return replace(_folder(snapshots[0].parent), name=name)


def _folder(folder: Path) -> ModelFiles:
    config_path = folder / "config.json"
    if not config_path.exists():
        raise SourceError(f"--model {folder}: the folder has no config.json, which describes the model's layers")
    config = _object(config_path)
    for file, method in _QUANTISATION_FILES:
        if config.get("quantization_config") is None and (folder / file).exists():
            config["quantization_config"] = {"quant_method": method, **_object(folder / file)}
    index = folder / "model.safetensors.index.json"
    weights = None
    if index.exists():
        from kvwatch.weights import index_bytes  # noqa: PLC0415 -- only where an index is there

        weights = index_bytes(_object(index, limit_bytes=_INDEX_LIMIT_BYTES))
    return ModelFiles(name=_name(config_path), config=config, weights_bytes=weights, origin=str(config_path))


def _name(config_path: Path) -> str:
    """The folder's name says more than `config`."""
    stem = config_path.stem
    return config_path.resolve().parent.name or stem if stem == "config" else stem


def _object(path: Path, *, limit_bytes: int = _CONFIG_LIMIT_BYTES) -> dict[str, Any]:
    try:
        text = bounded_text(path, limit_bytes=limit_bytes)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from error
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path} holds a {type(found).__name__}, but has to hold an object with the model's fields")
    return found


def _known(name: str) -> ModelFiles:
    known = json.loads(_KNOWN_FILE.read_text(encoding="utf-8"))
    hub_name = match(name, known)
    entry = known[hub_name]
    return ModelFiles(
        name=hub_name,
        config=entry["config"],
        weights_bytes=entry.get("weights_bytes"),
        origin="the models known to kvwatch",
    )
