"""What describes the keys of a ddpctl.yaml: the JSON schema for editors, with the fields' documentation."""

import jsonschema
import pytest
import yaml
from tests.unit.ddpctl.loading import KINDS

from ddpctl.job.schema import json_schema


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("job: {name: digits, nodes: 2, memory: 64Gi, time_limit: ~, env: {DEBUG: true, N: 1}, command: [a, 1]}", None),
        ("job: {nodes: '1:4', image: reg/me:1}\ntargets: {lab: {kind: ssh, hosts: [a]}, x: {kind: local}}", None),
        ("job: {memory: 64}", "job.memory"),
        ("job: {shm: 1GB}", "job.shm"),
        ("job: {time_limit: 12}", "job.time_limit"),
        ("job: {nodes: true}", "job.nodes"),
        ("job: {nodes: 0}", "job.nodes"),
        ("job: {name: My_Job}", "job.name"),
        ("profiles: {p: {name: My_Job}}", "profiles.p.name"),
        ("targets: {lab: {kind: shs}}", "targets.lab.kind"),
        ("targets: {lab: {kind: ssh, hosts: [a], tries: 0}}", "targets.lab.tries"),
    ],
)
def test_the_schema_refuses_what_ddpctl_refuses(text: str, path: str | None) -> None:
    schema = json_schema(KINDS)
    jsonschema.Draft202012Validator.check_schema(schema)
    errors = jsonschema.Draft202012Validator(schema).iter_errors(yaml.safe_load(text))
    assert [".".join(map(str, error.absolute_path)) for error in errors] == ([path] if path else [])
