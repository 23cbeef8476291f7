"""Weights to start from: torchvision's, downloaded once a node, or a file's; with a new head."""

import contextlib
import fcntl
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddptrain.errors import TrainError
from ddptrain.models.zoo import ThreeChannels, torchvision_models, torchvision_name
from ddptrain.options.model import ModelOptions
from ddpwire.exits import Exit

IMAGENET = "imagenet"
CONNECT_TIMEOUT_S = 30.0


def weights_file(options: ModelOptions) -> Path:
    """Where the weights are, or will be once they are fetched. Raises TrainError."""
    if options.pretrained != IMAGENET:
        return Path(str(options.pretrained))
    return Path(torch.hub.get_dir(), "checkpoints", _url(options.name).rsplit("/", 1)[1])


def fetch(options: ModelOptions) -> None:
    """Make sure that the file is there. Several runs of a node take turns. Raises TrainError."""
    path = weights_file(options)
    if options.pretrained != IMAGENET:
        if not path.is_file():
            raise TrainError(Exit.NO_INPUT, f"--pretrained {path} is not there; leave the name out to download weights")
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent / f".{path.name}.lock"):
            if not path.exists():
                _download(_url(options.name), path)
    except OSError as error:
        raise TrainError(Exit.CANNOT_WRITE, f"weights cannot be written to {path.parent}: {error.strerror}") from error


def load(model: nn.Module, options: ModelOptions) -> tuple[str, ...]:
    """Put the weights into a model; the names of its modules that stay fresh. Raises TrainError.

    The head stays fresh, since its classes are others, and the stem where it has another shape. All else must fit.
    """
    path = weights_file(options)
    given = _read(path)
    inner = model.model if isinstance(model, ThreeChannels) else model
    own = inner.state_dict()
    names = list(own)
    head, stem = names[-1].rpartition(".")[0], names[0].rpartition(".")[0]
    fresh = {head}
    if stem != head and names[0] in given and given[names[0]].shape != own[names[0]].shape:
        fresh.add(stem)
    wanted = {name: tensor for name, tensor in own.items() if name.rpartition(".")[0] not in fresh}
    wrong = [
        name
        for name, tensor in wanted.items()
        if (name not in given and not name.endswith("num_batches_tracked"))
        or (name in given and given[name].shape != tensor.shape)
    ]
    if wrong:
        raise TrainError(
            Exit.DATA,
            f"--pretrained {path} does not fit --model {options.name}: {len(wrong)} of its {len(wanted)} tensors are "
            f"missing or have another shape, {wrong[0]} first",
        )
    inner.load_state_dict({name: given[name] for name in wanted if name in given}, strict=False)
    return tuple(sorted(fresh))


def _read(path: Path) -> Mapping[str, Tensor]:
    """The tensors of a file: a state dict, or a checkpoint that holds one as "model" or "state_dict"."""
    try:
        values: Any = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise TrainError(Exit.NO_INPUT, f"--pretrained {path} cannot be read: {error.strerror}") from None
    except Exception:  # a broken pickle can fail in any way
        raise TrainError(Exit.DATA, f"--pretrained {path} is torn, or not a file of weights") from None
    for key in ("model", "state_dict"):
        if isinstance(values, dict) and isinstance(values.get(key), dict):
            values = values[key]
    if not isinstance(values, dict) or not values or not all(isinstance(one, Tensor) for one in values.values()):
        raise TrainError(Exit.DATA, f"--pretrained {path} holds no weights by name")
    return {str(name).removeprefix("module."): tensor for name, tensor in values.items()}


def _url(name: str) -> str:
    return str(torchvision_models().get_model_weights(torchvision_name(name)).DEFAULT.url)


def _download(url: str, path: Path) -> None:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(CONNECT_TIMEOUT_S)
    try:
        digest = path.stem.rpartition("-")[2]  # torchvision's names end in the start of the file's sha256
        torch.hub.download_url_to_file(url, str(path), hash_prefix=digest, progress=False)
    except Exception as error:
        raise TrainError(
            Exit.NO_INPUT, f"{url} cannot be downloaded from here: put it to {path}, or give --pretrained FILE"
        ) from error
    finally:
        socket.setdefaulttimeout(before)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
