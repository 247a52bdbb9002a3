"""The format "int{bits}g{group}" written out weight by weight, and products with it in float64."""

import torch


def random_quantized(shape, bits, group, dtype, kind, seed=0):
    """Codes int64, scales, and keep; `kind` is a density, "2:4", or "dense". An empty group has a scale of 0."""
    d_out, d_in = shape
    generator = torch.Generator().manual_seed(seed)
    most = 2 ** (bits - 1) - 1
    codes = torch.randint(-most, most + 1, shape, generator=generator)
    scale = (torch.rand(d_out, -(-d_in // group), generator=generator) + 0.5).to(dtype) / 64
    if kind == "dense":
        return codes, scale, None
    scores = torch.rand(shape, generator=generator)
    if kind == "2:4":
        padded = torch.nn.functional.pad(scores, (0, -d_in % 4), value=2.0).reshape(d_out, -1, 4)
        keep = (padded.argsort(-1).argsort(-1) < 2).reshape(d_out, -1)[:, :d_in]
    else:
        keep = scores < kind
        keep[d_out // 2] = False
        keep[-1] = True
        keep[0, :group] = False
        scale[0, 0] = 0
    return torch.where(keep, codes, 0), scale, keep


def pack(codes, keep, bits):
    """Bytes of codes of each row, a list of lists."""
    rows = []
    for row, (values, survives) in enumerate(zip(codes.tolist(), keep.tolist(), strict=True)):
        rows.append([])
        for start in range(0, len(values), 64):
            stream = length = 0
            for code, kept in zip(values[start : start + 64], survives[start : start + 64], strict=True):
                if kept:
                    stream |= (code + 2 ** (bits - 1)) << length
                    length += bits
            rows[row].extend(stream.to_bytes(-(-length // 8), "little"))
    return rows


def bitmask(keep):
    """uint8 [d_out, ⌈d_in/8⌉]: bit j of byte b is input 8b + j."""
    padded = torch.nn.functional.pad(keep.to(torch.uint8), (0, -keep.shape[1] % 8)).reshape(len(keep), -1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def dense(codes, scale, group):
    """The weights, in the dtype of the scales."""
    return codes.to(scale.dtype) * spread(scale, group, codes.shape[1])


def spread(scale, group, d_in):
    return scale.repeat_interleave(group, 1)[:, :d_in]


def rounded(inputs, group):
    """Inputs as integers times a scale of float32 for each row and group, in float64."""
    d_in = inputs.shape[1]
    groups = torch.nn.functional.pad(inputs.float(), (0, -d_in % group)).reshape(len(inputs), -1, group)
    most = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(most > 0, torch.tensor(127.0).div(most), 0)  # 127 / most multiplies by a rounded reciprocal
    return ((groups * inverse).round().double() * (most / 127).double()).reshape(len(inputs), -1)[:, :d_in]
