"""Fresh Debian machines become nodes: the commands of ansible/README.md, in its order, and what they leave there.

The machines are bare_lab's: without systemd and without a kernel of their own, so that what needs these (nftables at
boot, sysctls, the clock, NFS) is looked at with --check alone, and says so by name.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.cluster.ssh_lab import PACKAGES
from tests.e2e.driver import ROOT, wait_until
from tests.nightly.ssh import bare_lab
from tests.nightly.ssh.bare_site import BLOCKS, COMMANDS, GOOD, LAB, RAN, Site

pytestmark = [
    pytest.mark.skipif(bool(bare_lab.missing()), reason=bare_lab.missing() or "-"),
    pytest.mark.timeout(1800),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Two fresh machines, and one for each of four things that may be wrong."""
    folder = tmp_path_factory.mktemp("bare")
    with bare_lab.site(folder, GOOD + 4, small=1) as (laptop, person, boxes):
        key = person.home / ".ssh" / "id_ed25519"
        (folder / "ssh_config").write_text(f"Host *\n IdentityFile {key}\n UserKnownHostsFile {person.known_hosts}\n")
        (folder / "lab.json").write_text(json.dumps(LAB))
        (folder / "project").mkdir()
        (folder / "project" / "slurm").symlink_to(ROOT / "slurm")
        (folder / "project" / "ansible").symlink_to(ROOT / "ansible")
        made = Site(folder=folder, laptop=laptop, person=person, boxes=boxes)
        (text,) = (block for kind, block in BLOCKS if kind == "yaml")
        text = made.here(text).replace(", ddp@10.0.0.3, ddp@10.0.0.4", "").replace("nodes: 4", "nodes: 2")
        own = f"    runtime: none\n    python: {sys.executable}\n"
        (folder / "project" / "ddpctl.yaml").write_text(text.replace("gpus: 4", "gpus: 2\n  device: cpu") + own)
        for box in made.good:
            box.sh("for i in 0 1; do mknod /dev/nvidia$i c 195 $i; done")
        laptop.ip("addr", "add", "10.77.0.99/24", "dev", "eth0")
        yield made


def recap(output: str) -> list[tuple[str, str]]:
    return re.findall(r"^(\S+) +(done|failed) +(?:changed=\d+ ok=\d+)?", output, re.M)


def test_what_is_broken_is_named_and_the_others_are_done(site: Site) -> None:
    """A wrong key, a user without sudo, a Docker that cannot be had, a full disk: a sentence each."""
    good, wrong, powerless, dockerless, full = site.boxes[1:]
    wrong.sh("rm /root/.ssh/authorized_keys")
    powerless.sh("useradd -m -s /bin/sh eve && cp -r /root/.ssh /home/eve && chown -R eve /home/eve")
    dockerless.sh(
        "printf 'Package: docker.io\\nPin: release *\\nPin-Priority: -1\\n' >/etc/apt/preferences.d/no-docker"
    )
    full.sh("dd if=/dev/zero of=/fill bs=64k 2>&1 || true")
    hosts = {
        box.address: {"ansible_user": "eve" if box is powerless else "root", "ddpctl_peer": box.address}
        for box in site.boxes[1:]
    }
    shared = {"ddpctl_user": "ddp", "ddpctl_authorized_keys": [site.person.public_key]}
    shared |= {"ddpctl_containers": "docker", "ddpctl_image": ""}
    inventory = {"all": {"vars": shared, "children": {"nodes": {"hosts": hosts}}}}
    (site.folder / "broken.json").write_text(json.dumps(inventory))
    options = ("--inventory", str(site.folder / "broken.json"), "--tags", "user,containers")
    output = site.run("ddpctl", "provision", *options, code=69)
    *reasons, last = output.splitlines()[-5:]
    facts = (
        (wrong, "root@", "ssh-copy-id"),
        (powerless, "eve", "--ask-become-pass"),
        (dockerless, "docker.io", "apt-get update"),
        (full, "MiB are free on /", "2048 MiB"),
    )
    for reason, (box, *named) in zip(reasons, facts, strict=True):
        assert reason.startswith(f"{box.address}: ")
        assert [fact for fact in named if fact not in reason] == [], reason
    assert last.startswith("ddpctl: 4 of 5 hosts ")
    assert last.endswith(", ".join(box.address for box in site.boxes[2:]))
    assert re.search(rf"^{good.address} +done +changed=[1-9]", output, re.M), output
    assert "uid=10001(ddp)" in good.sh("id ddp; docker info --format ok")
    for box in (powerless, dockerless, full):
        assert "no such user" in box.sh("id ddp", check=False)


def test_fresh_machines_become_nodes(site: Site) -> None:
    """The look finds nothing against them, and says what it leaves out; then they are made."""
    lab = f"@{site.folder / 'lab.json'}"
    output = site.shown("ddpctl provision --login root$", "--monitor", site.boxes[1].address, "--", "-e", lab)
    hosts = [box.address for box in site.good]
    assert recap(output) == [(host, "done") for host in hosts] * 2, output
    looked, made = output.split(" ok=", 1)
    assert len(re.findall(rf"^{hosts[0]} +would ", looked, re.M)) == 9, output
    assert len(re.findall(rf"^{hosts[0]} +changed ", made, re.M)) == 13, output
    notes = set(re.findall(rf"^{hosts[0]} +note +(.*)$", output, re.M))
    assert {note.partition(":")[0] for note in notes} == {"firewall", "gpu", "clock", "limits"}


def test_a_second_run_by_hand_changes_nothing(site: Site) -> None:
    (site.folder / "project" / "inventory.yaml").symlink_to(
        site.folder / "state" / "runs" / ".provision" / "boxes.yaml"
    )
    lab = f"@{site.folder / 'lab.json'}"
    output = site.shown("ANSIBLE_CONFIG=", "-e", lab, "--skip-tags", "prometheus")
    assert re.findall(r"^(\S+) +done +(changed=\d+) ", output, re.M) == [
        (box.address, "changed=0") for box in site.good
    ]


def test_the_machines_train(site: Site) -> None:
    output = site.shown("ddpctl launch")
    assert re.search(r"test accuracy +99\.\d+ %", output), output
    assert re.search(r"world size +4\n", output), output


def connects(command: list[str], address: str, port: int, source: str = "") -> str:
    """What comes of it: connected, or why not."""
    script = (
        "import socket, sys\n"
        "try: socket.create_connection((sys.argv[1], int(sys.argv[2])), 5, (sys.argv[3], 0)); print('connected')\n"
        "except OSError as error: print(error.strerror)\n"
    )
    done = subprocess.run(
        [*command, sys.executable, "-c", script, address, str(port), source],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
    )
    return done.stdout.strip() or done.stderr


def test_the_ports_are_the_clusters_own(site: Site) -> None:
    first, second = site.good
    serve = "setsid /usr/bin/python3 -m http.server --bind 0.0.0.0 {} >/dev/null 2>&1 &"
    for port in (61234, 40000):  # a rendezvous, and what ddprun takes for its metrics
        first.sh(serve.format(port))
    wait_until(lambda: first.sh("ss -Hltn | grep -c -e :61234 -e :40000", check=False).strip() == "2", "the ports")
    inside, outside = second.machine.command(), site.laptop.command()
    ports = (22, 61234, 40000, 9100)
    assert [connects(inside, first.address, port) for port in ports] == ["connected"] * 4
    closed = "No route to host"
    stranger = [connects(outside, first.address, port, site.laptop.address) for port in ports]
    assert stranger == ["connected", closed, closed, closed]
    monitor = [connects(outside, first.address, port, "10.77.0.99") for port in ports]
    assert monitor == ["connected", closed, "connected", "connected"]


def test_slurms_role_makes_a_queue_that_trains(site: Site) -> None:
    """Slurm's role, then the script that is checked in."""
    lab = f"@{site.folder / 'lab.json'}"
    output = site.shown("ddpctl provision --login root --controller", "--", "-e", lab)
    assert recap(output) == [(box.address, "done") for box in site.good] * 2, output
    (line,) = (line for line in COMMANDS if line.startswith("sbatch "))
    RAN.append(line)
    first = site.good[0]
    wait_until(lambda: first.sh("sinfo -hNo %t").split() == ["idle", "idle"], "Slurm's nodes")
    mine = f"export PYTHON={sys.executable} PYTHONPATH={PACKAGES} DDP_NODES_HERE=2; cd /shared; "
    first.sh(f"su ddp -c '{mine} {line.replace('slurm/', f'--wait --output=job.log {ROOT}/slurm/')}'", timeout_s=300)
    log = (site.folder / "shared" / "job.log").read_text()
    assert re.search(r"test accuracy +99\.\d+ %", log), log
    assert re.search(r"world size +4\n", log), log


def test_verify_says_what_would_keep_a_run_from_starting(site: Site) -> None:
    assert [state for _, state in recap(site.shown("ddpctl provision --verify"))] == ["done"] * GOOD
    first, second = site.good
    first.sh("nft delete table inet ddpctl")
    second.sh("rm /home/ddp/.ssh/authorized_keys")
    output = site.run("ddpctl", "provision", "--login", "root", "--verify", "--tags", "firewall,user", code=69)
    open_ports, no_key, last = output.splitlines()[-3:]
    assert open_ports.startswith(f"{first.address}: ")
    assert open_ports.endswith("ddpctl provision --tags firewall")
    assert no_key.startswith(f"{second.address}: the user ddp ")
    assert no_key.endswith("ddpctl provision --tags user")
    assert last.endswith(f"{first.address}, {second.address}")


def test_storage_is_only_checked_without_a_kernel_of_its_own(site: Site) -> None:
    output = site.shown("ddpctl provision --login root --storage", "--check")
    assert recap(output) == [(box.address, "done") for box in site.good], output
    for box in site.good:
        (note,) = re.findall(rf"^{box.address} +note +shared: (.*)$", output, re.M)
        assert "NFS" in note


def test_uninstall_leaves_nothing_but_the_user(site: Site) -> None:
    output = site.shown("ddpctl provision --login root --uninstall")
    assert recap(output) == [(box.address, "done") for box in site.good] * 2, output
    remaining = (
        "ls /etc/nftables.d /etc/security/limits.d /etc/sysctl.d | grep ddpctl; nft list ruleset | grep ddpctl; id ddp"
    )
    for box in site.good:
        lines = [
            line for line in box.sh(remaining).splitlines() if not line.startswith("# Warning: ")
        ]  # nft, of Docker's
        assert [line.partition(" groups=")[0] for line in lines] == ["uid=10001(ddp) gid=10001(ddp)"]


def test_every_command_of_the_page_was_run() -> None:
    once = {"ddpctl image ship --target boxes"}  # to the engines of two machines: test_ship.py
    assert {line for line in COMMANDS if line and not line.startswith(("pip ", "ssh "))} - once == set(RAN)
    assert os.getuid() == 0
