"""vLLM versions, and the rules of its KV-cache planning that changed between them.

Boundaries are between releases that were read: 0.6.6, 0.7.3, 0.8.5, 0.9.2, 0.10.2, 0.11.2 and every minor release from
0.12 to 0.33. "Since X" means: the first of these that has the rule. A release candidate counts as its release.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from kvwatch.errors import SettingError

Version = tuple[int, int, int]

LATEST_KNOWN: Version = (0, 33, 0)
EARLIEST_KNOWN: Version = (0, 6, 0)
_UNTAGGED = re.compile(r"v?0\.(?:1|0)\.dev\d")  # setuptools_scm's version of a checkout without tags
_VERSION = re.compile(r"v?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,6}))?(?![\d])[\w.+\-]*")

TokensLine = Literal["blocks", "groups", "concurrency"]
ConcurrencyRule = Literal["tokens", "bytes", "groups"]


def parse_version(text: str) -> Version:
    """`0.32.0`, `v0.11.1-dev`, `0.20.2rc1.dev249+g3ab` -> (major, minor, patch). Raises SettingError."""
    if _UNTAGGED.match(text.strip()):
        raise SettingError(
            f"--vllm-version {text!r} is what vLLM calls itself when built without the repository's tags: it tells no "
            "release. Give the release that the build is closest to, such as 0.32.0."
        )
    found = _VERSION.fullmatch(text.strip())
    if found is None:
        raise SettingError(
            f"--vllm-version {text!r} is not a version. It decides which planning rules apply; give it as vLLM prints "
            "it at start-up or under GET /version, such as 0.32.0."
        )
    return int(found[1]), int(found[2]), int(found[3] or 0)


def engine_version(told: str | None, at_least: str | None) -> Version | None:
    """The version an engine told or was given, else the least its page implies; None where unknown or unreadable."""
    for text in (told, at_least):
        try:
            if text is not None:
                return parse_version(text)
        except SettingError:  # a name that tells no release: what the page implies is the next best
            continue
    return None


def version_text(version: Version) -> str:
    return ".".join(str(part) for part in version)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What one vLLM version does where others do otherwise. Sources: vllm/v1/core/kv_cache_utils.py unless said."""

    # The figure in "GPU KV cache size: N tokens": num_blocks × block_size up to 0.10; num_blocks // groups × block_size
    # from 0.11; int(max_concurrency × max_model_len) from 0.20.
    tokens_line: TokensLine
    # "Maximum concurrency": tokens / max_model_len up to 0.8; blocks over cdiv(bytes of a request, bytes of a block)
    # from 0.9; blocks over the sum of each group's blocks from 0.28.
    concurrency: ConcurrencyRule
    # The start-up check sets aside the null block since 0.29.
    null_block_in_fit_check: bool
    # A window keeps the tokens of every batch in flight since 0.26, of one batch before.
    in_flight_counts_batches: bool
    # Where two groups' sizes differ by less than this ratio the larger is taken and the smaller padded: 1.25 from 0.12,
    # 1.5 from 0.18. None: the smaller is always taken.
    padding_ratio: float | None
    # Windows, chunks and states are planned in groups of their own since 0.9; before, every layer keeps every token.
    hybrid_manager: bool
    # Mamba-2 keeps a further checkpoint block per request when prefixes are cached (verified for 0.32).
    mamba2_checkpoint_block: bool
    # --num-gpu-blocks-override replaces the memory in the fit check too, since 0.20.
    override_in_fit_check: bool
    gpu_memory_utilization: float
    async_scheduling: bool
    prefix_caching: bool
    hybrid_prefix_caching: bool


@lru_cache(maxsize=64)
def rules_of(version: Version) -> Rules:
    """The rules of a version; one older or newer than those known gets the nearest known rules."""
    return Rules(
        tokens_line="concurrency" if version >= (0, 20) else "groups" if version >= (0, 11) else "blocks",
        concurrency="groups" if version >= (0, 28) else "bytes" if version >= (0, 9) else "tokens",
        null_block_in_fit_check=version >= (0, 29),
        in_flight_counts_batches=version >= (0, 26),
        padding_ratio=1.5 if version >= (0, 18) else 1.25 if version >= (0, 12) else None,
        hybrid_manager=version >= (0, 9),
        mamba2_checkpoint_block=version >= (0, 32),
        override_in_fit_check=version >= (0, 20),
        gpu_memory_utilization=0.92 if version >= (0, 20) else 0.9,
        async_scheduling=version >= (0, 14),
        prefix_caching=version >= (0, 8),
        hybrid_prefix_caching=version >= (0, 20),
    )
