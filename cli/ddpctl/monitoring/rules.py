"""Recording rules: what dashboards and alerts ask for again and again, worked out once.

Named as Prometheus advises, level:metric:operation. A run is what has one ``job_id`` and, on Kubernetes, one
``namespace``; nodes and ranks are added up.
"""

from dataclasses import dataclass

RUN = "namespace, job_id"  # what tells runs apart; elsewhere than on Kubernetes there is no namespace


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A series that Prometheus works out; ``help`` is for a reader of the file."""

    name: str
    expr: str
    help: str


def share(part: str, whole: str, *, keep: str = "", window: str = "5m") -> str:
    """How much of a run's ``whole`` seconds were ``part``, over a window."""
    of = f"sum by ({RUN}) (rate({whole}[{window}]))"
    if keep:
        return f"sum by ({RUN}, {keep}) (rate({part}[{window}]))\n/ ignoring ({keep}) group_left ()\n{of}"
    return f"sum by ({RUN}) (rate({part}[{window}]))\n/\n{of}"


STEPS = Recording(
    name="run:ddp_steps:rate5m",
    expr=f"max by ({RUN}) (rate(ddp_steps_total[5m]))",
    help="Optimizer steps a second.",
)
SAMPLES = Recording(
    name="run:ddp_samples:rate5m",
    expr=f"sum by ({RUN}) (rate(ddp_samples_total[5m]))",
    help="Training samples a second, over all ranks.",
)
STEP_SECONDS = Recording(
    name="run:ddp_step_duration_seconds:mean5m",
    expr=share("ddp_step_duration_seconds_sum", "ddp_step_duration_seconds_count"),
    help="Mean time of a step.",
)
PHASES = Recording(
    name="run:ddp_step_phase:share5m",
    expr=share("ddp_step_phase_seconds_total", "ddp_step_phase_seconds_total", keep="phase"),
    help="Share of the steps' time by phase, 0 to 1.",
)
PRODUCTIVE = Recording(
    name="run:ddp_productive:ratio",
    expr=f"""\
sum by ({RUN}) (ddp_productive_seconds_total)
/
(
  sum by ({RUN}) (ddp_productive_seconds_total)
  + sum by ({RUN}) (ddp_unproductive_seconds_total)
)""",
    help="Effective training time ratio since the start: productive / (productive + unproductive) seconds.",
)
PRODUCTIVE_LATELY = Recording(
    name="run:ddp_productive:ratio1h",
    expr=f"""\
sum by ({RUN}) (rate(ddp_productive_seconds_total[1h]))
/
(
  sum by ({RUN}) (rate(ddp_productive_seconds_total[1h]))
  + sum by ({RUN}) (rate(ddp_unproductive_seconds_total[1h]))
)""",
    help="The same over the last hour.",
)
CHECKPOINT_AGE = Recording(
    name="run:ddp_checkpoint_age_seconds:min",
    expr=f"""\
time()
- max by ({RUN}) (ddp_checkpoint_last_success_timestamp_seconds > 0 or ddp_job_start_timestamp_seconds)
and on ({RUN}) ddp_checkpoint_last_success_timestamp_seconds""",
    help="Seconds since the last whole checkpoint, or since the start while there is none.",
)
RANKS_ALIVE = Recording(
    name="run:ddp_ranks_alive:sum",
    expr=f"sum by ({RUN}) (ddp_ranks_alive)",
    help="Ranks that are running, over all nodes.",
)

MODEL_FLOPS = Recording(
    name="run:ddp_model_flops:rate5m",
    expr=f"sum by ({RUN}) (rate(ddp_model_flops_total[5m]))",
    help="The model's floating-point operations a second, over all ranks; by the peak of the GPUs: utilisation.",
)

RECORDINGS: tuple[Recording, ...] = tuple(value for value in globals().values() if isinstance(value, Recording))
