"""``ddpctl bench`` over four SSH machines out of namespaces: what is sound is not named, a slow link and node are."""

import json
import subprocess
from collections.abc import Iterator

import pytest
from tests.cluster.ssh_cluster import Lab, cluster
from tests.cluster.ssh_lab import ROOT_MISSING

pytestmark = [pytest.mark.skipif(bool(ROOT_MISSING), reason=ROOT_MISSING or ""), pytest.mark.timeout(1800)]
BUCKET = "tbf rate 40mbit burst 32kb latency 200ms"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with cluster(tmp_path_factory.mktemp("bench"), boxes_wanted=4) as made:
        made.write()
        yield made


def bench(lab: Lab) -> dict:
    """Its result; its exit code is that of the result, and it leaves no run."""
    done = lab.ddpctl("bench", "--nodes", "4", "--gpus", "1", "--sizes", "64K", "--json", timeout=300)
    assert done.returncode in (0, 69), done.stderr
    found = json.loads(done.stdout)
    assert found["code"] == done.returncode
    assert len(found["links"]) == 6
    assert all(row["wrong"] == {} for row in found["collectives"])
    assert json.loads(lab.ddpctl("ps", "--json").stdout) == []
    return found


def tc(lab: Lab, machine: int, *lines: str) -> None:
    for line in lines:
        argv = ["ip", "netns", "exec", lab.machines[machine].namespace, "tc", *line.split()]
        subprocess.run(argv, check=True, timeout=10, capture_output=True)


def test_a_sound_target_a_slow_link_and_a_slow_node(lab: Lab) -> None:
    sound = bench(lab)
    assert (sound["slow"], sound["findings"], sound["code"]) == ([], [], 0)
    assert "last" not in sound
    tc(
        lab,
        1,
        "qdisc add dev eth0 root handle 1: htb default 1",
        *(f"class add dev eth0 parent 1: classid 1:{number} htb rate 10gbit quantum 60000" for number in (1, 2)),
        f"qdisc add dev eth0 parent 1:2 {BUCKET}",
        f"filter add dev eth0 parent 1: protocol ip u32 match ip dst {lab.machines[3].address}/32 flowid 1:2",
    )
    link = bench(lab)
    assert link["slow"] == [[1, 3]], (link["links"], link["suspects"])
    (again,) = (one for one in link["suspects"] if one["members"] == [1, 3])
    assert again["figures"][0][0] < 0.012  # 5 MB/s there, and back without a limit
    assert (link["code"], link["last"]["code"]) == (69, 0)
    tc(lab, 1, "qdisc del dev eth0 root")
    tc(lab, 2, f"qdisc add dev eth0 root {BUCKET}")
    node = bench(lab)
    assert node["slow"] == [[2]], (node["links"], node["suspects"])
    (finding,) = node["findings"]
    assert finding.startswith("node 2 (node-3) is slow")
