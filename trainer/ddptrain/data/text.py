# ruff: noqa: N803, N806, N815 - tensors carry their shape in their name
"""A text as a data set. A token is a byte, a sample is a window of bytes, and the label of a byte is the next byte.

Shapes: N bytes, B batch, T positions.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ddptrain.config import DataOptions, Options
from ddptrain.data.augment import Batch, Mark
from ddptrain.data.sampling import sample_hash
from ddptrain.errors import TrainError, config_error, os_errors
from ddpwire.exits import Exit

TEST_SHARE = 0.1  # the share of the text, at its end, that is the test set
MIN_WINDOWS = 3  # two to train with, and one to test with


@dataclass(frozen=True, kw_only=True)
class Windows:
    """A text that is split into consecutive windows of ``context`` bytes."""

    bytes_N: Tensor  # uint8
    context: int

    def __len__(self) -> int:
        return (len(self.bytes_N) - 1) // self.context

    def batch(self, indices_B: Tensor, shift_B: Tensor | None = None) -> Batch:
        """Return windows, each shifted by ``shift_B`` bytes. The label of each byte is the byte after it."""
        starts_B = indices_B.to(self.bytes_N.device) * self.context + (0 if shift_B is None else shift_B)
        at_BT = starts_B[:, None] + torch.arange(self.context + 1, device=self.bytes_N.device)
        bytes_BT = self.bytes_N[at_BT].long()
        return Batch(inputs=bytes_BT[:, :-1], labels_B=bytes_BT[:, 1:])


@dataclass(frozen=True, kw_only=True)
class TextDataset:
    """A text that is split into two parts, for training and for testing. The test part is at the end."""

    name: str
    context: int
    train: Windows
    test: Windows
    noun = "windows"  # the plural name of a sample


class TextBatches:
    """Builds a rank's batches. With augmentation, each window starts at a different byte in each epoch."""

    def __init__(self, options: Options, data: TextDataset, device: torch.device) -> None:
        self.feed = self
        self.description = f"{len(data.train.bytes_N):,} bytes of text on the device"
        self._train, self._test = (
            Windows(bytes_N=part.bytes_N.to(device), context=data.context) for part in (data.train, data.test)
        )
        self._seed = options.training.seed
        self._shifted = options.augmentation.augment

    def batch(self, indices_B: Tensor, *, epoch: int, mark: Mark = lambda _: None) -> Batch:  # noqa: ARG002 - the same as for images
        """Return the batch of these samples."""
        windows, shift_B = self._train, torch.zeros_like(indices_B)
        if self._shifted:  # by less than one window, and not beyond the end of the text
            left_B = len(windows.bytes_N) - 1 - (indices_B + 1) * windows.context
            shift_B = (sample_hash(indices_B, seed=self._seed, epoch=epoch) % windows.context).minimum(left_B)
        return windows.batch(indices_B, shift_B)

    def test_batch(self, indices_B: Tensor) -> Batch:
        """Return samples of the test set."""
        return self._test.batch(indices_B)

    def rewind(self) -> None:
        """Do nothing, because batches can be built in any order."""


def load_text(options: DataOptions, _seed: int) -> TextDataset:
    """Read a file, or the *.txt files of a folder in the order of their names. Raises TrainError.

    The test set consists of complete windows at the end of the text. Each byte of the test set is predicted once.
    """
    path, context = options.folder, options.context
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    with os_errors(Exit.NO_INPUT, f"--data-dir {path} cannot be read", hint="give a text file"):
        data = b"".join(file.read_bytes() for file in files)
    if len(data) <= MIN_WINDOWS * context:
        message = f"--data-dir {path} contains {len(data):,} bytes of text, too few for --context {context}"
        raise TrainError(Exit.DATA, message, hint="give a longer text, or a smaller --context")
    bytes_N = torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.uint8))
    num_test = max(1, int(TEST_SHARE * len(data)) // context) * context
    return TextDataset(
        name="text",
        context=context,
        train=Windows(bytes_N=bytes_N[:-num_test], context=context),
        test=Windows(bytes_N=bytes_N[-num_test - 1 :], context=context),
    )


def refuse_image_options(options: Options) -> None:
    """Raise TrainError if options are given that are only for images."""
    given = {f"--{name}": value for name, value in vars(options.augmentation).items() if name != "augment"}
    given |= {"--test-flip": options.training.test_flip, "--test-shift": options.training.test_shift}
    given["--pretrained"] = options.model.pretrained
    given["--sync-bn"] = options.ranks.sync_bn
    if wrong := next((flag for flag, value in given.items() if value), None):
        raise config_error(f"{wrong} is only for images, not for --data text", hint="leave it out")
    if options.data.input == "loader":
        raise config_error("--input loader is only for images; text is always kept on the device", hint="give auto")
