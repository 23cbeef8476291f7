"""The dashboard of one run: its health and speed, where its time goes, which rank is slow, what may be lost."""

from typing import Any

from dashboards import run_costs, run_speed
from dashboards.panels import SOURCE, number, q, rows_of, series, text_of, variable, word
from dashboards.selection import RUN, increase, of
from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import dashboard as models

OF_USER = 'namespace=~"$namespace", user=~"$user"'

HEALTH = [
    word(
        "What is it doing?",
        "The state of its nodes; several, while they differ. A restart shows as restarting.",
        q(f"max by (state) ({of('ddp_job_state')}) == 1", "{{state}}"),
    ),
    number(
        "How many ranks run?",
        "short",
        "Over all nodes; the second number: how many there should be.",
        q(of("run:ddp_ranks_alive:sum"), "running"),
        q(f"max({of('ddp_world_size_expected')})", "expected"),
    ),
    number(
        "When was the last step?",
        "s",
        "Seconds since any rank ended a step. A step's own time is normal; minutes are a hang.",
        q(f"time() - max({of('ddp_last_step_timestamp_seconds')} > 0)"),
        red=300,
    ),
    number(
        "How far is it?",
        "percentunit",
        "The last step by the step at which the training will be done.",
        q(f"max({of('ddp_last_step')}) / max({of('ddp_planned_steps')})"),
    ),
    number(
        "How long will it take?",
        "s",
        "The steps that are left, at the speed of the last five minutes; too long while the run is younger.",
        q(f"(max({of('ddp_planned_steps')}) - max({of('ddp_last_step')})) / max({of('run:ddp_steps:rate5m')} > 0)"),
    ),
    number(
        "What share of its time did it train?",
        "percentunit",
        "Goodput (effective training time ratio) over all starts of the run: seconds of new steps by all seconds.",
        q(of("run:ddp_productive:ratio")),
        red=0.8,
        below=True,
    ),
    rows_of(
        "Which alerts fire?",
        "What Prometheus finds wrong with this run; empty is good. docs/alerts.md says what to do about each.",
        {"firing": ("none", q(f'ALERTS{{alertstate="firing", {RUN}, run_uid=~"$run_uid|"}}'))},
        hidden=(
            "Time",
            "Value",
            "__name__",
            "alertstate",
            "job",
            "launcher",
            "namespace",
            "job_id",
            "run_uid",
            "user",
            "project",
        ),
        height=5,
    ),
    series(
        "Does the loss fall?",
        "short",
        "Mean loss of the last epoch over all ranks; of your own script, the last that rank 0 reported.",
        q(f"max({of('ddp_loss')})", "loss"),
        width=8,
    ),
    series(
        "How good is it on data that it has not seen?",
        "percentunit",
        "Share of held-out samples that were classified rightly.",
        q(f"max by (split) ({of('ddp_eval_accuracy_ratio')})", "{{split}}"),
        width=8,
        top=1,
    ),
    series(
        "Do the gradients stay sane?",
        "short",
        "Norm of the gradient over all parameters; a jump comes before a loss that is no number.",
        q(f"max({of('ddp_grad_norm')})", "gradient norm"),
        width=8,
    ),
]


def board() -> str:
    """Its JSON."""
    made = (
        dashboard.Dashboard("ddpctl: a run")
        .uid("ddpctl-run")
        .description("One distributed training. Made by ddpctl; `make specs` in its checkout writes it anew.")
        .tags(["ddpctl"])
        .editable()
        .refresh("10s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .link(dashboard.DashboardLink("all runs").type(models.DashboardLinkType.LINK).url("/d/ddpctl-fleet"))
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(variable("namespace", "Namespace", "label_values(ddp_run_info, namespace)", every=True))
        .with_variable(
            variable("user", "User", 'label_values(ddp_run_info{namespace=~"$namespace"}, user)', every=True)
        )
        .with_variable(variable("run", "Run", f"label_values(ddp_run_info{{{OF_USER}}}, job_id)", every=False))
        .with_variable(
            variable("run_uid", "Id", f'label_values(ddp_run_info{{{OF_USER}, job_id="$run"}}, run_uid)', every=False)
        )
        .with_variable(dashboard.TextBoxVariable("peak").label("Peak TFLOP/s a rank").default_value("989"))
        .annotation(restarts())
    )
    for title, panels in {
        "Is it healthy?": HEALTH,
        "How fast is it?": run_speed.SPEED,
        "Where does the time go?": run_speed.TIME,
        "Which rank is slow?": run_speed.RANKS,
        "Is the checkpoint fresh?": run_costs.CHECKPOINT,
        "What did it lose?": run_costs.LOST,
        "What do the machines do?": run_costs.MACHINES,
    }.items():
        made = made.with_row(dashboard.Row(title))
        for panel in panels:
            made = made.with_panel(panel)
    return text_of(made)


def restarts() -> Any:
    """A line through every graph where the ranks were started again."""
    query = f"sum by (reason) ({increase('ddp_restarts_total', window='1m')}) > 0"
    mark = dashboard.AnnotationQuery().name("restarts").datasource(SOURCE).enable(True).icon_color("red")
    return mark.expr(query)
