"""What Ansible says of a failure, and the one sentence that is made of it."""

import json
import subprocess
import sys
from pathlib import Path

PLUGINS = Path(__file__).parents[2] / "ansible" / "callback_plugins"
TASK = "firewall: Write the rules"
SAID = [
    (
        {"msg": "Failed to connect to the host via ssh: root@10.0.0.2: Permission denied (publickey,password)."},
        "it refuses every key for root@10.0.0.2: ssh-copy-id, or name another user (--login) or the right key",
    ),
    (
        {"msg": "Failed to connect to the host via ssh: ssh: connect to host box2 port 22: No route to host"},
        "it does not answer: No route to host",
    ),
    (
        {
            "msg": "Task failed: Failed to connect to the host via ssh: ssh: Could not resolve hostname box1: "
            "Name or service not known"
        },
        "its name box1 leads to no address (Name or service not known): name its address",
    ),
    (
        {"msg": "Failed to connect to the host via ssh: Host key verification failed."},
        "its host key is not in known_hosts: ssh to it once, and compare the fingerprint before you say yes",
    ),
    (
        {"msg": "@@@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @@@\nHost key verification failed."},
        "its host key has CHANGED: if it was set up anew, ssh-keygen -R it; if not, somebody may be in between",
    ),
    (
        {"msg": "MODULE FAILURE", "module_stderr": "OSError: [Errno 28] No space left on device"},
        "its disk is full: make room there",
    ),
    (
        {"msg": "No package matching 'docker.io' is available"},
        "its packages do not have docker.io: look at its sources with apt-get update",
    ),
    (
        {"msg": "no available installation candidate for docker.io"},
        "its packages do not have docker.io: look at its sources with apt-get update",
    ),
    ({"assertion": "x", "msg": "its clock is wrong"}, "its clock is wrong"),
    ({"msg": "one\ntwo\n  ^^^^\n"}, "firewall: Write the rules: two"),
    ({"results": [{"failed": True, "msg": "no such file"}]}, "firewall: Write the rules: no such file"),
    ({}, "firewall: Write the rules: it does not say why"),
]
# In a process of its own: Ansible replaces sys.intern for good, which torch cannot bear.
CODE = """
import json, sys, sentences
print(json.dumps([sentences.sentence(result, sys.argv[1]) for result in json.load(sys.stdin)]))
"""


def test_one_sentence() -> None:
    results = json.dumps([result for result, _ in SAID])
    command = [sys.executable, "-c", CODE, TASK]
    done = subprocess.run(command, cwd=PLUGINS, input=results, capture_output=True, text=True, check=True, timeout=120)
    assert json.loads(done.stdout) == [said for _, said in SAID]
