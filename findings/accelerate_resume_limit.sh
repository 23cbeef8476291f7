#!/usr/bin/env bash
# Most people expect Accelerate's automatic names for checkpoints, with a total_limit, to keep the newest ones, and a
# resumed training to continue with the next number behind the checkpoint that load_state() has found.
# What happens: load_state() takes the folder with the highest number, but the next save of the new process is number 0
# again. The limit removes the lowest number first, which is now the newest checkpoint. A training that is resumed from
# checkpoint_4 with a limit of 3 keeps 3 and 4 and one new checkpoint at a time; the fourth save removes the third, and
# ends with ValueError. The next load_state() loads checkpoint_4 from before: the work of all saves since is lost.
# ProjectConfiguration(iteration=5) avoids it.
# Version: accelerate 1.15.0, torch 2.15.0, CPU. Source: found by experiment; save_state and load_state in
# accelerate/accelerator.py. https://github.com/huggingface/accelerate/issues/3306 tells of the number, not of the loss.
# An optional FINDINGS_VENV names a Python with this torch, to skip the download of 5 GB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${FINDINGS_VENV:-python3}" -m venv "$folder/venv"
if [[ -n ${FINDINGS_VENV:-} ]]; then
  where='import sysconfig; print(sysconfig.get_path("purelib"))'
  "$FINDINGS_VENV" -c "$where" >"$("$folder/venv/bin/python" -c "$where")/torch.pth"
fi
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check accelerate==1.15.0 torch==2.15.0 numpy==2.4.6
cd "$folder"
for variable in "${!ACCELERATE_@}"; do unset "$variable"; done
cat >train.py <<'END'
import sys
from pathlib import Path

import accelerate
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from safetensors.torch import load_file

first, last = map(int, sys.argv[1:])
project = ProjectConfiguration("run", automatic_checkpoint_naming=True, total_limit=3)
accelerator = Accelerator(cpu=True, project_config=project)
model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
if first == 0:
    print("accelerate", accelerate.__version__)
else:
    accelerator.load_state()
    print(f"new process: load_state() loads save {model.weight.item():.0f}")
for save in range(first, last):
    with torch.no_grad():
        model.weight.fill_(save)
    try:
        accelerator.save_state()
        result = "succeeds"
    except ValueError:
        result = "is a ValueError"
    folders = sorted(Path("run/checkpoints").iterdir())
    kept = [f"{load_file(folder / 'model.safetensors')['weight'].item():.0f} in {folder.name}" for folder in folders]
    print(f"save {save} {result}, kept: {', '.join(kept)}")
END
{
  venv/bin/python -W ignore train.py 0 5
  venv/bin/python -W ignore train.py 5 9
  venv/bin/python -W ignore train.py 9 9
} 2>errors | tee seen || { cat errors && exit 1; }
diff <(grep -v "make room" seen) - <<'END'
accelerate 1.15.0
save 0 succeeds, kept: 0 in checkpoint_0
save 1 succeeds, kept: 0 in checkpoint_0, 1 in checkpoint_1
save 2 succeeds, kept: 0 in checkpoint_0, 1 in checkpoint_1, 2 in checkpoint_2
save 3 succeeds, kept: 1 in checkpoint_1, 2 in checkpoint_2, 3 in checkpoint_3
save 4 succeeds, kept: 2 in checkpoint_2, 3 in checkpoint_3, 4 in checkpoint_4
new process: load_state() loads save 4
save 5 succeeds, kept: 5 in checkpoint_0, 3 in checkpoint_3, 4 in checkpoint_4
save 6 succeeds, kept: 6 in checkpoint_1, 3 in checkpoint_3, 4 in checkpoint_4
save 7 succeeds, kept: 7 in checkpoint_2, 3 in checkpoint_3, 4 in checkpoint_4
save 8 is a ValueError, kept: 3 in checkpoint_3, 4 in checkpoint_4
new process: load_state() loads save 4
END
