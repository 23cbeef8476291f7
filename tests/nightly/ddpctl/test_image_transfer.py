"""The formats of an image's archive."""

import json
import subprocess
import sys

import pytest
from tests.unit.ddpctl.answers import perform
from tests.unit.ddpctl.test_image_transfer import BOX1, BOX2, CONFIG, HIGH, LOW

from ddpctl.command import FilePart, Output, Transfer
from ddpctl.errors import DdpctlError, UnavailableError
from ddpctl.operations import image_transfer
from ddpctl.operations.image_transfer import Blob, Survey


@pytest.mark.parametrize(("here", "has_zstd", "codec"), [(0, True, "zst"), (127, True, "gz"), (0, False, "gz")])
def test_layers_are_packed_with_zstd_only_if_every_machine_has_it(here: int, has_zstd: bool, codec: str) -> None:
    surveys = (Survey(host=BOX1, has_zstd=True), Survey(host=BOX2, has_zstd=has_zstd))
    assert perform(image_transfer.choose_codec(surveys), {"zstd": Output(returncode=here)})[1] == codec


def test_a_newer_dockers_archive_is_read_as_well() -> None:
    text = json.dumps([{"Config": f"blobs/sha256/{CONFIG}", "Layers": [f"blobs/sha256/{LOW}"]}])
    assert image_transfer.read_manifest(text) == (f"blobs/sha256/{CONFIG}", (f"blobs/sha256/{LOW}",))


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '[{"Config": "x"}]'], ids=["nothing", "no list", "no image", "no layers"]
)
def test_a_manifest_that_is_not_one_is_refused(text: str) -> None:
    with pytest.raises(DdpctlError, match="manifest"):
        image_transfer.read_manifest(text)


def test_a_survey_lists_each_hosts_layers_or_its_problem() -> None:
    first = Output(returncode=0, stdout=f"zstd\n700 {LOW}.tar.zst\n12 {HIGH}.tar.zst.part\n")
    failed = Output(returncode=69, stderr="x\nCannot connect to the Docker daemon\n")
    none = Output(returncode=1, stderr="No such image")
    verb = image_transfer.survey_hosts("docker", "me/train:1", (BOX1, BOX2))
    commands, surveys = perform(verb, {"image inspect": none, "": {str(BOX1): first, str(BOX2): failed}})
    assert surveys == (
        Survey(host=BOX1, has_zstd=True, files={f"{LOW}.tar.zst": 700, f"{HIGH}.tar.zst.part": 12}),
        Survey(host=BOX2, problem="Cannot connect to the Docker daemon"),
    )
    assert (surveys[0].blob_of(LOW), surveys[0].blob_of(HIGH)) == (f"{LOW}.tar.zst", None)
    assert [command.host for command in commands] == [BOX1, BOX1, BOX2, BOX2]
    assert commands[1].argv == ("docker", "image", "inspect", "me/train:1")


def test_the_rest_of_a_blob_goes_over_stdin() -> None:
    blob = Blob(digest=LOW, name=f"{LOW}.tar.gz", path="/cache/x y", size=700)
    survey = Survey(host=BOX2, files={f"{LOW}.tar.gz.part": 695})
    (command,), sent = perform(image_transfer.send(survey, blob), {})
    part = FilePart(path="/cache/x y", start=695, length=5)
    assert (sent, command.transfer) == (5, Transfer(num_bytes=5, num_files=1, reads=part))
    assert command.argv[4:] == (blob.name, "695", "700", LOW)
    longer = Survey(host=BOX2, files={f"{LOW}.tar.gz.part": 701})
    assert perform(image_transfer.send(longer, blob), {})[1] == 700
    assert perform(image_transfer.send(Survey(host=BOX2, files={blob.name: 700}), blob), {}) == ([], 0)
    lost = Output(returncode=255, stderr="the connection was lost (the host is gone)")
    with pytest.raises(UnavailableError, match="the host is gone"):
        perform(image_transfer.send(survey, blob), {"": lost})
    with pytest.raises(UnavailableError, match=LOW[:12]):
        perform(image_transfer.send(survey, blob), {"": Output(returncode=65)})


def test_an_option_is_no_host() -> None:
    argv = [sys.executable, "-P", "-m", "ddpctl", "image", "ship", "-oProxyCommand=x"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("ddpctl: ")
