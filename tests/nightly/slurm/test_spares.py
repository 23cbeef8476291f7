"""An allocation of a real Slurm that is larger than the job's nodes: a spare takes the place of a lost node."""

import json
from pathlib import Path

import pytest
from tests.cluster import slurm_lab
from tests.cluster.slurm_site import FILE, LONG, SLOW, Site, clear

pytestmark = [
    pytest.mark.skipif(bool(slurm_lab.missing()), reason=slurm_lab.missing() or "-"),
    pytest.mark.timeout(600),
]


def test_spare_takes_the_place_of_a_lost_node_and_slurm_lets_the_job_run(tmp_path: Path) -> None:
    with slurm_lab.cluster(3, prefix="ddpspare") as slurm:
        site = Site(slurm=slurm, folder=tmp_path)
        text = Path(FILE).read_text().replace("  nodes: 2\n", "  nodes: 2\n  spares: 1\n", 1)
        (tmp_path / "spares.yaml").write_text(text)
        site.ddpctl("launch", "-f", "spares.yaml", "--name", "spared", "--gpus", "1", "--detach", *SLOW, *LONG,
                    "--checkpoint-every", "10")  # fmt: skip
        job = site.job("spared")
        site.until_log("spared", r"epoch  2/")
        assert "NumNodes=3 " in site.sh("scontrol", "show", "job", job)
        reached = site.checkpoints("spared")[-1]
        slurm.nodes[1].cut()
        slurm.nodes[1].kill()  # its slurmd, its ddprun and its rank
        site.until_log("spared", r"continuing at step")
        site.until_log("spared", r"epoch  \d+/2000(.|\n)*started \(attempt 2\)(.|\n)*epoch  \d+/2000")
        status = json.loads(site.ddpctl("status", "spared", "--json"))
        spare = status["node_reports"][2]["state"]
        assert (status["state"], spare["node"], spare["attempt"]) == ("training", 1, 2), status
        assert site.checkpoints("spared")[-1] >= reached
        assert site.state(job) == "RUNNING"
        site.ddpctl("stop", "spared")
        clear(slurm)
