"""Models and data of the vision benchmarks: ResNet-20 (He et al. 2015) as a plain module, and CIFAR-10 images.

Checkpoint and images are in ../shared, outside the repository, with their source.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

SHARED = Path(__file__).resolve().parents[2] / "shared"
CHECKPOINT = SHARED / "models" / "resnet20-cifar10.safetensors"
IMAGES = SHARED / "data" / "cifar10-part.safetensors"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class BasicBlock(nn.Module):
    """Two 3×3 convolutions. Where the size changes, the shortcut drops pixels and pads channels ("option A")."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.added = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        if self.added:
            x = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.added // 2, self.added // 2))
        return functional.relu(x + y)


class ResNet20(nn.Module):
    """Three stages of three blocks, 16 to 64 channels, for images [B, 3, 32, 32] and 10 classes."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        stages, inputs = [], 16
        for outputs in (16, 32, 64):
            first = BasicBlock(inputs, outputs, 1 if inputs == outputs else 2)
            stages.append(nn.Sequential(first, *(BasicBlock(outputs, outputs, 1) for _ in range(2))))
            inputs = outputs
        self.layer1, self.layer2, self.layer3 = stages
        self.linear = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = functional.relu(self.bn1(self.conv1(images)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(x.mean((2, 3)))


def resnet20() -> ResNet20:
    """The trained model, 91.6% top-1 on the test images."""
    model = ResNet20()
    _, unexpected = model.load_state_dict(load_file(CHECKPOINT), strict=False)  # it lacks num_batches_tracked
    assert not unexpected
    return model.eval()


def cifar10(split: str) -> tuple[Tensor, Tensor]:
    """Normalized images [N, 3, 32, 32] and labels [N] of "train" or "test"."""
    tensors = load_file(IMAGES)
    images = tensors[f"{split}_images"].float() / 255
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, STD))
    return (images - mean) / std, tensors[f"{split}_labels"].long()


def batches(images: Tensor, labels: Tensor, size: int) -> list[dict[str, Tensor]]:
    """Model inputs."""
    parts = zip(images.split(size), labels.split(size), strict=True)
    return [{"pixel_values": x, "labels": y} for x, y in parts]
