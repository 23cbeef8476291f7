#!/usr/bin/env bash
# Most people expect paramiko (and so Fabric) to read a line of ssh_config as ssh does, in which a comment may stand behind
# the value, and to leave other hosts alone.
# What happens: only a line that begins with # is a comment to paramiko. `Port 2222 # behind the firewall` gives the port
# "2222 # behind the firewall", on which Fabric raises ValueError. Each word of a comment behind `Host gpu` becomes a
# pattern: the block also applies to a host that the comment only mentions. ssh reads the same file without a word.
# Version: paramiko 5.1.0, fabric 3.2.3; OpenSSH 9.2p1 of Debian 12 for comparison.
# Source: found by experiment; ssh_config(5) of OpenSSH 9.2 and https://docs.paramiko.org/en/stable/api/config.html
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check paramiko==5.1.0 fabric==3.2.3
cd "$folder"
apt-get download -qq -o APT::Sandbox::User=root openssh-client=1:9.2p1-2+deb12u10
dpkg -x openssh-client_*.deb .
usr/bin/ssh -V
cat >config <<'END'
Host gpu # the box beside desk
  Port 2222 # behind the firewall
END
ssh_port() { usr/bin/ssh -T -F config -G "$1" | sed -n 's/^port //p'; }
echo "ssh: gpu has port $(ssh_port gpu), desk $(ssh_port desk)"
[[ "$(ssh_port gpu) $(ssh_port desk)" == "2222 22" ]]
venv/bin/python - <<'END'
import fabric
import paramiko

print("paramiko", paramiko.__version__, "fabric", fabric.__version__)
config = paramiko.SSHConfig.from_path("config")
ports = {host: config.lookup(host).get("port") for host in ("gpu", "desk", "other")}
print("paramiko:", ports)
wrong = "2222 # behind the firewall"
assert ports == {"gpu": wrong, "desk": wrong, "other": None}, ports
try:
    fabric.Connection("gpu", config=fabric.Config(runtime_ssh_path="config"))
except ValueError as error:
    print("fabric.Connection: ValueError:", error)
else:
    raise SystemExit("changed: Fabric takes the port")
END
