"""Train a small DeiT on the CIFAR-10 images of the vision benchmark, with ResNet-20 as its teacher.

Usage: python benchmarks/train_deit.py [--output outputs/deit-cifar10]. Minutes on one core. As in DeiT (Touvron et al.,
arXiv 2012.12877) augmentation and a convolutional teacher compensate for the small data set.
"""

import time
from pathlib import Path

import torch
from common import parser
from torch import Tensor
from torch.nn import functional
from transformers import DeiTConfig, DeiTForImageClassification, ViTImageProcessorPil
from vision_models import MEAN, STD, batches, cifar10, resnet20

from optimum_moonshot import accuracy

OUTPUT = Path(__file__).resolve().parents[1] / "outputs" / "deit-cifar10"


def small_deit() -> DeiTForImageClassification:
    """64 patches of 4×4 pixels, four layers of width 96."""
    return DeiTForImageClassification(
        DeiTConfig(
            image_size=32,
            patch_size=4,
            hidden_size=96,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=3,
            num_labels=10,
        )
    )


def augmented(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shift each image by up to four pixels, and mirror every other one."""
    padded = functional.pad(images, (4, 4, 4, 4), mode="reflect")
    shifts = torch.randint(0, 9, (len(images), 2), generator=generator).tolist()
    shifted = torch.stack([x[:, i : i + 32, j : j + 32] for x, (i, j) in zip(padded, shifts, strict=True)])
    mirrored = torch.rand(len(images), generator=generator) < 0.5
    return torch.where(mirrored[:, None, None, None], shifted.flip(3), shifted)


def train(epochs: int, size: int, rate: float, seed: int) -> DeiTForImageClassification:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model, teacher, (images, labels) = small_deit(), resnet20(), cifar10("train")
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.05)
    steps = epochs * (len(images) // size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.15)
    started = time.perf_counter()
    for epoch in range(epochs):
        model.train()
        total = 0.0
        for rows in torch.randperm(len(images), generator=generator).split(size)[: len(images) // size]:
            x = augmented(images[rows], generator)
            with torch.no_grad():
                wanted = teacher(x).softmax(1)
            logits = model(pixel_values=x).logits
            loss = functional.cross_entropy(logits, labels[rows]) + functional.cross_entropy(logits, wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
        mean_loss = total * size / len(images) / 2
        print(f"epoch {epoch + 1}: loss {mean_loss:.3f}, {time.perf_counter() - started:.0f} s", flush=True)
    return model.eval()


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--output", type=Path, default=OUTPUT)
    arguments.add_argument("--epochs", type=int, default=50)
    arguments.add_argument("--size", type=int, default=64, help="of a batch")
    arguments.add_argument("--rate", type=float, default=1e-3)
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()
    model = train(options.epochs, options.size, options.rate, options.seed)
    model.save_pretrained(options.output)
    processor = ViTImageProcessorPil(size={"height": 32, "width": 32}, image_mean=MEAN, image_std=STD)
    processor.save_pretrained(options.output)
    top1 = accuracy(model, batches(*cifar10("test"), 256)).value
    print(f"top-1 {top1:.2%} on the test images; saved to {options.output}")


if __name__ == "__main__":
    main()
