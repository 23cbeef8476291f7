"""Further refusals of a cluster at a launch."""

from pathlib import Path

import pytest
from tests.unit.ddpctl import test_kubernetes_submit
from tests.unit.ddpctl.answers import Answer, matching, perform
from tests.unit.ddpctl.kubernetes_lab import OK, cluster, lines, plan_of, recorded
from tests.unit.ddpctl.test_kubernetes_submit import (
    ABSENT,
    DRY_RUN,
    OF_JOB,
    TRAINER,
    UID,
    UNREACHABLE,
    error_of,
    kinds,
    read,
    refused,
    submit,
)

from ddpctl.command import Command, Output
from ddpctl.errors import ConfigError, UnavailableError
from ddpctl.targets.kubernetes import project as reader
from ddpctl.targets.kubernetes.options import KubernetesOptions
from ddpctl.targets.kubernetes.target import KubernetesTarget


@pytest.mark.parametrize("refusals", [2, 5])
def test_a_train_job_whose_runtime_is_not_seen_yet_is_created_again_up_to_four_times(refusals: int) -> None:
    unseen = Output(returncode=1, stderr='admission webhook "v" denied the request: specified trainingRuntime must be '
                    "created before the TrainJob is created")  # fmt: skip
    outputs = iter([unseen] * refusals + [UID])
    answers: dict[str, Answer] = {"--raw": OK, OF_JOB: lambda _: next(outputs)}
    if refusals > 4:
        commands, error = error_of(answers, workload="trainjob")
        assert type(error) is ConfigError
    else:
        commands, submission = submit(answers, workload="trainjob")
        assert submission.handle["workload"] == "trainjob"
    assert lines(matching(commands, "sleep")) == ["sleep 1", "sleep 2", "sleep 4", "sleep 8"][:refusals]
    assert kinds(matching(commands, OF_JOB)) == ["TrainJob"] * min(refusals + 1, 5)


def test_a_cluster_that_does_not_answer_is_noted_for_a_workload_that_was_named() -> None:
    """In a dry run, nothing else shows it; a launch ends at its next command."""
    _, submission = submit({"--raw": UNREACHABLE}, workload="pytorchjob")
    assert "127.0.0.1:16999" in submission.note


@pytest.mark.parametrize(("contexts", "known"), [("lab\nprod\n", "lab, prod"), ("", "none")])
def test_a_context_that_does_not_exist_is_refused_with_those_that_do(contexts: str, known: str) -> None:
    missing = Output(returncode=1, stderr="error: cannot locate context prodd\n")
    answers = {"config view": missing, "get-contexts": Output(returncode=0, stdout=contexts)}
    _, error = error_of(answers, context="prodd")
    assert type(error) is ConfigError
    assert "'prodd'" in str(error)
    assert str(error).endswith(f": {known}")


def test_a_name_that_no_service_can_have_is_refused_before_the_cluster_judges_it() -> None:
    target, plan = KubernetesTarget(KubernetesOptions(workload="pytorchjob")), plan_of(run="a" * 55)
    commands: list[Command] = []
    with pytest.raises(ConfigError) as error:
        perform(target.submit(plan, attached=True), cluster(), commands)
    assert matching(commands, "create") == []
    assert all(fact in str(error.value) for fact in ("--name", plan.name, "55", "54"))


project = test_kubernetes_submit.project  # the fixture


def test_code_with_a_name_that_resembles_a_secret_is_sent(project: Path) -> None:
    names = ["environment.py", "key.py", "keys/model.py", "token.py", "tokenizer.json", "pem.txt"]
    for name in names:
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text("x")
    files, left_out = read(project, *names)
    assert (sorted(files), left_out) == (sorted(names), [])


@pytest.mark.parametrize(
    ("content", "fact"),
    [(b"\xff", "UTF-8"), (b"x" * (reader.MOST_BYTES + 1), "900 KiB")],
    ids=["not text", "too large"],
)
def test_a_file_that_is_not_text_or_too_large_is_refused_by_name(project: Path, content: bytes, fact: str) -> None:
    (project / "a.txt").write_bytes(content)
    with pytest.raises(ConfigError) as error:
        read(project, "*.txt")
    assert ("'a.txt'" in str(error.value), fact in str(error.value)) == (True, True)


@pytest.mark.parametrize(
    ("answers", "given", "kind", "facts"),
    [
        (
            {DRY_RUN: refused("PyTorchJob", recorded("bad/webhook-down"))},
            {},
            UnavailableError,
            ("validator.pytorchjob",),
        ),
    ],
    ids=["webhook"],
)
def test_a_refusal_comes_before_anything_is_created(answers, given, kind, facts):
    test_kubernetes_submit.test_a_refusal_comes_before_anything_is_created(answers, given, kind, facts)


@pytest.mark.parametrize(
    ("answers", "kind", "reason"),
    [
        (
            {
                "/openapi": Output(returncode=0, stdout='{"podTemplateOverrides": {}}'),
                "/apis/kubeflow.org": ABSENT,
                "/apis/trainer": TRAINER,
            },
            "Job",
            "2.2",
        ),
    ],
    ids=["old trainer"],
)
def test_the_workload_is_what_the_cluster_serves(answers, kind, reason):
    test_kubernetes_submit.test_the_workload_is_what_the_cluster_serves(answers, kind, reason)
