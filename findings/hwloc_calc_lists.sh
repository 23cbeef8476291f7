#!/usr/bin/env bash
# Most people expect hwloc-calc to fail if it is given cores that do not exist or that it cannot read, and its numbers
# to be those that taskset -c takes.
# What happens: it says so on stderr, leaves the argument out, and exits with 0. A list such as core:0,3 is unknown:
# alone it is the empty set, and "core:0,3 core:1" is core 1. core:8 on a machine with 8 cores is the empty set as well.
# core:3-1 is no error at all, but every core from 3 on. The numbers of -I are in hwloc's own order: where the second
# hyperthreads have the higher numbers, as on most servers, core 1 has the CPUs 1 and 9, and hwloc-calc prints 2,3,
# which are two other cores for taskset. --physical-output prints 1,9.
# Version: hwloc 2.9.0-1 (Debian 12), on a simulated machine, so that every machine gives the same.
# Source: found by experiment; hwloc-calc(1), and "Location Specification" in hwloc(7), which has no core:3-1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
apt-get download -qq -o APT::Sandbox::User=root hwloc-nox=2.9.0-1 libhwloc15=2.9.0-1
for package in ./*.deb; do dpkg -x "$package" .; done
libraries=(usr/lib/*-linux-gnu*)
export LD_LIBRARY_PATH=$PWD/${libraries[0]}
for variable in "${!HWLOC_@}"; do unset "$variable"; done
usr/bin/hwloc-calc --version
machine="node:2 core:4 pu:2(indexes=0,8,1,9,2,10,3,11,4,12,5,13,6,14,7,15)" # two sockets of four cores of two threads
show() { # prints what hwloc-calc says of its arguments
  code=0
  result=$(usr/bin/hwloc-calc -i "$machine" "$@" 2>messages) || code=$?
  echo "$*: '$result', exit code $code, $(wc -l <messages) lines on stderr"
}
{
  show -I core core:0 core:3
  show -I core core:0,3
  show -I core core:0,3 core:1
  show -I core core:8
  show -I core core:3-1
  show -I pu core:1
  show --physical-output -I pu core:1
} | tee seen
diff seen - <<'END'
-I core core:0 core:3: '0,3', exit code 0, 0 lines on stderr
-I core core:0,3: '', exit code 0, 3 lines on stderr
-I core core:0,3 core:1: '1', exit code 0, 3 lines on stderr
-I core core:8: '', exit code 0, 2 lines on stderr
-I core core:3-1: '3,4,5,6,7', exit code 0, 0 lines on stderr
-I pu core:1: '2,3', exit code 0, 0 lines on stderr
--physical-output -I pu core:1: '1,9', exit code 0, 0 lines on stderr
END
