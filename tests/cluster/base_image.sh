#!/usr/bin/env bash
# base_image.sh TAG: a stand-in for the Dockerfile's base, python:3.11-slim-bookworm, made from Debian's packages, for a
# machine that reaches no registry. Needs root, docker and mmdebstrap; about half a minute. The machine's certificates
# and pip's settings go in, so that what it may install from a build may as well.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
packages=ca-certificates,python3,python3-pip,netbase,tzdata
# shellcheck disable=SC2016 # a hook's $1 is for mmdebstrap
mmdebstrap --quiet --variant=minbase --include="$packages" \
  --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
  --customize-hook='ln -s python3 "$1/usr/bin/python"' \
  --customize-hook='rm -f "$1"/usr/lib/python3*/EXTERNALLY-MANAGED' \
  --customize-hook='copy-in /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs' \
  --customize-hook='if [ -f /etc/pip.conf ]; then cp /etc/pip.conf "$1/etc/pip.conf"; fi' \
  bookworm "$work/base.tar"
docker import --change 'CMD ["python3"]' "$work/base.tar" "$1" >/dev/null
