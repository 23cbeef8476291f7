"""A rank without torch. Each argument RANK=DEED says what a rank does (default: 'wait'), the deeds being:
a number (exit with it), -N (die of signal N), wait, save (exit with 128 + the signal that asks for it), deaf, family.
"""

import os
import signal
import subprocess
import sys
import time

deeds = dict(argument.split("=") for argument in sys.argv[1:])
deed = deeds.get(os.environ["RANK"], deeds.get("all", "wait"))
if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
    deed = deeds.get("again", deed)


def save(number, _):
    print("saved on", signal.Signals(number).name)
    sys.exit(128 + number)


if deed == "save":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, save)
elif deed == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
elif deed == "family":  # a worker as a DataLoader's, one in a session of its own, and a daemon's grandchild
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    subprocess.Popen(sleep)
    subprocess.Popen(sleep, start_new_session=True)
    twice = f"import subprocess; subprocess.Popen({sleep!r}, start_new_session=True)"
    subprocess.run([sys.executable, "-c", twice], start_new_session=True)
print("ready")
if deed.lstrip("-").isdecimal():
    if int(deed) < 0:
        os.kill(os.getpid(), -int(deed))
    sys.exit(int(deed))
time.sleep(60)
