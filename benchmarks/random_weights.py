"""Settings of packed weights by name, such as "2:4 int4" or "int4 e16", and random weights on the grid for them.

Speed, memory and bytes of files depend on the pattern and the bits, not on the values.
"""

import re
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from optimum_moonshot import MoonshotConfig, MoonshotPruner
from optimum_moonshot.checkpoint.compressed_tensors import export_files
from optimum_moonshot.checkpoint.packed_files import pack_files
from optimum_moonshot.model.layers import find_structure
from optimum_moonshot.model.word_embeddings import rounded_to, word_embeddings
from optimum_moonshot.objective.grid import Grid
from optimum_moonshot.objective.patterns import NM, Unstructured
from optimum_moonshot.packing import Codec, Quantized, find_codec
from optimum_moonshot.reports.record import PruningRecord

_NAME = re.compile(r"(?:(\d+):(\d+)|(0\.\d+))?(?:(?:^| )int([348]))?(?: e(16|8|4))?")


class Setting(NamedTuple):
    """The pattern of the surviving weights and their bits."""

    pattern: NM | Unstructured
    bits: int | None  # None: bits of the dtype
    embedding_bits: int = 8

    @staticmethod
    def of(name: str) -> "Setting":
        """Parse "2:4", "0.8", "2:4 int8", "int4", which removes nothing, or "int4 e16", of the embeddings."""
        match = _NAME.fullmatch(name)
        if not name or match is None:
            raise ValueError(f"{name!r} is no setting: give 2:4, 0.8, int4, or a pattern and bits, such as 2:4 int4")
        n, m, sparsity, bits, embedding_bits = match.groups()
        pattern = NM(int(n), int(m)) if n else Unstructured(float(sparsity or 0))
        return Setting(pattern, int(bits) if bits else None, int(embedding_bits or 8))

    @property
    def options(self) -> dict:
        """Of `MoonshotConfig`."""
        bits = {"bits": self.bits, "embedding_bits": self.embedding_bits}
        if isinstance(self.pattern, NM):
            return {"pattern": str(self.pattern), **bits}
        return {**({"sparsity": self.pattern.sparsity} if self.pattern.sparsity else {"pattern": None}), **bits}

    @property
    def nm(self) -> NM | None:
        """The pattern as codecs take it."""
        return self.pattern if isinstance(self.pattern, NM) else None

    def grid(self, dtype: torch.dtype) -> Grid | None:
        """The grid of the surviving weights."""
        return None if self.bits is None else Grid(self.bits, dtype=dtype)

    @property
    def codec(self) -> Codec:
        """The packed format."""
        return find_codec("bitmask") if self.bits is None else Quantized(self.bits)


def random_weight(d_out: int, d_in: int, pattern: NM | Unstructured, grid: Grid | None) -> torch.Tensor:
    """Weights that follow a pattern, in float32; with a grid, random codes other than 0 with random scales."""
    scores = torch.rand(d_out, d_in)
    keep = pattern.keep(scores) if isinstance(pattern, NM) else scores >= pattern.sparsity
    if grid is None:
        return torch.where(keep, torch.randn(d_out, d_in) * d_in**-0.5, 0)
    codes = torch.randint(1, grid.top + 1, (d_out, d_in)) * (2 * torch.randint(0, 2, (d_out, d_in)) - 1)
    scale = (0.5 + torch.rand(d_out, grid.groups(d_in))) * d_in**-0.5 / grid.top
    return torch.where(keep, grid.values(codes, grid.per_weight(scale, d_in)), 0).float()


@torch.no_grad()
def imitate_pruning(model: LlamaForCausalLM, name: str) -> None:
    """Give a Llama random weights of a setting, the same for all layers of one shape, and the record of a pruning.

    The record is that of a small model, because a pruner also computes the losses of every layer.
    """
    setting = Setting.of(name)
    sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
    small = LlamaForCausalLM(LlamaConfig(**sizes))
    MoonshotPruner(small, MoonshotConfig(solver="magnitude", **setting.options)).prune(progress=False)
    model.config.moonshot = small.config.moonshot
    weights: dict[tuple[int, int], torch.Tensor] = {}
    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            shape = tuple(module.weight.shape)
            if shape not in weights:
                weights[shape] = random_weight(*shape, setting.pattern, setting.grid(module.weight.dtype))
            module.weight.copy_(weights[shape])
    grid = PruningRecord.require_of(model).embedding_grid
    for embedding in () if grid is None else word_embeddings(model, find_structure(model).layers()):
        embedding.write(rounded_to(grid, embedding.matrix))


def save(model: LlamaForCausalLM, folder: Path, format: str = "packed") -> int:
    """Save a model of `imitate_pruning`, without report and card; returns the bytes of its weights."""
    model.save_pretrained(folder)
    if format == "packed":
        pack_files(folder, folder, model)
    elif format == "compressed-tensors":
        export_files(folder, folder, model)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
