"""Which of a job's words look like a secret or only sound like one, and what must not be mailed."""

import pytest

from ddpctl.job import secrets
from ddpctl.job.secrets import exposed, exposed_arguments, exposed_values
from ddpctl.job.spec import JobSpec, check_secrets


@pytest.mark.parametrize(
    ("command", "secrets"),
    [
        (("--token", "abc"), "[TOKEN]"),
        (("--token=abc",), "[TOKEN]"),
        (("api_key=abc",), "[API_KEY]"),
        (("--wandb-api-key", "abc", "--token", "x", "--token", "y"), "[WANDB_API_KEY, TOKEN]"),
        (("--authorization", "Basic abc"), "[AUTHORIZATION]"),
    ],
)
def test_an_option_that_looks_secret_is_named_as_a_secret_and_its_value_is_not(
    command: tuple[str, ...], secrets: str
) -> None:
    warning = exposed_arguments(JobSpec(command=("train.py", *command)))
    assert warning is not None
    assert (command[0].partition("=")[0] in warning, f"secrets: {secrets}" in warning) == (True, True)
    assert "abc" not in warning


def test_the_variables_that_look_secret() -> None:
    env = {"TOKEN": "abc", "SIGN_KEY": "abc", "TOKENIZERS_PARALLELISM": "false", "SECRET_NAME": "db", "PASSWORD": ""}
    assert "secrets: [TOKEN, SIGN_KEY]" in (exposed(JobSpec(env=env)) or "")
    assert exposed(JobSpec(env={"NCCL_DEBUG": "INFO"})) is None
    assert exposed_arguments(JobSpec()) is None, "our own trainer has no words"


def test_options_of_commands_on_a_node_are_secret_as_those_of_the_script() -> None:
    job = JobSpec(node_setup=("API_KEY=abc12345 login --password 'x y 12345'; ls",), node_teardown=("rm --token 'a",))
    assert exposed_values(job) == ["abc12345", "x y 12345", "'a"]
    warning = exposed_arguments(job) or ""
    assert [name for name in ("API_KEY", "--password", "--token") if name not in warning] == []


@pytest.mark.parametrize("name", ["UID", "EUID", "PPID", "BASHPID", "SHELLOPTS"])
def test_a_secret_with_a_shells_own_name_is_refused_by_name(name: str) -> None:
    """A script that exports UID ends, and one that exports BASHPID changes nothing."""
    with pytest.raises(ValueError, match=f"^{name} "):
        check_secrets((name,))


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("http://me:pw@proxy:3128/x", "http://me:[REDACTED]@proxy:3128/x"),
        ("s3://u:pa/ss@host/x", "s3://u:[REDACTED]@host/x"),
        ("git+https://:ghp_abc@github.com/x", "git+https://:[REDACTED]@github.com/x"),
        ("ssh://git@github.com/x https://github.com/x@v1", "ssh://git@github.com/x https://github.com/x@v1"),
        ("a value s3cr3tvalue alone", "a value [REDACTED] alone"),
        ("{'a': 'two ö\\'s\\n\"words\"'}", "{'a': '[REDACTED]'}"),
        ("https://h/?a=two%20%C3%B6%27s%0A%22words%22&b", "https://h/?a=[REDACTED]&b"),
        ("step 5 tokens: 4,096 loss: 0.3", "step 5 tokens: 4,096 loss: 0.3"),
    ],
)
def test_a_secret_in_a_text_is_redacted(text: str, redacted: str) -> None:
    assert secrets.redact_text(text, ["s3cr3tvalue", "ab", 'two ö\'s\n"words"']) == redacted


def test_the_argument_of_a_secret_flag_is_redacted() -> None:
    command = ("train.py", "--token", "hf_abc", "--api-key=1", "--lr", "0.1", "--auth-token", "--epochs", "3")
    assert secrets.redact_command(command) == (
        "train.py", "--token", "[REDACTED]", "--api-key=[REDACTED]", "--lr", "0.1", "--auth-token", "--epochs", "3",
    )  # fmt: skip
    assert secrets.redact_command(("--passphrase", "-abc d", "--token=a, b", "-v")) == (
        "--passphrase", "[REDACTED]", "--token=[REDACTED]", "-v",
    )  # fmt: skip


def test_variables_with_secret_names_are_redacted() -> None:
    env = {"HF_TOKEN": "x", "LR": "0.1", "SECRET_EMPTY": "", "URL": "s3://a:b@c"} | {
        "pod": {"spec": [{"env": [{"name": "API_KEY", "value": "k"}], "auth": ["a"], "cpus": 2}]}
    }
    assert secrets.redact_mapping(env) == {
        "HF_TOKEN": "[REDACTED]",
        "LR": "0.1",
        "SECRET_EMPTY": "",
        "URL": "s3://a:[REDACTED]@c",
        "pod": "{'spec': [{'env': [{'name': 'API_KEY', 'value': '[REDACTED]'}], 'auth': '[REDACTED]', 'cpus': 2}]}",
    }
