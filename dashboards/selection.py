"""The run that the reader chose, inside an expression."""

RUN = 'namespace=~"$namespace", job_id="$run"'


def of(name: str, more: str = "") -> str:
    """The series of that name of the chosen run; ``more``: further matchers."""
    return f"{name}{{{', '.join(filter(None, (RUN, more)))}}}"


def rate(name: str, more: str = "") -> str:
    """How fast they grow, a second; the window fits the scrape interval and the width of the graph."""
    return f"rate({of(name, more)}[$__rate_interval])"


def increase(name: str, more: str = "") -> str:
    """How much they grew within the time that the reader sees."""
    return f"increase({of(name, more)}[$__range])"
