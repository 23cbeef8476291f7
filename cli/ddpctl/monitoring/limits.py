"""From where on an alert fires: what a site may set otherwise, each with its unit."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from ddpctl.errors import UsageError
from ddpctl.fields import fields_of
from ddpctl.spec import Doc
from ddpctl.words import quote, unknown

DAYS = 30 * 86400  # a condition that takes longer to come true helps nobody


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The numbers in the alerts' conditions."""

    hold: Annotated[
        float | None, Doc("Seconds for which every condition must hold; null: each alert's own."), Ge(0), Le(86400)
    ] = None
    first_step: Annotated[float, Doc("Seconds from the start to the first step."), Ge(1), Le(DAYS)] = 900.0
    stalled_step: Annotated[float, Doc("Seconds without a step, in a run that has taken some."), Ge(1), Le(DAYS)] = (
        180.0
    )
    heartbeat: Annotated[float, Doc("Seconds without a sign of life from a rank."), Ge(1), Le(DAYS)] = 180.0
    skew: Annotated[float, Doc("The slowest rank's own time of a step, by the median."), Ge(1), Le(100)] = 1.25
    data_share: Annotated[float, Doc("Share of a step that waits for data."), Ge(0), Le(1)] = 0.3
    checkpoint_age: Annotated[float, Doc("Seconds since the last checkpoint, or since the start."), Ge(1), Le(DAYS)] = (
        3600.0
    )
    restarts: Annotated[float, Doc("Restarts within an hour."), Ge(1), Le(1000)] = 3.0
    ettr: Annotated[float, Doc("Share of the last hour in which steps were taken."), Ge(0), Le(1)] = 0.8
    clock_offset: Annotated[float, Doc("Seconds between a node's clock and node 0's."), Ge(0), Le(86400)] = 1.0


def parse(settings: Iterable[str]) -> Limits:
    """``checkpoint_age=7200`` and the like. Raises UsageError."""
    known = fields_of(Limits)
    given: dict[str, float] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if name not in known:
            raise UsageError(f"--limit: {unknown(name, 'limit', tuple(known))}")
        field = known[name]
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not equals or not field.low <= value <= field.high:  # also what is no number
            raise UsageError(f"--limit {name}: {quote(text)} is not allowed: a number {field.range_words}")
        given[name] = value
    return Limits(**given)
