"""Further answers of Kaggle's client, and options of the target."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from tests.unit.ddpctl import test_kaggle_target
from tests.unit.ddpctl.answers import perform
from tests.unit.ddpctl.kaggle_answers import answer
from tests.unit.ddpctl.test_kaggle_target import (
    ANSWERS,
    KERNEL,
    NO_CLIENT,
    PLAN,
    RUN,
    SCRIPT,
    VIEW,
    follow,
    push,
    refusal_of,
)

from ddpctl import targets
from ddpctl.command import Output
from ddpctl.errors import ConfigError, UnavailableError
from ddpctl.job import config
from ddpctl.targets import LogQuery
from ddpctl.targets.kaggle.options import KaggleOptions
from ddpctl.targets.kaggle.target import KaggleTarget


def test_files_of_the_clients_user_need_no_note() -> None:
    _, (files, note) = perform(KaggleTarget(KaggleOptions()).files(PLAN), ANSWERS)
    assert (json.loads(files["kernel-metadata.json"])["id"], note) == (KERNEL, "")


def test_a_dry_run_without_a_client_fails_as_a_launch() -> None:
    with pytest.raises(UnavailableError):
        perform(KaggleTarget(KaggleOptions(owner="ben")).dry_run(PLAN), {**ANSWERS, VIEW: NO_CLIENT})


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        pytest.param("targets: {k: {kind: kaggle}}", 2, id="by default"),
        pytest.param("targets: {k: {kind: kaggle, accelerator: NvidiaTeslaP100}}", 1, id="another accelerator"),
        pytest.param("targets: {k: {kind: kaggle}}\njob: {gpus: 1}", 1, id="the file's own"),
    ],
)
def test_both_t4s_are_used_by_default(text: str, gpus: int, tmp_path: Path) -> None:
    file = tmp_path / "ddpctl.yaml"
    file.write_text(f"target: k\n{text}\n")
    load = partial(config.load, file=file, kinds=targets.kinds())
    assert load().job.gpus == gpus
    assert load(flags={"gpus": "1"}).job.gpus == 1
    assert config.load(target="local", kinds=targets.kinds()).job.gpus == 1


@pytest.mark.parametrize("files", [("model.py",), ()])
def test_a_notebook_without_its_files_is_not_rendered(files: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        KaggleTarget(KaggleOptions(owner="ann", files=files)).render(SCRIPT)
    assert all(fact in str(error.value) for fact in ("train.py", *files, "ddpctl render --target kaggle --out FOLDER"))


@pytest.mark.parametrize(
    ("output", "fact"),
    [
        pytest.param("Phone verification is required to use GPUs.", "https://www.kaggle.com/settings", id="phone"),
        pytest.param("Maximum batch CPU sessions reached", "simultaneous sessions", id="sessions"),
        pytest.param("Something new", "Something new", id="unknown"),
    ],
)
def test_a_refusal_that_was_not_recorded(output: str, fact: str) -> None:
    assert fact in str(refusal_of(Output(returncode=0, stdout=f"Kernel push error: {output}\n")))


@pytest.mark.parametrize(
    ("output", "fact"),
    [
        (NO_CLIENT, "pip install kaggle six"),
        (Output(returncode=1, stderr="Traceback\nModuleNotFoundError: No module named 'six'\n"), "pip install six"),
    ],
    ids=["no client", "no module"],
)
def test_a_push_without_a_working_client_starts_nothing(output: Output, fact: str) -> None:
    reason = refusal_of(output)
    assert type(reason) is UnavailableError
    assert fact in str(reason)


def test_an_input_that_kaggle_does_not_know_is_named_since_the_push_succeeds() -> None:
    _, submission = push(answer("push-invalid-dataset"))
    (line,) = submission.table
    assert "'ann/no-such'" in line


def test_followed_logs_of_a_session_that_has_ended_are_printed_once() -> None:
    assert follow(LogQuery(follow=True, ranks=(1,)), "complete")[-1].argv == ("cat",)


def test_followed_logs_of_some_nodes_are_refused_while_the_session_goes_on() -> None:
    with pytest.raises(ConfigError) as error:
        follow(LogQuery(follow=True, nodes=(0,)), "running")
    assert all(fact in str(error.value) for fact in ("night", "-f", "--rank", "--node"))


def test_stop_of_a_run_that_was_not_pushed_has_nothing_to_stop() -> None:
    verb = KaggleTarget(KaggleOptions()).stop(replace(RUN, handle={}), signal="KILL")
    assert perform(verb, {}) == ([], True)


@pytest.mark.parametrize(
    "pushed",
    [
        Output(returncode=-9),
        Output(returncode=1, stderr="502 Server Error: Bad Gateway for url: https://www.kaggle.com/api"),
    ],
    ids=["killed", "gateway"],
)
def test_a_push_whose_reply_is_lost_may_have_started_a_session(pushed):
    test_kaggle_target.test_a_push_whose_reply_is_lost_may_have_started_a_session(pushed)


@pytest.mark.parametrize(
    ("session", "log", "state", "code", "fact"),
    [
        ("new_script", None, "pending", None, ""),
        ("404", None, "lost", 66, KERNEL),
        ("error-memory", answer("logs-name-error"), "failed", 1, "allocate more memory than is available"),
    ],
)
def test_a_session_has_its_state_and_its_end_is_in_its_log_unless_kaggle_names_the_cause(
    session, log, state, code, fact
):
    test_kaggle_target.test_a_session_has_its_state_and_its_end_is_in_its_log_unless_kaggle_names_the_cause(
        session, log, state, code, fact
    )
