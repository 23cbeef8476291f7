#!/usr/bin/env bash
# Most people expect a file for Prometheus' file_sd_configs to mean the same as JSON and as YAML: {"rank": 0} is valid
# in both or in neither, since JSON is YAML.
# What happens: in a .json file, a label whose value is a number is an error, and promtool exits with 1. In a .yml file,
# the number is valid. The same JSON text under the name .yml is valid, too. So a generator of targets must turn each
# value into a string, and a test of it with YAML proves nothing for JSON.
# Version: Prometheus 2.42.0 (Debian 12).
# Source: found by experiment; https://prometheus.io/docs/guides/file-sd/ shows only values that are strings.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
apt-get download -qq -o APT::Sandbox::User=root prometheus=2.42.0+ds-5+deb12u1
dpkg -x prometheus_*.deb .
usr/bin/promtool --version 2>&1 | head -n 1
check() { # prints promtool's exit code for a configuration with this file of targets
  printf 'scrape_configs:\n- job_name: ranks\n  file_sd_configs: [{files: [%s]}]\n' "$1" >prometheus.yml
  code=0
  usr/bin/promtool check config prometheus.yml >output 2>&1 || code=$?
  echo "$code"
}
text='[{"targets": ["node1:9100"], "labels": {"rank": 0}}]'
echo "$text" >targets.json
echo "$text" >targets.yml
sed 's/0}/"0"}/' targets.json >strings.json
results="$(check strings.json) $(check targets.yml) $(check targets.json)"
grep -m 1 FAILED output
echo "exit codes: $results (JSON with strings, the number as .yml, the number as .json)"
[[ $results == "0 0 1" ]]
