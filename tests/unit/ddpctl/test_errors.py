"""Errors as data: what a handler reads of one, and what a launch does by its type."""

import pickle

import pytest

from ddpctl.command import Output
from ddpctl.errors import ConfigError, DdpctlError, FileError, UnavailableError
from ddpctl.job.secrets import read_secrets
from ddpctl.job.spec import JobSpec
from ddpctl.notebook import RankError
from ddpwire.exits import Exit


def test_an_error_has_a_code_a_message_a_hint_and_fields() -> None:
    error = ConfigError("4 GPUs needed", hint="ask for fewer", gpus_found=2)
    assert (error.code, error.message, error.hint, error.fields) == (
        78, "4 GPUs needed", "ask for fewer", {"gpus_found": 2},
    )  # fmt: skip
    assert str(error) == "4 GPUs needed: ask for fewer"
    again = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (str(again), again.fields) == (str(error), error.fields)
    placed = FileError("a.yaml:1: no", hint="mend it", line=1)
    assert (placed.code, placed.prefix, str(placed), placed.fields) == (78, "", "a.yaml:1: no: mend it", {"line": 1})
    of_rank = RankError("rank 1 failed", rank=1, code=3, traceback="a\nb\n")
    assert (of_rank.code, of_rank.message, str(of_rank)) == (3, "rank 1 failed", "rank 1 failed\na\nb")
    assert (DdpctlError("x").code, UnavailableError("x").code, str(UnavailableError("x"))) == (70, 69, "x")


def test_a_secret_that_is_not_set_is_named_and_an_empty_one_is_set() -> None:
    assert read_secrets(JobSpec(secrets=("A", "B")), {"A": "a\n", "B": "", "C": "c"}) == {"A": "a\n", "B": ""}
    with pytest.raises(ConfigError, match="export B="):
        read_secrets(JobSpec(secrets=("A", "B")), {"A": "a"})


def test_the_last_line_of_an_output_is_that_of_stderr_or_its_exit_code() -> None:
    assert Output(returncode=1, stderr="a\n b \n\n").last_line() == " b"
    assert Output(returncode=3).last_line() == "exit code 3"
    assert Output(returncode=3, stderr="\n").last_line("no answer") == "no answer"


def test_a_run_is_retried_after_a_kill_a_signal_to_save_absent_nodes_and_a_hang() -> None:
    assert [code for code in Exit if code.retry] == [137, 138, 140, 142, 143, 144]


def test_every_code_of_a_failed_run_has_a_meaning() -> None:
    assert {code for code in Exit if not code.meaning} == {Exit.OK, Exit.USAGE}
