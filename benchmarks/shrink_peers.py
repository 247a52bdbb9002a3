"""Other one-shot methods for smaller dense models, written from their papers for models of Llama's layout.

Each takes a dense model, calibration batches and a number of parameters, and returns a smaller copy.

- `magnitude`: neurons and heads by the norm of all of their weights, one width for all blocks.
- `flap` (An et al., arXiv 2312.11983): by the variance of an input column times its squared weights; the mean of a
  removed column is added as a bias. "uniform" has one width (UL-UM): a Llama is stock with attention_bias and mlp_bias,
  whose other biases are zeros; other configurations have no such biases. "global" is FLAP's default (AL-AM):
  standardized scores of heads and neurons of all blocks compete. Its widths differ by block: not stock.
- `short_gpt` (Men et al., arXiv 2403.03853): blocks whose output is most similar to their input, by the mean cosine.
- `slice_gpt` (Ashkboos et al., arXiv 2401.15024): the hidden size, by principal components before every norm. A
  residual connection between two bases needs a matrix, which counts as parameters; tied embeddings untie. Not stock.

With grouped queries, a head leaves with its key-value head and all queries of that.
"""

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

Batches = list[dict[str, Tensor]]
DAMPING, MULTIPLE = 0.01, 8  # of SliceGPT: of the covariance, and of its hidden size


@dataclass(frozen=True)
class Shape:
    """Sizes of a dense model."""

    hidden: int
    heads: int  # of keys and values
    head_rows: int  # query rows of a key-value head
    head_dim: int
    neurons: int
    blocks: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Shape":
        config = model.config
        rows = config.num_attention_heads // config.num_key_value_heads * config.head_dim
        sizes = config.hidden_size, config.num_key_value_heads, rows, config.head_dim
        return cls(*sizes, config.intermediate_size, config.num_hidden_layers)

    @property
    def head_cost(self) -> int:
        """Parameters of a key-value head in one block."""
        return 2 * self.hidden * (self.head_rows + self.head_dim)

    @property
    def neuron_cost(self) -> int:
        return 3 * self.hidden


def widths(model: PreTrainedModel, budget: int, with_heads: bool, extra: int = 0) -> tuple[int, int]:
    """Key-value heads and neurons of every block: heads in proportion, rounded, and as many neurons as remain.

    Args:
        model: dense.
        budget: number of parameters.
        with_heads: whether heads leave too.
        extra: parameters that the method adds.

    Raises:
        ValueError: the neurons alone do not suffice.
    """
    shape = Shape.of(model)
    excess = model.num_parameters() + extra - budget
    share = excess / (shape.blocks * (shape.heads * shape.head_cost + shape.neurons * shape.neuron_cost))
    gone = min(shape.heads - 1, round(share * shape.heads)) if with_heads else 0
    neurons = shape.neurons - math.ceil((excess / shape.blocks - gone * shape.head_cost) / shape.neuron_cost)
    if neurons < 1:
        raise ValueError("no neuron would remain")
    return shape.heads - gone, min(shape.neurons, neurons)


def cut(model: PreTrainedModel, heads: list[Tensor], neurons: list[Tensor]) -> PreTrainedModel:
    """A copy with these key-value heads and neurons of each block, by index; stock where all have equal widths."""
    shape, small = Shape.of(model), copy.deepcopy(model)
    for layer, heads_kept, neurons_kept in zip(small.model.layers, heads, neurons, strict=True):
        queries = (heads_kept[:, None] * shape.head_rows + torch.arange(shape.head_rows)).flatten()
        values = (heads_kept[:, None] * shape.head_dim + torch.arange(shape.head_dim)).flatten()
        attention, mlp = layer.self_attn, layer.mlp
        rows = {attention.q_proj: queries, attention.k_proj: values, attention.v_proj: values}
        rows |= dict.fromkeys((mlp.gate_proj, mlp.up_proj), neurons_kept)
        for linear, indices in rows.items():
            linear.weight = nn.Parameter(linear.weight.data[indices])
        for linear, indices in ((attention.o_proj, queries), (mlp.down_proj, neurons_kept)):
            linear.weight = nn.Parameter(linear.weight.data[:, indices])
    config, count = small.config, len(heads[0])
    if len({*map(len, heads)}) == len({*map(len, neurons)}) == 1:
        config.num_attention_heads = config.num_attention_heads // shape.heads * count
        config.num_key_value_heads, config.intermediate_size = count, len(neurons[0])
    return small


def largest(scores: Tensor, count: int) -> Tensor:
    return scores.topk(count).indices.sort().values


def magnitude(model: PreTrainedModel, batches: Batches, budget: int, with_heads: bool) -> PreTrainedModel:
    """By the norm of all weights of a neuron or a head; no data."""
    shape, (heads, neurons) = Shape.of(model), widths(model, budget, with_heads)
    kept: tuple[list[Tensor], list[Tensor]] = [], []
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        squares = [linear.weight.data.square().sum(1) for linear in (attention.q_proj, attention.k_proj)]
        squares += [attention.v_proj.weight.data.square().sum(1), attention.o_proj.weight.data.square().sum(0)]
        kept[0].append(largest(sum(each.view(shape.heads, -1).sum(1) for each in squares), heads))
        weights = (mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight.T)
        kept[1].append(largest(sum(weight.data.square().sum(1) for weight in weights), neurons))
    return cut(model, *kept)


class Moments:
    """Mean and variance of the inputs of a layer, over all tokens."""

    def __init__(self, linear: nn.Linear):
        self.count, self.total, self.squares = 0, 0.0, 0.0
        self.handle = linear.register_forward_pre_hook(self.add)

    def add(self, _: nn.Module, inputs: tuple[Tensor]) -> None:
        rows = inputs[0].detach().flatten(0, -2).double()
        self.count += len(rows)
        self.total, self.squares = self.total + rows.sum(0), self.squares + rows.square().sum(0)

    @property
    def mean(self) -> Tensor:
        return self.total / self.count

    @property
    def variance(self) -> Tensor:
        return (self.squares - self.total * self.mean) / (self.count - 1)


@torch.no_grad()
def run(model: PreTrainedModel, batches: Batches) -> None:
    for batch in batches:
        model(**batch, use_cache=False)


def flap(model: PreTrainedModel, batches: Batches, budget: int, with_heads: bool, uniform: bool) -> PreTrainedModel:
    """By the fluctuation of the inputs; the biases count."""
    shape, layers = Shape.of(model), model.model.layers
    read = [(layer.self_attn.o_proj, layer.mlp.down_proj) for layer in layers]
    moments = {linear: Moments(linear) for pair in read for linear in pair}
    run(model, batches)
    scores = {}
    for linear, each in moments.items():
        each.handle.remove()
        scores[linear] = each.variance * linear.weight.data.double().square().sum(0)
    stock = uniform and hasattr(model.config, "mlp_bias")
    columns = shape.hidden + shape.heads * (shape.head_rows + 2 * shape.head_dim) + 2 * shape.neurons
    biases = shape.blocks * ((columns if stock else shape.hidden) + shape.hidden)
    by_head = [scores[output].view(shape.heads, -1).mean(1) for output, _ in read]
    by_neuron = [scores[down] for _, down in read]
    if uniform:
        heads, neurons = widths(model, budget, with_heads, biases)
        kept = [largest(each, heads) for each in by_head], [largest(each, neurons) for each in by_neuron]
    else:
        standard = [[_standardized(scores[linear]) for linear in pair] for pair in read]
        by_head = [output.view(shape.heads, -1).mean(1) for output, _ in standard]
        excess = model.num_parameters() + biases - budget
        kept = _compete(by_head if with_heads else [], [down for _, down in standard], excess, shape)
    small = cut(model, *kept)
    for layer, (output, down), heads_kept, neurons_kept in zip(small.model.layers, read, *kept, strict=True):
        gone = torch.ones(shape.heads, shape.head_rows).index_fill(0, heads_kept, 0).flatten()
        _add_bias(layer.self_attn.o_proj, output, moments[output].mean * gone)
        _add_bias(layer.mlp.down_proj, down, moments[down].mean.index_fill(0, neurons_kept, 0))
    return _with_stock_biases(small) if stock else small


def _standardized(scores: Tensor) -> Tensor:
    return (scores - scores.mean()) / scores.std()


def _compete(
    heads: list[Tensor], neurons: list[Tensor], excess: int, shape: Shape
) -> tuple[list[Tensor], list[Tensor]]:
    """All but the least scores of all blocks, at least one of each kind per block; all heads if none is given."""
    kept = tuple([torch.ones(size, dtype=torch.bool) for _ in neurons] for size in (shape.heads, shape.neurons))
    costs = shape.head_cost, shape.neuron_cost
    scored = [
        (score, costs[kind], kept[kind][block], index)
        for kind, blocks in enumerate((heads, neurons))
        for block, each in enumerate(blocks)
        for index, score in enumerate(each.tolist())
    ]
    for _, cost, mask, index in sorted(scored, key=lambda entry: entry[0]):
        if excess > 0 and mask.sum() > 1:
            mask[index] = False
            excess -= cost
    return tuple([mask.nonzero().flatten() for mask in masks] for masks in kept)


def _add_bias(linear: nn.Linear, dense: nn.Linear, means: Tensor) -> None:
    linear.bias = nn.Parameter((dense.weight.data.double() @ means).to(dense.weight.dtype))


def _with_stock_biases(model: PreTrainedModel) -> PreTrainedModel:
    """The same as a model of its configuration, whose other biases are zeros."""
    config = copy.deepcopy(model.config)
    config.attention_bias = config.mlp_bias = True
    stock = type(model)(config).to(model.dtype).eval()
    for name, parameter in stock.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
    stock.load_state_dict(model.state_dict(), strict=False)
    return stock


def short_gpt(model: PreTrainedModel, batches: Batches, budget: int) -> PreTrainedModel:
    """Without the blocks of least influence, as few as the budget allows."""
    influence = [0.0] * len(model.model.layers)

    def watch(index: int) -> Callable[..., None]:
        def add(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
            influence[index] += float((1 - torch.cosine_similarity(inputs[0], output, dim=-1)).sum())

        return add

    handles = [layer.register_forward_hook(watch(index)) for index, layer in enumerate(model.model.layers)]
    run(model, batches)
    for handle in handles:
        handle.remove()
    small = copy.deepcopy(model)
    cost = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    gone = math.ceil((model.num_parameters() - budget) / cost)
    removed = set(sorted(range(len(influence)), key=influence.__getitem__)[:gone])
    small.model.layers = nn.ModuleList(each for i, each in enumerate(small.model.layers) if i not in removed)
    for index, layer in enumerate(small.model.layers):
        layer.self_attn.layer_idx = index
    small.config.num_hidden_layers = len(small.model.layers)
    return small


class Sliced(nn.Module):
    """A block whose residual connections change the basis."""

    def __init__(self, block: nn.Module, size: int):
        super().__init__()
        self.block, self.bases = block, nn.ParameterList(torch.empty(size, size) for _ in range(2))

    def forward(self, hidden_states: Tensor, **kwargs) -> Tensor:
        block = self.block
        attended, _ = block.self_attn(hidden_states=block.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states @ self.bases[0] + attended
        return hidden_states @ self.bases[1] + block.mlp(block.post_attention_layernorm(hidden_states))


def sliced_size(model: PreTrainedModel, budget: int) -> int:
    """The largest hidden size within the budget: embeddings and head, blocks, norms, and two matrices per block."""
    shape = Shape.of(model)
    rows = 2 * model.config.vocab_size + 1
    rows += shape.blocks * (2 * shape.heads * (shape.head_rows + shape.head_dim) + 3 * shape.neurons + 2)
    fitting = [d for d in range(MULTIPLE, shape.hidden + 1, MULTIPLE) if rows * d + 2 * shape.blocks * d * d <= budget]
    if not fitting:
        raise ValueError("no hidden size fits")
    return fitting[-1]


@torch.no_grad()
def slice_gpt(model: PreTrainedModel, batches: Batches, budget: int) -> PreTrainedModel:
    """The hidden size by principal components, block by block on the inputs of the sliced blocks before."""
    size, dense = sliced_size(model, budget), Shape.of(model).hidden
    config = copy.deepcopy(model.config)
    config.hidden_size, config.tie_word_embeddings = size, False
    small = type(model)(config).to(model.dtype).eval()
    hidden = [model.model.embed_tokens(batch["input_ids"]) for batch in batches]
    basis = _components(hidden, size)
    small.model.embed_tokens.weight.data = model.model.embed_tokens.weight @ basis
    hidden = [each @ basis for each in hidden]
    for index, (before, after) in enumerate(zip(model.model.layers, small.model.layers, strict=True)):
        small.model.layers[index] = sliced = Sliced(after, size).to(model.dtype)
        _scale_norms((after.input_layernorm, after.post_attention_layernorm), dense)
        _enter(before.self_attn, after.self_attn, ("q_proj", "k_proj", "v_proj"), before.input_layernorm, basis)
        output, down = before.self_attn.o_proj.weight, before.mlp.down_proj.weight
        after.self_attn.o_proj.weight.data = output.clone()  # its outputs have the dense basis for now
        full = [each @ basis.T + _attended(model, after, each) for each in hidden]
        middle = _components(full, size)
        sliced.bases[0].data, after.self_attn.o_proj.weight.data = basis.T @ middle, middle.T @ output
        hidden = [each @ middle for each in full]
        _enter(before.mlp, after.mlp, ("gate_proj", "up_proj"), before.post_attention_layernorm, middle)
        after.mlp.down_proj.weight.data = down.clone()
        full = [each @ middle.T + after.mlp(after.post_attention_layernorm(each)) for each in hidden]
        basis = _components(full, size)
        sliced.bases[1].data, after.mlp.down_proj.weight.data = middle.T @ basis, basis.T @ down
        hidden = [each @ basis for each in full]
    _scale_norms((small.model.norm,), dense)
    small.lm_head.weight.data = (model.lm_head.weight * model.model.norm.weight) @ basis
    return small


def _enter(before: nn.Module, after: nn.Module, names: Iterable[str], norm: nn.Module, basis: Tensor) -> None:
    """Weights that read the residual stream in a basis, with the norm's folded."""
    for name in names:
        getattr(after, name).weight.data = getattr(before, name).weight * norm.weight @ basis


def _components(hidden: list[Tensor], size: int) -> Tensor:
    """The principal components of all tokens, [hidden, size]."""
    rows = torch.cat([each.flatten(0, -2) for each in hidden]).double()
    covariance = rows.T @ rows
    covariance += DAMPING * covariance.diagonal().mean() * torch.eye(len(covariance))
    return torch.linalg.eigh(covariance).eigenvectors[:, -size:].flip(1).to(hidden[0].dtype)


def _scale_norms(norms: Iterable[nn.Module], dense: int) -> None:
    """RMSNorm divides by the root of the mean over the dense hidden size, as SliceGPT's does."""
    for norm in norms:
        norm.weight.data.fill_(math.sqrt(dense / norm.weight.numel()))


def _attended(model: PreTrainedModel, layer: nn.Module, hidden: Tensor) -> Tensor:
    positions = torch.arange(hidden.shape[1])[None]
    embeddings = model.model.rotary_emb(hidden, positions)
    inputs = layer.input_layernorm(hidden)
    return layer.self_attn(hidden_states=inputs, position_embeddings=embeddings, attention_mask=None)[0]
