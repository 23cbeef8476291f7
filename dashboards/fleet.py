"""The dashboard of all runs: which one needs a look, and what the machines are used for."""

from typing import Any

from dashboards.panels import number, q, rows_of, series, text_of, variable
from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import dashboard as models

from ddpctl.monitoring.alerts import RUN, TRAINING, by_run

HERE = 'namespace=~"$namespace"'
LEGEND = "{{job_id}} ({{user}} {{run_uid}})"
ITS_BOARD = "/d/ddpctl-run?var-run=${__data.fields.job_id}&var-run_uid=${__data.fields.run_uid}"


def of(name: str, more: str = "") -> str:
    """The series of that name of all runs in the chosen namespaces."""
    return f"{name}{{{', '.join(filter(None, (HERE, more)))}}}"


def each(name: str) -> str:
    """A recorded series without its name, by which rows of a table would be told apart."""
    return f"max by ({RUN}) ({of(name)})"


def of_run(operation: str, name: str) -> str:
    """A node's or a rank's series, aggregated over each run."""
    return by_run(operation, of(name))


def rate(name: str) -> str:
    """How fast they grow, a second."""
    return f"rate({of(name)}[$__rate_interval])"


NOW = [
    number(
        "How many runs train?",
        "short",
        "Runs of which a node is in the state training.",
        q(f"count({of(TRAINING.name)} == 1) or vector(0)"),
    ),
    number("How many ranks run?", "short", "Over all runs.", q(f"sum({of('run:ddp_ranks_alive:sum')})")),
    number(
        "How many ranks are missing?",
        "short",
        "Those that runs should have, less those that run or have ended with 0.",
        q(
            f"sum({of_run('max', 'ddp_world_size_expected')} "
            f"- {of_run('sum', 'ddp_ranks_alive')} - {of_run('sum', 'ddp_ranks_done')})"
        ),
        red=1,
    ),
    number(
        "What share of the time do they train?",
        "percentunit",
        "Goodput of all runs that are there, each over all of its starts, by its ranks.",
        q(
            f"sum({of('ddp_productive_seconds_total')}) "
            f"/ (sum({of('ddp_productive_seconds_total')}) + sum({of('ddp_unproductive_seconds_total')}))"
        ),
        red=0.8,
        below=True,
    ),
    number(
        "How many alerts fire?",
        "short",
        "Of all runs.",
        q(f'count(ALERTS{{alertstate="firing", {HERE}}}) or vector(0)'),
        red=1,
    ),
    number(
        "How many nodes do not answer?",
        "short",
        "Targets that Prometheus knows and cannot scrape.",
        q('sum(1 - up{job="ddp"}) or vector(0)'),
        red=1,
    ),
    rows_of(
        "How is each run?",
        "A row a run; its name leads to its dashboard. Behind: ranks that are missing. Skew: slowest rank by median.",
        {
            "ranks": ("short", q(each("run:ddp_ranks_alive:sum"))),
            "step": ("short", q(of_run("max", "ddp_last_step"))),
            "done": (
                "percentunit",
                q(f"{of_run('max', 'ddp_last_step')} / {of_run('max', 'ddp_planned_steps')}"),
            ),
            "samples/s": ("short", q(each("run:ddp_samples:rate5m"))),
            "goodput": ("percentunit", q(each("run:ddp_productive:ratio"))),
            "skew": ("short", q(of_run("max", "ddp_straggler_skew_ratio"))),
            "checkpoint age": ("s", q(each("run:ddp_checkpoint_age_seconds:min"))),
            "restarts": ("short", q(by_run("max", f"sum without (reason) ({of('ddp_restarts_total')})"))),
        },
        link=ITS_BOARD,
        height=10,
    ),
    rows_of(
        "Which alerts fire?",
        "Empty is good. docs/alerts.md says what to do about each.",
        {"firing": ("none", q(f'ALERTS{{alertstate="firing", {HERE}}}'))},
        hidden=("Time", "Value", "__name__", "alertstate", "job", "launcher"),
        link=ITS_BOARD,
        height=6,
    ),
]

OVER_TIME = [
    series(
        "How fast is each run?",
        "suffix: /s",
        "Training samples of all ranks a second.",
        q(by_run("sum", rate("ddp_samples_total")), LEGEND),
    ),
    series(
        "Which run trains for too little of its time?",
        "percentunit",
        "Goodput of the last hour.",
        q(of("run:ddp_productive:ratio1h"), LEGEND),
        top=1,
    ),
    series(
        "What does the time of all runs go to?",
        "short",
        "Ranks that were busy with new steps, and with what was none, by cause: ranks, as if each did one thing only.",
        q(f"sum({rate('ddp_productive_seconds_total')})", "training"),
        q(f"sum by (cause) ({rate('ddp_unproductive_seconds_total')})", "{{cause}}"),
        stacked=True,
    ),
    series(
        "Which run waits for a slow rank?",
        "suffix: x",
        "The slowest rank's own time of a step by the median: 1 is even.",
        q(of_run("max", "ddp_straggler_skew_ratio"), LEGEND),
    ),
    series(
        "Which run waits for data?",
        "percentunit",
        "Share of the steps.",
        q(of("run:ddp_step_phase:share5m", 'phase="data"'), LEGEND),
        top=1,
    ),
    series(
        "Which run would lose much?",
        "s",
        "Age of the newest checkpoint.",
        q(of("run:ddp_checkpoint_age_seconds:min"), LEGEND),
    ),
    series(
        "Which run starts again and again?",
        "short",
        "Restarts since its nodes started.",
        q(by_run("max", f"sum without (reason) ({of('ddp_restarts_total')})"), LEGEND),
    ),
    series(
        "Are the GPUs busy?",
        "percentunit",
        "Mean over the GPUs of each run's nodes of the time in which a kernel ran. Needs a GPU.",
        q(of_run("avg", "ddp_device_utilization_ratio"), LEGEND),
        top=1,
    ),
]


def board() -> str:
    """Its JSON."""
    made: Any = (
        dashboard.Dashboard("ddpctl: all runs")
        .uid("ddpctl-fleet")
        .description(
            "Every training that Prometheus sees. Made by ddpctl; `make specs` in its checkout writes it anew."
        )
        .tags(["ddpctl"])
        .editable()
        .refresh("30s")
        .time("now-6h", "now")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(variable("namespace", "Namespace", "label_values(ddp_run_info, namespace)", every=True))
    )
    for title, panels in {"What needs a look?": NOW, "What are the machines used for?": OVER_TIME}.items():
        made = made.with_row(dashboard.Row(title))
        for panel in panels:
            made = made.with_panel(panel)
    return text_of(made)
