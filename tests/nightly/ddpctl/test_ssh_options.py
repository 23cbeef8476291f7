"""Hosts in a ddpctl.yaml: their short form, what is wrong with them by line and column, their record, their schema."""

from dataclasses import asdict, replace
from pathlib import Path

import jsonschema
import pytest
import yaml
from tests.unit.ddpctl.ssh_answers import RUN
from tests.unit.ddpctl.test_ssh import HEAD, WHOLE, load

from ddpctl import targets
from ddpctl.commands.launch import request_of_flags, request_to_resume
from ddpctl.errors import ConfigError
from ddpctl.job.schema import json_schema
from ddpctl.targets.ssh.options import SshHost, SshOptions


def test_an_editor_knows_hosts() -> None:
    schema = json_schema(targets.kinds())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(yaml.safe_load(HEAD + WHOLE), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(yaml.safe_load(HEAD + "    hosts: [{user: bob}]\n"), schema)


def test_copies_of_checkpoints_are_for_hosts_without_a_shared_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = "job: {nodes: 2, checkpoint_copies: 2}\n"
    hosts = "    hosts: [box1, box2]\n"
    settings = load(f"{hosts}{job}", tmp_path)
    assert settings.job.checkpoint_copies == 2
    with pytest.raises(ConfigError, match=r"ddpctl\.yaml:6:36: checkpoint_copies: "):
        load(f"{hosts}    checkpoint_dir: /nfs\n{job}", tmp_path)
    (tmp_path / "ddpctl.yaml").write_text(job)
    monkeypatch.chdir(tmp_path)
    for kind in ("local", "slurm", "kubernetes"):
        with pytest.raises(ConfigError, match=f"checkpoint_copies: .*{kind}"):
            request_of_flags({"target": kind})


def test_a_run_with_copies_is_resumed_on_fewer_nodes() -> None:
    run = replace(RUN, options=asdict(SshOptions(hosts=(SshHost(address="box1"),))))
    run = replace(run, job=replace(run.job, nodes="2", checkpoint_copies=2))
    job = request_to_resume({"nodes": "1"}, run).job
    assert (job.nodes, job.checkpoint_copies) == ("1", 2)


@pytest.mark.parametrize(
    ("text", "places"),
    [
        pytest.param("    runtime: none\n", ["3:5"], id="no-hosts"),
        pytest.param("    hosts: box1\n", ["4:12"], id="no-list"),
        pytest.param("    hosts: []\n", ["4:12"], id="empty"),
        pytest.param("    hosts: [a, b, a]\n", ["4:12"], id="twice"),
        pytest.param("    hosts: [-oProxyCommand=x, 'a b', 'a:99999']\n", ["4:13", "4:31", "4:38"], id="short-form"),
        pytest.param(
            "    hosts:\n      - {user: bob, prt: 3, gpus: 99}\n      - {address: '-x'}\n",
            ["5:9", "5:21", "5:35", "6:19"],
            id="long-form",
        ),
        pytest.param("    hosts: [a]\n    home: runs\n    project: here\n", ["5:11", "6:14"], id="paths"),
        pytest.param("    hosts: [a, b]\n    exclude: [c]\n", ["5:14"], id="exclude"),
    ],
)
def test_errors_have_line_and_column(text: str, places: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(text, tmp_path)
    errors = [line for line in str(error.value).splitlines() if not line.startswith("--target")]
    assert [line.removeprefix(f"{tmp_path}/ddpctl.yaml:").partition(": ")[0] for line in errors] == places
