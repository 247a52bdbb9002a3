"""A smaller vocabulary: the tokens of a text, or the most frequent ones, and what other text costs.

Only the rows of the embeddings and the head are removed, with the token ids in the configurations, so the logits of the
remaining tokens stay the same. The tensors with a row for each token are those whose shape follows the size of the
vocabulary in the configuration.
"""

import dataclasses
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ..checkpoint.packed_files import pruned_layers
from ..data.text import NO_TOKENIZER
from ..errors import MoonshotError, check_whole, require
from ..model.calls import check_usable, close, evaluation_mode, model_device, model_result, to_device
from ..model.compaction import build_smaller, copied
from ..model.layers import require_resident
from ..model.model_info import config_fields, edited, embedded_tokens, last_line, on_meta_device
from ..model.structured_groups import probe_inputs
from ..pipeline.selection import Subject
from ..reports.record import PruningRecord
from .costs import dense_cost
from .report import VocabularyReport
from .tokens import Corpus, Tokens, template_ids, vocabulary_files

# Fields of configurations with token ids, also in lists; others with "tokens" in their names are numbers of tokens.
TOKEN_IDS = re.compile(r"(token_ids?|token_index|suppress_tokens|words_ids|forced_decoder_ids|sequence_bias)$")
OTHER_INPUTS = re.compile(r"(^|\.)(vision|audio|image|video|speech)[a-z_]*(_config\.|token)")
PER_LAYER = re.compile(r"(^|\.)vocab_size_per_layer_input$")


def check_tokens_removable(model: Any) -> None:
    """Check that rows of a model's embeddings can be removed, by its configuration.

    Raises:
        MoonshotError: another type of model, offloaded weights, other inputs than text, pruned embeddings, or
            embeddings of tokens in every block.
    """
    name = type(model).__name__
    require(isinstance(model, PreTrainedModel), f"model is a {name}", hint="pass a PreTrainedModel")
    text = model.main_input_name == "input_ids" and embedded_tokens(model) is not None
    require(text, f"{name} does not embed tokens of text", field="vocabulary")
    fields = dict(config_fields(model.config))
    other = next((field for field, value in fields.items() if OTHER_INPUTS.search(field) and value is not None), None)
    message = f"{name} also reads images or sound, for which its processor has tokens of its own ({other})"
    require(other is None, message, field="vocabulary", hint="load its language model alone")
    per_layer = any(PER_LAYER.search(field) for field in fields)
    require(not per_layer, f"every block of {name} has embeddings of tokens", field="vocabulary")
    require_resident(model)
    if PruningRecord.of(model) is not None:
        embeddings = model.get_input_embeddings(), model.get_output_embeddings()
        tables = {id(table.weight) for table in embeddings if table is not None}
        pruned = next((name for name in pruned_layers(model) if id(model.get_parameter(name)) in tables), None)
        require(pruned is None, f"{pruned} is pruned, and the report has its shape", field="vocabulary")


def configured_ids(model: PreTrainedModel, tokens: Sequence[int]) -> set[int]:
    """The token ids in a model's configurations.

    Raises:
        MoonshotError: an id has an embedding, but is not among the tokens.
    """
    ids, present, embedded = set[int](), set(tokens), embedded_tokens(model) or 0

    def collect(field: str, value: int) -> int:
        message = "the tokenizer has no such token"
        require(value in present or not 0 <= value < embedded, message, field=field, value=value, hint="correct it")
        ids.update({value} & present)
        return value

    for field, value in _settings(model):
        _changed(field, value, collect)
    return ids


def _settings(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """The fields with token ids of a model's configurations."""
    fields = [*config_fields(model.config), *vars(getattr(model, "generation_config", None) or object).items()]
    return ((name, value) for name, value in fields if TOKEN_IDS.search(name))


def _changed(field: str, value: Any, change: Callable[[str, int], int]) -> Any:
    """The value of a field with its token ids changed."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return change(field, value)
    if field.endswith("forced_decoder_ids") and value is not None:  # pairs of a position and a token
        return [[position, _changed("", token, change)] for position, token in value]
    if isinstance(value, Mapping):  # sequences of tokens → bias
        return {_changed(field, key, change): bias for key, bias in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_changed(field, entry, change) for entry in value)
    return value


@torch.no_grad()
def keep_tokens(model: PreTrainedModel, tokens: Sequence[int], numbers: Mapping[int, int]) -> PreTrainedModel:
    """A model of the same class with some of the tokens.

    Args:
        model: unchanged.
        tokens: ids of the tokens to keep; the result numbers them in this order.
        numbers: old → new ids, for configurations; also of tokens without an embedding.

    Returns:
        A new model with the same dtype and device, which `save_pretrained` and `from_pretrained` support.

    Raises:
        MoonshotError: the architecture has other tensors with tokens, or gives the remaining ones other logits.
    """
    change, rows = (embedded_tokens(model) or 0, len(tokens)), torch.tensor(tokens)

    def new(_: str, token: int) -> int:
        return numbers.get(token, token)  # an id without a new number, such as -1, stays

    config = _configuration(model, *change, new)
    smaller = on_meta_device(type(model), config).state_dict()
    selected: dict[tuple[int, torch.Size], Tensor] = {}  # tied tensors once
    for name, tensor in model.state_dict().items():
        key, size = (tensor.data_ptr(), tensor.shape), getattr(smaller.get(name), "shape", torch.Size())
        if tensor.shape != size and key not in selected:
            axes = [axis for axis, pair in enumerate(zip(tensor.shape, size, strict=False)) if pair == change]
            message = f"{name} {list(tensor.shape)} would be {list(size)} with {rows.numel()} tokens"
            require(len(axes) == 1, message, field="vocabulary")
            selected[key] = tensor.index_select(axes[0], rows.to(tensor.device))
            require(selected[key].shape == size, message, field="vocabulary")
    keys = {name: (tensor.data_ptr(), tensor.shape) for name, tensor in model.state_dict().items()}
    state = copied({name: tensor for name, tensor in model.state_dict().items() if keys[name] not in selected})
    state |= {name: selected[key] for name, key in keys.items() if key in selected}
    small = build_smaller(model, config, state)
    for field, value in vars(getattr(small, "generation_config", None) or object).copy().items():
        if TOKEN_IDS.search(field):
            setattr(small.generation_config, field, _changed(field, value, new))
    _verify(model, small, rows)
    return small


def _configuration(model: PreTrainedModel, before: int, after: int, new: Callable[[str, int], int]) -> PreTrainedConfig:
    """The configuration with another size of the vocabulary, and new token ids."""
    fields = dict(config_fields(model.config))
    names = [name for name, value in fields.items() if name.rpartition(".")[2] == "vocab_size" and value == before]
    message = f"{type(model.config).__name__} has no vocab_size of {before}, the number of embeddings"
    require(bool(names), message, field="vocabulary")
    edit = {name: _changed(name, value, new) for name, value in fields.items() if TOKEN_IDS.search(name)}
    try:
        return edited(model.config, {**edit, **dict.fromkeys(names, after)})
    except Exception as error:  # the configuration's class may raise anything
        raise MoonshotError(f"{type(model.config).__name__} cannot have {after} tokens: {last_line(error)}") from error


def _verify(model: PreTrainedModel, small: PreTrainedModel, rows: Tensor) -> None:
    """Compare the logits of the remaining tokens, or the hidden states of a model without a head, on random tokens.

    Raises:
        MoonshotError: the results differ.
    """
    inputs, device = {name: ids % len(rows) for name, ids in probe_inputs(model).items()}, model_device(model)
    before = {name: rows[ids] for name, ids in inputs.items()}
    with evaluation_mode(model), evaluation_mode(small):
        expected = model_result(model, to_device(before, device))
        result = model_result(small, to_device(inputs, device))
    if expected.shape != result.shape:
        expected = expected.index_select(-1, rows.to(expected.device))
    message = f"{type(model).__name__} with fewer tokens differs in its results: nothing changed"
    require(close(result, expected), message, field="vocabulary")
    check_usable(model, small, inputs)


@dataclasses.dataclass(frozen=True)
class SmallerVocabulary:
    """A model with fewer tokens, and its tokenizer."""

    model: PreTrainedModel
    tokenizer: Any
    report: VocabularyReport
    files: frozenset[str]  # names of the files with the vocabulary of the original


def check_vocabulary(subject: Subject, vocabulary: Any) -> int | None:
    """The number of tokens that a request asks for; None if it is text.

    Raises:
        MoonshotError: a model without a tokenizer, or whose tokens cannot be removed, or several processes.
    """
    number = isinstance(vocabulary, int)
    if number:
        check_whole("vocabulary", vocabulary, 1)
    subject.require_one_process("shrink")
    check_tokens_removable(subject.model)
    message = "a smaller vocabulary needs one"
    require(subject.tokenizer is not None, message, field="tokenizer", value=None, hint=NO_TOKENIZER)
    return vocabulary if number else None


def reduce_vocabulary(subject: Subject, vocabulary: Any, calibration: Any) -> SmallerVocabulary:
    """A smaller vocabulary, like `MoonshotPruner.shrink`; the subject's model and tokenizer are unchanged.

    Args:
        subject: a model of text, also a pruned one, and its fast tokenizer.
        vocabulary: a number of tokens, or text whose tokens remain.
        calibration: text that determines the most frequent tokens, for a number.

    Raises:
        MoonshotError: an architecture or a tokenizer whose tokens cannot be removed, or text that cannot be read.
    """
    started = time.perf_counter()
    count = check_vocabulary(subject, vocabulary)
    source = vocabulary if count is None else calibration
    message = "the most frequent tokens are those of a text; give some"
    require(source is not None, message, field="calibration", value=None)
    model, tokenizer = subject.model, subject.tokenizer
    assert isinstance(model, PreTrainedModel)
    tokens = Tokens.of(tokenizer, embedded_tokens(model) or 0)
    always = configured_ids(model, tokens.ids) | template_ids(tokenizer)
    corpus = Corpus.read(source, tokenizer)
    remaining = tokens.choose(corpus.counts(everything=count is None), always, count)
    smaller = tokens.smaller(tokenizer, remaining)
    small = keep_tokens(model, remaining, tokens.renumbered(remaining))
    # Tokens are counted in the whole text; the cost of other text is measured with the tokens of nine tenths.
    counted = tokens.choose(corpus.counts(everything=False), always, count)
    trial = smaller if counted == remaining else tokens.smaller(tokenizer, counted)
    characters, before, after = corpus.held_out_lengths(trial, tokens.renumbered(counted))
    report = VocabularyReport(
        source=corpus.name,
        tokens=(tokens.embedded, len(remaining)),
        parameters=(model.num_parameters(), small.num_parameters()),
        bytes=(round(dense_cost(model, "bytes")), round(dense_cost(small, "bytes"))),
        characters=characters,
        tokens_per_character=(before / characters, after / characters),
        seconds=time.perf_counter() - started,
    )
    return SmallerVocabulary(small, smaller, report, vocabulary_files(tokenizer))
