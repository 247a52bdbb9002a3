"""Folders of images."""

import numpy as np
from PIL import Image as Picture

CLASSES = ["ant", "bee", "cat", "dog", "eel"]


def picture(number: int, size=(20, 24), mode="RGB"):
    """An image whose pixels encode its number."""
    generator = np.random.default_rng(number)
    pixels = generator.integers(0, 255, (*size, 3), dtype=np.uint8)
    pixels[..., 0] = number
    return Picture.fromarray(pixels).convert(mode)


def fill(folder, classes=CLASSES, each=3):
    """A folder with a sub-folder per class; image k·each + i is the i-th of class k."""
    for k, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for i in range(each):
            picture(k * each + i).save(folder / name / f"{i}.png")
    return folder
