#!/usr/bin/env bash
# Most people expect nproc to print how many cores the process may use, as Python's len(os.sched_getaffinity(0)) does.
# What happens: nproc also obeys two variables of OpenMP. OMP_NUM_THREADS replaces the number, even by one that is higher
# than the machine has, and OMP_THREAD_LIMIT is an upper limit. Launchers such as torchrun set OMP_NUM_THREADS=1 for each
# rank, and sites set it in profiles: there, `make -j$(nproc)` builds with one job, and a load compared with $(nproc)
# looks too high. `nproc --all` ignores the variables, but also the affinity; so use env -u.
# Version: GNU coreutils 9.1 (Debian 12).
# Source: met in a health check of SSH hosts; the manual of coreutils names both variables, `nproc --help` neither.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
apt-get download -qq -o APT::Sandbox::User=root coreutils=9.1-1
dpkg -x coreutils_*.deb .
nproc=$folder/usr/bin/nproc
"$nproc" --version | head -n 1
unset OMP_NUM_THREADS OMP_THREAD_LIMIT
own=$("$nproc")
few=$(OMP_NUM_THREADS=1 "$nproc")
many=$(OMP_NUM_THREADS=4096 "$nproc")
limited=$(OMP_NUM_THREADS=4096 OMP_THREAD_LIMIT=3 "$nproc")
nested=$(OMP_NUM_THREADS=5,2 "$nproc")
help=$("$nproc" --help)
echo "cores: $own; OMP_NUM_THREADS=1: $few; 4096: $many; 5,2: $nested; 4096 and OMP_THREAD_LIMIT=3: $limited"
[[ $own == "$(python3 -c 'import os; print(len(os.sched_getaffinity(0)))')" ]]
[[ "$few $many $limited $nested" == "1 4096 3 5" && $help != *OMP_* ]]
