#!/usr/bin/env bash
# Most people expect paramiko's SSHClient.connect, given one key file and no password, to log in with the key or to raise
# an exception: it is a library, and look_for_keys and allow_agent are off.
# What happens: if the server accepts the key and wants a second factor (a password or a code), connect() writes the
# server's question to stdout, and reads the answer from stdin with input(). A program whose stdout is data gets the
# prompt in it, one that reads its own stdin loses a line, and a pool of threads asks the same person many times at once.
# OpenSSH has BatchMode for this; paramiko has no parameter. A transport_factory whose class overrides
# auth_interactive_dumb turns it off.
# Version: paramiko 5.1.0.
# Source: found by experiment; SSHClient._auth and Transport.auth_interactive_dumb in paramiko's client.py and transport.py
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check paramiko==5.1.0
cat >"$folder/ask.py" <<'END'
import socket
import sys
import threading

import paramiko
from paramiko.common import AUTH_FAILED, AUTH_PARTIALLY_SUCCESSFUL, AUTH_SUCCESSFUL

folder = sys.argv[1]
key = paramiko.RSAKey.generate(2048)
key.write_private_key_file(f"{folder}/key")


class TwoFactors(paramiko.ServerInterface):
    """Accepts any key, and then asks for a code."""

    is_known = False

    def get_allowed_auths(self, username):
        return "keyboard-interactive" if self.is_known else "publickey"

    def check_auth_publickey(self, username, key):
        self.is_known = True
        return AUTH_PARTIALLY_SUCCESSFUL

    def check_auth_interactive(self, username, submethods):
        return paramiko.InteractiveQuery("", "", ("Code: ", True))

    def check_auth_interactive_response(self, responses):
        return AUTH_SUCCESSFUL if list(responses) == ["first line of stdin"] else AUTH_FAILED


ours, theirs = socket.socketpair()
server = paramiko.Transport(theirs)
server.add_server_key(paramiko.RSAKey.generate(2048))
threading.Thread(target=server.start_server, kwargs={"server": TwoFactors(), "event": threading.Event()}).start()
client = paramiko.SSHClient()
client.set_missing_host_key_policy(paramiko.AutoAddPolicy())
client.connect("host", username="me", key_filename=f"{folder}/key", allow_agent=False, look_for_keys=False, sock=ours)
print("paramiko", paramiko.__version__, "authenticated:", client.get_transport().is_authenticated(), file=sys.stderr)
print("left on stdin:", repr(sys.stdin.read()), file=sys.stderr)
client.close()
server.close()
END
printf 'first line of stdin\nsecond line\n' | "$folder/venv/bin/python" "$folder/ask.py" "$folder" >"$folder/out" 2>"$folder/err"
cat "$folder/err"
echo "stdout: $(<"$folder/out")"
[[ $(<"$folder/out") == *"Code:"* && $(<"$folder/err") == *"authenticated: True"* ]]
[[ $(<"$folder/err") == *"left on stdin: 'second line"* ]]
