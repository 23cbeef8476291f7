"""PromQL expressions for the run that the reader has chosen."""

RUN = 'namespace=~"$namespace", job_id="$run"'
UID = 'run_uid="$run_uid"'
RECORDED = "run:"  # the names of the recording rules begin with this


def of(name: str, more: str = "") -> str:
    """Return an expression for the series ``name`` of the chosen run. ``more`` contains additional label matchers."""
    if name.startswith(RECORDED):
        return f"{name}{{{_matchers(RUN, UID, more)}}}"
    return _of_its_nodes(f"{name}{{{_matchers(RUN, more)}}}")


def rate(name: str, more: str = "") -> str:
    """Return an expression for the growth of a counter per second. The window fits the scrape interval."""
    return _of_its_nodes(f"rate({name}{{{_matchers(RUN, more)}}}[$__rate_interval])")


def increase(name: str, more: str = "", window: str = "$__range") -> str:
    """Return an expression for the growth of a counter within ``window`` or, by default, the visible time range."""
    return _of_its_nodes(f"increase({name}{{{_matchers(RUN, more)}}}[{window}])")


def _of_its_nodes(series: str) -> str:
    """Keep only the series of this run's nodes. Another run may have the same name (see ddp_run_info)."""
    return f"({series} and on (namespace, job_id, instance) ddp_run_info{{{RUN}, {UID}}})"


def _matchers(*parts: str) -> str:
    return ", ".join(filter(None, parts))
