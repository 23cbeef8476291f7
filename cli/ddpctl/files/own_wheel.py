"""Packs the installed ddpctl as a wheel and as text, for machines without a network.

The wheel declares no dependencies, because the other machine cannot download any. The same installed files always give
the same text. The text must fit in a notebook, which may have at most 1 MB. Therefore, it lacks what serves other
machines, is compressed with LZMA as a whole, and then encoded in base85 (550 kB, 680 kB as text).
"""

import base64
import hashlib
import importlib.util
import io
import lzma
import zipfile
from functools import cache
from pathlib import Path

from ddpctl.errors import UnavailableError
from ddpwire.version import __version__

PACKAGES = ("ddpctl", "ddpwire", "ddprank", "ddprun", "ddptrain", "ddpcheck")
# A session has no Prometheus server, and the files of other launchers are translated where ddpctl.yaml is written.
NOT_IN_A_NOTEBOOK = ("ddpctl/monitoring/", "ddpctl/migration/")
_PROGRAMS = """\
[console_scripts]
ddpctl = ddpctl.__main__:main
ddprun = ddprun.__main__:main
ddptrain = ddptrain.__main__:main
"""


@cache
def wheel_text() -> str:
    """Return a notebook's wheel, compressed and encoded in base85. Raises UnavailableError, OSError."""
    return base64.b85encode(lzma.compress(wheel(without=NOT_IN_A_NOTEBOOK), preset=9)).decode()


def wheel(*, without: tuple[str, ...] = ()) -> bytes:
    """Return the wheel as bytes (PEP 427). Raises UnavailableError, OSError. ``without``: folders to leave out."""
    about = f"ddpctl-{__version__}.dist-info"
    files: dict[str, bytes] = {}
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise UnavailableError(f"the package {package}, a part of ddpctl, is not installed here")
        top = Path(spec.submodule_search_locations[0])
        paths = sorted(path for path in top.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        names = {f"{package}/{path.relative_to(top)}": path for path in paths}
        files |= {name: path.read_bytes() for name, path in names.items() if not name.startswith(without)}
    files[f"{about}/METADATA"] = f"Metadata-Version: 2.1\nName: ddpctl\nVersion: {__version__}\n".encode()
    files[f"{about}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: ddpctl\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{about}/entry_points.txt"] = _PROGRAMS.encode()
    rows = []
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},{len(data)}\n")
    files[f"{about}/RECORD"] = "".join([*rows, f"{about}/RECORD,,\n"]).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, date_time=(2020, 1, 1, 0, 0, 0))
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data)
    return buffer.getvalue()
