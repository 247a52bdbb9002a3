"""Models with smaller vocabularies: equal logits, all files with new ids, further targets, and refusals."""

import json
import subprocess
import sys

import pytest
import torch
import transformers as hf
from command_line import DEMO, failure
from llama_runs import assert_same, weights
from models import GROUPED, make, spread
from trained_tokenizers import LINES, loaded

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner, PruneReport, verify
from optimum_moonshot.__main__ import main
from optimum_moonshot.shrink.report import ShrinkReport

TEXTS = LINES[::40]
CALIBRATION = str(DEMO / "calibration.txt")
SIZES = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128,
)  # fmt: skip
VISION = {name: SIZES[name] for name in list(SIZES)[:4]}
FEW = dict(num_samples=2, sequence_length=32, rotation_steps=2)
ENCODER_DECODER = dict(
    d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=128,
)  # fmt: skip
# Architecture → tokenizer, class, configuration.
MODELS = {
    "llama": ("llama3", hf.LlamaForCausalLM, lambda **ids: hf.LlamaConfig(**SIZES, **ids)),
    "tied": ("smollm2", hf.LlamaForCausalLM, lambda **ids: hf.LlamaConfig(**SIZES, tie_word_embeddings=True, **ids)),
    "gemma3": ("gemma", hf.Gemma3ForCausalLM, lambda **ids: hf.Gemma3TextConfig(**SIZES, head_dim=8, **ids)),
    "gpt2": ("gpt2", hf.GPT2LMHeadModel, lambda **ids: hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, **ids)),
    "phi": ("gpt2", hf.PhiForCausalLM, lambda **ids: hf.PhiConfig(**SIZES, **ids)),  # a head with a bias
    "bert": ("bert", hf.BertForMaskedLM, lambda **ids: hf.BertConfig(**SIZES, **ids)),
    "headless": ("bert", hf.BertModel, lambda **ids: hf.BertConfig(**SIZES, **ids)),
    "t5": (
        "t5",
        hf.T5ForConditionalGeneration,
        lambda **ids: hf.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, **ids),
    ),
    "bart": ("gpt2", hf.BartForConditionalGeneration, lambda **ids: hf.BartConfig(**ENCODER_DECODER, **ids)),
}


def special_ids(tokenizer, decodes):
    """The ids of special tokens for a configuration, where every architecture needs some."""
    eos = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos
    ids = {"eos_token_id": eos, "pad_token_id": pad, "bos_token_id": tokenizer.bos_token_id}
    return ids | ({"decoder_start_token_id": pad, "forced_eos_token_id": eos} if decodes else {})


def build(name, folder, more_rows=0):
    """A tiny model of an architecture, and its tokenizer; `more_rows` have no token, as in many checkpoints."""
    family, cls, config = MODELS[name]
    tokenizer = loaded(family, folder)
    torch.manual_seed(0)
    ids = special_ids(tokenizer, cls in (hf.T5ForConditionalGeneration, hf.BartForConditionalGeneration))
    model = spread(cls(config(vocab_size=len(tokenizer) + more_rows, **ids))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += torch.randn_like(parameter)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_()
    return model, tokenizer


def outputs(model, ids):
    inputs = {"input_ids": torch.tensor([ids])}
    inputs |= {"decoder_input_ids": inputs["input_ids"]} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        result = model.eval()(**inputs)
    return result.last_hidden_state if hasattr(result, "last_hidden_state") else result.logits


def numbers_of(before, after):
    """Old → new ids of the tokens of two tokenizers."""
    return {before.convert_tokens_to_ids(token): new for token, new in after.get_vocab().items()}


@pytest.mark.parametrize("more_rows", [0, 24])
@pytest.mark.parametrize("name", MODELS)
def test_remaining_tokens_have_the_same_logits_and_plain_transformers_loads_the_folder(tmp_path, name, more_rows):
    model, tokenizer = build(name, tmp_path / "tokenizer", more_rows)
    before, vocabulary = weights(model), tokenizer.get_vocab()
    pruner = MoonshotPruner(model, tokenizer=tokenizer)
    report = pruner.shrink(vocabulary=TEXTS, progress=False)
    assert_same(model, before)
    assert pruner.model is not model and tokenizer.get_vocab() == vocabulary
    small, count = pruner.model, len(pruner.tokenizer)
    assert report.vocabulary.tokens == (len(tokenizer) + more_rows, count) and count < 0.9 * len(tokenizer)
    assert report.parameters == (model.num_parameters(), small.num_parameters())
    pruner.save_pretrained(tmp_path / "small")
    reloaded = type(model).from_pretrained(tmp_path / "small")
    reread = hf.AutoTokenizer.from_pretrained(tmp_path / "small")
    numbers = numbers_of(tokenizer, reread)
    rows = sorted(numbers, key=numbers.get)
    for text in TEXTS[:4]:
        ids = tokenizer(text)["input_ids"][:60]
        new = reread(text)["input_ids"][:60]
        assert new == [numbers[token] for token in ids]
        expected, result = outputs(model, ids), outputs(reloaded, new)
        expected = expected[..., rows] if name != "headless" else expected
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
    for field in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"):
        for name in ("config", "generation_config"):
            old, new = (getattr(getattr(one, name, None), field, None) for one in (model, reloaded))
            assert new == (None if old is None else numbers[old])
    assert reloaded.config.vocab_size == count
    assert ShrinkReport.load(tmp_path / "small") == report
    card = (tmp_path / "small/README.md").read_text()
    assert f"| tokens | {len(tokenizer) + more_rows:,} | {count:,} |" in card


def test_token_ids_in_configurations_follow_in_lists_and_pairs_too(tmp_path):
    model, tokenizer = build("llama", tmp_path)
    first, *others = (tokenizer.convert_tokens_to_ids(token) for token in ("Ġthe", "Ġand", "ĠPrejudice", "s"))
    settings = dict(
        eos_token_id=[tokenizer.eos_token_id, first], suppress_tokens=others, bad_words_ids=[others, [first]],
        begin_suppress_tokens=[first], forced_decoder_ids=[[1, first]], sequence_bias={tuple(others): -1.0},
        max_new_tokens=7, num_assistant_tokens=5,
    )  # fmt: skip
    for field, value in settings.items():
        setattr(model.generation_config, field, value)
    model.config.eos_token_id = [tokenizer.eos_token_id, first]
    model.config.pad_token_id = -1
    pruner = MoonshotPruner(model, tokenizer=tokenizer)
    pruner.shrink(vocabulary=["Nothing of all this\n", "but o t h e r words\n"], progress=False)
    numbers, new = numbers_of(tokenizer, pruner.tokenizer), pruner.model.generation_config
    assert numbers.keys() >= {first, *others}
    assert new.eos_token_id == pruner.model.config.eos_token_id == [numbers[tokenizer.eos_token_id], numbers[first]]
    assert new.suppress_tokens == [numbers[token] for token in others]
    assert new.bad_words_ids == [[numbers[token] for token in others], [numbers[first]]]
    assert new.begin_suppress_tokens == [numbers[first]] and new.forced_decoder_ids == [[1, numbers[first]]]
    assert new.sequence_bias == {tuple(numbers[token] for token in others): -1.0}
    assert (new.max_new_tokens, new.num_assistant_tokens, pruner.model.config.pad_token_id) == (7, 5, -1)
    assert model.generation_config.suppress_tokens == others


def test_the_words_of_a_chat_template_stay(tmp_path):
    model, tokenizer = build("tied", tmp_path)
    tokenizer.chat_template = (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Bennet countenance\\n' }}{% endif %}{{ ' marriage' if tools }}"
    )
    pruner = MoonshotPruner(model, tokenizer=tokenizer)
    pruner.shrink(vocabulary=["a b c\n", "d e f\n"], progress=False)
    numbers = numbers_of(tokenizer, pruner.tokenizer)
    conversation = [{"role": "user", "content": "a"}]
    text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    for words in (text, " marriage"):
        assert pruner.tokenizer(words)["input_ids"] == [numbers[token] for token in tokenizer(words)["input_ids"]]
    assert pruner.tokenizer.chat_template == tokenizer.chat_template


GENERATED = """
import json, sys
import transformers as hf
folder, prompt = sys.argv[1:]
model, tokenizer = hf.AutoModelForCausalLM.from_pretrained(folder), hf.AutoTokenizer.from_pretrained(folder)
ids = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=40, do_sample=False)[0].tolist()
assert "optimum_moonshot" not in sys.modules
print(json.dumps([ids, tokenizer.decode(ids)]))
"""


def in_a_fresh_process(folder, prompt):
    command = [sys.executable, "-c", GENERATED, str(folder), prompt]
    run = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.slow
def test_generation_is_equal_token_for_token_in_a_fresh_process(tmp_path):
    prompt = "The old man looked at the sea, and"
    ids, text = in_a_fresh_process(DEMO, prompt)
    pruner = MoonshotPruner.from_pretrained(DEMO)
    tokenizer = pruner.tokenizer
    report = pruner.shrink(vocabulary=[*TEXTS[:20], prompt, text], progress=False)
    assert report.parameters[1] < report.parameters[0]
    pruner.save_pretrained(tmp_path / "small")
    numbers = numbers_of(tokenizer, pruner.tokenizer)
    assert in_a_fresh_process(tmp_path / "small", prompt) == [[numbers[token] for token in ids], text]


def loss_per_byte(model, tokenizer, text):
    """The loss of a text in nats per byte, which vocabularies of any size have in common."""
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :400]
    length = len(tokenizer.decode(ids[0]).encode())
    with torch.no_grad():
        return float(model(input_ids=ids, labels=ids).loss) * (ids.shape[1] - 1) / length


def test_the_loss_per_byte_of_known_text_does_not_grow(tmp_path):
    text = (DEMO / "heldout.txt").read_text(encoding="utf-8")[:1500]
    pruner = MoonshotPruner.from_pretrained(DEMO, dtype=torch.float32)
    dense = loss_per_byte(pruner.model.eval(), pruner.tokenizer, text)
    pruner.shrink(vocabulary=[text, *TEXTS], progress=False)
    fewer = loss_per_byte(pruner.model.eval(), pruner.tokenizer, text)
    assert 0.9 * dense < fewer <= dense + 1e-6  # fewer tokens share the probability
    with pytest.raises(MoonshotError, match="vocabulary: the vocabulary is smaller already; load the model again"):
        pruner.shrink(vocabulary=TEXTS, progress=False)


def test_a_number_reports_the_cost_of_other_text(tmp_path):
    pruner = MoonshotPruner.from_pretrained(DEMO)
    report = pruner.shrink(CALIBRATION, vocabulary=1024, progress=False)
    before, after = report.vocabulary.tokens_per_character
    assert report.vocabulary.tokens == (2048, 1024) and pruner.model.config.vocab_size == 1024
    assert 1.02 < after / before < 1.3
    heldout = (DEMO / "heldout.txt").read_text(encoding="utf-8")
    original = hf.AutoTokenizer.from_pretrained(DEMO)
    actual = len(pruner.tokenizer(heldout)["input_ids"]) / len(original(heldout)["input_ids"])
    assert after / before == pytest.approx(actual, abs=0.03)
    assert "2,048 → 1,024 tokens of calibration.txt" in report.line()
    assert report.vocabulary.source == "calibration.txt"  # no path of this machine


def test_a_target_counts_the_smaller_vocabulary_first(tmp_path):
    config = MoonshotConfig(solver="osscar", pattern="structured", sparsity=0, num_samples=8, sequence_length=32)
    model, tokenizer = build("tied", tmp_path / "tokenizer")
    total = model.num_parameters()
    pruner = MoonshotPruner(model, config, tokenizer)
    report = pruner.shrink(CALIBRATION, vocabulary=600, parameters=0.9, progress=False)
    assert report.chosen.allowed == ("vocabulary",) and report.budget == int(0.9 * total) >= report.parameters[1]
    pruner = MoonshotPruner(model, config, tokenizer)
    report = pruner.shrink(CALIBRATION, vocabulary=600, parameters=0.5, progress=False)
    assert report.vocabulary.tokens == (len(tokenizer), 600) and report.parameters[0] == report.dense == total
    assert pruner.model.num_parameters() == report.parameters[1] <= 0.5 * total
    assert pruner.model.config.vocab_size == len(pruner.tokenizer) == 600
    pruner.save_pretrained(tmp_path / "small")
    assert PruneReport.load(tmp_path / "small").shrink == report
    record = json.loads((tmp_path / "small/config.json").read_text())["moonshot"]
    assert record["shrink"]["vocabulary"] == [len(tokenizer), 600] and record["compaction"]["parameters"][0] == total
    assert "smaller vocabulary" in (tmp_path / "small/README.md").read_text()
    reloaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert reloaded.num_parameters() == report.parameters[1]
    batches = [{"input_ids": torch.randint(600, (4, 16))}] * 2
    with pytest.raises(MoonshotError, match="calibration=.*: token ids are those of all tokens; give text"):
        MoonshotPruner(model, config, tokenizer).shrink(batches, vocabulary=600, parameters=0.5, progress=False)


INTEGERS = dict(solver="sparsegpt", sparsity=0.5, bits=8, embedding_bits=8, quant_group=64, lam=1)


@pytest.mark.parametrize("method", [dict(solver="magnitude", pattern="2:4"), INTEGERS])
@pytest.mark.parametrize("order", ["prune first", "vocabulary first"])
def test_a_pruned_model_keeps_its_zeros_and_integers(tmp_path, order, method):
    model, tokenizer = build("tied", tmp_path / "tokenizer")
    config = MoonshotConfig(**method, num_samples=4, sequence_length=32)
    pruner = MoonshotPruner(model.bfloat16(), config, tokenizer)
    steps = [lambda: pruner.prune(CALIBRATION, progress=False), lambda: pruner.shrink(vocabulary=TEXTS, progress=False)]
    for step in steps if order == "prune first" else steps[::-1]:
        step()
    report, small = pruner.report, pruner.model
    assert report.shrink.vocabulary.tokens[1] == small.config.vocab_size
    assert report.parameters == small.num_parameters()
    for format in ("dense", "packed"):
        pruner.save_pretrained(tmp_path / format, format=format)
        assert verify(tmp_path / format)
        assert "smaller vocabulary" in (tmp_path / format / "README.md").read_text()
        assert PruneReport.load(tmp_path / format).shrink == report.shrink
        reloaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path / format)
        ids = hf.AutoTokenizer.from_pretrained(tmp_path / format)(TEXTS[0])["input_ids"]
        assert torch.equal(outputs(reloaded, ids), outputs(small, ids))


def test_a_model_that_is_packed_in_memory_is_unpacked_first(tmp_path):
    model, tokenizer = build("tied", tmp_path)
    pruner = MoonshotPruner(model, MoonshotConfig(solver="magnitude", pattern="2:4"), tokenizer)
    pruner.prune(progress=False)
    pruner.to_runtime("packed")
    with pytest.raises(MoonshotError, match=r'packed in memory: call pruner.to_runtime\("dense"\) first'):
        pruner.shrink(vocabulary=TEXTS, progress=False)
    pruner.to_runtime("dense")
    pruner.shrink(vocabulary=TEXTS, progress=False)
    assert pruner.to_runtime("packed")


def test_a_pruned_head_stays(tmp_path):
    model, tokenizer = build("llama", tmp_path)
    config = MoonshotConfig(solver="magnitude", pattern="2:4", targets=["lm_head", "mlp"])
    pruner = MoonshotPruner(model, config, tokenizer)
    pruner.prune(progress=False)
    with pytest.raises(MoonshotError, match="vocabulary: lm_head.weight is pruned"):
        pruner.shrink(vocabulary=TEXTS, progress=False)


def test_vocabulary_files_of_the_source_are_not_copied(tmp_path):
    model, tokenizer = build("bert", tmp_path / "source")
    model.save_pretrained(tmp_path / "source")
    for name in ("vocab.txt", "tokenizer.model", "special_tokens_map.json", "notes.txt"):
        (tmp_path / "source" / name).write_text("{}")
    pruner = MoonshotPruner.from_pretrained(tmp_path / "source")
    pruner.shrink(vocabulary=TEXTS, progress=False)
    pruner.save_pretrained(tmp_path / "small")
    names = {path.name for path in (tmp_path / "small").iterdir()}
    assert "notes.txt" in names and not names & {"vocab.txt", "tokenizer.model", "special_tokens_map.json"}


def gemma3n():
    config = hf.Gemma3nTextConfig(
        **{**GROUPED, "num_hidden_layers": 4}, head_dim=8, vocab_size_per_layer_input=96, hidden_size_per_layer_input=4,
        num_kv_shared_layers=2, layer_types=["sliding_attention", "full_attention"] * 2, laurel_rank=4,
        altup_num_inputs=2, activation_sparsity_pattern=None,
    )  # fmt: skip
    return hf.Gemma3nForCausalLM(config)


@pytest.mark.parametrize(
    ("build_model", "message"),
    [
        (lambda: make("vit"), "vocabulary: ViTForImageClassification does not embed tokens of text"),
        (gemma3n, "vocabulary: every block of Gemma3nForCausalLM has embeddings of tokens"),
        (lambda: torch.nn.Linear(2, 2), "model is a Linear; pass a PreTrainedModel"),
        (
            lambda: hf.LlavaForConditionalGeneration(
                hf.LlavaConfig(
                    vision_config=hf.CLIPVisionConfig(**VISION),
                    text_config=hf.LlamaConfig(**GROUPED),
                    image_token_index=3,
                )
            ),
            "vocabulary: LlavaForConditionalGeneration also reads images or sound",
        ),
    ],
)
def test_models_whose_tokens_cannot_be_removed(build_model, message, tmp_path):
    tokenizer = loaded("smollm2", tmp_path)
    with pytest.raises(MoonshotError, match=message):
        MoonshotPruner(build_model(), tokenizer=tokenizer).shrink(vocabulary=TEXTS, progress=False)


def test_requests_that_are_refused_before_anything_changes(tmp_path):
    model, tokenizer = build("llama", tmp_path)
    before = weights(model)
    pruner = MoonshotPruner(model, tokenizer=tokenizer)
    for request, message in (
        (dict(vocabulary=0), "vocabulary=0: give a whole number of at least 1"),
        (dict(vocabulary=True), "vocabulary=True: give a whole number"),
        (dict(vocabulary=500), "calibration=None: the most frequent tokens are those of a text; give some"),
        (dict(vocabulary=10, calibration=CALIBRATION), "vocabulary=10: characters, bytes and special tokens"),
        (dict(vocabulary="no/such/file.txt"), "neither the name of a data set nor a file"),
        (dict(vocabulary=["one line"]), "has 1 lines of text; give more text"),
        (dict(vocabulary=[{"input_ids": torch.ones(1, 4).long()}]), "contains model inputs; give text"),
        (dict(), "give exactly one of"),
    ):
        with pytest.raises(MoonshotError, match=message):
            pruner.shrink(**request, progress=False)
    assert pruner.model is model and pruner.tokenizer is tokenizer
    assert_same(model, before)
    with pytest.raises(MoonshotError, match="tokenizer=None: a smaller vocabulary needs one"):
        MoonshotPruner(model).shrink(vocabulary=TEXTS, progress=False)
    model.generation_config.suppress_tokens = [len(tokenizer)]
    model.resize_token_embeddings(len(tokenizer) + 8)
    with pytest.raises(MoonshotError, match=f"suppress_tokens={len(tokenizer)}: the tokenizer has no such token"):
        pruner.shrink(vocabulary=TEXTS, progress=False)


def test_a_second_table_of_tokens_is_noticed(tmp_path):
    """A model that reads token ids in another place than its embeddings gives other results, and is refused."""

    class Doubled(hf.LlamaForCausalLM):
        def forward(self, input_ids=None, **options):
            output = super().forward(input_ids=input_ids, **options)
            output.logits = output.logits + (input_ids % 7).unsqueeze(-1)
            return output

    model, tokenizer = build("llama", tmp_path)
    model.__class__ = Doubled
    with pytest.raises(MoonshotError, match="Doubled with fewer tokens differs in its results: nothing changed"):
        MoonshotPruner(model, tokenizer=tokenizer).shrink(vocabulary=TEXTS, progress=False)


@pytest.mark.slow
def test_a_rotated_model_notes_its_vocabulary(tmp_path):
    pruner = MoonshotPruner.from_pretrained(DEMO, MoonshotConfig(pattern="2:4", rotation="heads", **FEW))
    pruner.rotate(CALIBRATION, progress=False)
    pruner.shrink(CALIBRATION, vocabulary=1500, progress=False)
    pruner.save_pretrained(tmp_path)
    assert "vocabulary 2,048 → 1,500 tokens" in (tmp_path / "README.md").read_text()
    assert "vocabulary 2,048" in (tmp_path / "moonshot_rotation.json").read_text()


def test_the_command(tmp_path, capsys):
    (tmp_path / "corpus.txt").write_text("".join(TEXTS))
    (tmp_path / "other.txt").write_text((DEMO / "heldout.txt").read_text(encoding="utf-8")[:6000])
    main(["shrink", str(DEMO), "--vocabulary", str(tmp_path / "corpus.txt"), "--output", str(tmp_path / "text")])
    assert "tokens of corpus.txt" in capsys.readouterr().out
    counted = ["--vocabulary", "1024", "--calibration", CALIBRATION, "--eval", str(tmp_path / "other.txt")]
    main(["shrink", str(DEMO), *counted, "--output", str(tmp_path / "count")])
    assert hf.AutoConfig.from_pretrained(tmp_path / "count").vocab_size == 1024
    assert "note        per token, which other vocabularies make incomparable" in capsys.readouterr().out
    status, lines = failure(capsys, "shrink", DEMO, "--vocabulary", "missing.txt", "--output", tmp_path / "missing")
    assert status == 2 and "--vocabulary missing.txt: neither one of" in lines[-1]
