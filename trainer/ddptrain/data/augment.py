# ruff: noqa: N803, N806, N815 - tensors carry their shape in their name
"""What happens to images on the device: normalisation, crops, mirror images, cutout, erasing, mixup and cutmix.

Random values depend only on the seed, the epoch and the sample. Shapes: see ddptrain.data.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ddptrain.data import sampling

MAX_COUNTED_BYTES = 100_000_000  # in a larger data set, the mean is computed from a part of the images
MAX_PART_BYTES = 1 << 26  # of images that are laid out at a time
SHORT_ROW = 64  # numbers; shorter rows are joined
IMAGENET_MEAN_DEVIATION = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # of torchvision's weights
ERASE_AREA = (0.02, 0.33)  # share of the image; this and the ratio of the sides as in Z. Zhong et al. 2017,
ERASE_RATIO = (0.3, 3.3)  # https://arxiv.org/abs/1708.04896
Mark = Callable[[str], None]  # called at the end of a phase of a step, with its name


@dataclass(frozen=True, kw_only=True)
class Normalisation:
    """Normalises images to mean 0 and standard deviation 1 over the training set.

    A normalised value is a byte multiplied by ``scale``, plus ``offset``. Both tensors have the shape (C, 1, 1).
    """

    scale: Tensor
    offset: Tensor
    _repeated: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)  # per number of pixels

    def __call__(self, images_BHWC: Tensor) -> Tensor:
        """Return normalised images of shape (B, C, H, W) in channels_last format and in the dtype of ``scale``."""
        batch, height, width, channels = images_BHWC.shape
        # Complete rows or images at a time: vector instructions need more numbers than one pixel has (measured: 6 to 10
        # times slower), or a row of 28 grey pixels (4 times slower).
        at_once = width if width * channels >= SHORT_ROW else height * width
        if at_once not in self._repeated:
            self._repeated[at_once] = self.scale.view(-1).repeat(at_once), self.offset.view(-1).repeat(at_once)
        scale, offset = self._repeated[at_once]
        rows = images_BHWC.reshape(batch, -1, at_once * channels).to(self.scale.dtype)
        return torch.addcmul(offset, rows, scale).view(batch, height, width, channels).permute(0, 3, 1, 2)

    def to(self, device: torch.device, dtype: torch.dtype) -> "Normalisation":
        """Return a copy on the given device, in the given dtype."""
        return Normalisation(scale=self.scale.to(device, dtype), offset=self.offset.to(device, dtype))


def normalisation_of_images(images_NHWC: Tensor) -> Normalisation:
    """Return the normalisation of uint8 images. It is computed from integers, so it is bit-identical on all ranks."""
    per_image = images_NHWC[0].numel()
    counted = images_NHWC[:: max(1, len(images_NHWC) * per_image // MAX_COUNTED_BYTES)]
    values = torch.arange(256)
    counts = torch.stack([torch.bincount(plane.flatten(), minlength=256) for plane in counted.unbind(3)])
    total, sums, squares = counts.sum(1), (counts * values).sum(1), (counts * values**2).sum(1)
    mean = sums / total
    deviation = (squares / total - mean**2).clamp(min=1e-3).sqrt()  # a channel of one colour has deviation 0
    return Normalisation(scale=(1 / deviation).view(-1, 1, 1), offset=(-mean / deviation).view(-1, 1, 1))


def normalisation_of_imagenet(channels: int) -> Normalisation:
    """Return ImageNet's normalization. For gray images, average its values over ImageNet's three channels."""
    mean, deviation = (torch.tensor(values) for values in IMAGENET_MEAN_DEVIATION)
    if channels == 1:
        mean, deviation = mean.mean().view(1), deviation.mean().view(1)
    return Normalisation(scale=(1 / (255 * deviation)).view(-1, 1, 1), offset=(-mean / deviation).view(-1, 1, 1))


@dataclass(frozen=True, kw_only=True)
class Pixels:
    """Images as bytes. A single indexing operation returns a batch of shifted crops.

    The images are already padded. If mirror images are stored as well, the same operation also mirrors crops.
    """

    squares_MHWC: Tensor  # M is N, or 2 N with mirror images: that of image i has the index N + i
    num_images: int
    crop_px: int

    @property
    def choices(self) -> int:
        """The number of possible positions of a crop in each direction."""
        return self.squares_MHWC.shape[1] - self.crop_px + 1

    def crops(self, index_B: Tensor, top_B: Tensor, left_B: Tensor, mirrored_B: Tensor | None) -> Tensor:
        """Return crops of shape (B, crop_px, crop_px, C). ``top_B`` and ``left_B`` are their positions."""
        has_mirror_images = len(self.squares_MHWC) > self.num_images
        if mirrored_B is not None and has_mirror_images:
            index_B = index_B + self.num_images * mirrored_B
            left_B = torch.where(mirrored_B.bool(), self.choices - 1 - left_B, left_B)
        size, channels = self.crop_px, self.squares_MHWC.shape[3]
        image, row, pixel, _ = self.squares_MHWC.stride()
        corners = self.squares_MHWC.as_strided(
            (len(self.squares_MHWC), self.choices, self.choices, size, size * channels), (image, row, pixel, row, 1)
        )
        crops_BHWC = corners[index_B, top_B, left_B].view(len(index_B), size, size, channels)
        if mirrored_B is not None and not has_mirror_images:
            crops_BHWC = torch.where(mirrored_B.bool()[:, None, None, None], crops_BHWC.flip(2), crops_BHWC)
        return crops_BHWC


def lay_out(
    images_NHWC: Tensor,
    *,
    crop_px: int,
    shift_px: int,
    mirrored: bool,
    reflect: bool = False,
    device: torch.device | None = None,
) -> Pixels:
    """Return images as Pixels on ``device``, by default on the device of the images.

    Images are padded by ``shift_px`` pixels. If ``reflect`` is set, these are the mirrored border, otherwise black.

    Images are used without a copy if they are already on the device and need no padding and no mirror images. Padded or
    mirrored images are copied in parts, so that the device needs little more memory than ``num_bytes_laid_out``.
    """
    num, height, width, channels = images_NHWC.shape
    device = device or images_NHWC.device
    if not shift_px and not mirrored:
        return Pixels(squares_MHWC=images_NHWC.to(device).contiguous(), num_images=num, crop_px=crop_px)
    shape = (2 * num if mirrored else num, height + 2 * shift_px, width + 2 * shift_px, channels)
    squares_MHWC = torch.zeros(shape, dtype=images_NHWC.dtype, device=device)
    inside_MHWC = squares_MHWC[:, shift_px : shift_px + height, shift_px : shift_px + width]
    count = max(1, MAX_PART_BYTES // (height * width * channels))
    for start in range(0, num, count):
        part = images_NHWC[start : start + count].to(device)
        inside_MHWC[start : start + len(part)] = part
        if mirrored:
            inside_MHWC[num + start : num + start + len(part)] = part.flip(2)
    if reflect and shift_px:
        for side in (squares_MHWC, squares_MHWC.transpose(1, 2)):
            side[:, :shift_px] = side[:, shift_px + 1 : 2 * shift_px + 1].flip(1)
            side[:, -shift_px:] = side[:, -2 * shift_px - 1 : -shift_px - 1].flip(1)
    return Pixels(squares_MHWC=squares_MHWC, num_images=num, crop_px=crop_px)


def num_bytes_laid_out(images_NHWC: Tensor, *, shift_px: int, mirrored: bool) -> int:
    """Return the number of bytes that the result of ``lay_out`` needs."""
    num, height, width, channels = images_NHWC.shape
    return num * (height + 2 * shift_px) * (width + 2 * shift_px) * channels * (2 if mirrored else 1)


def box_mask(top_B: Tensor, left_B: Tensor, bottom_B: Tensor, right_B: Tensor, size_px: int) -> Tensor:
    """Return a bool tensor of shape (B, 1, H, W) that is True inside the rectangle of each image.

    A rectangle may extend beyond its image.
    """
    at = torch.arange(size_px, device=top_B.device)
    rows_BH = (at >= top_B[:, None]) & (at < bottom_B[:, None])
    columns_BW = (at >= left_B[:, None]) & (at < right_B[:, None])
    return (rows_BH[:, :, None] & columns_BW[:, None, :])[:, None]


def square_mask(bits_B: Tensor, streams: tuple[int, int], side_B: Tensor | int, size_px: int) -> Tensor:
    """Return the mask of a square with side ``side_B`` around a random pixel of each image.

    ``streams`` are the stream numbers (see `sampling.uniform`) for the row and the column of the pixel.
    """
    top_B, left_B = ((sampling.uniform(bits_B, stream) * size_px).long() - side_B // 2 for stream in streams)
    return box_mask(top_B, left_B, top_B + side_B, left_B + side_B, size_px)


def erase_mask(bits_B: Tensor, fraction: float, size_px: int) -> Tensor:
    """Return a mask with a random rectangle in some images. Each image has one with the probability ``fraction``."""
    low, high = ERASE_AREA
    area = (low + (high - low) * sampling.uniform(bits_B, sampling.ERASE_AREA)) * size_px**2
    first, last = (torch.tensor(ratio).log().item() for ratio in ERASE_RATIO)
    ratio = (first + (last - first) * sampling.uniform(bits_B, sampling.ERASE_SHAPE)).exp()
    height = (area * ratio).sqrt().round().clamp(1, size_px).long()
    width = (area / ratio).sqrt().round().clamp(1, size_px).long()
    row = (sampling.uniform(bits_B, sampling.ERASE_TOP) * (size_px - height + 1)).long()
    column = (sampling.uniform(bits_B, sampling.ERASE_LEFT) * (size_px - width + 1)).long()
    chosen = sampling.uniform(bits_B, sampling.ERASE) < fraction
    return box_mask(row, column, row + height * chosen, column + width * chosen, size_px)


def mix_images(
    images_BCHW: Tensor, others_BCHW: Tensor, bits_B: Tensor, *, mixup: Tensor | None, cutmix: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the mixed images, and for each image the weight of its own label (float32).

    Mixup: H. Zhang et al. 2017, https://arxiv.org/abs/1710.09412; cutmix: S. Yun et al. 2019, arXiv 1905.04899.
    ``mixup`` and ``cutmix`` are the quantiles of their beta distributions (see sampling.beta_table), or None for a
    method that is not used. At least one of them is used.
    """
    size_px = images_BCHW.shape[2]
    if mixup is None or cutmix is None:
        pasted_B = torch.full_like(bits_B, mixup is None, dtype=torch.bool)
    else:
        pasted_B = sampling.uniform(bits_B, sampling.WHICH) < 0.5
    own_B = torch.ones(len(bits_B), device=bits_B.device)
    keep = torch.ones((), device=bits_B.device)
    if mixup is not None:
        own_B = torch.where(pasted_B, own_B, sampling.beta(sampling.uniform(bits_B, sampling.BLEND), mixup))
        keep = own_B[:, None, None, None]
    if cutmix is not None:
        # The share of the image that is covered by the other image.
        share_B = 1 - sampling.beta(sampling.uniform(bits_B, sampling.PASTE), cutmix)
        side_B = (share_B.sqrt() * size_px).long() * pasted_B
        box = square_mask(bits_B, (sampling.PASTE_TOP, sampling.PASTE_LEFT), side_B, size_px)
        own_B = torch.where(pasted_B, 1 - box.float().mean((1, 2, 3)), own_B)
        keep = torch.where(box, 0.0, keep)
    return torch.lerp(others_BCHW, images_BCHW, keep.to(images_BCHW.dtype)), own_B


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Inputs and labels. A mixed image has a second label, ``others_B``. ``own_B`` is the weight of the first label."""

    inputs: Tensor  # images, of shape (B, C, H, W), or the bytes of a text, of shape (B, T)
    labels_B: Tensor
    others_B: Tensor | None = None
    own_B: Tensor | None = None
