"""Further flags that are refused."""

import pytest
from tests.unit.ddpctl import test_config
from tests.unit.ddpctl.test_config import FILE, TWO

folder = test_config.folder  # the fixture


MORE_BAD_FLAGS = [
    ("gpus of two nodes", FILE, {"gpus": "2,1", "nodes": "1"}, ["--gpus: ", "1 node:", "--nodes 2"]),
    ("grace", FILE, {"grace": float("nan")}, ["--grace: nan"]),
    ("join_timeout", FILE, {"join_timeout": 0.5}, ["--join-timeout: 0.5", "1"]),
    ("hang_timeout", FILE, {"hang_timeout": -1}, ["--hang-timeout: -1", "0"]),
    ("target local", FILE, {"target": "lokal"}, ["--target: 'lokal'", "'local'"]),
    ("kind of two targets", TWO, {"target": "ssh"}, ["--target: ", "a or b"]),
    ("kind without a file", None, {"target": "ssh"}, ["--target: ", "hosts", "ddpctl.yaml", "FOLDER"]),
    ("nodes", FILE, {"nodes": "2:1"}, ["--nodes: '2:1'", "MIN:MAX"]),
    ("target of the file", FILE, {"target": "laptp"}, ["--target: 'laptp'", "'laptop'"]),
    ("profile", FILE, {"profile": "quik"}, ["--profile: 'quik'", "'quick'"]),
    ("kind without a target", "", {"target": "ssh"}, ["--target: ", "ssh", "hosts"]),
    ("profile without a file", None, {"profile": "quick"}, ["--profile: 'quick'", "ddpctl.yaml", "FOLDER"]),
]


@pytest.mark.parametrize(
    ("text", "flags", "facts"),
    [pytest.param(*row, id=name) for name, *row in MORE_BAD_FLAGS],
)
def test_a_bad_flag_is_named_with_its_value_unless_it_may_be_secret(text, flags, facts, folder):
    test_config.test_a_bad_flag_is_named_with_its_value_unless_it_may_be_secret(text, flags, facts, folder)
