"""Predict with weights that ``ddpctl export digits weights.pt`` has written; with --onnx FILE, also write them as ONNX.

python examples/predict.py
python examples/predict.py --onnx digits.onnx   # needs pip install onnxscript (about 40 MB) onnxruntime
"""

import argparse

import torch

from ddptrain.config import DataOptions
from ddptrain.data.augment import normalisation_of_images
from ddptrain.data.base import ImageShape
from ddptrain.data.datasets import load_digits
from ddptrain.models import build_model

parser = argparse.ArgumentParser()
parser.add_argument("--weights", default="weights.pt")
parser.add_argument("--onnx", metavar="FILE")
args = parser.parse_args()

model = build_model("digitsnet", ImageShape(channels=1, size_px=8, classes=10))
model.load_state_dict(torch.load(args.weights, weights_only=True))
digits = load_digits(DataOptions(), 0)
normalise = normalisation_of_images(digits.train.images_NHWC)  # needs the training set, so the classifier keeps it


class Classifier(torch.nn.Module):
    """The probability of each class, from images as bytes of shape (batch, height, width, channels)."""

    def __init__(self):
        super().__init__()
        self.model = model
        self.register_buffer("scale", normalise.scale)
        self.register_buffer("offset", normalise.offset)

    def forward(self, images):
        """Return the probabilities."""
        return self.model(images.permute(0, 3, 1, 2) * self.scale + self.offset).softmax(1)


classifier = Classifier().eval()
images, labels = digits.test.images_NHWC, digits.test.labels_N
with torch.inference_mode():
    accuracy = (classifier(images).argmax(1) == labels).float().mean().item()
print(f"test accuracy {100 * accuracy:.2f} %")

if args.onnx:
    import onnxruntime

    torch.onnx.export(
        classifier,
        (images[:2],),
        args.onnx,
        input_names=["images"],
        output_names=["probabilities"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),  # any number of images at a time
        external_data=False,  # the weights in the same file
    )
    session = onnxruntime.InferenceSession(args.onnx)
    (probabilities,) = session.run(None, {"images": images.numpy()})
    print(f"{(probabilities.argmax(1) == labels.numpy()).mean():.2%} of {len(labels)} test images, by ONNX")
