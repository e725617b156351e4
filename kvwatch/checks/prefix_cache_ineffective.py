"""Prefix caching is on and cannot hit: prompts are shorter than one block.

## Meaning

Prompts are looked up in the prefix cache and none of their tokens is ever found, and 95 % of the prompts are shorter
than a block. Only whole blocks are cached, so a shared prefix below one block can never be found. Hybrid models with
Mamba or linear attention have blocks of many hundred tokens.

## Impact

Shared prompts are computed again for every request; time to first token and throughput are those without a cache.

## Diagnosis

- `block_size` of `vllm:cache_config_info` against `vllm:request_prompt_tokens`.
- `rate(vllm:prefix_cache_hits_total[5m])` is 0 while `rate(vllm:prefix_cache_queries_total[5m])` is not.
- With hybrid models and speculative decoding the counter may stay 0 although the cache works: compare the time to first
  token of two equal requests.
- A low share of hits with long prompts is no fault of the engine: the prompts share little, or the router spreads them.

## Mitigation

- Attention-only models: leave `--block-size` at its default of 16.
- Hybrid models: newer vLLM releases cache state at smaller steps; otherwise put the shared part into longer prompts.
- If prompts share nothing, nothing is lost: prefix caching costs next to nothing.
"""

from kvwatch.checks.check import ENGINE, AlertRule, Check, EngineView, reported, warning
from kvwatch.errors import NoData
from kvwatch.finding import Status, Verdict
from kvwatch.thresholds import Thresholds
from kvwatch.vllm_metrics import PREFIX_CACHE_HITS, PREFIX_CACHE_QUERIES, REQUEST_PROMPT_TOKENS


def evaluate(view: EngineView, _limits: Thresholds) -> Verdict:
    window = view.window
    if window.latest.cache_config.enable_prefix_caching is False:
        return Verdict(status=Status.OK, summary="prefix caching is off")
    queries, hits = window.increase(PREFIX_CACHE_QUERIES), window.increase(PREFIX_CACHE_HITS)
    evidence = {"looked_up_tokens": queries, "hit_tokens": hits}
    if queries <= 0:
        return Verdict(status=Status.OK, summary="no prompt was looked up", evidence=evidence)
    if hits > 0:
        return Verdict(status=Status.OK, summary=f"{hits / queries:.1%} of the prompt tokens hit", evidence=evidence)
    block = view.capacity.tokens_per_block or view.capacity.block_size_tokens
    if block is None:
        raise NoData("block_size is not exposed by this engine")
    longest = window.quantile(REQUEST_PROMPT_TOKENS, 0.95)
    evidence |= {"block_size_tokens": block, "prompt_tokens_p95": longest}
    if longest >= block:
        return Verdict(status=Status.OK, summary="no prompt shared a block with an earlier one", evidence=evidence)
    return Verdict(
        status=Status.WARNING,
        summary=f"no hit is possible: 95 % of the prompts have at most {longest:.0f} tokens, a block has {block}",
        evidence=evidence,
    )


def alert(limits: Thresholds) -> tuple[AlertRule, ...]:
    return (
        warning(
            limits,
            expr=reported("prefix_cache_ineffective", Status.WARNING),
            summary=f"the prefix cache of {ENGINE} cannot hit: prompts are shorter than one block",
        ),
    )


CHECK = Check(id="prefix_cache_ineffective", docs=__doc__, evaluate=evaluate, alert=alert)
