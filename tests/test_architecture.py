"""The architecture: one list of modules, from the errors to the command line. A module imports what stands above it."""

import ast
from itertools import chain
from pathlib import Path

import pytest

import kvwatch
from kvwatch import checks
from kvwatch.vllm_metrics import ALL

PACKAGE = Path(kvwatch.__file__).parent

# What comes in, and what is known about vLLM.
LIVE = """
    errors versions flag_releases vllm_metrics exposition snapshot window trend lengths
"""
# From a model's config and vLLM's flags to blocks.
BUDGET = """
    model.nested model.fields model.dims model.spec model.length model.checkpoint model.encoder model.full model.chunked
    model.interleaved model.mla model.mamba model.hybrid model.delta_net model
    model_names gpu device kv_dtypes quant_methods engine parameters quantization weights memory
    backends pages planning budget demand budget_report budget_explain what_fits vllm_args
"""
# vLLM's scheduler, without vLLM.
WHAT_IF = """
    samples ticks blockpool simulation lockstep tally arrivals scheduling simulator objective what_if cost
    long_context_trap workload_spec
"""
# What is said about an engine.
JUDGEMENT = """
    thresholds finding recording capacity reconcile footprint
    checks.check checks.sequence_cap_reached checks.concurrency_oversubscribed checks.metrics_missing checks.* checks
    proposal analytic settings_now workload capacity_changes study recommend report
"""
# How it is shown. Pure as well.
PRESENTATION = """
    render render.args render.budget_data render.data render.options_text render.text render.budget_text
    render.simulation render.html_assets render.simulation_assets render.simulation_html render.html
    render.prometheus render.alertmanager
    generate generate.panels generate.queries generate.frame generate.shared generate.engine_page generate.fleet
    generate.incident generate.dashboards generate.reference generate.rules
    promql vllm_names lint render.lint
"""
# Clocks, files, sockets, threads, the terminal.
SHELLS = """
    files yaml_once config sources sources.capture sources.scrape sources.prometheus_session sources.prometheus
    sources.gather sources.model_files sources.workload_files lint_files
    sinks sinks.alertmanager server adviser agent plugin demo
    cli.output cli.not_empty cli cli.options cli.vllm_flags cli.kv_memory cli.engine_flags cli.judge cli.observed_load
    cli.* __main__
"""
PURE = (LIVE, BUDGET, WHAT_IF, JUDGEMENT, PRESENTATION)
LAYERS = tuple(chain.from_iterable(part.split() for part in (*PURE, SHELLS)))

# What the pure part may not do: look at a clock, at the machine, at the network, write a log, start anything.
IMPURE = frozenset(
    [
        "os",
        "sys",
        "time",
        "socket",
        "logging",
        "threading",
        "urllib3",
        "requests",
        "click",
        "subprocess",
        "http",
        "concurrent",
        "signal",
        "select",
        "asyncio",
        "pathlib",
        "shutil",
        "tempfile",
        "rich",
    ]
)


def modules() -> dict[str, Path]:
    """Module -> file, named without the package."""
    found = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in found.items() if name != "__init__"}


MODULES = modules()


def place(module: str) -> int:
    """Where a module stands; a pattern is the place of what no line of its own names."""
    if module in LAYERS:
        return LAYERS.index(module)
    return LAYERS.index(f"{module.partition('.')[0]}.*")


def imported(path: Path) -> list[str]:
    """All modules that a file imports, wherever in it: `a.b` for kvwatch's own, `.a.b` for others."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return [_own(name) or f".{name}" for name in names if name.partition(".")[0] != "__future__"]


def _own(name: str) -> str | None:
    head, _, rest = name.partition(".")
    if head != PACKAGE.name or not rest:
        return None
    return rest if rest in MODULES else rest.rpartition(".")[0] or None


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_a_place(module: str) -> None:
    assert place(module) >= 0


def test_every_place_is_a_modules() -> None:
    planned = {"plugin"}
    patterns = {"checks.*", "cli.*"}
    assert set(LAYERS) - planned - patterns - set(MODULES) == set()
    assert len(set(LAYERS)) == len(LAYERS)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_stands_above_it(module: str) -> None:
    below = [
        other
        for other in imported(MODULES[module])
        if not other.startswith(".") and other != module and place(other) >= place(module)
    ]
    assert below == []


@pytest.mark.parametrize("module", [m for m in MODULES if place(m) < LAYERS.index(SHELLS.split(maxsplit=1)[0])])
def test_the_core_touches_nothing_outside(module: str) -> None:
    outside = {name[1:].partition(".")[0] for name in imported(MODULES[module]) if name.startswith(".")}
    assert outside & IMPURE == set()


def test_the_checks_are_the_files_of_their_folder_in_one_explicit_tuple() -> None:
    files = {path.stem for path in (PACKAGE / "checks").glob("*.py")} - {"__init__", "check"}
    listed = [check.id for check in checks.ALL]
    assert sorted(listed) == sorted(files)
    assert len(set(listed)) == len(listed)


def test_the_list_at_the_top_of_the_checks_names_them_in_their_order() -> None:
    documented = [line.split()[0] for line in (checks.__doc__ or "").splitlines()[2:] if line]
    assert documented == [check.id for check in checks.ALL]


def test_no_metric_of_vllm_is_spelt_outside_its_list() -> None:
    """Docstrings and messages may name one; a line of code that does is a second spelling."""
    names = {metric.name for metric in ALL}
    spelt = {
        (module, node.value)
        for module, path in MODULES.items()
        if module not in {"vllm_metrics", "demo"}
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.partition(":")[2] in names
    }
    assert spelt == set()
