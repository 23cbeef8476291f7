"""Any ddpctl.yaml: a job that is written is read back, and everything else is refused with a line for each error."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.unit.ddpctl.loading import load

from ddpctl.errors import DdpctlError, NoInputError
from ddpctl.spec import JobSpec


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Text that a process and a file can carry: no NUL, no half of a character.
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
jobs = st.builds(
    JobSpec,
    name=st.from_regex(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", fullmatch=True),
    nodes=st.one_of(st.integers(1, 9999).map(str), st.integers(1, 99).map(lambda low: f"{low}:{low + 3}")),
    gpus=st.integers(1, 64),
    device=st.sampled_from(["auto", "cuda", "cpu"]),
    command=st.lists(texts, max_size=4).map(lambda given: ("train.py", *given) if given else ()),
    env=st.dictionaries(st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True), texts, max_size=4),
    port=st.none() | st.integers(1, 65535),
    grace=st.floats(0, 3600),
    join_timeout=st.none() | st.floats(1, 1e300),
    hang_timeout=st.none() | st.floats(0, 1e300),
    max_restarts=st.none() | st.integers(0, 1000),
)


@settings(max_examples=200, deadline=None)
@given(jobs)
def test_a_job_that_yaml_dumps_is_read_back(spec: JobSpec) -> None:
    values = {**vars(spec), "command": list(spec.command)}
    assert load(yaml.safe_dump({"job": values})).job == spec
    assert load(None, **vars(spec)).job == replace(spec)


keys = st.sampled_from(["job", "target", "targets", "profiles", "kind", "hosts", "check", *vars(JobSpec()), "<<", "a"])
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts | st.dates() | st.binary(max_size=4) | keys
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys | scalars, inner, max_size=4),
    max_leaves=12,
)
bits = st.sampled_from(
    [*"\t\n :-?[]{},&*!|>'\"%@`#~\\0e.", "\n  ", ": ", "&a ", "*a", "<<: ", "job:", "env:", "targets:", "\\U", "---"]
)
line_start = re.compile(r"(ddpctl\.yaml:[1-9][0-9]*:[1-9][0-9]*|--[a-z-]+|-- SCRIPT): .")


def check_answer(data: bytes, name: str | None) -> None:
    try:
        load(data, profile=name, target=name)
    except NoInputError:
        raise AssertionError("the file is there") from None
    except DdpctlError as error:
        assert all(line_start.match(line) and line.isprintable() for line in str(error).split("\n"))  # noqa: PT017


@settings(max_examples=200, deadline=None)
@given(trees, st.sampled_from([None, "a"]))
def test_any_structure_is_loaded_or_refused_with_positions(tree: object, name: str | None) -> None:
    check_answer(yaml.safe_dump(tree).encode(), name)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(bits | texts | keys, max_size=20).map("".join).map(str.encode) | st.binary(max_size=40),
    st.sampled_from([None, "a"]),
)
@example(b'"\\U00110000"', None)
@example(b"%YAML 9.9\n---\n{}", None)
def test_any_text_is_loaded_or_refused_with_positions(data: bytes, name: str | None) -> None:
    check_answer(data, name)
