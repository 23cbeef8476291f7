"""Whatever a job says arrives at a host byte for byte, and runs nothing that it should not."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from ddpctl.targets.ssh import scripts
from ddpctl.targets.ssh.options import SshOptions

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30) | st.sampled_from(
    [
        "$(touch canary)",
        "`touch canary`",
        "'; touch canary; '",
        '"; touch canary; "',
        "END_OF_FILE",
        "a\nEND_OF_INPUT\n",
    ]
)
NAMES = st.from_regex(r"X[A-Z0-9_]{0,8}", fullmatch=True)
DUMP = (
    f"#!{sys.executable} -IS\nimport json, os, sys\n"
    "env = {k: v for k, v in os.environ.items() if k.startswith('X')}\n"
    "with open('said.new', 'w') as file:\n    json.dump([sys.argv[1:], env], file)\n"
    "os.rename('said.new', 'said')\n"
)


@settings(max_examples=40, deadline=None)
@given(arguments=st.lists(TEXT, max_size=4), env=st.dictionaries(NAMES, TEXT, max_size=4))
def test_arguments_and_environment_arrive(arguments: list[str], env: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory(prefix="it's a $HOME ") as name:
        home = Path(name)
        (home / "my python").write_text(DUMP)
        (home / "my python").chmod(0o755)
        options = SshOptions(hosts=(), runtime="none")
        launch = scripts.launch_process(options, "night", 0, ("~/my python", *arguments), env, folder="~/")
        text = scripts.start_node(options, "night", 0, launch, gpus=(), checkpoints="~/.ddpctl/c", secret="")
        done = subprocess.run(
            ["/bin/sh"],
            input=text,
            env={"HOME": name, "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert (done.returncode, done.stderr) == (0, "")
        deadline = time.monotonic() + 30
        while not (home / "said").exists():
            assert time.monotonic() < deadline, (home / ".ddpctl/runs/night/node-0/node.log").read_text()
            time.sleep(0.01)
        assert json.loads((home / "said").read_text()) == [arguments, env]
        assert sorted(path.name for path in home.iterdir()) == [".ddpctl", "my python", "said"]
