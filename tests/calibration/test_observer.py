"""What hooks hand on and what is made of it: statistics of one's own, shared inputs, calls that come to nothing."""

import pytest
import torch
from models import image_batches, make, token_batches
from torch import nn

from optimum_moonshot import MoonshotError
from optimum_moonshot.calibration.observer import Observer
from optimum_moonshot.calibration.statistic import GradientStatistic, InputStatistic
from optimum_moonshot.calibration.storage import Storage
from optimum_moonshot.data.batches import batch_size
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
    """The statistics of all layers, from passes of the whole model."""
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


def mean_inputs(model, layers, batches):
    """Of all tokens' inputs at once, by layer."""
    rows, masks = {layer.name: [] for layer in layers}, []

    def keep(layer, inputs):
        form = find_layer(layer.modules[0])
        rows[layer.name] += form.tokens(inputs, form.token_mask(inputs, masks[-1]))

    handles = [
        layer.modules[0].register_forward_hook(lambda _, args, output, layer=layer: keep(layer, args[0].detach()))
        for layer in layers
    ]
    for batch in batches:
        masks.append(token_mask(batch))
        run_model(model, batch)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(found, 1).mean(1) for name, found in rows.items()}


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "convnet", "called twice"])
def test_a_statistic_is_one_class_and_one_argument(name, diagonal):
    model = make(name)
    batches = token_batches(padded=True) if name in ("llama", "gpt2") else image_batches()
    layers, found = observe(model, batches, diagonal=diagonal, extra=(InputMean, FisherTrace))
    _, plain = observe(model, batches, diagonal=diagonal)
    means = mean_inputs(model, layers, batches)
    for layer in layers:
        mine, usual = found[layer.name], plain[layer.name]
        assert set(mine.extra) == {InputMean, FisherTrace} and not usual.extra
        torch.testing.assert_close(mine.extra[InputMean], means[layer.name], rtol=1e-4, atol=1e-5)
        squares = usual.gradients if diagonal else usual.gradients.gradients.square()
        assert mine.extra[FisherTrace] == pytest.approx(float(squares.sum()) / 6, rel=1e-4)
        assert torch.equal(mine.inputs, usual.inputs)
        pair = (each.gradients if diagonal else each.gradients.gradients for each in (mine, usual))
        assert torch.equal(*pair)


def test_without_gradients_only_inputs_are_gathered():
    _, found = observe(make("llama"), token_batches(), gradients=False, extra=(InputMean, FisherTrace))
    assert all(set(statistics.extra) == {InputMean} for statistics in found.values())


@pytest.mark.parametrize("share", [True, False])
def test_layers_that_read_a_tensor_have_one_statistic_of_it(share):
    InputMean.made = 0
    model = make("llama")
    _, found = observe(model, token_batches(), extra=(InputMean,), share=share)
    assert InputMean.made == 3 * (4 if share else 7)
    block = "model.layers.1.self_attn"
    together = found[f"{block}.q_proj"].inputs is found[f"{block}.v_proj"].inputs
    assert together == share
    assert torch.equal(found[f"{block}.q_proj"].inputs, found[f"{block}.v_proj"].inputs)
    assert found[f"{block}.q_proj"].inputs is not found[f"{block}.o_proj"].inputs


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


def test_a_tensor_that_was_changed_in_place_is_another():
    inputs = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    kept = inputs.flatten(0, 1).clone()

    def call(a, b):
        a(inputs)
        b(inputs.relu_())

    first, second = Watched().pass_on(call)
    torch.testing.assert_close(first.inputs, gram(kept))
    torch.testing.assert_close(second.inputs, gram(kept.relu()))


@pytest.mark.parametrize("diagonal", [False, True])
def test_a_call_whose_output_nothing_reads_adds_no_gradient(diagonal):
    """Nor does it keep the others of its batch from being counted, each sample by itself."""
    inputs = torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(0))

    def call(part):
        def run(a, b):
            a(part + 1)
            a(part).tanh().sum().backward()
            b(part.clone()).sum().backward()

        return run

    watched = Watched(diagonal, gradients=True)
    found, _ = watched.pass_on(call(inputs[:2]), call(inputs[2:]))
    exact = []
    for sample in inputs:
        (gradient,) = torch.autograd.grad(watched.modules[0](sample).tanh().sum(), watched.modules[0].weight)
        exact.append(gradient)
    exact = torch.stack(exact)
    if diagonal:
        torch.testing.assert_close(found.gradients, exact.square().sum(0))
    else:
        torch.testing.assert_close(found.gradients.gradients, exact)


def gram(*tensors):
    return sum(tensor.flatten(0, -2).T @ tensor.flatten(0, -2) for tensor in tensors)


def tensors(count):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, 4, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("order", ["aab", "aba", "baa"])
def test_layers_that_read_a_tensor_together_and_others_alone(order):
    x, y = tensors(2)

    def call(a, b):
        own = iter((x, y))
        for name in order:
            a(next(own)) if name == "a" else b(x)

    first, second = Watched().pass_on(call, call)
    torch.testing.assert_close(first.inputs, 2 * gram(x, y))
    torch.testing.assert_close(second.inputs, 2 * gram(x))


def test_a_layer_that_is_reached_late_has_seen_nothing_before():
    x, y = tensors(2)
    first, second = Watched().pass_on(lambda a, b: a(x), lambda a, b: (a(y), b(y)))
    torch.testing.assert_close(first.inputs, gram(x, y))
    torch.testing.assert_close(second.inputs, gram(y))


def test_empty_inputs_are_not_the_same_tensor():
    """As those of experts that a batch has no token for."""
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


def test_inputs_given_by_name_are_seen():
    x, y = tensors(2)
    first, _ = Watched().pass_on(lambda a, b: (a(input=x), b(y)))
    torch.testing.assert_close(first.inputs, gram(x))


def test_a_layer_that_no_data_reach_is_named():
    with pytest.raises(MoonshotError, match="b: no calibration data reached this layer; add its name to ignore to"):
        Watched().pass_on(lambda a, b: a(torch.randn(2, 3, 4)))


def test_errors_of_a_call_begin_with_the_layers_name():
    with pytest.raises(MoonshotError, match=r"^a: inputs of shape \[3, 4\] do not show which of the batch's 2 samples"):
        Watched(gradients=True).pass_on(lambda a, b: a(torch.randn(3, 4)).sum().backward())
