"""vLLM's command-line flags: one table of those that matter here, and a reader of whole `vllm serve` command lines.

The table is what the options of every command are made from, so a flag is spelt once.
Source: vLLM 0.33.0, vllm/engine/arg_utils.py (flags), vllm/utils/argparse_utils.py (human_readable_int, dashes and
underscores, `--flag.key value`).
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvwatch.errors import SettingError, shown
from kvwatch.versions import parse_version

FlagKind = Literal["count", "length", "bytes", "share", "gigabytes", "text", "version", "switch", "list", "whole"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One vLLM flag: its long name, the EngineConfig field it sets, what it takes, and its short forms."""

    name: str
    field: str
    kind: FlagKind
    help: str
    aliases: tuple[str, ...] = ()

    @property
    def option(self) -> str:
        return f"--{self.name}"


def _flag(name: str, kind: FlagKind, text: str, *aliases: str, field: str | None = None) -> Flag:
    return Flag(name=name, field=field or name.replace("-", "_"), kind=kind, help=text, aliases=aliases)


FLAGS: tuple[Flag, ...] = (
    _flag("tensor-parallel-size", "count", "GPUs that split each layer.", "-tp"),
    _flag("pipeline-parallel-size", "count", "Stages that split the layers.", "-pp"),
    _flag("data-parallel-size", "count", "Engines, each with a pool of its own.", "-dp"),
    _flag("decode-context-parallel-size", "count", "Ranks that share out each sequence.", "-dcp"),
    _flag("dtype", "text", "The model's dtype: auto, bfloat16, float16, float32."),
    _flag("kv-cache-dtype", "text", "auto, fp8, fp8_e4m3, nvfp4, int8_per_token_head, ..."),
    _flag("kv-cache-dtype-skip-layers", "list", "Layers left in the model's dtype: numbers, or sliding_window."),
    _flag("block-size", "count", "Tokens per block."),
    _flag("max-model-len", "length", "Longest context: 8192, 32k (decimal), 32K (binary), auto."),
    _flag("max-num-seqs", "count", "Most requests that run at once."),
    _flag("max-num-batched-tokens", "length", "Most tokens in one step."),
    _flag("gpu-memory-utilization", "share", "Share of the GPU's total memory that vLLM takes."),
    _flag("kv-cache-memory-bytes", "bytes", "KV-cache memory per GPU; replaces the share."),
    _flag("num-gpu-blocks-override", "count", "Number of blocks, whatever the memory."),
    _flag("watermark", "share", "Share of the blocks kept free when a request is admitted."),
    _flag("enable-prefix-caching", "switch", "Keep the blocks of finished requests for reuse."),
    _flag("enable-chunked-prefill", "switch", "Spread a long prompt over several steps."),
    _flag("disable-hybrid-kv-cache-manager", "switch", "Plan windows and chunks as full attention."),
    _flag("disable-sliding-window", "switch", "Cap the context at the window."),
    _flag("async-scheduling", "switch", "Schedule a step while the last one runs."),
    _flag("performance-mode", "text", "balanced, interactivity or throughput."),
    _flag("mamba-cache-mode", "text", "none, align or all."),
    _flag("mamba-cache-dtype", "text", "dtype of convolution states."),
    _flag("mamba-ssm-cache-dtype", "text", "dtype of recurrent states."),
    _flag("cpu-offload-gb", "gigabytes", "Weights kept in host memory, GiB per GPU."),
    _flag("enforce-eager", "switch", "No CUDA graphs."),
    _flag("enable-expert-parallel", "switch", "Split experts over GPUs instead of each expert.", "-ep"),
    _flag("quantization", "text", "How the weights are quantised.", "-q"),
)
_BY_OPTION = {spelling: flag for flag in FLAGS for spelling in (flag.option, *flag.aliases)}
_BY_OPTION["--kv-cache-memory"] = _BY_OPTION["--kv-cache-memory-bytes"]  # what vLLM's log line prints
_BY_OPTION["--device-memory-utilization"] = _BY_OPTION["--gpu-memory-utilization"]  # alias since 0.33

# vLLM 0.32's flags without a value, those of the table aside.
_SWITCH_PREFIXES = ("--enable-", "--disable-", "--no-", "--use-", "--trust-", "--skip-")
_OTHER_SWITCHES = frozenset(
    {
        "--aggregate-engine-logging",
        "--allow-deprecated-quantization",
        "--cudagraph-metrics",
        "--exclude-tools-when-tool-choice-none",
        "--fully-sharded-loras",
        "--headless",
        "--kv-cache-metrics",
        "--kv-sharing-fast-prefill",
        "--language-model-only",
        "--log-error-stack",
        "--mm-encoder-only",
        "--return-tokens-as-token-ids",
        "--scheduler-reserve-full-isl",
        "--tokens-only",
    }
)
# Flags that change the KV cache or its memory in ways that are not computed here.
_CHANGING = frozenset(
    {
        "--attention-backend",
        "--compilation-config",
        "--config",
        "--enable-lora",
        "--hf-config-path",
        "--hf-overrides",
        "--kv-offloading-size",
        "--limit-mm-per-prompt",
        "--max-lora-rank",
        "--max-loras",
        "--prefill-context-parallel-size",
        "--rope-scaling",
        "--rope-theta",
    }
)
# Where the shell goes on to another command.
_OPERATORS = frozenset({"&&", "||", "|", "&", ";"})
_YAML_KEY = re.compile(r"(?:command|args|entrypoint|cmd):\s*", re.IGNORECASE)
_YAML_BLOCKS = frozenset({"|", ">", "|-", ">-", ""})
# Binary with a capital letter, decimal with a small one, as vLLM reads them.
_SUFFIX = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "": 1}
_HUMAN = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)(?:i?[bB])?")
_SHELL_WORDS = 3  # bash -c "..."
_SHORTEST_BEGINNING = len("--gpu-mem")
_ENVIRONMENT = re.compile(r"[A-Za-z_]\w*=")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """What a `vllm serve` command line says: EngineConfig fields, and the flags and words that were not read."""

    model: str | None
    fields: Mapping[str, Any]
    ignored: tuple[str, ...]


def left_out(ignored: tuple[str, ...]) -> str:
    """One sentence on what of a command line was not read, and whether that may change the figures."""
    changing = [name for name in dict.fromkeys(ignored) if name.partition(".")[0] in _CHANGING]
    others = [name for name in dict.fromkeys(ignored) if name not in changing]
    sentences = []
    if changing:
        sentences.append(f"Not read, though it can change the KV cache or its memory: {', '.join(changing)}.")
    if others:
        sentences.append(f"Without effect on the KV cache, or not a flag kvwatch knows: {', '.join(others)}")
    return " ".join(sentences)


def whole_number(text: str) -> int:
    """`8192`, `32k` (32,000), `32K` (32,768), `2.5M`, `16GiB`. Raises ValueError."""
    found = _HUMAN.fullmatch(text.strip().replace(",", "").replace("_", ""))
    if found is None:
        raise ValueError(text)
    suffix = found[2]
    if text.strip().lower().endswith("ib"):
        suffix = suffix.upper()
    value = float(found[1]) * _SUFFIX[suffix] if "." in found[1] else int(found[1]) * _SUFFIX[suffix]
    if value != int(value):
        raise ValueError(text)
    return int(value)


def value_of(flag: Flag, text: str) -> Any:
    """The EngineConfig value of a flag's text. Raises SettingError naming the flag, the text and what it takes."""
    read, wanted = _READERS[flag.kind]
    try:
        return read(text)
    except ValueError:
        raise SettingError(f"{flag.option} is {text!r}, but takes {wanted}") from None


def _length(text: str) -> int:
    return -1 if text.strip().lower() in {"auto", "-1"} else whole_number(text)


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError(text)
    return value


def _gigabytes(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError(text)
    return value


def _switch(text: str) -> bool:
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.strip().lower() not in known:
        raise ValueError(text)
    return known[text.strip().lower()]


def _word(text: str) -> str:
    if not text.strip():
        raise ValueError(text)
    return text.strip()


def _list(text: str) -> tuple[str, ...]:
    parts = tuple(part.strip() for part in re.split(r"[,\s]+", text) if part.strip())
    if not parts:
        raise ValueError(text)
    return parts


_READERS: dict[FlagKind, tuple[Callable[[str], Any], str]] = {
    "count": (whole_number, "a whole number"),
    "length": (_length, "a number of tokens (8192, 32k, 32K) or auto"),
    "bytes": (whole_number, "a number of bytes (34359738368, 32G, 32GiB)"),
    "share": (_share, "a share between 0 and 1"),
    "gigabytes": (_gigabytes, "a number of GiB"),
    "text": (_word, "a word"),
    "version": (parse_version, "a version"),
    "switch": (_switch, "true or false"),
    "list": (_list, "a list"),
    "whole": (whole_number, "a whole number"),
}


def parse_command_line(text: str) -> CommandLine:
    """A whole command line, as copied from a pod spec, a unit file or a shell history.

    Understood: `vllm serve MODEL --flag value --flag=value --no-flag`, `python -m vllm.entrypoints...`, a container's
    YAML list of arguments, trailing backslashes, leading VAR=value, `#` comments. Raises SettingError for a flag whose
    value cannot be read; flags that do not change the KV cache are listed in `ignored`.
    """
    return parse_words(_words(text))


def _words(text: str) -> list[str]:
    lines = []
    for line in text.replace("\\\r\n", " ").replace("\\\n", " ").splitlines():
        stripped = _YAML_KEY.sub("", _without_comment(line).strip(), count=1)
        if stripped.startswith("- "):  # an item of a YAML list
            stripped = stripped[2:].strip()
        if stripped not in _YAML_BLOCKS:
            lines.append(_without_brackets(stripped))
    joined = _without_brackets(" ".join(lines))
    import shlex  # noqa: PLC0415 -- only a whole command line needs it

    try:
        return shlex.split(joined)
    except ValueError as error:
        raise SettingError(
            f"--vllm-args cannot be split into words ({error}): {joined[:80]!r}. Check the quotes, or put the command "
            "line in a file and give --vllm-args-file."
        ) from None


def _without_brackets(text: str) -> str:
    """A JSON or flow-style list of arguments as words."""
    if not (text.startswith("[") and text.endswith("]")):
        return text
    return text[1:-1].replace('",', '" ').replace("',", "' ")


def _without_comment(line: str) -> str:
    """What a shell or YAML reads: up to a # that begins a word outside quotes."""
    quote = ""
    for index, mark in enumerate(line):
        if quote:
            quote = "" if mark == quote else quote
        elif mark in "\"'":
            quote = mark
        elif mark == "#" and (index == 0 or line[index - 1].isspace()):
            return line[:index]
    return line


def parse_words(words: list[str]) -> CommandLine:
    """`parse_command_line` for arguments that are already separate."""
    rest = _after_program(words)
    fields: dict[str, Any] = {}
    ignored: list[str] = []
    model: str | None = None
    while rest:
        word = rest.pop(0)
        if word in _OPERATORS:
            break
        if not word.startswith("-") or word == "-":
            if model is not None:
                ignored.append(word)
            model = model or _model(word)
            continue
        name, equals, inline = word.partition("=")
        name = _normal(name)
        if name == "--model":
            model = _model(inline if equals else _take(rest, name))
            continue
        if name == "--no-" or _special(name, inline if equals else None, rest, fields):
            continue
        flag, negated = _find(name)
        if flag is None:
            ignored.append(name)
            if not equals and not _is_switch(name) and rest and not rest[0].startswith("-"):
                rest.pop(0)
            continue
        _set(flag, negated=negated, inline=inline if equals else None, rest=rest, fields=fields)
    return CommandLine(model=model, fields=fields, ignored=tuple(ignored))


def _after_program(words: list[str]) -> list[str]:
    """Without the environment, the interpreter and the entry point in front."""
    rest = list(words)
    if len(rest) >= _SHELL_WORDS and rest[0].rsplit("/", 1)[-1] in {"bash", "sh"} and re.fullmatch("-[a-z]*c", rest[1]):
        rest = _words(rest[2])
    while rest and (_ENVIRONMENT.match(rest[0]) or rest[0] in {"env", "exec", "sudo"}):
        rest.pop(0)
    for index, word in enumerate(rest):
        if word.startswith("vllm.entrypoints") or (word == "serve" and index and rest[index - 1].endswith("vllm")):
            return rest[index + 1 :]
        if word.startswith("--") and word != "--":
            break
    return rest[1:] if rest and rest[0].rsplit("/", 1)[-1] in {"vllm", "serve"} else rest


def _normal(name: str) -> str:
    """--max_model_len and --max-model-len are the same flag."""
    return name.replace("_", "-") if name.startswith("--") else name


def _take(rest: list[str], name: str) -> str:
    if not rest:
        raise SettingError(f"{name} stands at the end of the vLLM arguments without a value")
    return rest.pop(0)


def _model(text: str) -> str:
    if not text.strip():
        raise SettingError(f"the model of the vLLM arguments is {text!r}; is a variable not set where they come from?")
    return text


def _find(name: str) -> tuple[Flag | None, bool]:
    if name in _BY_OPTION:
        return _BY_OPTION[name], False
    if name.startswith("--no-"):
        positive = _BY_OPTION.get("--" + name[len("--no-") :])
        return (positive, True) if positive is not None and positive.kind == "switch" else (None, False)
    # argparse takes the beginning of a flag for the flag, where only one begins so.
    begun = [flag for flag in FLAGS if len(name) >= _SHORTEST_BEGINNING and flag.option.startswith(name)]
    return (begun[0] if len(begun) == 1 else None), False


def _is_switch(name: str) -> bool:
    """Whether a flag without effect here stands alone: the word after it may be the model."""
    return name.startswith(_SWITCH_PREFIXES) or name in _OTHER_SWITCHES


def _set(flag: Flag, *, negated: bool, inline: str | None, rest: list[str], fields: dict[str, Any]) -> None:
    if flag.kind == "switch":
        fields[flag.field] = not negated if inline is None else value_of(flag, inline)
        return
    if flag.kind == "list" and inline is None:
        values = []
        while rest and not rest[0].startswith("-"):
            values.append(rest.pop(0))
        fields[flag.field] = value_of(flag, " ".join(values))
        return
    fields[flag.field] = value_of(flag, _take(rest, flag.option) if inline is None else inline)


def _special(name: str, inline: str | None, rest: list[str], fields: dict[str, Any]) -> bool:
    """Flags that hold an object: speculative decoding and the KV connector. True when `name` is one."""
    base, _, key = name.partition(".")
    if base in {"--speculative-config", "-sc"}:
        text = _take(rest, name) if inline is None else inline
        speculation = {key.replace("-", "_"): text} if key else _object(name, text)
        if "num_speculative_tokens" in speculation:
            fields["num_speculative_tokens"] = _whole(name, speculation["num_speculative_tokens"])
        if isinstance(speculation.get("method"), str):
            fields["speculative_method"] = speculation["method"]
        return True
    if base == "--kv-transfer-config":
        text = _take(rest, name) if inline is None else inline
        transfer = {key.replace("-", "_"): text} if key else _object(name, text)
        if isinstance(transfer.get("kv_connector"), str):
            fields["kv_connector"] = transfer["kv_connector"]
        return True
    if name == "--num-speculative-tokens":
        fields["num_speculative_tokens"] = _whole(name, _take(rest, name) if inline is None else inline)
        return True
    return False


def _object(name: str, text: str) -> dict[str, Any]:
    import json  # noqa: PLC0415 -- only a flag that holds an object needs it

    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise SettingError(
            f"{name} is {shown(text)}, but takes a JSON object; check that the shell quotes survived the copy"
        )
    return found


def _whole(name: str, value: Any) -> int:
    try:
        return whole_number(str(value))
    except ValueError:
        raise SettingError(f"{name}: num_speculative_tokens is {value!r}, but has to be a whole number") from None
