"""Coverage of the model families in the installed transformers: prune a tiny random model of each.

    python benchmarks/architectures.py                        # all of them; results/architectures.json, and the guide
    python benchmarks/architectures.py --only llama t5 vit     # run a few again

Each family's default configuration is shrunk (tiny_configs.py); the model is built in a separate process with a time
limit, and pruned to 2:4 at λ = 0.9. Text models get tokens, multimodal models tokens only, image and speech models
random images and waveforms.
"""

import json
import os
import resource
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from common import RESULTS, machine, parser
from tiny_configs import TOKENS, tiny_config
from transformers.models.auto import modeling_auto

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner
from optimum_moonshot.pipeline import model_pipeline

KINDS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "multimodal": modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "image": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "speech": modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    "ctc": modeling_auto.MODEL_FOR_CTC_MAPPING_NAMES,
    "audio": modeling_auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
}
SAMPLES, LENGTH = 4, 16
PAGE = Path(__file__).parents[1] / "docs" / "reference.md"
MARKS = ("<!-- survey -->", "<!-- end of survey -->")
LIMIT = 12 * 2**30  # bytes of address space per process


def families(kinds: list[str]) -> list[tuple[str, str, str]]:
    """(kind, model type, class name), each class once, under the first of its kinds."""
    classes: dict[str, tuple[str, str, str]] = {}
    for kind in kinds:
        for model_type, names in KINDS[kind].items():
            for name in [names] if isinstance(names, str) else names[:1]:
                classes.setdefault(name, (kind, model_type, name))
    return list(classes.values())


def batches(kind: str, model) -> list[dict]:
    """Two batches of inputs for a family."""
    generator = torch.Generator().manual_seed(0)
    config, size = model.config, 2
    model_inputs = []
    for _ in range(SAMPLES // size):
        ids = torch.randint(3, TOKENS - 20, (size, LENGTH), generator=generator)
        if kind in ("causal", "multimodal"):
            batch = {"input_ids": ids}
            if config.is_encoder_decoder:
                batch["labels"] = ids.flip(1)
        elif kind in ("seq2seq", "masked"):
            batch = {"input_ids": ids, "labels": ids.flip(1)}
        elif kind == "image":
            side = image_size(config)
            batch = {"pixel_values": torch.randn(size, getattr(config, "num_channels", 3), side, side)}
            batch["labels"] = torch.randint(0, config.num_labels, (size,), generator=generator)
        else:
            main = model.main_input_name
            batch = {main: ids if main == "input_ids" else sound(model, size)}
            batch["labels"] = ids if kind == "speech" else torch.randint(0, config.num_labels, (size,))
        model_inputs.append(batch)
    return model_inputs


def with_images(batch: dict, model) -> dict:
    """A batch of tokens with images, for families that require images."""
    side = image_size(model.config)
    samples = len(batch["input_ids"])
    images = torch.randn(samples, 3, side, side)
    return {**batch, "labels": batch["input_ids"], "pixel_values": images}


def image_size(config) -> int:
    size = getattr(config, "image_size", None) or getattr(getattr(config, "vision_config", None), "image_size", 32)
    return size[0] if isinstance(size, list | tuple) else size


def sound(model, size: int) -> torch.Tensor:
    """Waveforms [B, T], or spectrograms in the layout of the family."""
    config = getattr(model.config, "encoder_config", model.config)
    if model.main_input_name == "input_values":
        if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):
            return torch.randn(size, config.max_length, config.num_mel_bins)
        return torch.randn(size, 4000)
    if model.config.model_type == "whisper":
        return torch.randn(size, config.num_mel_bins, 2 * config.max_source_positions)
    names = ("feature_projection_input_dim", "num_mel_bins", "input_dim", "input_feat_per_channel")
    return torch.randn(size, 64, next((getattr(config, name) for name in names if hasattr(config, name)), 80))


def own_loss(output, batch) -> torch.Tensor:
    """Loss for families whose logits have no labels of the same shape (CTC)."""
    return output.logits.float().logsumexp(-1).flatten(1).mean(1)


def survey(kind: str, model_type: str, class_name: str) -> dict:
    """Build a tiny model and prune it."""
    torch.manual_seed(0)
    try:
        model = getattr(transformers, class_name)(tiny_config(model_type, class_name)).eval()
    except Exception as error:  # inconsistent sizes, or a package that is not installed
        return {"not made": f"{type(error).__name__}: {error}".strip()[:400]}
    result = {"parameters": sum(parameter.numel() for parameter in model.parameters())}
    real = model_pipeline.find_block_sequences

    def noted(*arguments):
        chains = real(*arguments)
        result["chains"] = [len(chain.blocks) for chain in chains.sequential]
        result["loose"] = [block.name for block in chains.non_sequential]
        return chains

    model_pipeline.find_block_sequences = noted
    config = MoonshotConfig(pattern="2:4", lam=0.9, num_samples=SAMPLES, batch_size=2)
    options = {"loss": own_loss if kind == "ctc" else None, "progress": False}
    data = batches(kind, model)
    try:
        report = MoonshotPruner(model, config).prune(data, **options)
    except MoonshotError as error:
        if kind != "multimodal" or "cannot be called" not in str(error):
            raise
        result["without images"] = str(error)
        report = MoonshotPruner(model, config).prune([with_images(batch, model) for batch in data], **options)
    weights = dict(model.named_parameters(remove_duplicate=False))
    for layer in report.layers:
        weight = weights[layer.name if layer.name in weights else f"{layer.name}.weight"]  # experts: parameter names
        if weight.count_nonzero() * 2 > weight.numel():
            raise AssertionError(f"{layer.name} is not 2:4")
    reasons = Counter(report.skipped.values())
    return result | {"pruned": len(report.layers), "skipped": dict(reasons), "notes": list(report.notes)}


def isolated(family: tuple[str, str, str], limit: int, verbose: bool, work: Callable[..., dict] = survey) -> dict:
    """The work for a family in a separate process, killed after `limit` seconds."""
    reading, writing = os.pipe()
    started = time.perf_counter()
    child = os.fork()
    if child == 0:
        os.close(reading)
        signal.alarm(limit)
        resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        if not verbose:
            os.dup2(quiet, 2)
        try:
            result = work(*family)
        except MoonshotError as error:
            result = {"refused": str(error)}
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)
            result = {
                "error": f"{type(error).__name__}: {error}"[:600],
                "at": [f"{f.filename.split('site-packages/')[-1]}:{f.lineno} {f.name}" for f in where[-3:]],
            }
            if verbose:
                traceback.print_exc()
        with os.fdopen(writing, "w") as out:
            json.dump(result, out)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as source:
        text = source.read()
    _, status = os.waitpid(child, 0)
    kind, model_type, class_name = family
    result = json.loads(text) if text else {"error": f"ended by signal {os.WTERMSIG(status)}"}
    return {
        "kind": kind,
        "family": model_type,
        "class": class_name,
        **result,
        "seconds": round(time.perf_counter() - started, 1),
    }


def line(result: dict) -> str:
    head = f"{result['kind']:10} {result['family']:28} {result['seconds']:5}"
    for field in ("error", "refused", "not made"):
        if field in result:
            return f"{head} {field}: {result[field][:160]}"
    loose = f", {len(result['loose'])} LOOSE" if result.get("loose") else ""
    skipped = "; ".join(f"{count}x {reason[:70]}" for reason, count in result["skipped"].items())
    return f"{head} pruned {result['pruned']:3}, chains {result.get('chains')}{loose} | {skipped}"


def outcome(result: dict) -> str:
    """The column of the table in which an entry is counted."""
    for field in ("error", "refused", "not made"):
        if field in result:
            return field
    return "in part" if result["skipped"] else "whole"


def table(results: list[dict]) -> str:
    """The results as a Markdown table, one row per kind."""
    columns = ("whole", "in part", "refused", "not made", "error")
    counts = {kind: Counter(outcome(result) for result in results if result["kind"] == kind) for kind in KINDS}
    loose = Counter(result["kind"] for result in results if result.get("loose"))
    lines = [
        "| kind | families | all layers pruned | some dense, with the reason | of these two, not block by block "
        "| refused | not made | errors |",
        "|---|" + "---:|" * 7,
    ]
    for kind, count in counts.items():
        whole, part, *rest = (count[column] for column in columns)
        cells = [count.total(), whole, part, loose[kind], *rest]
        lines.append(f"| {kind} | " + " | ".join(map(str, cells)) + " |")
    total = Counter(outcome(result) for result in results)
    cells = [len(results), total["whole"], total["in part"], loose.total(), *(total[column] for column in columns[2:])]
    return "\n".join([*lines, "| all | " + " | ".join(map(str, cells)) + " |"])


def write_page(results: list[dict]) -> None:
    """Write the table into the guide, between its marks."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    PAGE.write_text(f"{before}{MARKS[0]}\n{table(results)}\n{MARKS[1]}{after}", encoding="utf-8")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    arguments.add_argument("--only", nargs="*", help="model types; their entries in the file are replaced")
    arguments.add_argument("--verbose", action="store_true", help="show tracebacks")
    arguments.add_argument("--seconds", type=int, default=300, help="for one model")
    arguments.add_argument("--output", default=str(RESULTS / "architectures.json"))
    given = arguments.parse_args()
    torch.set_num_threads(1)
    output = Path(given.output)
    previous = json.loads(output.read_text(encoding="utf-8"))["results"] if given.only and output.exists() else []
    everything = {(result["kind"], result["class"]): result for result in previous}
    for family in families(given.kinds):
        if not given.only or family[1] in given.only:
            result = isolated(family, given.seconds, given.verbose)
            everything[result["kind"], result["class"]] = result
            print(line(result), flush=True)
    results = list(everything.values())
    text = {"machine": machine(), "transformers": transformers.__version__, "results": results}
    output.write_text(json.dumps(text, indent=1), encoding="utf-8")
    write_page(results)


if __name__ == "__main__":
    main()
