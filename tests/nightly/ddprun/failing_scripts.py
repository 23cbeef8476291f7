"""Ten realistic ways in which a single-process training script fails, by an author who had not seen ddprun.

TEN = {name: (script_text, exit_code, expected)}.  `expected` is a piece of text a human
would call the cause (class without its module, first meaningful words); "" where no
exception ended the script.
"""

TEN = {}

# 1 ---------------------------------------------------------------- DataLoader worker
# UnicodeDecodeError cannot be rebuilt from one string, so torch re-raises RuntimeError.
TEN["dataloader_worker_unicode"] = (
    r"""
import os, tempfile
import torch
from torch.utils.data import DataLoader, Dataset

class Captions(Dataset):
    def __init__(self, path):
        self.path = path
    def __len__(self):
        return 8
    def __getitem__(self, i):
        with open(self.path, encoding="utf-8") as f:
            return len(f.read()) + i

def main():
    path = os.path.join(tempfile.mkdtemp(), "captions.txt")
    with open(path, "wb") as f:
        f.write("caf\xe9 au lait\n".encode("latin-1"))
    print("epoch 0: start", flush=True)
    for batch in DataLoader(Captions(path), batch_size=4, num_workers=1):
        print(batch.float().mean())

if __name__ == "__main__":
    main()
""",
    1,
    "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xe9 in position 3",
)

# 2 ------------------------------------------- load_state_dict, then wandb's last words
TEN["state_dict_mismatch_wandb"] = (
    r"""
import atexit, sys
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = nn.Linear(16, classes)

def wandb_finish():
    p = lambda s: print(s, file=sys.stderr, flush=True)
    p("wandb: ")
    p("wandb: Run history:")
    p("wandb: train/error \u2588\u2585\u2583\u2582\u2581")
    p("wandb: ")
    p("wandb: Run summary:")
    p("wandb: train/error 0.41207")
    p("wandb: ")
    p("wandb: \U0001f680 View run eager-sun-12 at: https://wandb.ai/lab/imagenet/runs/3k1p9xq2")
    p("wandb: \u2b50\ufe0f View project at: https://wandb.ai/lab/imagenet")
    p("wandb: Synced 5 W&B file(s), 0 media file(s), 0 artifact file(s) and 0 other file(s)")
    p("wandb: Find logs at: ./wandb/run-20250312_101502-3k1p9xq2/logs")

atexit.register(wandb_finish)
print("wandb: Tracking run with wandb version 0.19.8", file=sys.stderr, flush=True)
state = Net(1000).state_dict()
state["module.extra"] = torch.zeros(1)
Net(10).load_state_dict(state)
""",
    1,
    "RuntimeError: Error(s) in loading state_dict for Net",
)

# 3 ------------------------------------------------------------------------------ hydra
TEN["hydra_config_key"] = (
    r"""
import sys, traceback
import torch

class ConfigAttributeError(AttributeError):
    pass
ConfigAttributeError.__module__ = "omegaconf.errors"

class DictConfig(dict):
    def __getattr__(self, key):
        if key in self:
            return self[key]
        raise ConfigAttributeError(
            f"Key '{key}' is not in struct\n    full_key: optim.{key}\n    object_type=dict")

def main(cfg):
    model = torch.nn.Linear(4, 2)
    torch.optim.SGD(model.parameters(), lr=cfg.optim.learning_rate)

def run_and_report(func):
    # what hydra._internal.utils.run_and_report prints
    try:
        return func()
    except Exception as ex:
        print("Error executing job with overrides: ['optim.lr=0.1', 'trainer=cpu']",
              file=sys.stderr)
        tb = ex.__traceback__.tb_next.tb_next
        print("Traceback (most recent call last):", file=sys.stderr)
        traceback.print_tb(tb, file=sys.stderr)
        for line in traceback.format_exception_only(type(ex), ex):
            sys.stderr.write(line)
        print("\nSet the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.",
              file=sys.stderr)
    sys.exit(1)

run_and_report(lambda: main(DictConfig(optim=DictConfig(lr=0.1))))
""",
    1,
    "ConfigAttributeError: Key 'learning_rate' is not in struct",
)

# 4 ---------------------------------------------------------- rich, imitated
TEN["rich_excepthook"] = (
    r"""
import sys, textwrap, traceback
import torch

def rich_hook(tp, value, tb):
    # the box of rich.traceback at the 80 columns it takes when there is no terminal
    w = 80
    out = ["\u256d" + " Traceback (most recent call last) ".center(w - 2, "\u2500") + "\u256e"]
    row = lambda s: out.append("\u2502 " + s[:w - 4].ljust(w - 4) + " \u2502")
    src = open(__file__).read().splitlines()
    for fs in traceback.extract_tb(tb):
        row(f"{fs.filename}:{fs.lineno} in {fs.name}")
        row("")
        for n in range(max(1, fs.lineno - 3), min(len(src), fs.lineno + 3) + 1):
            mark = "\u2771" if n == fs.lineno else " "
            line = src[n - 1]
            if line.startswith("    "):
                line = "\u2502   " + line[4:]
            row(f"{mark} {n:2d} {line}")
        row("")
    out[-1:] = ["\u2570" + "\u2500" * (w - 2) + "\u256f"]
    words = textwrap.wrap(f"{tp.__name__}: {value}", w - 1, break_long_words=False)
    print("\n".join(out) + "\n" + " \n".join(words), file=sys.stderr, flush=True)

sys.excepthook = rich_hook

def loss_fn(logits, target):
    # raise ValueError("target: wrong shape")  TODO
    return ((logits - target) ** 2).mean()

def train():
    logits = torch.nn.Linear(8, 32)(torch.randn(4, 8))
    return loss_fn(logits, torch.randn(4, 10))

train()
""",
    1,
    "RuntimeError: The size of tensor a (32) must match the size of tensor b (10)",
)

# 5 ----------------------------------- "During handling ...": the last one is the cause
TEN["chained_unicode_message"] = (
    r"""
import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

class \u00dcberpr\u00fcfungsFehler(ValueError):
    pass

def dtype_of(name):
    try:
        return DTYPES[name]
    except KeyError:
        raise \u00dcberpr\u00fcfungsFehler(
            f"unbekannte Genauigkeit \u201e{name}\u201c: erlaubt sind {', '.join(DTYPES)} \u2192 config.yaml:7")

def train(dtype):
    return torch.nn.Linear(4, 2).to(dtype_of(dtype))

train("fp15")
""".encode("ascii").decode("unicode_escape"),
    1,
    "\u00dcberpr\u00fcfungsFehler: unbekannte Genauigkeit \u201efp15\u201c: erlaubt sind fp32, bf16",
)

# 6 ---------------------------------------------------------------------------- dynamo
TEN["dynamo_graph_break"] = (
    r"""
import torch
import torch._dynamo

@torch.compile(backend="eager", fullgraph=True)
def step(x, w):
    y = x @ w
    torch._dynamo.graph_break()
    return y.sum()

print("compiling ...", flush=True)
step(torch.ones(2, 2), torch.ones(2, 2))
""",
    1,
    "Unsupported: Call to `torch._dynamo.graph_break()`",
)

# 7 -------------------------- a tqdm bar on the traceback's line, notes, the bar again
TEN["tqdm_and_notes"] = (
    r"""
import sys
import torch

def tqdm(it, total):
    n = 0
    def draw(end=""):
        full = 10 * n // total
        sys.stderr.write(f"\r{100 * n // total:3d}%|{chr(0x2588) * full:<10}| {n}/{total} "
                         f"[00:0{n}<00:0{total - n}, 1.02it/s, loss=2.3]{end}")
        sys.stderr.flush()
    try:
        for x in it:
            draw()
            yield x
            n += 1
    finally:
        draw("\n")

bars = []

def train():
    model = torch.nn.Linear(16, 2)
    bar = tqdm(range(8), 8)
    bars.append(bar)
    for step in bar:
        try:
            model(torch.randn(4, 16 if step < 3 else 8))
        except RuntimeError as e:
            e.add_note(f"step: {step}, epoch: 0")
            e.add_note("Batch:\n  Sample: train/n01440764_10026.JPEG\n"
                       "  PreviousError: none since epoch 0")
            e.add_note("Hint: ValueError: is what older versions raised here")
            raise

train()
""",
    1,
    "RuntimeError: addmm: mat1 and mat2 shapes cannot be multiplied (4x8 and 16x2)",
)

# 8 ------------------- an assert with no words, a logging excepthook, and atexit's lines
TEN["bare_assert_logged_atexit"] = (
    r"""
import atexit, logging, sys
import torch

logging.basicConfig(level=logging.INFO, format="[%(asctime)s][%(name)s][%(levelname)s] - %(message)s")
log = logging.getLogger("train")
sys.excepthook = lambda t, v, tb: log.critical("Uncaught exception", exc_info=(t, v, tb))

@atexit.register
def summary():
    log.info("best val error: 0.314 (epoch 2)")
    print("TopOneError: 31.4%", file=sys.stderr)
    print("Warning: 1 checkpoint was not uploaded", file=sys.stderr, flush=True)

def check(logits, labels):
    assert logits.shape[0] == labels.shape[0]

log.info("epoch 3")
check(torch.randn(4, 10), torch.zeros(3))
""",
    1,
    "AssertionError",
)

# 9 --------------- "": caught and printed torch.load tracebacks, then a chosen sys.exit
TEN["caught_load_then_exit3"] = (
    r"""
import argparse, os, sys, tempfile, traceback
import torch

path = os.path.join(tempfile.mkdtemp(), "last.ckpt")
torch.save({"args": argparse.Namespace(lr=0.1), "w": torch.ones(2)}, path)

def resume(path):
    return torch.load(path, weights_only=True)

for attempt in range(2):
    try:
        resume(path)
        break
    except Exception:
        print(f"[resume] attempt {attempt + 1}/2 failed:", file=sys.stderr)
        traceback.print_exc()
else:
    sys.stderr.flush()
    sys.exit(3)
""",
    3,
    "",
)

# 10 --- "": a helper thread dies (traceback printed), training continues, the time limit ends
TEN["thread_dies_time_limit_exit75"] = (
    r"""
import sys, threading, time
import torch

def upload_metrics():
    time.sleep(0.1)
    raise ConnectionRefusedError(111, "Connection refused: metrics.lab:9091")

threading.Thread(target=upload_metrics, name="metrics-uploader", daemon=True).start()
model = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
start, step = time.monotonic(), 0
while True:
    loss = model(torch.ones(2, 4)).pow(2).mean()
    opt.zero_grad(); loss.backward(); opt.step()
    step += 1
    time.sleep(0.02)
    if time.monotonic() - start > 0.6:
        print(f"time limit reached at step {step}, asking to be requeued", flush=True)
        sys.exit(75)
""",
    75,
    "",
)
