"""A patch in the file has the types of JSON."""

from pathlib import Path

from tests.unit.ddpctl.test_kubernetes_validation import GOOD, load


def test_a_patch_in_the_file_has_the_types_of_json(tmp_path: Path) -> None:
    spec = "{hostNetwork: true, priority: 5, a: 0.5, b: '5', c: null, d: yes, e: 010, f: [1, {g: ~}], h: 2026-11-27}"
    pod = load(tmp_path, GOOD.replace("kubernetes}", f"kubernetes, pod: {{spec: {spec}}}}}")).options.pod
    assert pod == {
        "spec": {
            "hostNetwork": True,
            "priority": 5,
            "a": 0.5,
            "b": "5",
            "c": None,
            "d": "yes",
            "e": "010",
            "f": [1, {"g": None}],
            "h": "2026-11-27",
        }
    }
