"""The observer's hooks: custom statistics, shared inputs, calls without gradients, errors."""

import pytest
import reference
import torch
from models import image_batches, make, token_batches
from torch import nn

from optimum_moonshot import MoonshotError
from optimum_moonshot.calibration.accumulators import GradientPlan, GradientStatistic, InputStatistic
from optimum_moonshot.calibration.observer import Observer
from optimum_moonshot.calibration.storage import Storage
from optimum_moonshot.data.batches import batch_size, split_batches
from optimum_moonshot.model.calls import frozen, run_model
from optimum_moonshot.model.layer_kinds import LinearLayer, find_layer
from optimum_moonshot.model.layers import find_structure
from optimum_moonshot.model.losses import loss_gradient, token_mask


class InputMean(InputStatistic):
    """The mean of every feature, [groups, in]."""

    made = 0

    def __init__(self, layer, storage, device):
        super().__init__(layer, storage, device)
        InputMean.made += 1
        self.total, self.tokens = torch.zeros(layer.groups, layer.shape[1], device=device), 0

    def add(self, inputs, groups):
        self.total[groups] += inputs.sum(1)
        self.tokens += inputs.shape[1]

    def result(self):
        return self.total / self.tokens


class FisherTrace(GradientStatistic):
    """1/N Σ_n ‖A_n‖², from one batch's gradients at a time."""

    def __init__(self, layer, samples, storage):
        super().__init__(layer, samples, storage)
        self.trace, self.seen = 0.0, []

    def begin(self, first, count):
        self.gradients = torch.zeros(count, *self.layer.shape)
        self.seen += range(first, first + count)

    def add(self, inputs, delta, done, groups):
        self.gradients += (delta.mT @ inputs).flatten(1, 2)

    def end(self):
        self.trace += float(self.gradients.square().sum()) / self.samples

    def result(self):
        assert self.seen == list(range(self.samples))
        return self.trace


def storage():
    return Storage(torch.device("cpu"))


def observe(model, batches, gradients=True, diagonal=False, **options):
    """The statistics of all layers, from passes through the whole model."""
    layers = list(find_structure(model).layers())
    samples = sum(map(batch_size, batches))
    wanted = {layer.name for layer in layers} if gradients else set()
    first = 0
    with frozen(model), Observer(layers, diagonal, wanted, samples, storage(), **options) as observer:
        for batch in batches:
            observer.begin(first, batch_size(batch), token_mask(batch))
            output = run_model(model, batch)
            if gradients:
                torch.autograd.backward(*loss_gradient(model, output, batch)[:2])
            observer.end()
            first += batch_size(batch)
    return layers, {layer.name: observer.take(layer) for layer in layers}


class Pairs(GradientStatistic):
    """The inputs and output gradients of all tokens, [groups, tokens, …]."""

    def __init__(self, layer, samples, storage):
        super().__init__(layer, samples, storage)
        self.pairs = [([], []) for _ in range(layer.groups)]

    def add(self, inputs, delta, done, groups):
        for index, pair in enumerate(self.pairs[groups]):
            for tokens, tensor in zip(pair, (inputs, delta), strict=True):
                tokens.append(tensor[:, index].flatten(0, 1).double())

    def result(self):
        return [tuple(torch.cat(tokens) for tokens in pair) for pair in self.pairs]


@pytest.mark.parametrize("name", ["llama", "gpt2", "convnet", "called twice", "mixtral"])
def test_the_weighted_gram_matrix_equals_the_sum_over_tokens(name):
    model = make(name)
    batches = image_batches() if name in ("convnet", "called twice") else token_batches(padded=True)
    batches = split_batches(token_batches(), 1) if name == "mixtral" else batches
    layers = find_structure(model).layers()
    plans = {layer.name: GradientPlan(shared=True, squares=True) for layer in layers}
    layers, whole = observe(model, batches, plans=plans, extra=(Pairs,))
    for layer in layers:
        fisher, size = whole[layer.name].gradients, layer.shape[0] // layer.groups
        assert fisher.count == layer.shape[0] and fisher.samples == 6
        for index, (inputs, deltas) in enumerate(whole[layer.name].extra[Pairs]):
            expected = reference.weighted_gram(inputs, deltas)
            tolerance = {"rtol": 1e-4, "atol": 1e-6 * float(expected.max())}
            rows = slice(index * size, (index + 1) * size)
            matrices = fisher.matrices(rows, torch.device("cpu"))
            torch.testing.assert_close(matrices, expected.expand(size, -1, -1), **tolerance)
            squares = fisher.squares[rows].double()
            by_token = sum(torch.outer(delta**2, x**2) for x, delta in zip(inputs, deltas, strict=True))
            torch.testing.assert_close(squares, by_token, rtol=1e-4, atol=1e-6 * float(by_token.max()))
            torch.testing.assert_close(squares.mean(0), expected.diagonal(), **tolerance)


def mean_inputs(model, layers, batches):
    """Mean input over all tokens at once, by layer."""
    rows, masks = {layer.name: [] for layer in layers}, []

    def keep(layer, inputs):
        kind = find_layer(layer.modules[0])
        rows[layer.name] += kind.tokens(inputs, kind.token_mask(inputs, masks[-1]))

    handles = [
        layer.modules[0].register_forward_hook(lambda _, args, output, layer=layer: keep(layer, args[0].detach()))
        for layer in layers
    ]
    for batch in batches:
        masks.append(token_mask(batch))
        run_model(model, batch)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(parts, 1).mean(1) for name, parts in rows.items()}


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "convnet", "called twice"])
def test_a_statistic_is_one_class_and_one_argument(name, diagonal):
    model = make(name)
    batches = token_batches(padded=True) if name in ("llama", "gpt2") else image_batches()
    layers, statistics = observe(model, batches, diagonal=diagonal, extra=(InputMean, FisherTrace))
    _, defaults = observe(model, batches, diagonal=diagonal)
    means = mean_inputs(model, layers, batches)
    for layer in layers:
        extended, default = statistics[layer.name], defaults[layer.name]
        assert set(extended.extra) == {InputMean, FisherTrace} and not default.extra
        torch.testing.assert_close(extended.extra[InputMean], means[layer.name], rtol=1e-4, atol=1e-5)
        squares = default.gradients if diagonal else default.gradients.gradients.square()
        assert extended.extra[FisherTrace] == pytest.approx(float(squares.sum()) / 6, rel=1e-4)
        assert torch.equal(extended.inputs, default.inputs)
        pair = (each.gradients if diagonal else each.gradients.gradients for each in (extended, default))
        assert torch.equal(*pair)


def test_without_gradients_only_inputs_are_gathered():
    _, statistics = observe(make("llama"), token_batches(), gradients=False, extra=(InputMean, FisherTrace))
    assert all(set(layer.extra) == {InputMean} for layer in statistics.values())


@pytest.mark.parametrize("share", [True, False])
def test_layers_with_a_common_input_share_its_statistic(share):
    InputMean.made = 0
    model = make("llama")
    _, statistics = observe(model, token_batches(), extra=(InputMean,), share=share)
    assert InputMean.made == 3 * (4 if share else 7)
    block = "model.layers.1.self_attn"
    shared = statistics[f"{block}.q_proj"].inputs is statistics[f"{block}.v_proj"].inputs
    assert shared == share
    assert torch.equal(statistics[f"{block}.q_proj"].inputs, statistics[f"{block}.v_proj"].inputs)
    assert statistics[f"{block}.q_proj"].inputs is not statistics[f"{block}.o_proj"].inputs


class Watched:
    """Two layers that a function calls, under an observer."""

    def __init__(self, diagonal=False, gradients=False):
        torch.manual_seed(0)
        self.modules = nn.Linear(4, 4), nn.Linear(4, 4)
        self.layers = [LinearLayer(name, (module,), False) for name, module in zip("ab", self.modules, strict=True)]
        wanted = {"a", "b"} if gradients else set()
        self.observer = Observer(self.layers, diagonal, wanted, 4, storage())

    def pass_on(self, *calls):
        with self.observer as observer:
            for number, call in enumerate(calls):
                observer.begin(2 * number, 2, None)
                call(*self.modules)
                observer.end()
        return [self.observer.take(layer) for layer in self.layers]


def test_a_tensor_changed_in_place_is_not_shared():
    inputs = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    kept = inputs.flatten(0, 1).clone()

    def call(a, b):
        a(inputs)
        b(inputs.relu_())

    first, second = Watched().pass_on(call)
    torch.testing.assert_close(first.inputs, gram(kept))
    torch.testing.assert_close(second.inputs, gram(kept.relu()))


@pytest.mark.parametrize("diagonal", [False, True])
def test_a_call_with_an_unused_output_adds_no_gradient(diagonal):
    """The other calls of its batch still count, with one gradient per sample."""
    inputs = torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(0))

    def call(part):
        def run(a, b):
            a(part + 1)
            a(part).tanh().sum().backward()
            b(part.clone()).sum().backward()

        return run

    watched = Watched(diagonal, gradients=True)
    statistics, _ = watched.pass_on(call(inputs[:2]), call(inputs[2:]))
    exact = []
    for sample in inputs:
        (gradient,) = torch.autograd.grad(watched.modules[0](sample).tanh().sum(), watched.modules[0].weight)
        exact.append(gradient)
    exact = torch.stack(exact)
    if diagonal:
        torch.testing.assert_close(statistics.gradients, exact.square().sum(0))
    else:
        torch.testing.assert_close(statistics.gradients.gradients, exact)


def gram(*tensors):
    return sum(tensor.flatten(0, -2).T @ tensor.flatten(0, -2) for tensor in tensors)


def tensors(count):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, 4, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("order", ["aab", "aba", "baa"])
def test_shared_and_separate_inputs_are_both_counted(order):
    x, y = tensors(2)

    def call(a, b):
        inputs = iter((x, y))
        for name in order:
            a(next(inputs)) if name == "a" else b(x)

    first, second = Watched().pass_on(call, call)
    torch.testing.assert_close(first.inputs, 2 * gram(x, y))
    torch.testing.assert_close(second.inputs, 2 * gram(x))


def test_a_layer_reached_late_counts_only_its_own_calls():
    x, y = tensors(2)
    first, second = Watched().pass_on(lambda a, b: a(x), lambda a, b: (a(y), b(y)))
    torch.testing.assert_close(first.inputs, gram(x, y))
    torch.testing.assert_close(second.inputs, gram(y))


def test_empty_inputs_are_not_the_same_tensor():
    """Experts that receive no token of a batch read such tensors."""
    x, y = tensors(2)
    empty = torch.zeros(0, 4)
    first, second = Watched().pass_on(lambda a, b: (a(empty), b(empty)), lambda a, b: (a(x), b(y)))
    torch.testing.assert_close(first.inputs, gram(x))
    torch.testing.assert_close(second.inputs, gram(y))


@pytest.mark.parametrize(
    "later", [lambda x, y: lambda a, b: (a(x), b(y)), lambda x, y: lambda a, b: a(x)], ids=["another", "none"]
)
def test_sharing_in_some_batches_only_is_an_error(later):
    x, y = tensors(2)
    watched = Watched()
    with pytest.raises(MoonshotError, match=r"layers \['a', 'b'\] read the same tensor in some batches only"):
        watched.pass_on(lambda a, b: (a(x), b(x)), later(x, y))
    assert not any(module._forward_hooks for module in watched.modules)


def test_keyword_inputs_are_observed():
    x, y = tensors(2)
    first, _ = Watched().pass_on(lambda a, b: (a(input=x), b(y)))
    torch.testing.assert_close(first.inputs, gram(x))


def test_a_layer_without_data_is_named():
    with pytest.raises(MoonshotError, match="b: no calibration data reached this layer; add its name to `ignore` to"):
        Watched().pass_on(lambda a, b: a(torch.randn(2, 3, 4)))


def test_errors_of_a_call_begin_with_the_layers_name():
    with pytest.raises(MoonshotError, match=r"^a: inputs of shape \[3, 4\] do not show which of the batch's 2 samples"):
        Watched(gradients=True).pass_on(lambda a, b: a(torch.randn(3, 4)).sum().backward())
