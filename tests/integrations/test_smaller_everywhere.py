"""A smaller model runs without this package: in a process with transformers alone, exported, and pruned further."""

import subprocess
import sys

import pytest
import torch
import transformers as hf
from marks import slow_but
from smaller_models import SMALLER, logits, make_smaller, prompts

from optimum_moonshot import MoonshotConfig, MoonshotPruner, load_pruned
from optimum_moonshot.checkpoint.verification import verify

DYNAMIC = torch.export.Dim.DYNAMIC
SHAPES = [(2, 11), (1, 7), (3, 33)]  # samples, tokens

# Load each folder, and save the logits and greedy tokens, with and without a cache.
PLAIN = """
import sys
sys.modules["optimum_moonshot"] = None  # importing it is an error
import torch, transformers
torch.set_num_threads(1)
ids, *folders = torch.load(sys.argv[1])
results = []
for folder in folders:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    settings = dict(max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    cached, other = (model.generate(ids, use_cache=use, **settings) for use in (True, False))
    assert torch.equal(cached, other)
    with torch.no_grad():
        results.append((model(ids).logits, cached))
torch.save(results, sys.argv[2])
"""


@pytest.fixture(scope="module")
def smaller(tmp_path_factory):
    """Returns the folder of a smaller model, and its logits before it was saved."""
    root, expected = tmp_path_factory.mktemp("smaller"), {}

    def folder(name):
        if name not in expected:
            expected[name] = make_smaller(name, root / name)
        return root / name, expected[name]

    return folder


def loaded(folder):
    return hf.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


@pytest.mark.slow
def test_a_process_with_transformers_alone(smaller, tmp_path):
    folders, expected = zip(*map(smaller, SMALLER), strict=True)
    torch.save([prompts(), *map(str, folders)], tmp_path / "inputs")
    subprocess.run([sys.executable, "-c", PLAIN, tmp_path / "inputs", tmp_path / "results"], check=True, timeout=300)
    for before, (after, generated) in zip(expected, torch.load(tmp_path / "results"), strict=True):
        assert torch.allclose(after, before, atol=1e-5)
        assert torch.equal(generated[:, 11], before[:, -1].argmax(-1)) and generated.shape == (2, 19)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLER)
def test_the_exported_program_equals_the_model_at_every_length(name, smaller, tmp_path):
    model = loaded(smaller(name)[0])
    shapes = {"input_ids": {0: DYNAMIC, 1: DYNAMIC}, "use_cache": None}
    program = torch.export.export(
        model, (), {"input_ids": prompts(), "use_cache": False}, dynamic_shapes=shapes, strict=False
    )
    torch.export.save(program, tmp_path / "model.pt2")
    exported = torch.export.load(tmp_path / "model.pt2").module()
    for shape in SHAPES:
        ids = prompts(*shape)
        assert torch.allclose(exported(input_ids=ids, use_cache=False).logits, logits(model, ids), atol=1e-5)


class Logits(torch.nn.Module):
    """A model with one tensor as input and one as output, which an ONNX file has."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        return self.model(input_ids=input_ids, use_cache=False).logits


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SMALLER if name not in ("llama", "qwen2")])
def test_onnxruntime_equals_torch_at_every_length(name, smaller, tmp_path):
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    model = loaded(smaller(name)[0])
    if name == "mixtral":
        model.set_experts_implementation("batched_mm")  # the default's product has no translation to ONNX
    program = torch.onnx.export(
        Logits(model), (prompts(),), dynamo=True, dynamic_shapes=({0: DYNAMIC, 1: DYNAMIC},), verbose=False
    )
    program.save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for shape in SHAPES:
        ids = prompts(*shape)
        (result,) = session.run(None, {"input_ids": ids.numpy()})
        assert torch.allclose(torch.from_numpy(result), logits(model, ids), atol=1e-4)


@pytest.mark.parametrize("name", slow_but(["llama-tied-biased"], SMALLER))
def test_two_of_four_and_four_bits_on_top(name, smaller, tmp_path):
    """The layer with an odd number of neurons as inputs stays dense, and the report names it."""
    config = MoonshotConfig(pattern="2:4", bits=4, lam=1, num_samples=4)
    pruner = MoonshotPruner.from_pretrained(smaller(name)[0], config, dtype="auto")
    report = pruner.prune([{"input_ids": prompts(4, 32)}], progress=False)
    odd = [layer for layer, reason in report.skipped.items() if "45 inputs do not divide into groups" in reason]
    assert len(odd) == (0 if name in ("mixtral", "qwen3-shrunk") else 2)
    assert {layer.sparsity >= 0.5 for layer in report.layers} == {True}
    pruner.save_pretrained(tmp_path, format="packed")
    assert verify(tmp_path)
    expected = logits(pruner.model, prompts())
    assert torch.equal(logits(load_pruned(tmp_path), prompts()), expected)
    packed = load_pruned(tmp_path, runtime="packed", inputs="float")
    assert torch.allclose(logits(packed, prompts()), expected, atol=1e-4)
