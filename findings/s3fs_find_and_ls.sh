#!/usr/bin/env bash
# Most people expect fsspec's file system for S3 to look up an object when it is asked for that object, and the calls
# that list a folder to agree.
# What happens: after one ls() of a folder, a file that another process adds there does not exist for exists(), info(),
# ls(), glob() and even cat(), which raises FileNotFoundError without a request, for as long as the process lives. find()
# returns it, because it makes its own listing. A file that another process replaces keeps its old size, and open()
# raises FileExpired. use_listings_cache=False, or invalidate_cache() before each look, avoids it.
# Version: s3fs 2026.9.0, against moto 5.2.5 as the server.
# Source: found by experiment; https://filesystem-spec.readthedocs.io/en/latest/features.html describes the cache.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [[ -z ${FINDINGS_VENV:-} ]]; then
  python3 -m venv "$folder/venv"
  "$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    s3fs==2026.9.0 aiobotocore==3.10.0 boto3==1.43.117 'moto[s3]==5.2.5' flask==3.1.3 flask-cors==6.0.5
fi
for variable in "${!AWS_@}" "${!FSSPEC_@}"; do unset "$variable"; done
export HOME=$folder AWS_ACCESS_KEY_ID=key AWS_SECRET_ACCESS_KEY=secret AWS_DEFAULT_REGION=us-east-1
"${FINDINGS_VENV:-$folder/venv/bin/python}" - <<'END'
import logging
from importlib.metadata import version

import boto3
import s3fs
from moto.server import ThreadedMotoServer

logging.disable()
print("s3fs", s3fs.__version__, "moto", version("moto"))
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
host, port = server.get_host_and_port()
url = f"http://{host}:{port}"
other = boto3.client("s3", endpoint_url=url)
other.create_bucket(Bucket="runs")
other.put_object(Bucket="runs", Key="night/step-1.pt", Body=b"1")

own = s3fs.S3FileSystem(endpoint_url=url)
own.ls("runs/night")
other.put_object(Bucket="runs", Key="night/step-2.pt", Body=b"22")


def answers(files: s3fs.S3FileSystem) -> dict[str, object]:
    try:
        content = files.cat("runs/night/step-2.pt")
    except FileNotFoundError:
        content = "FileNotFoundError"
    return {
        "exists": files.exists("runs/night/step-2.pt"),
        "ls": len(files.ls("runs/night")),
        "glob": len(files.glob("runs/night/*.pt")),
        "find": len(files.find("runs/night")),
        "cat": content,
    }


cached = answers(own)
print("after another process has added a second file:", cached)
fresh = answers(s3fs.S3FileSystem(endpoint_url=url, use_listings_cache=False))
print("without the cache of listings:", fresh)
server.stop()
assert cached == {"exists": False, "ls": 1, "glob": 1, "find": 2, "cat": "FileNotFoundError"}, cached
assert fresh == {"exists": True, "ls": 2, "glob": 2, "find": 2, "cat": b"22"}, fresh
END
