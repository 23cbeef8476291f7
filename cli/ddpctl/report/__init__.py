"""The HTML report of a run, its plots, and the templates of HTML."""

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined


@cache
def environment() -> Environment:
    """Return the environment of the templates in this package, which escape each value."""
    return Environment(
        loader=PackageLoader("ddpctl.report", ""), autoescape=True, trim_blocks=True, undefined=StrictUndefined
    )
