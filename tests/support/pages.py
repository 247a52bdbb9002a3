"""Runs the code blocks of a Markdown page, in a folder where the names on the pages resolve to small local files.

A page of Python and shell blocks runs from top to bottom, its Python blocks in one namespace. Blocks marked
`python` or `bash` run; `text` is the output of a program. A block that cannot run is preceded by the reason:

    <!-- not run: needs a GPU -->
"""

import configparser
import json
import re
import runpy
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import datasets
import torch
import transformers as hf
from image_folders import CLASSES, fill
from models import make
from PIL import Image
from zeroshot_tasks import TASK

from optimum_moonshot.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples" / "demo_model"
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "examples/demo_model/README.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")),
)
FENCE = re.compile(r"^(?:<!-- not run: (?P<reason>.+?) -->\n)?```(?P<kind>\S*)\n(?P<source>.*?)^```$", re.M | re.S)
KINDS = ("python", "bash", "text")

# Text of a page → its replacement in tests: less work, and tasks that need no download.
SMALLER = {
    "num_samples=512": "num_samples=20",
    "num_samples=64": "num_samples=6",
    "lambdas=[0.25, 0.5, 0.75, 0.9, 1]": "lambdas=[0.5, 1]",
    "parameters=0.75": "parameters=0.95",  # the tiny models are mostly embeddings
    "--parameters 0.75": "--parameters 0.95",
    "--seeds 0 1 2": "--seeds 0 --lambdas 0.5 1",
    "max_steps=200": "max_steps=4",
    "--tasks paper": "--tasks letters.yaml",
}


class Broken(Exception):
    """A block fails, contrary to its page."""


@dataclass(frozen=True)
class Block:
    page: str
    line: int  # first line of code, from 1
    kind: str
    source: str
    reason: str | None  # not to run it

    @property
    def smaller(self) -> str:
        text = self.source
        for full, reduced in SMALLER.items():
            text = text.replace(full, reduced)
        return text


def blocks(page: str, text: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    return [
        Block(page, text.count("\n", 0, match.start("source")) + 1, match["kind"], match["source"], match["reason"])
        for match in FENCE.finditer(text)
    ]


def run(blocks: list[Block]) -> None:
    """Run all blocks of a page in the current folder.

    Raises:
        Broken: a command is unknown, or fails. Exceptions of Python blocks propagate.
    """
    namespace = {"__name__": "page"}
    for block in blocks:
        if block.reason is not None:
            continue
        if block.kind == "python":
            code = "\n" * (block.line - 1) + block.smaller  # so that tracebacks show the line of the page
            exec(compile(code, str(ROOT / block.page), "exec"), namespace)
        elif block.kind == "bash":
            for words in commands(block.smaller):
                run_command(words)


def commands(source: str) -> Iterator[list[str]]:
    """The commands of a shell block, split into words."""
    for line in source.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


def run_command(words: list[str]) -> None:
    """Run a command of this package; check the files and options of any other."""
    words = [words[0].removeprefix(".venv/bin/"), *words[1:]]
    for start, runner in RUNNERS.items():
        size = len(start.split())
        if " ".join(words[:size]) == start:
            return runner(words[size:])
    raise Broken(f"unknown command: {shlex.join(words)}")


def _moonshot(words: list[str]) -> None:
    try:
        main(words)
    except SystemExit as error:
        raise Broken(f"optimum-cli moonshot {shlex.join(words)}: exit status {error.code}") from error


def _torchrun(words: list[str]) -> None:
    """Run this package's command in one process; other tests start several."""
    module = words.index("-m") + 1 if "-m" in words else len(words)
    if words[module : module + 1] != ["optimum_moonshot"]:
        raise Broken(f"torchrun {shlex.join(words)}: not this package")
    _moonshot(words[module + 1 :])


def _script(words: list[str]) -> None:
    """Check that the script exists and accepts these options; other tests run it."""
    if not (ROOT / words[0]).is_file():
        raise Broken(f"python {words[0]}: no such script")
    parse = runpy.run_path(str(ROOT / words[0])).get("parse")
    try:
        if parse is not None:
            parse(words[1:])
        elif words[1:]:
            raise Broken(f"python {words[0]}: it takes no options")
    except SystemExit as error:
        raise Broken(f"python {shlex.join(words)}: exit status {error.code}") from error


def _pytest(words: list[str]) -> None:
    for word in words:
        if word.startswith("tests/") and not (ROOT / word.split("::")[0]).is_file():
            raise Broken(f"pytest {word}: no such file")


def _make(words: list[str]) -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in words:
        if not re.search(rf"^{re.escape(target)}:", text, re.M):
            raise Broken(f"make {target}: no such target")


def _pip(words: list[str]) -> None:
    """Check that only this package is installed, with extras that exist."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg", encoding="utf-8")
    constraints = [after for option, after in zip(words, words[1:], strict=False) if option == "-c"]
    if not all((ROOT / name).is_file() for name in constraints):
        raise Broken(f"pip install -c {' '.join(constraints)}: no such file")
    for word in (word for word in words if not word.startswith("-") and word not in constraints):
        name, _, extras = word.rstrip("]").partition("[")
        if name not in (".", settings["metadata"]["name"]):
            raise Broken(f"pip install {word}: not this package")
        for extra in filter(None, extras.split(",")):
            if extra not in settings["options.extras_require"]:
                raise Broken(f"pip install {word}: no such extra")


def _pre_commit(words: list[str]) -> None:
    if words != ["install"] or not (ROOT / ".pre-commit-config.yaml").is_file():
        raise Broken(f"pre-commit {shlex.join(words)}")


RUNNERS: dict[str, Callable[[list[str]], None]] = {
    "optimum-cli moonshot": _moonshot,
    "python -m optimum_moonshot": _moonshot,
    "python -m pytest": _pytest,
    "python": _script,
    "make": _make,
    "pip install": _pip,
    "torchrun": _torchrun,
    "pre-commit": _pre_commit,
}


def lay_out(folder: Path) -> None:
    """Create the models, data and files that pages name."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=2048, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    llama = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=64))
    for name in ("meta-llama/Llama-3.2-1B", "HuggingFaceTB/SmolLM2-135M"):
        llama.save_pretrained(folder / name)
        hf.AutoTokenizer.from_pretrained(DEMO).save_pretrained(folder / name)
    heads = dict(num_key_value_heads=2, head_dim=8, max_position_embeddings=64)
    mixture = hf.Qwen3MoeConfig(**sizes, **heads, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16)
    hf.Qwen3MoeForCausalLM(mixture).save_pretrained(folder / "Qwen" / "Qwen3-30B-A3B")
    hf.AutoTokenizer.from_pretrained(DEMO).save_pretrained(folder / "Qwen" / "Qwen3-30B-A3B")
    encoder = folder / "sentence-transformers" / "all-MiniLM-L6-v2"
    hf.BertModel(hf.BertConfig(**sizes, max_position_embeddings=128)).save_pretrained(encoder)
    hf.AutoTokenizer.from_pretrained(DEMO).save_pretrained(encoder)
    (encoder / "modules.json").write_text('[{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]')
    (encoder / "1_Pooling").mkdir()
    (encoder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    resnet = make("resnet-bottleneck")
    resnet.config.id2label = dict(enumerate(CLASSES))
    resnet.config.label2id = {name: number for number, name in enumerate(CLASSES)}
    resnet.save_pretrained(folder / "microsoft" / "resnet-50")
    hf.ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder / "microsoft" / "resnet-50")
    fill(folder / "train_images", each=4)
    fill(folder / "val_images", each=2)
    lay_out_captions(folder)
    text = (DEMO / "calibration.txt").read_text(encoding="utf-8")
    sentences = [json.dumps({"text": line}) for line in text.splitlines() if line.strip()]
    (folder / "sentences.jsonl").write_text("\n".join(sentences[:80]), encoding="utf-8")
    (folder / "heldout.jsonl").write_text("\n".join(sentences[80:100]), encoding="utf-8")
    (folder / "corpus.txt").write_text(text[:20_000], encoding="utf-8")
    rows = '{"question": "abc", "choices": ["de", "fg"], "answer": 1}\n'
    (folder / "questions.txt").write_text("Why is the sky blue?\nWho are you?\n")
    (folder / "letters.jsonl").write_text(rows * 4)
    (folder / "letters.yaml").write_text(TASK.format(data=folder / "letters.jsonl", metric="acc"))
    (folder / "examples").mkdir()
    shutil.copytree(DEMO, folder / "examples" / "demo_model")


def lay_out_captions(folder: Path) -> None:
    """Create a vision–language model with its processor, and images with text."""
    tokenizer = hf.AutoTokenizer.from_pretrained(DEMO)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    text = hf.LlamaConfig(**sizes, vocab_size=len(tokenizer), num_key_value_heads=1, max_position_embeddings=64)
    image = tokenizer.convert_tokens_to_ids("<image>")
    vision = hf.CLIPVisionConfig(**sizes, image_size=8, patch_size=4)
    config = hf.LlavaConfig(vision_config=vision, text_config=text, image_token_index=image)
    processor = hf.LlavaProcessor(
        hf.CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}),
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    llava = folder / "llava-hf" / "llava-1.5-7b-hf"
    hf.LlavaForConditionalGeneration(config).save_pretrained(llava)
    processor.save_pretrained(llava)
    (folder / "captions").mkdir()
    rows = []
    for i in range(8):
        Image.new("RGB", (10 + i, 9), (20 * i, 5, 80)).save(folder / "captions" / f"{i}.png")
        rows.append(json.dumps({"file_name": f"{i}.png", "text": f"The picture of number {i} and what is in it."}))
    (folder / "captions" / "metadata.jsonl").write_text("\n".join(rows), encoding="utf-8")


def load_dataset(path: str, *args, split: str | None = None, **options):
    """Replacement of `datasets.load_dataset`, with text of this repository for the data sets on the Hub."""
    column = {"allenai/c4": "text", "Salesforce/wikitext": "text", "ptb-text-only/ptb_text_only": "sentence"}.get(path)
    if column is None:
        return datasets.load_dataset(path, *args, split=split, **options)
    name, size, count = ("calibration", 1200, 200) if split == "train" else ("heldout", 400, 12)
    text = (DEMO / f"{name}.txt").read_text(encoding="utf-8")
    rows = datasets.Dataset.from_dict({column: [text[n * size : (n + 1) * size] for n in range(count)]})
    return rows.to_iterable_dataset() if options.get("streaming") else rows
