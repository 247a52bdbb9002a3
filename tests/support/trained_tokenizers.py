"""Tokenizers of every kind, trained on the demo's text and loaded as the classes of transformers load them.

Texts for them are random: words, pieces of words, characters of any script, white space and special tokens.
"""

import json
import random
from functools import cache

import transformers as hf
from command_line import DEMO
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = (DEMO / "calibration.txt").read_text(encoding="utf-8")[:120_000]
FOREIGN = "Über die Brücke, naïve café; Ελληνικά και русский язык, 東京 日本語 😀 → ∑ ½ ∈ \t x\u0301 ﬁ\n"
LINES = [*CORPUS.splitlines(keepends=True), *([FOREIGN] * 20)]
SIZE = 1200
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _byte_level(specials, **options):
    tokenizer = Tokenizer(models.BPE(**options))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        LINES, trainers.BpeTrainer(vocab_size=SIZE, special_tokens=specials, initial_alphabet=alphabet)
    )
    return tokenizer


def smollm2():
    tokenizer = _byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    special = dict(bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>", unk_token="<|endoftext|>")
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def gpt2():
    model = json.loads(_byte_level(["<|endoftext|>"]).to_str())["model"]
    return hf.GPT2Tokenizer(vocab=model["vocab"], merges=[tuple(merge) for merge in model["merges"]])


def qwen2():
    """Added tokens behind the vocabulary, one of them in the middle of words."""
    model = json.loads(_byte_level([]).to_str())["model"]
    tokenizer = hf.Qwen2Tokenizer(vocab=model["vocab"], merges=[tuple(merge) for merge in model["merges"]])
    tokenizer.add_tokens([AddedToken("ther", normalized=False), AddedToken("<tool_call>", special=True)])
    return tokenizer


def llama3():
    """Whole words of the vocabulary ignore the merges, and some words have no merges at all."""
    tokenizer = _byte_level(["<|begin_of_text|>", "<|eot_id|>"])
    spec = json.loads(tokenizer.to_str())
    spec["model"]["ignore_merges"] = True
    whole = ["Ġmarriage", "Ġcountenance", "ĠPrejudice", "Bennet", "Ġtheeth"]
    for word in whole:
        spec["model"]["vocab"].setdefault(word, len(spec["model"]["vocab"]))
    bos = ("<|begin_of_text|>", spec["model"]["vocab"]["<|begin_of_text|>"])
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), processors.TemplateProcessing(f"{bos[0]} $A", special_tokens=[bos])]
    )
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos[0], eos_token="<|eot_id|>")


def _sentencepiece_bpe(specials):
    """The vocabulary and merges of a BPE with ▁ for spaces and tokens for bytes; some characters have no token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    text = [line for line in LINES if line.isascii()]
    tokenizer.train_from_iterator(text, trainers.BpeTrainer(vocab_size=SIZE, special_tokens=[*specials, *BYTES]))
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def gemma():
    vocabulary, merges = _sentencepiece_bpe(["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>"])
    tokenizer = hf.GemmaTokenizer(vocab=vocabulary, merges=merges)
    tokenizer.add_tokens([AddedToken("<start_of_turn>", special=True)])
    return tokenizer


def llama():
    vocabulary, merges = _sentencepiece_bpe(["<unk>", "<s>", "</s>"])
    return hf.LlamaTokenizer(vocab=vocabulary, merges=merges)


def clip():
    """Merges of words that end with a mark."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    trainer = trainers.BpeTrainer(vocab_size=SIZE, special_tokens=["<unk>"], end_of_word_suffix="</w>")
    tokenizer.train_from_iterator(LINES, trainer)
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def prefixed():
    """Merges of words whose later characters have a mark."""
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]", continuing_subword_prefix="##", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece("##")
    trainer = trainers.BpeTrainer(vocab_size=SIZE, special_tokens=["[UNK]"], continuing_subword_prefix="##")
    tokenizer.train_from_iterator(LINES, trainer)
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


def _unigram(specials, unk, **options):
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=SIZE, special_tokens=specials, unk_token=unk, **options)
    tokenizer.train_from_iterator([line for line in LINES if line.isascii()], trainer)
    return json.loads(tokenizer.to_str())["model"]


def t5():
    model = _unigram(["<pad>", "</s>", "<unk>"], "<unk>")
    return hf.T5Tokenizer(vocab=[tuple(entry) for entry in model["vocab"]], extra_ids=4)


def unigram_bytes():
    """Unknown characters are bytes."""
    model = _unigram(["<unk>", "<s>", "</s>"], "<unk>")
    vocabulary = [*model["vocab"][:3], *([token, 0.0] for token in BYTES), *model["vocab"][3:]]
    tokenizer = Tokenizer(models.Unigram([tuple(entry) for entry in vocabulary], 0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Metaspace()])
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def bert():
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    text = [line for line in LINES if line.isascii()]
    tokenizer.train_from_iterator(text, trainers.WordPieceTrainer(vocab_size=SIZE, special_tokens=specials))
    return hf.BertTokenizer(vocab=tokenizer.get_vocab())


FAMILIES = (smollm2, gpt2, qwen2, llama3, gemma, llama, clip, prefixed, t5, unigram_bytes, bert)
BY_NAME = {family.__name__: cache(family) for family in FAMILIES}


def loaded(name, folder):
    """The tokenizer of a family, saved and loaded as that of a model."""
    BY_NAME[name]().save_pretrained(folder)
    return hf.AutoTokenizer.from_pretrained(folder)


def random_texts(tokenizer, count, seed=0):
    """Texts of some words, pieces of the corpus, tokens, characters of any script, white space and special tokens."""
    generator = random.Random(seed)
    words, pieces = CORPUS.split(), tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    sources = (
        lambda: " " + generator.choice(words),
        lambda: CORPUS[(start := generator.randrange(len(CORPUS))) : start + generator.randrange(40)],
        lambda: tokenizer.convert_tokens_to_string([generator.choice(pieces)]),
        lambda: generator.choice(FOREIGN),
        lambda: chr(generator.choice([generator.randrange(32, 0x2000), generator.randrange(0x3000, 0xD800)])),
        lambda: generator.choice([" ", "  ", "\n", "\n\n", "\t", "   \n", "'s", "-", "1", "..."]),
        lambda: generator.choice(tokenizer.all_special_tokens),
    )
    weights = (8, 4, 2, 1, 0.3, 2, 0.3)
    for _ in range(count):
        chosen = generator.choices(sources, weights, k=generator.randrange(1, 8))
        yield "".join(source() for source in chosen)
