"""The formats of an image's archive."""

import json

import pytest
from tests.unit.ddpctl.answers import perform
from tests.unit.ddpctl.test_image_transfer import BOX1, BOX2, CONFIG, LOW

from ddpctl.command import Output
from ddpctl.errors import DdpctlError
from ddpctl.operations import image_transfer
from ddpctl.operations.image_transfer import Survey


@pytest.mark.parametrize(("here", "there", "codec"), [(0, True, "zst"), (127, True, "gz"), (0, False, "gz")])
def test_layers_are_packed_with_zstd_only_if_every_machine_has_it(here: int, there: bool, codec: str) -> None:
    surveys = (Survey(host=BOX1, has_zstd=True), Survey(host=BOX2, has_zstd=there))
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
