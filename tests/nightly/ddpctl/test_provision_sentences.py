"""Results of failed Ansible tasks, and the one sentence that is made of each."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

PLUGINS = Path(__file__).parents[3] / "ansible" / "callback_plugins"
TASK = "firewall : Write the rules"
RESULTS: list[tuple[dict[str, Any], str]] = [  # of a task, and the fact that the sentence has
    (
        {"msg": "Failed to connect to the host via ssh: root@10.0.0.2: Permission denied (publickey,password)."},
        "root@10.0.0.2",
    ),
    ({"msg": "Failed to connect to the host via ssh: ssh: connect to host box2 port 22: No route to host"}, "No route"),
    (
        {
            "msg": "Task failed: Failed to connect to the host via ssh: ssh: Could not resolve hostname box1: "
            "Name or service not known"
        },
        "'box1'",
    ),
    ({"msg": "Failed to connect to the host via ssh: Host key verification failed."}, "known_hosts"),
    (
        {"msg": "@@@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @@@\nHost key verification failed."},
        "ssh-keygen -R",
    ),
    ({"msg": "MODULE FAILURE", "module_stderr": "OSError: [Errno 28] No space left on device"}, "disk"),
    ({"msg": "No package matching 'docker.io' is available"}, "docker.io"),
    ({"msg": "no available installation candidate for docker.io"}, "docker.io"),
    ({"assertion": "x", "msg": "its clock is wrong"}, "its clock is wrong"),
    ({"msg": "one\ntwo\n  ^^^^\n"}, "firewall: the step 'Write the rules' failed: two"),
    ({"results": [{"failed": True, "msg": "no such file"}]}, "no such file"),
    ({}, "Write the rules"),
]
# In a process of its own: Ansible replaces sys.intern for good, which torch cannot bear.
CODE = """
import json, sys, sentences
failure = sentences.failure_of(sys.argv[1])
print(json.dumps([sentences.sentence(result, failure) for result in json.load(sys.stdin)]))
"""


def test_a_failed_task_of_ansible_becomes_one_line_with_the_cause() -> None:
    command = [sys.executable, "-c", CODE, TASK]
    done = subprocess.run(
        command,
        cwd=PLUGINS,
        input=json.dumps([result for result, _ in RESULTS]),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    sentences = json.loads(done.stdout)
    for sentence, (_, fact) in zip(sentences, RESULTS, strict=True):
        assert (fact in sentence, "\n" in sentence) == (True, False), sentence
