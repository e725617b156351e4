"""BudgetReport -> text for a terminal: verdict, formula, layers, one request, contexts × users, other layouts.

Plain text, at most `width` columns, readable without colour.
"""

import textwrap
from collections.abc import Iterable

from kvwatch.budget import Budget, caches_of, grows, payload_bytes
from kvwatch.budget_report import BudgetReport, MemoryFigure
from kvwatch.demand import Row, most_requests
from kvwatch.kv_dtypes import element_bytes
from kvwatch.model.spec import LayerCache
from kvwatch.pages import head_token_bytes

_GIB = 1 << 30
_MIB = 1 << 20
_BOLD = {True: "1;32", False: "1;31", None: "1"}


def budget_text(report: BudgetReport, *, width: int = 80, colour: bool = False, explain: bool = False) -> str:
    """The whole report, sections separated by empty lines."""
    sections = [
        _verdict(report, width=width, colour=colour),
        _section("Bytes per token", _per_token(report), width=width),
        _section("Layers", _layers(report), width=width, wrap=False),
        _section("Pool" if report.budget else "Pool: not known", _pool(report), width=width),
        _section("One request", _request(report), width=width),
        _section(_table_title(report), _table(report, width=width), width=width, wrap=False),
        _section("Offered load", _load(report), width=width),
        _section("The same layers, stored otherwise", _layouts(report), width=width, wrap=False),
    ]
    if explain:
        sections.append(_section("Step by step", _steps(report), width=width))
    sections.append(_section("Assumed", [f"- {text}" for text in report.assumptions], width=width))
    return "\n\n".join(section for section in sections if section)


def _section(title: str, lines: Iterable[str], *, width: int, wrap: bool = True) -> str:
    found = [line for line in lines if line]
    if not found:
        return ""
    if wrap:
        found = [
            _wrap(line, width=width, indent="    " if line.startswith("- ") else "      ", first="  ") for line in found
        ]
    else:
        found = [f"  {line}".rstrip() for line in found]
    return "\n".join([title, *found])


def _wrap(text: str, *, width: int, indent: str = "", first: str = "") -> str:
    return textwrap.fill(
        text,
        width=width,
        initial_indent=first,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def gib(size_bytes: float) -> str:
    """GiB, MiB or bytes, whichever reads best."""
    if abs(size_bytes) >= 1000 * _GIB:
        return f"{size_bytes / _GIB:,.0f} GiB"
    if abs(size_bytes) >= 0.1 * _GIB:
        return f"{size_bytes / _GIB:,.2f} GiB"
    if abs(size_bytes) >= 0.1 * _MIB:
        return f"{size_bytes / _MIB:,.2f} MiB"
    return f"{size_bytes:,.0f} bytes"


# --- verdict ---


def _verdict(report: BudgetReport, *, width: int, colour: bool) -> str:
    word, text = _judgement(report)
    body = _wrap(f"{word}  {text}", width=width, indent="    ")
    if colour:
        body = f"\x1b[{_BOLD[report.fits]}m{word}\x1b[0m" + body[len(word) :]
    warnings = [_wrap(f"WARNING  {text}", width=width, indent="    ") for text in report.warnings]
    return "\n".join([body, *warnings])


def _judgement(report: BudgetReport) -> tuple[str, str]:
    where = f"{report.model.name}{_placement(report)}"
    if report.refusal is not None:
        words = (
            f"{where}: {report.refusal.text}",
            *report.remedies,
            _near_refusal(report, report.refusal.needed_bytes),
        )
        return "DOES NOT FIT", " ".join(word for word in words if word)
    budget = report.budget
    if budget is None:
        return "COSTS ONLY", (
            f"{where}: without the memory there is no pool to size. Give --gpu NAME, --gpu-memory-gib X, "
            "--kv-cache-memory-bytes N or --num-gpu-blocks-override N."
        )
    if not report.plan.groups:
        return "FITS", f"{where}: the model keeps no KV cache; --max-num-seqs {budget.max_num_seqs} is the limit."
    engines = report.plan.engine.data_parallel_size
    each = f" on each of {engines} engines" if engines > 1 else ""
    return "FITS", (
        f"{where}: {budget.max_concurrency:.2f} requests of {budget.max_model_len:,} tokens at once{each}"
        f"{_range(report)}. "
        f"vLLM logs: KV cache size {budget.capacity_tokens:,} tokens, maximum concurrency "
        f"{budget.max_concurrency:.2f}x."
    )


def _range(report: BudgetReport) -> str:
    """What the bounds of an estimated memory make of the concurrency."""
    low, high = report.memory.low_bytes_per_rank, report.memory.high_bytes_per_rank
    if not low or not high or low == high:
        return ""
    blocks = report.costs.block_bytes_per_rank * report.costs.blocks_per_max_len_request
    least = max(0.0, min(low) / blocks)
    refuses = "; below 1 it would refuse to start" if least < 1 else ""
    return f" (an estimate: {least:.1f} to {min(high) / blocks:.1f}{refuses})"


def _near_refusal(report: BudgetReport, needed_bytes: int) -> str:
    """Where the memory is an estimate and its upper bound would do, the refusal is not certain."""
    low, high = report.memory.low_bytes_per_rank, report.memory.high_bytes_per_rank
    if not low or not high or min(high) < needed_bytes:
        return ""
    return (
        f"The memory is an estimate, between {gib(min(low))} and {gib(min(high))}: it may start all the same. What the "
        "engine logs as 'Available KV cache memory' decides."
    )


def _placement(report: BudgetReport) -> str:
    engine = report.plan.engine
    gpus = engine.tensor_parallel_size * engine.pipeline_parallel_size
    name = engine.device.name if engine.device and engine.device.name else "GPU"
    if gpus == 1:
        return f" on one {name}" if engine.device else ""
    return f" on {gpus} × {name}"


# --- bytes per token ---


def _per_token(report: BudgetReport) -> list[str]:
    costs, engine = report.costs, report.plan.engine
    stages = len(report.plan.block_bytes)
    growing = [(cache, count) for cache, count in caches_of(report.model, engine) if grows(cache, engine)]
    lines = [_formula(report, cache, count) for cache, count in growing]
    if len(growing) > 1:
        lines.append(f"together {costs.bytes_per_token:,} bytes ({costs.bytes_per_token / 1024:,.1f} KiB) per token")
    if not growing:
        lines.append("no layer keeps every token: a long context costs no more than a short one")
    if growing and (engine.tensor_parallel_size > 1 or stages > 1):
        split = f"tensor parallel {engine.tensor_parallel_size}" + (f", {stages} pipeline stages" if stages > 1 else "")
        lines.append(f"on each GPU {costs.bytes_per_token_per_rank:,} bytes ({split}){_replication(report)}")
    if costs.fixed_bytes_per_request:
        lines.append(
            f"plus {gib(costs.fixed_bytes_per_request)} per request that do not grow: windows, chunks and states"
        )
    return lines


def _formula(report: BudgetReport, cache: LayerCache, count: int) -> str:
    engine = report.plan.engine
    token = head_token_bytes(cache, engine.kv_cache_dtype, engine)
    heads = max(1, cache.kv_heads)
    total = count * heads * token
    dtype = engine.dtype if engine.kv_cache_dtype == "auto" else engine.kv_cache_dtype
    if cache.kind == "mla_indexer":
        return f"{count} layers × {token} bytes (index keys, fp8 with scales) = {total:,} bytes"
    if cache.kind == "mla":
        return f"{count} layers × {token:,} bytes (latent of {cache.head_dim} elements, {dtype}) = {total:,} bytes"
    element = element_bytes(engine.kv_cache_dtype, model_dtype=engine.dtype)
    shape = f"{count} layers × {heads} KV heads"
    if cache.head_dim == cache.value_head_dim and token == 2 * cache.head_dim * element:
        return f"2 × {shape} × {cache.head_dim} × {element} ({dtype}) = {total:,} bytes"
    return f"{shape} × {token} bytes (key and value of {cache.head_dim}, {dtype}) = {total:,} bytes"


def _replication(report: BudgetReport) -> str:
    """Where GPUs hold the same keys: more of them than KV heads, or a latent."""
    engine = report.plan.engine
    heads = [cache.kv_heads for cache, _ in report.model.kind_counts if cache.kind == "full"]
    if report.model.uses_mla and engine.tensor_parallel_size > engine.decode_context_parallel_size:
        return "; every GPU holds the whole latent, so more GPUs add memory but no saving per token"
    if heads and engine.tensor_parallel_size > max(heads):
        copies = engine.tensor_parallel_size // max(heads)
        return f"; {max(heads)} KV heads on {engine.tensor_parallel_size} GPUs: each is held {copies} times"
    return ""


# --- layers, pool, request ---


def _layers(report: BudgetReport) -> list[str]:
    lines = [f"{'kind':<20}{'layers':>7}{'KV heads':>10}{'head size':>11}{'window':>10}"]
    for cache, count in caches_of(report.model, report.plan.engine):
        cells = [cache.kv_heads or None, cache.head_dim or None, cache.window_tokens]
        heads, size, window = ("-" if cell is None else f"{cell:,}" for cell in cells)
        lines.append(f"{cache.label:<20}{count:>7}{heads:>10}{size:>11}{window:>10}")
    lines += [
        f"{f'{kind} (no cache)':<20}{count:>7}{'-':>10}{'-':>11}{'-':>10}" for kind, count in report.model.cacheless
    ]
    return lines


def _pool(report: BudgetReport) -> list[str]:
    costs, budget, memory = report.costs, report.budget, report.memory
    lines = []
    if budget is not None:
        low, high = memory.low_bytes_per_rank, memory.high_bytes_per_rank
        between = ""
        if low and high and low != high:
            between = f", expected between {gib(min(low))} and {gib(min(high))}"
        lines.append(f"memory         {gib(budget.available_bytes_per_rank)} per GPU ({memory.origin}{between})")
        if memory.terms and memory.requested_bytes is not None:
            lines.append(f"  {gib(memory.requested_bytes)} claimed, less")
        lines += [_term(term) for term in memory.terms]
    lines.append(f"one block      {costs.block_size_tokens} tokens, {gib(costs.block_bytes_per_rank)} per GPU")
    if budget is not None:
        lines.append(f"blocks         {budget.num_gpu_blocks:,}, {budget.usable_blocks:,} usable: vLLM holds one back")
    if len(costs.groups) > 1:
        lines.append(f"groups         {_groups(report)}")
    return lines


def _term(term: MemoryFigure) -> str:
    note = f", {term.note}" if term.note else ""
    return f"- {term.name.replace('_', ' ')}: {gib(term.bytes_per_rank)} ({term.source}{note})"


def _groups(report: BudgetReport) -> str:
    listed: dict[tuple[str, int], int] = {}
    for group in report.costs.groups:
        key = (group.kind, group.blocks_per_max_len_request)
        listed[key] = listed.get(key, 0) + 1
    parts = [f"{count} {kind} ({blocks:,} blocks each)" for (kind, blocks), count in listed.items()]
    return f"{len(report.costs.groups)}, all drawing from one pool: " + ", ".join(parts)


def _request(report: BudgetReport) -> list[str]:
    costs, planned = report.costs, report.plan
    if not planned.groups:
        return []
    tokens = costs.max_model_len
    payload = gib(payload_bytes(planned, tokens))
    fixed = f"{gib(costs.fixed_bytes_per_request)} + " if costs.fixed_bytes_per_request else ""
    lines = [f"cost           {fixed}{costs.bytes_per_token:,} bytes × tokens"]
    blocks = planned.blocks_for_request(tokens)
    each = sum(planned.block_bytes) * planned.engine.tensor_parallel_size
    text = f"{tokens:,} tokens: {blocks:,} blocks, {gib(blocks * each)} allocated over all GPUs"
    lines.append(f"longest        {text}, {payload} of it payload over the model")
    if blocks != costs.blocks_per_max_len_request:
        lines.append(
            f"vLLM counts    {costs.blocks_per_max_len_request:,} blocks for it: a window may start inside a block"
        )
    return lines


# --- contexts × users ---


def _table_title(report: BudgetReport) -> str:
    engines = report.plan.engine.data_parallel_size
    over = f", over {engines} engines" if engines > 1 else ""
    return f"Contexts × users: KV cache they fill (payload){over}"


def _table(report: BudgetReport, *, width: int) -> list[str]:
    users = list(dict.fromkeys(row.concurrency for row in report.table))
    by_context: dict[int, dict[int, Row]] = {}
    for row in report.table:
        by_context.setdefault(row.context_tokens, {})[row.concurrency] = row
    shown = users[: max(1, (width - 24) // 14)]
    budget = report.budget
    head = f"{'tokens':>9}  " + "".join(f"{count:>12,}  " for count in shown)
    lines = [head + (f"{'at most':>10}" if budget is not None else "")]
    for tokens, rows in by_context.items():
        line = f"{tokens:>9,}  " + "".join(f"{_cell(rows[count]):>14}" for count in shown if count in rows)
        lines.append(line + (f"{most_requests(report.plan, budget, context_tokens=tokens):>10,}" if budget else ""))
    if len(users) > len(shown):
        lines.append(f"({len(users) - len(shown)} more numbers of users: --output json)")
    if any(row.fits is False for row in report.table):
        lines.append("! does not fit: requests beyond the last column wait or are preempted")
    elif budget is not None:
        lines.append("every combination fits; the last column is the most that would")
    if any(row.fits and row.free_blocks is not None and row.free_blocks < 0 for row in report.table):
        lines.append("an exact fit counts the block vLLM holds back: one request waits for it")
    return lines


def _cell(row: Row) -> str:
    size = gib(row.kv_cache_bytes)
    return f"{size} !" if row.fits is False else f"{size}  "


def _load(report: BudgetReport) -> list[str]:
    lines = []
    load, budget = report.arrivals, report.budget
    if load is not None:
        retries = f" ÷ (1 − {load.retry_ratio:g})" if load.retry_ratio else ""
        lines.append(
            f"in flight      {load.arrival_rate_per_second:g} requests/s{retries} × {load.response_time_seconds:g} s = "
            f"{load.in_flight:,.1f} requests (Little's law)"
        )
        if load.retries_in_flight:
            lines.append(f"retries        {load.retries_in_flight:,.1f} of them, which slower answers multiply")
        if budget is not None:
            cap = budget.max_num_seqs * report.plan.engine.data_parallel_size
            lines.append(_against_cap(load.in_flight, cap))
    if report.mix is not None:
        listed = " + ".join(f"{count:,} × {tokens:,}" for tokens, count in report.mix.requests)
        verdict = {True: "fits", False: "does not fit", None: "pool not known"}[report.mix.fits]
        each = " on each engine" if report.plan.engine.data_parallel_size > 1 else ""
        size = f"{gib(report.mix.kv_cache_bytes)}, {report.mix.blocks:,} blocks{each}"
        lines.append(f"mixed          {listed} tokens: {size}, {verdict}")
    return lines


def _against_cap(in_flight: float, cap: int) -> str:
    if in_flight > cap:
        return (
            f"sequence cap   --max-num-seqs {cap:,} is lower: {in_flight - cap:,.1f} requests queue whatever the memory"
        )
    return f"sequence cap   --max-num-seqs {cap:,} is enough"


# --- other layouts, steps ---


def _layouts(report: BudgetReport) -> list[str]:
    if not report.layouts:
        return []
    lines = [f"{'':<48}{'bytes/token':>13}{'times':>8}"]
    for layout in report.layouts:
        lines.append(f"{layout.name:<48}{layout.bytes_per_token:>13,}{layout.ratio:>8.2f}")
        if layout.max_concurrency is not None and report.budget is not None and report.budget.max_concurrency:
            lines.append(f"    {_gain(report.budget, layout.max_concurrency)}")
        if layout.note:
            lines.append(f"    {layout.note}")
    return lines


def _gain(budget: Budget, concurrency: float) -> str:
    factor = concurrency / budget.max_concurrency
    return (
        f"concurrency {budget.max_concurrency:.2f} -> {concurrency:.2f}: {factor:.2f} times, not only bytes per token"
    )


def _steps(report: BudgetReport) -> list[str]:
    from kvwatch.budget_explain import steps  # noqa: PLC0415 -- only --explain needs it

    return [
        f"{number}. {step.what}: {step.formula} [{step.source}; {step.rule}]"
        for number, step in enumerate(steps(report), 1)
    ]
