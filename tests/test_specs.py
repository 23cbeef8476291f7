"""The checked-in specs are what ``ddpctl render`` makes of examples/; ``make specs`` writes them anew."""

import sys
from pathlib import Path

import pytest

from ddpctl import config, launch, targets

ROOT = Path(__file__).parent.parent
SPECS = {"examples/digits.local.sh": ("examples/digits.yaml", "here")}


def render(file: str, target: str) -> str:
    settings = config.load(file=ROOT / file, profile=None, target=target, overrides={}, kinds=targets.kinds())
    request = launch.Request(
        job=settings.job,
        target=settings.target,
        kind=settings.kind,
        options=settings.options,
        why=settings.why,
        cwd=".",
    )
    plan = launch.plan_of(request, settings.job.name, Path())
    return targets.make(settings.kind, settings.options).render(plan)


@pytest.mark.parametrize("spec", SPECS)
def test_the_checked_in_spec_is_the_rendered_one(spec: str) -> None:
    assert (ROOT / spec).read_text() == render(*SPECS[spec]), f"{spec} is old: make specs"


if __name__ == "__main__":
    for spec, source in SPECS.items():
        (ROOT / spec).write_text(render(*source))
        print(f"wrote {spec}", file=sys.stderr)
