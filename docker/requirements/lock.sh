#!/usr/bin/env bash
# Updates the image's pinned and hashed requirements. `make lock` runs it. Needs uv and a network.
#   build.txt   to build the wheel
#   torch.txt   the requirements of torch
#   ddpctl.txt  the requirements in pyproject.toml, without torch and without those in torch.txt
set -euo pipefail
cd "$(dirname "$0")"

compile() {
  uv pip compile --quiet --upgrade --python-version 3.11 --python-platform linux --generate-hashes --no-header --no-annotate "$@"
}

compile build.in --output-file build.txt
compile torch.in --output-file torch.txt

mapfile -t there < <(sed -nE 's/^([a-z0-9-]+)==.*/\1/p' torch.txt)
printf '%s ; sys_platform == "never"\n' torch torchvision >no-torch.tmp
trap 'rm -f no-torch.tmp' EXIT
compile ../../pyproject.toml --extra train --extra digits --constraint torch.txt --override no-torch.tmp \
  "${there[@]/#/--no-emit-package=}" --no-emit-package=torch --no-emit-package=torchvision --output-file ddpctl.txt
