#!/usr/bin/env bash
# Most people expect two files of node exporter's textfile collector that hold one metric with different labels to give
# both series, whether HELP and TYPE stand in both files or only in the first.
# What happens: the HELP lines must agree. If the second file has none, the exporter makes one up that names both files,
# finds that it differs from the first file's, and drops the second file's series. The scrape succeeds,
# node_textfile_scrape_error is 0, and node_textfile_mtime_seconds lists both files. Only a line in the exporter's log and
# promhttp_metric_handler_errors_total tell. If neither file has HELP, both series are there.
# Version: node exporter 1.5.0 (Debian 12).
# Source: found by experiment; the README of node_exporter describes the collector without this rule.
set -euo pipefail
folder=$(mktemp -d)
exporter=
trap '[[ -z $exporter ]] || kill "$exporter"; rm -rf "$folder"' EXIT
cd "$folder"
apt-get download -qq -o APT::Sandbox::User=root prometheus-node-exporter=1.5.0-1+b6
dpkg -x prometheus-node-exporter_*.deb .
usr/bin/prometheus-node-exporter --version 2>&1 | head -n 1
mkdir files
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
usr/bin/prometheus-node-exporter --collector.disable-defaults --collector.textfile \
  --collector.textfile.directory="$PWD/files" --web.listen-address="127.0.0.1:$port" >log 2>&1 &
exporter=$!
scrape() {
  curl -sf --retry 20 --retry-connrefused --retry-delay 1 "http://127.0.0.1:$port/metrics" >metrics
  grep -E '^(jobs|node_textfile_scrape_error)' metrics | tr '\n' ' '
}
echo 'jobs{node="a"} 1' >files/a.prom
echo 'jobs{node="b"} 2' >files/b.prom
without=$(scrape)
printf '# HELP jobs Running jobs.\n# TYPE jobs gauge\n' | cat - files/a.prom >a && mv a files/a.prom
first=$(scrape)
grep -o 'mtime_seconds{file=.*/[ab].prom' metrics | grep -o '[ab].prom'
printf '# HELP jobs Running jobs.\n# TYPE jobs gauge\n' | cat - files/b.prom >b && mv b files/b.prom
both=$(scrape)
echo "HELP in no file: $without"
echo "HELP in the first file: $first"
echo "HELP in both files: $both"
grep -m 1 -o 'has help .*' log
[[ $first == 'jobs{node="a"} 1 node_textfile_scrape_error 0 ' ]]
[[ $without == 'jobs{node="a"} 1 jobs{node="b"} 2 node_textfile_scrape_error 0 ' && $both == "$without" ]]
