"""The dashboard of all runs: the state of each run, and what the machines are used for."""

from dashboards.panels import new_board, number, q, rows_of, series, text_of

from ddpctl.monitoring.alerts import RUN, TRAINING, by_run

HERE = 'namespace=~"$namespace"'
LEGEND = "{{job_id}} ({{user}} {{run_uid}})"
ITS_BOARD = "/d/ddpctl-run?var-run=${__data.fields.job_id}&var-run_uid=${__data.fields.run_uid}"


def of(name: str, more: str = "") -> str:
    """Return an expression for the series ``name`` of all runs in the chosen namespaces."""
    return f"{name}{{{', '.join(filter(None, (HERE, more)))}}}"


def each(name: str) -> str:
    """Return an expression for a recorded series without its name, so that a table has one row per run."""
    return f"max by ({RUN}) ({of(name)})"


def of_run(operation: str, name: str) -> str:
    """Return an expression that aggregates a series of nodes or ranks over each run."""
    return by_run(operation, of(name))


def rate(name: str) -> str:
    """Return an expression for the growth of a counter per second."""
    return f"rate({of(name)}[$__rate_interval])"


NOW = [
    number(
        "How many runs train?",
        "short",
        "Runs that are training on at least one node.",
        q(f"count({of(TRAINING.name)} == 1) or vector(0)"),
    ),
    number("How many ranks run?", "short", "Running ranks of all runs.", q(f"sum({of('run:ddp_ranks_alive:sum')})")),
    number(
        "How many ranks are missing?",
        "short",
        "Ranks that the runs should have, minus those that run or have exited with 0.",
        q(
            f"sum({of_run('max', 'ddp_world_size_expected')} "
            f"- {of_run('sum', 'ddp_ranks_alive')} - {of_run('sum', 'ddp_ranks_done')})"
        ),
        red=1,
    ),
    number(
        "What share of the time is spent on training?",
        "percentunit",
        "Effective training time ratio of all current runs over all of their starts, weighted by ranks.",
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
        "Alerts that fire for any run.",
        q(f'count(ALERTS{{alertstate="firing", {HERE}}}) or vector(0)'),
        red=1,
    ),
    number(
        "How many nodes do not answer?",
        "short",
        "Targets that Prometheus cannot scrape.",
        q('sum(1 - up{job="ddp"}) or vector(0)'),
        red=1,
    ),
    rows_of(
        "How is each run doing?",
        "One row per run; its name links to its dashboard. skew: the slowest rank's step time, divided by the median.",
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
        "The alerts that fire for any run. docs/alerts.md says what to do about each one.",
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
        "Training samples of all ranks per second.",
        q(by_run("sum", rate("ddp_samples_total")), LEGEND),
    ),
    series(
        "Which run spends too little time on training?",
        "percentunit",
        "Effective training time ratio of the last hour.",
        q(of("run:ddp_productive:ratio1h"), LEGEND),
        top=1,
    ),
    series(
        "What do all ranks spend their time on?",
        "short",
        "The time of all ranks by activity, as a number of ranks: training new steps, or a cause of lost time.",
        q(f"sum({rate('ddp_productive_seconds_total')})", "training"),
        q(f"sum by (cause) ({rate('ddp_unproductive_seconds_total')})", "{{cause}}"),
        stacked=True,
    ),
    series(
        "Which run waits for a slow rank?",
        "suffix: x",
        "The slowest rank's own step time, divided by the median. 1: all ranks are equally fast.",
        q(of_run("max", "ddp_straggler_skew_ratio"), LEGEND),
    ),
    series(
        "Which run waits for data?",
        "percentunit",
        "Share of the step time.",
        q(of("run:ddp_step_phase:share5m", 'phase="data"'), LEGEND),
        top=1,
    ),
    series(
        "How old is each run's newest checkpoint?",
        "s",
        "Age of the newest checkpoint.",
        q(of("run:ddp_checkpoint_age_seconds:min"), LEGEND),
    ),
    series(
        "Which run restarts repeatedly?",
        "short",
        "Restarts since the run's nodes started.",
        q(by_run("max", f"sum without (reason) ({of('ddp_restarts_total')})"), LEGEND),
    ),
    series(
        "Are the GPUs busy?",
        "percentunit",
        "Share of the time in which a kernel ran, mean over the GPUs of a run's nodes. Needs a GPU.",
        q(of_run("avg", "ddp_device_utilization_ratio"), LEGEND),
        top=1,
    ),
]


def board() -> str:
    """Return the JSON of the dashboard."""
    description = "All training runs that Prometheus scrapes."
    made = new_board("ddpctl: all runs", "ddpctl-fleet", description, refresh="30s", since="now-6h")
    return text_of(made, {"Which runs need attention?": NOW, "What are the machines used for?": OVER_TIME})
