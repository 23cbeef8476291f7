"""The dashboard of one run: its health and speed, how it spends its time, slow ranks, and what it may lose."""

from typing import Any

from dashboards import run_costs, run_speed
from dashboards.panels import SOURCE, new_board, number, q, rows_of, series, text_of, variable, word
from dashboards.selection import RUN, increase, of
from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import dashboard as models

OF_USER = 'namespace=~"$namespace", user=~"$user"'

HEALTH = [
    word(
        "What is it doing?",
        "The state of the run's nodes. Several states are shown while the nodes differ.",
        q(f"max by (state) ({of('ddp_job_state')}) == 1", "{{state}}"),
    ),
    number(
        "How many ranks run?",
        "short",
        "Running ranks of all nodes, and the number of ranks that the run should have.",
        q(of("run:ddp_ranks_alive:sum"), "running"),
        q(f"max({of('ddp_world_size_expected')})", "expected"),
    ),
    number(
        "How long ago was the last step?",
        "s",
        "Time since a rank completed a step. Much more than the time of a step means that the ranks hang.",
        q(f"time() - max({of('ddp_last_step_timestamp_seconds')} > 0)"),
        red=300,
    ),
    number(
        "How far has it got?",
        "percentunit",
        "The last step, divided by the number of planned steps.",
        q(f"max({of('ddp_last_step')}) / max({of('ddp_planned_steps')})"),
    ),
    number(
        "How long will it take?",
        "s",
        "The remaining steps at the speed of the last five minutes. Too long in the first five minutes of a run.",
        q(f"(max({of('ddp_planned_steps')}) - max({of('ddp_last_step')})) / max({of('run:ddp_steps:rate5m')} > 0)"),
    ),
    number(
        "What share of the time was spent on training?",
        "percentunit",
        "Effective training time ratio over all starts of the run: time spent on new steps, divided by the total time.",
        q(of("run:ddp_productive:ratio")),
        red=0.8,
        below=True,
    ),
    rows_of(
        "Which alerts fire?",
        "The alerts that fire for this run. docs/alerts.md says what to do about each one.",
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
        "ddptrain: mean loss of the last epoch over all ranks. Your own script: the highest last loss of its ranks.",
        q(f"max({of('ddp_loss')})", "loss"),
        width=8,
    ),
    series(
        "How accurate is it on held-out data?",
        "percentunit",
        "Share of held-out samples that were classified correctly.",
        q(f"max by (split) ({of('ddp_eval_accuracy_ratio')})", "{{split}}"),
        width=8,
        top=1,
    ),
    series(
        "How large are the gradients?",
        "short",
        "Norm of the gradient over all parameters. A jump often precedes a loss that is NaN.",
        q(f"max({of('ddp_grad_norm')})", "gradient norm"),
        width=8,
    ),
]


def board() -> str:
    """Return the JSON of the dashboard."""
    made = new_board("ddpctl: a run", "ddpctl-run", "One distributed training run.", refresh="10s", since="now-1h")
    made = made.link(dashboard.DashboardLink("all runs").type(models.DashboardLinkType.LINK).url("/d/ddpctl-fleet"))
    for name, label, values, every in (
        ("user", "User", 'label_values(ddp_run_info{namespace=~"$namespace"}, user)', True),
        ("run", "Run", f"label_values(ddp_run_info{{{OF_USER}}}, job_id)", False),
        ("run_uid", "Id", f'label_values(ddp_run_info{{{OF_USER}, job_id="$run"}}, run_uid)', False),
    ):
        made = made.with_variable(variable(name, label, values, every=every))
    made = made.with_variable(dashboard.TextBoxVariable("peak").label("Peak TFLOP/s a rank").default_value("989"))
    rows = {
        "Is it healthy?": HEALTH,
        "How fast is it?": run_speed.SPEED,
        "Where does the time go?": run_speed.TIME,
        "Which rank is slow?": run_speed.RANKS,
        "Is the checkpoint fresh?": run_costs.CHECKPOINT,
        "What was lost to failures?": run_costs.LOST,
        "How busy are the machines?": run_costs.MACHINES,
    }
    return text_of(made.annotation(restarts()), rows)


def restarts() -> Any:
    """Return an annotation: a line in every graph at each time when the ranks were started again."""
    query = f"sum by (reason) ({increase('ddp_restarts_total', window='1m')}) > 0"
    mark = dashboard.AnnotationQuery().name("restarts").datasource(SOURCE).enable(True).icon_color("red")
    return mark.expr(query)
