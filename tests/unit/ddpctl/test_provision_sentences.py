"""Results of failed Ansible tasks, and the one sentence that is made of each."""

import json
import subprocess
import sys
from pathlib import Path

from tests.wording import Wording

PLUGINS = Path(__file__).parents[3] / "ansible" / "callback_plugins"
TASK = "firewall : Write the rules"
RESULTS = [
    {"msg": "Failed to connect to the host via ssh: root@10.0.0.2: Permission denied (publickey,password)."},
    {"msg": "Failed to connect to the host via ssh: ssh: connect to host box2 port 22: No route to host"},
    {
        "msg": "Task failed: Failed to connect to the host via ssh: ssh: Could not resolve hostname box1: "
        "Name or service not known"
    },
    {"msg": "Failed to connect to the host via ssh: Host key verification failed."},
    {"msg": "@@@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @@@\nHost key verification failed."},
    {"msg": "MODULE FAILURE", "module_stderr": "OSError: [Errno 28] No space left on device"},
    {"msg": "No package matching 'docker.io' is available"},
    {"msg": "no available installation candidate for docker.io"},
    {"assertion": "x", "msg": "its clock is wrong"},
    {"msg": "one\ntwo\n  ^^^^\n"},
    {"results": [{"failed": True, "msg": "no such file"}]},
    {},
]
# In a process of its own: Ansible replaces sys.intern for good, which torch cannot bear.
CODE = """
import json, sys, sentences
failure = sentences.failure_of(sys.argv[1])
print(json.dumps([sentences.sentence(result, failure) for result in json.load(sys.stdin)]))
"""


def test_one_sentence(wording: Wording) -> None:
    command = [sys.executable, "-c", CODE, TASK]
    done = subprocess.run(
        command, cwd=PLUGINS, input=json.dumps(RESULTS), capture_output=True, text=True, check=True, timeout=120
    )
    sentences = json.loads(done.stdout)
    assert len(sentences) == len(RESULTS)
    for sentence in sentences:
        wording(sentence)
