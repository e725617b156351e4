"""`kvwatch lint`: somebody's own dashboards and rules against a vLLM version."""

import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import click

from kvwatch.cli.not_empty import PathName
from kvwatch.errors import SourceError
from kvwatch.files import bounded_text
from kvwatch.lint import Expression, Fault, judge
from kvwatch.lint_files import expressions, recorded
from kvwatch.promql import MadeOfVariables, NotPromQL, metric_name, parse, selectors
from kvwatch.versions import Version, parse_version, version_text
from kvwatch.vllm_names import Catalogue, Reader, catalogue

MAX_FILE_BYTES = 32 * 1024 * 1024
SUFFIXES = (".json", ".yaml", ".yml")


@click.command("lint")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=PathName(path_type=Path))
@click.option("--vllm-version", metavar="X.Y.Z", help="The version that runs; the newest known without it.")
@click.option("--output", "-o", type=click.Choice(("text", "json")), default="text", show_default=True, help="Format.")
@click.pass_context
def command(ctx: click.Context, *, files: tuple[Path, ...], vllm_version: str | None, output: str) -> None:
    """Find mistakes in your own dashboards and rules: metrics that your vLLM does not have, alerts that cannot fire.

    FILE is a Grafana dashboard (JSON), a rule file of Prometheus, a PrometheusRule, a ConfigMap that holds any of
    them, or a folder of such files. Needs promql-parser, the extra `lint`.

    Exit code 0: nothing found. 1: faults. 2: a file cannot be read.
    """
    from kvwatch.render.lint import lint_data, lint_text

    known = shipped_catalogue()
    version = parse_version(vllm_version) if vllm_version else known.last_release
    if version > known.last_release:
        newest = version_text(known.last_release)
        click.echo(
            f"vLLM {vllm_version} is newer than the newest known, {newest}; names are those of {newest}", err=True
        )
    queries, defined = _read(files)
    faults: list[Fault] = []
    judged = 0
    for query in queries:
        found = _judged(query, defined, known, version)
        if found is not None:
            judged += 1
            faults += found
    render = lint_text if output == "text" else lint_data
    shown = render(faults, version=version_text(version), expressions=judged)
    click.echo(shown if isinstance(shown, str) else json.dumps(shown, indent=2, ensure_ascii=False))
    ctx.exit(1 if faults else 0)


def shipped_catalogue() -> Catalogue:
    """The names that this kvwatch knows."""
    return catalogue(json.loads(resources.files("kvwatch").joinpath("data/vllm_metric_names.json").read_text("utf-8")))


def _judged(query: Expression, defined: set[str], known: Catalogue, version: Version) -> tuple[Fault, ...] | None:
    """The faults of a query; None where it does not read vLLM's metrics or cannot be judged."""
    if "vllm" not in query.text:
        return None
    try:
        tree = parse(query.text)
    except MadeOfVariables as error:
        click.echo(f"{query.file}: {query.where}: not judged: {error}", err=True)
        return None
    except NotPromQL as error:
        return (
            Fault(
                file=query.file,
                where=query.where,
                expression=query.text,
                rule="not_promql",
                why=f"Prometheus refuses it: {error}",
                instead="an expression that `promtool check rules` accepts",
            ),
        )
    reader = Reader(known, version)
    read = [one for one in selectors(tree) if reader.spoken_of(one) is not None]
    if all(metric_name(one) in defined for one in read):
        return None
    return judge(query, tree, known, version)


def _read(files: tuple[Path, ...]) -> tuple[list[Expression], set[str]]:
    """All queries of the files, and the names that rules among them record."""
    found: list[Expression] = []
    defined: set[str] = set()
    for path in _paths(files):
        documents = _documents(_text(path), str(path))
        mine = [query for document in documents for query in expressions(str(path), document, _inner(path))]
        if not any("vllm" in query.text for query in mine):
            click.echo(f"{path}: no query of vLLM's metrics", err=True)
        found += mine
        defined |= {name for document in documents for name in recorded(document)}
    return found, defined


def _paths(files: tuple[Path, ...]) -> Iterator[Path]:
    """The files, and those in the folders."""
    for path in files:
        if not path.is_dir():
            yield path
            continue
        inside = sorted(one for one in path.rglob("*") if one.suffix in SUFFIXES and one.is_file())
        if not inside:
            raise SourceError(f"{path}: a folder without {', '.join(SUFFIXES)} files")
        yield from inside


def _text(path: Path) -> str:
    try:
        return bounded_text(path, limit_bytes=MAX_FILE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{path}: cannot be read: {error}") from error


def _inner(path: Path) -> Any:
    return lambda text: _documents(text, str(path))


def _documents(text: str, name: str) -> list[Any]:
    """JSON or YAML -> its documents. Raises SourceError."""
    hint = "; of a Helm chart, lint the output of helm template" if "{{" in text else ""
    if text.lstrip().startswith(("{", "[")):
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SourceError(f"{name}: not JSON: {error}{hint}") from error
        return content if isinstance(content, list) else [content]
    import yaml

    from kvwatch.yaml_once import load_yaml_all

    try:
        return load_yaml_all(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SourceError(f"{name}: neither JSON nor YAML: {' '.join(str(error).split())}{hint}") from error
