"""A smaller vocabulary of a real model: size, speed of decoding, perplexity and tokens of a text, before and after.

    python benchmarks/vocabulary.py .venv/real/SmolLM2-135M-Instruct --corpus valid.txt --test test.txt
    python benchmarks/vocabulary.py … --count 16384          # the most frequent tokens of the corpus
    python benchmarks/vocabulary.py … --show                 # table of the results so far

`make .venv/.real` installs the models, and the tests in tests/real dequantize them to folders. The tokens are those of
the corpus; the test text is another one. Perplexity is per byte, since other tokens make one per token incomparable:
exp of the loss of some pieces of the test text, each after BOS or a line end, divided by their bytes. Decoding is
greedy, one sequence after a prompt, in float32 on one thread; best of three. Results are in
results/vocabulary-MODEL.json.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
from common import RESULTS, decoding_rate, versions, write
from transformers.utils import logging

from optimum_moonshot import MoonshotPruner
from optimum_moonshot.data.text import bos_of
from optimum_moonshot.reports.tables import text_table

PIECE = 1500  # characters
PROMPT = "The history of the town begins with a bridge over the river, which was built by"


def pieces(text: str, count: int) -> list[str]:
    """Evenly spaced pieces of a text."""
    step = (len(text) - PIECE) // count
    return [text[start : start + PIECE] for start in range(0, step * count, step)]


@torch.no_grad()
def loss_per_byte(model, tokenizer, texts: list[str]) -> float:
    """The loss of texts in nats per byte."""
    first = bos_of(tokenizer) or tokenizer("\n", add_special_tokens=False)["input_ids"][:1]
    total = 0.0
    for text in texts:
        ids = torch.tensor([first + tokenizer(text, add_special_tokens=False)["input_ids"]])
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        total += float(torch.nn.functional.cross_entropy(logits.float(), ids[0, 1:], reduction="sum"))
    return total / sum(len(text.encode()) for text in texts)


def measured(pruner: MoonshotPruner, test: str, options: argparse.Namespace) -> dict:
    model, tokenizer = pruner.model.eval(), pruner.tokenizer
    sizes = {"parameters": model.num_parameters(), "bytes": sum(p.nbytes for p in model.parameters())}
    model = model.float()
    return {
        "tokens": model.get_input_embeddings().num_embeddings,
        **sizes,
        "tokens_per_second": decoding_rate(model, options.decoded, **tokenizer(PROMPT, return_tensors="pt")),
        "perplexity_per_byte": math.exp(loss_per_byte(model, tokenizer, pieces(test, options.pieces))),
        "tokens_per_character": len(tokenizer(test, add_special_tokens=False)["input_ids"]) / len(test),
    }


def run(options: argparse.Namespace) -> dict:
    """The measurements of a model with all tokens, and with fewer."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    test = options.test.read_text(encoding="utf-8")
    corpus = [path.read_text(encoding="utf-8") for path in options.corpus]
    before = measured(MoonshotPruner.from_pretrained(options.model), test, options)
    pruner = MoonshotPruner.from_pretrained(options.model)
    started = time.process_time()
    chosen = {"vocabulary": corpus} if options.count is None else {"calibration": corpus, "vocabulary": options.count}
    report = pruner.shrink(**chosen, progress=False)
    seconds = time.process_time() - started
    return {
        "corpus": {"files": [path.name for path in options.corpus], "characters": sum(map(len, corpus))},
        "test": {"file": options.test.name, "characters": len(test), "pieces": options.pieces},
        "count": options.count,
        "estimate": list(report.vocabulary.tokens_per_character),
        "seconds": seconds,
        "before": before,
        "after": measured(pruner, test, options),
    }


def table(runs: list[dict]) -> str:
    headers = ["corpus", "tokens", "parameters", "MB", "tokens/s", "perplexity per byte", "tokens per character", "s"]
    rows = []
    for result in runs:
        for state in ("before", "after"):
            row = result[state]
            name = f"{result['corpus']['characters'] / 1e6:.1f}M characters" + (
                "" if result["count"] is None else ", N"
            )
            cells = [f"{row['tokens']:,}", f"{row['parameters'] / 1e6:.1f}M", f"{row['bytes'] / 1e6:.0f}"]
            cells += [f"{row['tokens_per_second']:.1f}", f"{row['perplexity_per_byte']:.4f}"]
            cells += [f"{row['tokens_per_character']:.4f}", f"{result['seconds']:.1f}" if state == "after" else ""]
            rows.append([name if state == "after" else "all tokens", *cells])
    return text_table(headers, rows, 160, left=headers[:1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--corpus", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--test", type=Path, metavar="FILE")
    parser.add_argument("--count", type=int, metavar="N", help="tokens; default: all that the corpus uses")
    parser.add_argument("--pieces", type=int, default=24, help=f"of {PIECE} characters, for the perplexity")
    parser.add_argument("--decoded", type=int, default=48, help="tokens")
    parser.add_argument("--show", action="store_true", help="print the results so far")
    options = parser.parse_args()
    name = f"vocabulary-{Path(options.model).name}"
    path = RESULTS / f"{name}.json"
    runs = json.loads(path.read_text())["results"]["runs"] if path.exists() else []
    if not options.show:
        if not options.corpus or not options.test:
            parser.error("give --corpus and --test")
        runs.append(run(options))
        write(name, {"versions": versions("transformers", "tokenizers"), "runs": runs})
    print(table(runs))


if __name__ == "__main__":
    main()
