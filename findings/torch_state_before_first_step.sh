#!/usr/bin/env bash
# Most people expect get_optimizer_state_dict and get_state_dict of torch.distributed.checkpoint to read and to change
# nothing: a checkpoint of step 0 does not change the training.
# What happens: if the optimizer has no state yet, they make one with a call of step(), with gradients of zero and lr
# 0. The weights stay, but the call counts. Adam's `step` is 1, so the first real update has the bias correction of the
# second: 0.74 of its length. A momentum with dampening 0.5 begins at zero in place of the first gradient: half of the
# length. After backward() and before step(), they make nothing, and the state in the result is empty. Nothing is
# reported.
# Version: torch 2.15.0, CPU, one process without a process group.
# Source: _init_optim_state in torch/distributed/checkpoint/state_dict.py, whose comment says that SGD is not
# disturbed; https://github.com/pytorch/pytorch/issues/164929 has Adam's case.
# An optional FINDINGS_VENV names a Python with this torch, to skip the download of 5 GB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [[ -z ${FINDINGS_VENV:-} ]]; then
  python3 -m venv "$folder/venv"
  "$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.15.0 numpy==2.4.6
fi
cat >"$folder/first_update.py" <<'END'
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn import Linear


def backward(model: Linear) -> None:
    model(torch.ones(1, 1)).sum().backward()


def first_update(kind: type[torch.optim.Optimizer], look: bool, **options: float) -> float:
    model = Linear(1, 1, bias=False)
    optimizer = kind(model.parameters(), lr=0.1, **options)
    before = model.weight.item()
    if look:
        get_optimizer_state_dict(model, optimizer)
        assert model.weight.item() == before
    backward(model)
    optimizer.step()
    return before - model.weight.item()


print("torch", torch.__version__.partition("+")[0])
for name, kind, options in (
    ("Adam", torch.optim.Adam, {}),
    ("SGD with momentum and dampening", torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
):
    plain, looked = (first_update(kind, look, **options) for look in (False, True))
    print(f"first update of {name}: {plain:.4f}, after a look at the state {looked:.4f}")
model = Linear(1, 1, bias=False)
optimizer = torch.optim.Adam(model.parameters())
print("state before backward:", sorted(get_optimizer_state_dict(model, optimizer)["state"]["weight"]))
print("steps that Adam has counted:", optimizer.state[model.weight]["step"].item())
optimizer = torch.optim.Adam(model.parameters())
backward(model)
print("state between backward and step:", get_optimizer_state_dict(model, optimizer)["state"])
END
"${FINDINGS_VENV:-$folder/venv/bin/python}" "$folder/first_update.py" | tee "$folder/seen"
diff "$folder/seen" - <<'END'
torch 2.15.0
first update of Adam: 0.1000, after a look at the state 0.0744
first update of SGD with momentum and dampening: 0.1000, after a look at the state 0.0500
state before backward: ['exp_avg', 'exp_avg_sq', 'step']
steps that Adam has counted: 1.0
state between backward and step: {}
END
