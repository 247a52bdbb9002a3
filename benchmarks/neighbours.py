"""Packages that are used beside this one, in one environment: a check of each with a pruned model, and its version.

The demo model, or a small random one, is pruned by magnitude; a check fails unless the neighbour computes with the
pruned weights, and keeps their zeros where it changes weights. Install the packages beside this one first.

Usage: python benchmarks/neighbours.py [NAME …]    writes results/neighbours.json; without a NAME, all of them

prints the table of docs/reference.md. One file has the results of several environments.
"""

import json
import tempfile
import traceback
from importlib import metadata
from pathlib import Path

import torch
import transformers as hf
from common import RESULTS, parser, versions, write
from torch import nn

from optimum_moonshot import MoonshotCallback, MoonshotConfig, MoonshotPruner
from optimum_moonshot.masks import find_pruned

DEMO = Path(__file__).resolve().parents[1] / "examples" / "demo_model"
TEXT = DEMO / "calibration.txt"
CONFIG = MoonshotConfig(solver="magnitude", pattern="2:4", lam=1, num_samples=2, sequence_length=64)


def pruned() -> MoonshotPruner:
    pruner = MoonshotPruner.from_pretrained(DEMO, CONFIG, dtype=torch.float32)
    pruner.prune(str(TEXT))
    return pruner


def zeros(model: nn.Module) -> dict[str, torch.Tensor]:
    return {layer.name: layer.matrix == 0 for layer in find_pruned(model)}


def removed_weights_are_zero(model: nn.Module, before: dict[str, torch.Tensor]) -> None:
    after = zeros(model)
    assert before and all((after[name] | ~places).all() for name, places in before.items())


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(32)[None]).logits


def trl(folder: Path) -> str:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    pruner = pruned()
    before, weights = zeros(pruner.model), logits(pruner.model)
    text = Dataset.from_dict({"text": TEXT.read_text(encoding="utf-8")[:4000].split("\n\n")})
    settings = SFTConfig(output_dir=str(folder), max_steps=2, report_to=[], use_cpu=True, max_length=64, bf16=False)
    tokenizer = pruner.tokenizer
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    callbacks = [MoonshotCallback()]
    SFTTrainer(pruner.model, args=settings, train_dataset=text, processing_class=tokenizer, callbacks=callbacks).train()
    removed_weights_are_zero(pruner.model, before)
    assert not torch.equal(logits(pruner.model), weights)
    return "SFTTrainer with MoonshotCallback trains and keeps the zeros"


def peft(folder: Path) -> str:
    from peft import LoraConfig, get_peft_model

    from optimum_moonshot.integrations.peft import sparse_lora

    model = pruned().model
    before, weights = zeros(model), logits(model)
    adapted = sparse_lora(get_peft_model(model, LoraConfig(r=4, target_modules="all-linear")))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    expected, merged = logits(adapted), adapted.merge_and_unload()
    removed_weights_are_zero(merged, before)
    torch.testing.assert_close(logits(merged), expected, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(expected, weights, atol=1e-3)
    return "sparse_lora merges into the surviving weights alone"


def lm_eval(folder: Path) -> str:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    pruner = pruned()
    context, end = "The sky is", " blue"
    evaluated = HFLM(pretrained=pruner.model, tokenizer=pruner.tokenizer, device="cpu", batch_size=1)
    request = Instance("loglikelihood", {}, (context, end), 0)
    ((likelihood, _),) = evaluated.loglikelihood([request], disable_tqdm=True)
    ids = torch.tensor([evaluated.tok_encode(context + end)])
    start = len(evaluated.tok_encode(context))
    with torch.no_grad():
        scores = pruner.model(ids).logits.log_softmax(-1)[0, start - 1 : -1]
    assert abs(likelihood - scores.gather(1, ids[0, start:, None]).sum().item()) < 1e-3
    return "log-likelihoods are those of the pruned model"


def torchao(folder: Path) -> str:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = pruned().model
    before, weights = zeros(model), logits(model)
    quantize_(model, Int8WeightOnlyConfig())
    assert before and (logits(model) - weights).norm() < 0.05 * weights.norm()
    for name, places in before.items():
        assert (model.get_submodule(name.removesuffix(".weight")).weight.dequantize()[places] == 0).all()
    return "int8 weights keep the zeros"


def bitsandbytes(folder: Path) -> str:
    pruner = pruned()
    pruner.save_pretrained(folder)
    settings = hf.BitsAndBytesConfig(load_in_8bit=True)
    model = hf.AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings, device_map="cpu")
    layer = model.model.layers[0].mlp.up_proj
    assert layer.weight.dtype == torch.int8
    assert (layer.weight[pruner.model.model.layers[0].mlp.up_proj.weight == 0] == 0).all()
    expected = logits(pruner.model)
    assert (logits(model).float() - expected).norm() < 0.1 * expected.norm()
    return "int8 on the CPU keeps the zeros"


def sentence_transformers(folder: Path) -> str:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer

    pruner = pruned()
    tokenizer = pruner.tokenizer
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    pruner.save_pretrained(folder)
    encoder = Transformer(str(folder))
    embedder = SentenceTransformer(modules=[encoder, Pooling(pruner.model.config.hidden_size)], device="cpu")
    embedding = torch.as_tensor(embedder.encode("The sky is blue")).float()
    with torch.no_grad():
        states = pruner.model.model(**tokenizer("The sky is blue", return_tensors="pt")).last_hidden_state
    torch.testing.assert_close(embedding, states[0].mean(0), rtol=1e-3, atol=1e-3)
    return "embeds with a saved pruned model"


def llmcompressor(folder: Path) -> str:
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    model = pruned().model
    before, weights = zeros(model), logits(model)
    oneshot(model=model, recipe=[QuantizationModifier(targets="Linear", scheme="W8A8", ignore=["lm_head"])])
    removed_weights_are_zero(model, before)
    difference = (logits(model) - weights).norm()
    assert 0 < difference < 0.05 * weights.norm()
    return "int8 weights and inputs (W8A8) keep the zeros"


def timm(folder: Path) -> str:
    import timm as images

    net = images.create_model("resnet18", num_classes=10).eval()
    loader = [(torch.randn(2, 3, 64, 64), torch.randint(0, 10, (2,))) for _ in range(2)]
    config = MoonshotConfig(solver="magnitude", sparsity=0.5, lam=1, num_samples=4)
    report = MoonshotPruner(net, config).prune(loader)
    assert abs(report.sparsity - 0.5) < 0.01
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    images.create_model("resnet18", num_classes=10).load_state_dict(state)
    return f"a plain module: {len(report.layers)} layers pruned, its state loads in timm"


# Check by distribution.
CHECKS = {
    "trl": trl,
    "peft": peft,
    "lm_eval": lm_eval,
    "torchao": torchao,
    "bitsandbytes": bitsandbytes,
    "sentence-transformers": sentence_transformers,
    "llmcompressor": llmcompressor,
    "timm": timm,
}


def check(name: str) -> dict:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return {"version": None, "result": "not installed"}
    try:
        with tempfile.TemporaryDirectory() as folder:
            return {"version": version, "works": True, "result": CHECKS[name](Path(folder))}
    except Exception as error:  # a finding, which the table shows
        traceback.print_exc()
        return {"version": version, "works": False, "result": f"{type(error).__name__}: {error}".splitlines()[0]}


# Names that differ from those of the distributions.
NAMES = {"trl": "TRL", "peft": "PEFT", "lm_eval": "lm-eval", "llmcompressor": "llm-compressor"}


def table(results: dict) -> str:
    """Markdown: the checks, with the versions of torch and transformers in their environment."""
    lines = ["| package | version | torch | transformers | checked |", "|---|---|---|---|---|"]
    for name, row in results.items():
        checked = row["result"] if row.get("works") else f"fails: {row['result']}"
        environment = row["environment"]
        torch_version = environment["torch"].partition("+")[0]
        cells = NAMES.get(name, name), row["version"], torch_version, environment["transformers"], checked
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("names", nargs="*", default=list(CHECKS), help="distributions")
    path = RESULTS / "neighbours.json"
    results = json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else {}
    for name in options.parse_args().names:
        torch.manual_seed(0)
        shared = versions("torch", "transformers", "optimum", "datasets", "huggingface-hub", "numpy")
        results[name] = {**check(name), "environment": shared}
        print(name, results[name], flush=True)
    write("neighbours", results)
    print(table(results))


if __name__ == "__main__":
    main()
