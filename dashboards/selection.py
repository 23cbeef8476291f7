"""PromQL expressions for the run that the reader has chosen."""

RUN = 'namespace=~"$namespace", job_id="$run"'
UID = 'run_uid="$run_uid"'
RECORDED = "run:"  # how the names of what the rules record for each run begin


def of(name: str, more: str = "") -> str:
    """Return an expression for the series ``name`` of the chosen run. ``more`` contains additional label matchers."""
    if name.startswith(RECORDED):
        return f"{name}{{{_matchers(RUN, UID, more)}}}"
    return _of_its_nodes(f"{name}{{{_matchers(RUN, more)}}}")


def rate(name: str, more: str = "") -> str:
    """Return an expression for their growth per second. The window fits the scrape interval and the width of the graph."""
    return _of_its_nodes(f"rate({name}{{{_matchers(RUN, more)}}}[$__rate_interval])")


def increase(name: str, more: str = "", window: str = "$__range") -> str:
    """Return an expression for their growth within ``window`` or, by default, within the visible time range."""
    return _of_its_nodes(f"increase({name}{{{_matchers(RUN, more)}}}[{window}])")


def _of_its_nodes(series: str) -> str:
    """Those of the run's own nodes: another run may have its name, and only a node's ddp_run_info says which it is."""
    return f"({series} and on (namespace, job_id, instance) ddp_run_info{{{RUN}, {UID}}})"


def _matchers(*parts: str) -> str:
    return ", ".join(filter(None, parts))
