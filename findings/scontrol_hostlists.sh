#!/usr/bin/env bash
# Most people expect `scontrol show hostnames EXPRESSION` to be a pure function of text that fails if it fails, and
# `hostlistsorted` to return each host once, in one range.
# What happens: brackets may not be followed by text at the end of a name. n[1-2].lab and gpu[1-2]x, which ClusterShell
# expands, are "Invalid hostlist", although n[1-2]x[3-4] is four hosts. The exit code is 0, and nothing is on stdout: a
# loop over the hosts of a failed call runs zero times and succeeds. hostlistsorted keeps duplicates and breaks the range
# for them: n1,n2,n2,n1 is n[1,1-2,2]. Names that end in a letter are never folded: n1x,n2x stays as it is.
# Version: slurm-client 22.05.8-4+deb12u3 (Debian 12), ClusterShell 1.10.1.
# Source: found by experiment; https://slurm.schedmd.com/scontrol.html (show hostlistsorted) says nothing of duplicates.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check ClusterShell==1.10.1
cd "$folder"
apt-get download -qq -o APT::Sandbox::User=root slurm-client=22.05.8-4+deb12u3 \
  slurm-wlm-basic-plugins=22.05.8-4+deb12u3 libreadline8=8.2-1.3 liblz4-1=1.9.4-1
for package in *.deb; do dpkg -x "$package" .; done
libraries=$(find "$folder/usr" "$folder/lib" -name 'lib*.so*' -printf '%h\n' | sort -u | paste -s -d :)
printf '%s\n' ClusterName=lab SlurmctldHost=localhost "PluginDir=$(dirname "$(find usr -name select_linear.so)")" \
  'NodeName=n[1-9]' 'PartitionName=all Nodes=ALL' >slurm.conf
sed -i "s|PluginDir=|&$folder/|" slurm.conf
show() { SLURM_CONF=$folder/slurm.conf LD_LIBRARY_PATH=$libraries usr/bin/scontrol show "$@"; }
SLURM_CONF=$folder/slurm.conf LD_LIBRARY_PATH=$libraries usr/bin/scontrol --version
for expression in 'n[1-2]x[3-4]' 'n[1-2].lab' 'gpu[1-2]x'; do
  code=0
  hosts=$(show hostnames "$expression" 2>error) || code=$?
  echo "$expression: scontrol '${hosts//$'\n'/ }' (exit $code) $(cat error); nodeset $(venv/bin/nodeset -e "$expression")"
  case $expression in
    *']x[3-4]') [[ $code == 0 && $(wc -w <<<"$hosts") == 4 ]] ;;
    *) [[ $code == 0 && -z $hosts && -s error && $(venv/bin/nodeset -c "$expression") == 2 ]] ;;
  esac
done
sorted=$(show hostlistsorted n1,n2,n2,n1) letters=$(show hostlist n1x,n2x)
echo "hostlistsorted n1,n2,n2,n1: $sorted (nodeset $(venv/bin/nodeset -f n1,n2,n2,n1)); hostlist n1x,n2x: $letters"
[[ $sorted == "n[1,1-2,2]" && $letters == n1x,n2x ]]
