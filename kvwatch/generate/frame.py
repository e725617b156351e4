"""What every dashboard has: address, selection, links to the others, marks for alerts and restarts."""

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import dashboard as models

from kvwatch.generate import TAG
from kvwatch.generate.panels import SOURCE
from kvwatch.generate.queries import AGENT_STATUS, RATE, alerts, names
from kvwatch.recording import selectors
from kvwatch.vllm_metrics import GENERATION_TOKENS, PROCESS_START_TIME, REQUESTS_RUNNING

FLEET, ENGINE, INCIDENT = (f"{TAG}-{name}" for name in ("fleet", "engine", "incident"))
EVERYTHING = ".*"
"""What "All" stands for: it matches an absent label too."""


def framed(uid: str, title: str, about: str, *, since: str, one_instance: bool = False) -> dashboard.Dashboard:
    """An empty dashboard over the last `since`, such as 1h; of one instance, or of all until some are chosen."""
    builder = (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(about)
        .tags([TAG, "vllm"])
        .time(f"now-{since}", "now")
        .timezone("browser")
        .refresh("30s")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("kvwatch")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .include_vars(True)
            .keep_time(True)
        )
    )
    for variable in _variables(one_instance=one_instance):
        builder.with_variable(variable)
    for annotation in _annotations():
        builder.annotation(annotation)
    return builder


def _variables(*, one_instance: bool) -> list[dashboard.DatasourceVariable | dashboard.QueryVariable]:
    engines = names(REQUESTS_RUNNING)
    of_instance = f'{{{engines},job=~"$job",instance=~"$instance"}}'
    return [
        dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"),
        _choice("job", "Job", f"label_values({{{engines}}}, job)"),
        _choice("model_name", "Model", f'label_values({{{engines},job=~"$job"}}, model_name)'),
        _choice(
            "instance",
            "Instance",
            f'label_values({{{engines},job=~"$job",model_name=~"$model_name"}}, instance)',
            one=one_instance,
        ),
        _choice("engine", "Engine", f"label_values({of_instance}, engine)"),
        # The pod of the instance has its agent beside it. Without pods it is empty, which matches an absent label.
        _choice("pod", "Agent's pod", f"label_values({of_instance}, pod)", one=one_instance),
        _choice("target", "Agent's target", f'label_values({AGENT_STATUS}{{pod=~"$pod"}}, target)'),
    ]


def _choice(name: str, label: str, query: str, *, one: bool = False) -> dashboard.QueryVariable:
    """A list of values: any number of them and at first all, or one, at first the first."""
    found = (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query({"query": query, "refId": f"kvwatch-{name}"})
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.NATURAL_ASC)
        .allow_custom_value(True)
    )
    if one:
        return found.multi(False).include_all(False)
    everything = models.VariableOption(selected=True, text=["All"], value=["$__all"])
    return found.multi(True).include_all(True).all_value(EVERYTHING).current(everything)


def _annotations() -> list[dashboard.AnnotationQuery]:
    return [
        _marks("Critical alerts", "red", alerts("critical")),
        _marks("Warnings", "orange", alerts("warning"), enabled=False),
        _marks("Restarts", "blue", restarts()),
    ]


def _marks(name: str, color: str, expr: str, *, enabled: bool = True) -> dashboard.AnnotationQuery:
    return dashboard.AnnotationQuery().name(name).datasource(SOURCE).enable(enabled).icon_color(color).expr(expr)


def restarts() -> str:
    """A sample wherever an engine restarted: its process start time moved, or its counters fell."""
    chosen = 'job=~"$job",instance=~"$instance"'
    counters = "".join(f"\n  or resets({one}[{RATE}])" for one in selectors(GENERATION_TOKENS, matcher=chosen))
    return f"sum by (job, instance) (\n  changes({PROCESS_START_TIME}{{{chosen}}}[{RATE}]){counters}\n) > 0"
