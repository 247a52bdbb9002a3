"""Memory and passes of fused experts: solvers hold one expert at a time; no token is gathered or shown twice."""

from types import SimpleNamespace

import pytest
import tiny_mixtures
import torch
import transformers as hf
from models import token_batches
from tiny_mixtures import experts
from torch.nn import functional

from optimum_moonshot import MoonshotConfig, MoonshotPruner
from optimum_moonshot.calibration.observer import LayerStatistics
from optimum_moonshot.calibration.storage import Storage
from optimum_moonshot.data.batches import split_batches
from optimum_moonshot.model import weight_sums
from optimum_moonshot.model.calls import run_model
from optimum_moonshot.model.experts import _Watched
from optimum_moonshot.model.layers import find_structure
from optimum_moonshot.objective.patterns import Unstructured
from optimum_moonshot.objective.quadratic import DiagonalQuadratic, Quadratic
from optimum_moonshot.pipeline.backoff import Backoff
from optimum_moonshot.pipeline.partition import StatisticsSpec
from optimum_moonshot.pipeline.under_calibrated_experts import UnderCalibratedExperts
from optimum_moonshot.plan.trials import LiveBytes
from optimum_moonshot.prune.layers import solve
from optimum_moonshot.recover.student import StudentBlock
from optimum_moonshot.solvers import make_solver

EXPERTS = 64


def mixtral(experts=EXPERTS, **changes):
    return tiny_mixtures.mixtral(experts, num_hidden_layers=1, **changes)


def statistics(layer, diagonal):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(layer.groups, 40, layer.shape[1], generator=generator)
    gram = inputs.mT @ inputs
    return LayerStatistics(gram.diagonal(dim1=1, dim2=2).clone() if diagonal else gram, None, 8, diagonal)


@pytest.mark.parametrize("name", ["wanda", "sparsegpt"])
@pytest.mark.parametrize("sparsities", [(0.5,), (0.5, 0.7)])
def test_solving_holds_results_in_the_layers_dtype_and_the_memory_of_one_expert(name, sparsities):
    solver, layer = make_solver(name, {}), experts(mixtral().bfloat16())[0]
    of_layer, patterns = statistics(layer, solver.objective.diagonal_only), [Unstructured(each) for each in sparsities]
    peaks = []
    for count in (1, EXPERTS):
        part = layer.expert(0) if count == 1 else layer
        of_part = next(of_layer.groups(EXPERTS)) if count == 1 else of_layer
        with LiveBytes() as live:
            results = solve(solver, part, of_part, 1.0, patterns)
        peaks.append(live.peak)
    weights = len(sparsities) * layer.parameter.nbytes
    assert {weight.dtype for _, weight in results} == {torch.bfloat16}
    assert weights <= peaks[1] <= weights + 1.2 * peaks[0] < weights + 2 * layer.parameter.numel() * len(sparsities)


@pytest.mark.parametrize("name", ["wanda", "sparsegpt"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_expert_is_solved_as_if_alone_bit_for_bit(name, dtype):
    solver, pattern = make_solver(name, {}), Unstructured(0.6)
    layer = experts(mixtral(experts=4).to(dtype))[1]
    of_layer = statistics(layer, solver.objective.diagonal_only)
    ((report, weight),) = solve(solver, layer, of_layer, 1.0, [pattern])
    zeros = 0
    for index, of_expert in enumerate(of_layer.groups(4)):
        matrix = layer.matrix.unflatten(0, (4, -1))[index]
        if solver.objective.diagonal_only:
            objective = DiagonalQuadratic.build(matrix, of_expert.inputs, None, 8, 1.0)
        else:
            objective = Quadratic.build(matrix, of_expert.inputs, None, 1.0)
        alone = solver.solve(objective, pattern).weight.to(dtype)
        zeros += int((alone == 0).sum())
        assert torch.equal(weight.unflatten(0, (4, -1))[index], alone)
    assert report.sparsity == zeros / weight.numel()


def test_weight_sums_are_computed_expert_by_expert(monkeypatch):
    parameter = experts(mixtral())[0].parameter
    monkeypatch.setattr(weight_sums, "_CHUNK", parameter[0].numel())
    with LiveBytes() as live:
        sums = weight_sums.tensor_sums(parameter)
    assert live.peak < 4 * 8 * parameter[0].numel()
    total = float(sums.split()[-2])
    assert total == pytest.approx(float(parameter.double().sum()), rel=1e-9)
    with torch.no_grad():
        parameter[[2, 5]] = parameter[[5, 2]]
        assert weight_sums.tensor_sums(parameter) != sums
        parameter[[2, 5]] = parameter[[5, 2]]
        assert weight_sums.tensor_sums(parameter) == sums
        parameter[5, 3, 2] += 1e-3
    assert weight_sums.tensor_sums(parameter) != sums


def test_a_student_holds_float32_copies_of_the_pruned_weights_alone():
    (block,) = find_structure(mixtral().bfloat16()).blocks
    weights = [(layer, layer.matrix.clone()) for layer in block.layers]
    size = sum(weight.numel() for _, weight in weights)
    with LiveBytes() as live:
        student = StudentBlock(block, weights, {layer.name for layer, _ in weights})
    assert {name for name in student.tensors} == {*dict(block.module.named_parameters())}
    assert (4 + 1) * size <= live.peak < 6 * size


class Passes:
    """The batches, through the model."""

    def __init__(self, model):
        self.model, self.batches = model, split_batches(token_batches(), 1)
        self.tokens = sum(batch["input_ids"].numel() for batch in self.batches)

    def observe(self, observer, advance=False):
        with torch.no_grad():
            for index, batch in enumerate(self.batches):
                observer.begin(index, 1, None)
                run_model(self.model, batch)
                observer.end()


def truncated_repr(model, diagonal=False):
    """Sums of all experts after calibration on all tokens, and the passes over the data."""
    passes, layers = Passes(model), experts(model)
    sums = {layer.name: statistics(layer, diagonal).inputs for layer in layers}
    solver, names = make_solver("wanda" if diagonal else "sparsegpt", {}), [layer.name for layer in layers]
    spec = StatisticsSpec(solver, {}, dict.fromkeys(names, 1.0), len(passes.batches))
    under_calibrated = UnderCalibratedExperts(spec, Backoff(Storage(torch.device("cpu"))), [])
    observer = SimpleNamespace(
        reached=lambda layer: True,
        sums=lambda layer: sums[layer.name],
        tokens=lambda layer: torch.zeros(layer.groups, dtype=torch.int64),
    )
    under_calibrated.observe(passes, layers, observer)
    assert len(under_calibrated.replaced) == sum(layer.groups for layer in layers)
    return sums, passes


def test_all_tokens_reach_every_expert():
    model, batches = tiny_mixtures.mixtral(), split_batches(token_batches(), 1)
    seen = []
    handle = model.model.layers[1].mlp.experts.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        for batch in batches:
            run_model(model, batch)
    handle.remove()
    tokens = torch.cat(seen)
    _, _, gate_up, down = experts(model)
    spec = StatisticsSpec(make_solver("sparsegpt", {}), {}, dict.fromkeys((gate_up.name, down.name), 1.0), len(batches))
    under_calibrated = UnderCalibratedExperts(spec, Backoff(Storage(torch.device("cpu"))), [])
    counts = {gate_up.name: [0, 0, 0, 0], down.name: [99, 0, 99, 99]}
    sums = {layer.name: torch.full((4, layer.shape[1], layer.shape[1]), 7.0) for layer in (gate_up, down)}
    observer = SimpleNamespace(
        reached=lambda layer: True,
        sums=lambda layer: sums[layer.name],
        tokens=lambda layer: torch.tensor(counts[layer.name]),
    )
    under_calibrated.observe(Passes(model), [gate_up, down], observer)
    assert under_calibrated.experts == {gate_up.name: [0, 1, 2, 3], down.name: [1]}
    replaced = {(name, expert) for name, numbers in under_calibrated.experts.items() for expert in numbers}
    assert under_calibrated.replaced == replaced
    for expert in range(4):
        torch.testing.assert_close(sums[gate_up.name][expert], tokens.T @ tokens)
    gate, up = functional.linear(tokens, gate_up.parameter[1]).chunk(2, -1)
    inner = functional.silu(gate) * up
    torch.testing.assert_close(sums[down.name][1], inner.T @ inner, rtol=1e-4, atol=1e-6)
    assert (sums[down.name][[0, 2, 3]] == 7).all()


def test_an_expert_is_shown_every_token_once(monkeypatch):
    """A call ends after the expert that is shown; only before the last one the tokens pass their second choice."""
    rows, original = {}, _Watched.product

    def counted(self, key, expert, turned, inputs, output):
        if self.forced is not None:
            rows[key] = rows.get(key, 0) + inputs[..., 0].numel()
        return original(self, key, expert, turned, inputs, output)

    monkeypatch.setattr(_Watched, "product", counted)
    _, passes = truncated_repr(mixtral(experts=6))
    assert rows == dict.fromkeys(("gate_up_proj", "down_proj"), passes.tokens * (6 + 1))


def test_an_expert_computed_in_chunks_is_shown_all_tokens():
    """A module may multiply an expert's tokens in chunks."""
    model, other = mixtral(experts=6), mixtral(experts=6)
    module = other.model.layers[0].mlp.experts
    whole = type(module).forward

    def in_pieces(hidden, index, weights):
        cut = len(hidden) // 3
        parts = [(hidden[tokens], index[tokens], weights[tokens]) for tokens in (slice(0, cut), slice(cut, None))]
        return torch.cat([whole(module, *part) for part in parts])

    module.forward = in_pieces
    for name, sums in truncated_repr(model)[0].items():
        torch.testing.assert_close(truncated_repr(other)[0][name], sums, rtol=1e-4, atol=1e-5)


def test_all_tokens_take_no_memory_beside_the_sums():
    model = mixtral(hidden_size=48)
    gram = statistics(experts(model)[0], False).inputs.nbytes
    with LiveBytes() as live:
        sums, _ = truncated_repr(model)
    size = sum(map(torch.Tensor.nbytes.__get__, sums.values()))
    assert live.peak < size + gram  # the sums are allocated inside as well


def plan(**fields):
    config = hf.MixtralConfig(**mixtral().config.to_dict())
    defaults = dict(sparsity=0.5, num_samples=8, batch_size=4, sequence_length=16, lam=1)
    return MoonshotPruner.plan_for(config, MoonshotConfig(**{**defaults, **fields}))


def test_a_plan_counts_the_pass_for_under_calibrated_experts():
    """128 tokens to 2 of 64 experts are 4 to each: too few for 24 inputs. A pass of pruned weights feeds the next."""
    passes = {how: plan(under_calibrated_experts=how).blocks[0].passes for how in ("all", "magnitude", "routed")}
    assert passes == {"all": 4, "magnitude": 3, "routed": 2}
    assert plan(num_samples=16).blocks[0].passes == 3


def test_a_plan_counts_the_weights_of_all_experts_while_they_are_solved():
    solving = [snapshot for snapshot in plan(solver="wanda").snapshots if snapshot.phase == "solver"]
    peak = max(solving, key=lambda snapshot: snapshot.total("cpu"))
    gate_up, down = EXPERTS * 48 * 16 * 4, EXPERTS * 16 * 24 * 4
    assert peak.where.endswith("down_proj") and peak.items["results"]["cpu"] >= gate_up
    assert down < peak.items["solver"]["cpu"] < 1.5 * down
