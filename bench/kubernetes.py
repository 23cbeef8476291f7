"""Render 10,000 generated configurations for Kubernetes, and check every option against every schema.

    python bench/kubernetes.py [--configurations N]

Prints how many configurations were refused, and how many were rendered as each kind of object. In each of these cases,
an assertion fails and names the configuration:

- rendering ends with a traceback
- the configuration is refused, but the error does not name its line
- a schema or Pod Security refuses the manifest
- an argument or an environment variable would reach the container with a changed value

Needs no cluster.
"""

import collections
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import measuring

sys.path[:0] = [str(Path(__file__).parent.parent)]

from hypothesis import HealthCheck, given, seed, settings  # noqa: E402
from tests.nightly.ddpctl.kubernetes_hostile import CANARY, CONFIGURATIONS  # noqa: E402
from tests.nightly.ddpctl.kubernetes_trial import trial  # noqa: E402
from tests.unit.ddpctl.kubernetes_judges import VERSIONS, faults  # noqa: E402
from tests.unit.ddpctl.test_kubernetes_manifests import cases, objects  # noqa: E402


def generated(number: int) -> collections.Counter[str]:
    counted: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:

        @seed(20261120)
        @settings(max_examples=number, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(CONFIGURATIONS)
        def one(configuration: tuple[dict[str, Any], dict[str, Any]]) -> None:
            counted[trial(Path(folder), *configuration)] += 1

        one()
        assert not list(Path(folder).rglob(f"*{CANARY}*"))
    return counted


def matrix() -> tuple[int, int]:
    number = 0
    for case in cases(all_pairs=True):
        for thing in objects(*case.values):
            assert faults(thing) == [], (case.id, thing["kind"])
            number += 1
    return len(cases(all_pairs=True)), number


def main() -> None:
    parser = measuring.options(__doc__)
    parser.add_argument("--configurations", type=int, default=10_000)
    options = parser.parse_args()
    began = time.monotonic()
    counted = generated(options.configurations)
    rendered = sum(counted.values()) - counted["refused"]
    print(
        f"{sum(counted.values())} configurations in {time.monotonic() - began:.0f} s: "
        f"{counted['refused']} refused by line, "
        f"{rendered} rendered ({', '.join(f'{n} {kind}' for kind, n in counted.most_common() if kind != 'refused')})"
    )
    began = time.monotonic()
    cases, things = matrix()
    print(
        f"{cases} cases of the matrix, {things} objects, Kubernetes {VERSIONS[0]} to {VERSIONS[-1]} "
        f"and the CRDs, in {time.monotonic() - began:.0f} s: no fault"
    )


if __name__ == "__main__":
    main()
