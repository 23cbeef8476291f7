"""Which files of a project are sent."""

from pathlib import Path

import pytest

from ddpctl.errors import ConfigError
from ddpctl.targets.kubernetes import project as reader
from ddpctl.targets.kubernetes.options import DEFAULT_PROJECT


def read(folder: Path, *globs: str, listed: str = "") -> tuple[dict[str, str], list[str]]:
    answer = reader.read(folder, listed, globs or DEFAULT_PROJECT)
    return answer["files"], answer["left_out"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    for name, text in {
        "train.py": "import lib.model\n",
        "lib/model.py": "x = 'é'\n",
        "conf/big.yaml": "a: 1\n",
        "README.md": "no",
        ".git/config.py": "no",
        "__pycache__/train.py": "no",
        "env/pyvenv.cfg": "no",
        "env/lib/site.py": "no",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_without_git_it_finds_the_code_and_no_environment_or_cache(project: Path) -> None:
    assert read(project) == ({"lib/model.py": "x = 'é'\n", "train.py": "import lib.model\n"}, [])


def test_only_files_that_git_lists_and_that_a_pattern_matches_are_sent(project: Path) -> None:
    sent = read(project, "lib/*.py", listed="train.py\0lib/model.py\0gone/lib.py\0")
    assert sent == ({"lib/model.py": "x = 'é'\n"}, [])


SECRETS = (
    "AWS_Credentials.json", "conf/secrets.yaml", ".env", ".env.local", "prod.env", "tls.key", "tls.pem", "id_rsa",
    "service-account-1.json", "my_passwords.txt", "secrets/a.py", ".netrc", "hf_token.json", "kubeconfig-lab",
)  # fmt: skip


@pytest.mark.parametrize("name", SECRETS)
def test_a_file_with_a_name_like_a_secret_is_sent_only_by_its_own_name(project: Path, name: str) -> None:
    (project / name).parent.mkdir(exist_ok=True)
    (project / name).write_text("canary")
    files, left_out = read(project, "*")
    assert (name in files, left_out) == (False, [name])
    files, left_out = read(project, "*.py", name)
    assert (files[name], left_out) == ("canary", [])


def test_code_with_a_name_that_resembles_a_secret_is_sent(project: Path) -> None:
    names = ["environment.py", "key.py", "keys/model.py", "token.py", "tokenizer.json", "pem.txt"]
    for name in names:
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text("x")
    files, left_out = read(project, *names)
    assert (sorted(files), left_out) == (sorted(names), [])


def test_a_configuration_of_ddpctl_is_never_sent(project: Path) -> None:
    (project / "ddpctl.yaml").write_text("a: [broken")
    (project / "night.yml").write_text("job: {env: {WANDB_API_KEY: canary}}\ntarget: local\n")
    (project / "conf/job.yaml").write_text("job: {name: a}\nlr: 0.1\n")  # somebody else's
    files, left_out = read(project, "*.yaml", "*.yml", "ddpctl.yaml", "night.yml")
    assert (sorted(files), left_out) == (["conf/big.yaml", "conf/job.yaml"], [])


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
