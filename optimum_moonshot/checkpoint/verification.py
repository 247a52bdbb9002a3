"""Compare the weights in a folder's files, layer by layer, with its declared metadata, without loading the model."""

import dataclasses
import math
import os
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

from safetensors import SafetensorError
from torch import Tensor

from ..errors import MoonshotError, check_path, reason, require
from ..masks import follows
from ..objective.grid import Grid
from ..objective.patterns import NM, parse_pattern
from ..packing import PackedLayer, Quantized, weight_of
from ..reports.prune_report import REPORT_NAME
from ..reports.tables import text_table
from .compressed_tensors import BESIDE, WORDS, unpack_words
from .declared_metadata import (
    CARD,
    CONFIG,
    Declaration,
    DeclaredMetadata,
    WeightLocations,
    locate_weights,
    read_declared_metadata,
)
from .folder import HUB_OPTIONS, Checkpoint
from .weight_files import EXPORT, METHOD, StoredTensors, dtype_name

_SPARSER = 0.01  # difference of sparsities that is worth a note
_ROUNDED = 1e-6  # rounding error of a declared sparsity
_UNREADABLE = (MoonshotError, SafetensorError, KeyError, ValueError, IndexError, RuntimeError)  # of damaged files


@dataclasses.dataclass(frozen=True)
class LayerFinding:
    """One pruned layer in the files. Fields that could not be read are None, for the reason in `problem`."""

    name: str
    declared: float | None  # the sparsity in the report
    pattern: str | None  # the declared n:m
    shape: tuple[int, int] | None = None  # d_out, d_in
    stored: str | None = None  # representation, such as "bfloat16" or "packed bfloat16"
    zeros: int | None = None
    sparsity: float | None = None
    follows: bool | None = None  # whether its zeros have that pattern
    bits: int | None = None  # the declared bits of a surviving weight
    on_grid: bool | None = None  # whether its weights are on the declared grid
    bits_per_weight: float | None = None  # stored, of all its weights
    problem: str = ""

    def row(self) -> list[str]:
        """The row of the table."""
        shape = "" if self.shape is None else f"{self.shape[0]}×{self.shape[1]}"
        sparsities = ["" if value is None else f"{value:.4f}" for value in (self.declared, self.sparsity)]
        fits = {True: self.pattern or "", False: f"not {self.pattern}", None: ""}[self.follows]
        bits = "" if self.bits_per_weight is None else f"{self.bits_per_weight:.3f}"
        return [self.name, shape, self.stored or "", *sparsities, fits, bits]


@dataclasses.dataclass(frozen=True)
class Verification:
    """The result of `verify`. It is true if everything matches the declared metadata."""

    path: str
    format: str  # "dense", "packed" or "compressed-tensors"
    checksums: bool | None  # whether a packed checkpoint's are right; None for another format
    layers: tuple[LayerFinding, ...]
    sparsity: float | None  # zeros among the weights of the pruned layers that can be read
    model_sparsity: float | None  # zeros among all weights in the files; None where some cannot be read
    parameters: int | None  # all weights in the files; None where some cannot be read
    bits_per_weight: float | None  # stored bits of the pruned layers per weight; None where some cannot be read
    model_bits_per_weight: float | None  # of all weights in the files; None likewise
    declared: tuple[str, ...]  # the metadata of each file
    mismatches: tuple[str, ...]  # differences from it, and damage
    notes: tuple[str, ...]  # other differences from the files as they were written

    def __bool__(self) -> bool:
        return not self.mismatches

    def to_dict(self) -> dict[str, Any]:
        """Convert the result to JSON types."""
        return {**dataclasses.asdict(self), "matches": bool(self)}

    def table(self, width: int = 120) -> str:
        """A text table, `width` characters wide, of the layers, then the declared metadata and the mismatches."""
        headers = ["layer", "shape", "stored as", "declared", "sparsity", "n:m", "bits"]
        table = text_table(headers, [layer.row() for layer in self.layers], width, left=("stored as",))
        sums = {True: "; every checksum is right", False: "; damaged", None: ""}[self.checksums]
        lines = [f"format      {self.format}{sums}"]
        if self.sparsity is not None:
            whole = "" if self.model_sparsity is None else f", {self.model_sparsity:.4f} of the whole model"
            lines.append(f"sparsity    {self.sparsity:.4f} over {len(self.layers)} layers{whole}")
        if self.bits_per_weight is not None:
            bits = self.model_bits_per_weight
            whole = "" if bits is None else f", {bits:.3f} of the whole model"
            lines.append(f"bits        {self.bits_per_weight:.3f} per weight of these layers{whole}")
        lines += [f"declared    {line}" for line in self.declared]
        lines += [f"note        {note}" for note in self.notes]
        lines += [f"mismatch    {line}" for line in self.mismatches]
        count = len(self.mismatches)
        verdict = f"{count} mismatch{'es' if count > 1 else ''}" if count else "matches its metadata"
        lines.append(f"verdict     {verdict if self.declared or count else 'no metadata declares that it is pruned'}")
        return "\n".join([*([table, ""] if self.layers else []), *lines])


def verify(name_or_path: str | os.PathLike[str], *, trust_remote_code: bool = False, **hub: Any) -> Verification:
    """Compare the weights of a checkpoint that this package wrote with its declared metadata.

    This checks the files (of a packed checkpoint, every checksum), the zeros, the n:m and the grid of every pruned
    layer against config.json, the report and the model card, and that transformers would load no other files. No model
    is loaded. More zeros than declared are a note; fewer zeros, or a weight that cannot be read, are a mismatch.

    Args:
        name_or_path: a local folder or a Hub repository.
        trust_remote_code: run the model's own code, to find its layers.
        hub: `revision`, `token`, `cache_dir` and `local_files_only` of a repository.

    Raises:
        MoonshotError: there is no checkpoint, none in safetensors files, or another program has quantized it.
    """
    check_path("name_or_path", name_or_path)
    unknown = sorted(hub.keys() - set(HUB_OPTIONS))
    supported = f"the options of verify are trust_remote_code, {', '.join(HUB_OPTIONS)}"
    require(not unknown, supported, field=", ".join(unknown))
    checkpoint = Checkpoint.find(name_or_path, whole=True, **hub)
    message = f"{checkpoint.folder} has been quantized by another program ({checkpoint.quant_method})"
    hint = "verify the checkpoint that it was made from"
    require(checkpoint.quant_method in (None, METHOD, EXPORT), message, hint=hint)
    declared, damage = read_declared_metadata(checkpoint), _damage(checkpoint)
    try:
        tensors = checkpoint.open()
    except (MoonshotError, SafetensorError, OSError) as error:
        raise MoonshotError(damage[0] if damage else f"{checkpoint.folder} cannot be read: {reason(error)}") from None
    with tensors:
        names = list(dict.fromkeys(_weight_names(tensors)))
        locations = locate_weights(checkpoint.folder, declared, names, trust_remote_code=trust_remote_code)
        comparison = _Comparison(locations, declared)
        comparison.read(tensors, names)
    mismatches = [*declared.damaged, *damage, *comparison.mismatches()]
    card = declared.declarations.get(CARD)
    if card is not None and card.format not in ("", checkpoint.format):
        mismatches.append(f"{CARD} says that it is {card.format}: it is {checkpoint.format}")
    parameters, layers = comparison.parameters, comparison.layers
    return Verification(
        path=str(name_or_path),
        format=checkpoint.format,
        checksums=not damage if checkpoint.packed else None,
        layers=layers,
        sparsity=comparison.sparsity,
        model_sparsity=comparison.zeros / parameters if parameters else None,
        parameters=parameters,
        bits_per_weight=_mean([(layer.shape, layer.bits_per_weight) for layer in layers]),
        model_bits_per_weight=8 * comparison.bytes / parameters if parameters else None,
        declared=tuple(f"{source}: {declaration}" for source, declaration in declared.declarations.items()),
        mismatches=tuple(dict.fromkeys(mismatches)),
        notes=(*locations.notes, *comparison.notes()),
    )


def _damage(checkpoint: Checkpoint) -> list[str]:
    """The errors of the integrity checks of the files; raises `MoonshotError` if there are no files."""
    errors, checks = [], [checkpoint.check_files, checkpoint.check_no_other_weights] if checkpoint.files else []
    for check in checks:
        try:
            check()
        except MoonshotError as error:
            errors.append(reason(error))
    return errors


def _mean(values: list[tuple[tuple[int, int] | None, float | None]]) -> float | None:
    """The mean of a value of layers over their weights; None without layers, or if it is None for any."""
    complete = [(math.prod(shape), value) for shape, value in values if shape is not None and value is not None]
    if not complete or len(complete) < len(values):
        return None
    return sum(count * value for count, value in complete) / sum(count for count, _ in complete)


class _Weight(NamedTuple):
    """A weight in the files."""

    dense: Tensor
    stored: str  # its representation, such as "packed bfloat16"
    bytes: int  # of its tensors in the files
    format: str = ""  # of a packed weight


def _weight_names(tensors: StoredTensors) -> Iterator[str]:
    """The weights in the files by their names in a dense checkpoint; a packed one once for each of its tensors."""
    for name in sorted(tensors):
        beside = next((name.removesuffix(end) for end in BESIDE if name.endswith(end)), "")
        if weight_of(name) in tensors.layers:
            yield weight_of(name)
        elif name.endswith(f"weight{WORDS}"):
            yield name.removesuffix(WORDS)
        elif beside + WORDS not in tensors and tensors.dtype(name).startswith(("F", "BF")):
            yield name


def _read_weight(tensors: StoredTensors, weight: str) -> _Weight:
    """Read a weight, dense, packed or in the format of compressed-tensors."""
    if weight in tensors.layers:
        layer = tensors.layers[weight]
        parts = {name: tensors[name] for name in layer.names(weight) if name in tensors}
        kind = layer.dtype if layer.format == PackedLayer.format else f"{layer.format}, {layer.dtype}"
        size = sum(part.nbytes for part in parts.values())
        return _Weight(layer.unpack(weight, parts), f"packed {kind}", size, layer.format)
    if weight + WORDS in tensors:
        parts = {name: tensors[weight + name] for name in (WORDS, *BESIDE)}
        dense, bits = unpack_words(parts)
        return _Weight(dense, f"{EXPORT} int{bits}", sum(part.nbytes for part in parts.values()))
    dense = tensors[weight]
    return _Weight(dense, dtype_name(dense.dtype), dense.nbytes)


class _Matrix(NamedTuple):
    """The weight of a layer in the files, or of one of its experts, compared with the metadata."""

    shape: tuple[int, int]  # d_out, d_in
    stored: str
    zeros: int
    bytes: int
    wrong: frozenset[NM]  # declared patterns that it does not follow
    on_grid: bool | None


class _Comparison:
    """The weights in the files, and the metadata to compare them with."""

    def __init__(self, locations: WeightLocations, declared: DeclaredMetadata):
        self.locations, self.declared, names = locations, declared, locations.layers
        self.patterns = {source: _patterns(entry, declared, names) for source, entry in declared.declarations.items()}
        self.grids = {} if declared.record is None else declared.record.layer_grids(names)
        self.matrices: dict[str, list[_Matrix]] = {}  # of every layer
        self.problems: dict[str, str] = {}  # layer → why it cannot be compared
        self.parameters: int | None = 0  # all weights in the files; None where some cannot be read
        self.zeros = self.bytes = 0  # zeros among these weights, and their bytes in the files
        self.moved: list[str] = []  # word embeddings that are not on their grid

    def read(self, tensors: StoredTensors, names: list[str]) -> None:
        """Read all weights, one in memory at a time, or several that transformers converts together."""
        locations = self.locations
        for weights, conversion in locations.together(names):
            try:
                contents = {weight: _read_weight(tensors, weight) for weight in weights}
                loaded = locations.loaded({name: content.dense for name, content in contents.items()}, conversion)
            except _UNREADABLE as error:
                self.parameters = None
                weight = weights[0] if conversion is None else conversion.target.weight
                name = (locations.weights if conversion is None else locations.parameters).get(weight)
                if name is not None:
                    self.problems[name] = f"its weight cannot be read: {reason(error)}"
                continue
            count = sum(content.dense.numel() for content in contents.values())
            size = sum(content.bytes for content in contents.values())
            self.parameters = None if self.parameters is None else self.parameters + count
            self.zeros += sum(int((content.dense == 0).sum()) for content in contents.values())
            self.bytes += size
            for weight in contents.keys() & locations.embeddings.keys():
                grid, matrix = locations.embeddings[weight], locations.as_matrix(weight, contents[weight].dense)
                self.moved += [] if _is_on_grid(matrix, grid, contents[weight].format) else [weight]
            first = contents[weights[0]]
            for name, tensor in loaded.items():
                share = round(size * tensor.numel() / count)
                self._add(name, locations.as_matrix(name, tensor), first._replace(bytes=share))

    def _add(self, name: str, matrix: Tensor, content: _Weight) -> None:
        """Compare the weight of a layer, or of one of its experts, with the declared patterns and grid."""
        declared = {rules[name] for rules in self.patterns.values() if name in rules}
        wrong = frozenset(pattern for pattern in declared if not follows(matrix, pattern))
        grid, zeros = self.grids.get(name), matrix.numel() - int(matrix.count_nonzero())
        on_grid = None if grid is None else _is_on_grid(matrix, grid, content.format)
        shape = matrix.shape[0], matrix.shape[1]
        matrices = self.matrices.setdefault(name, [])
        matrices.append(_Matrix(shape, content.stored, zeros, content.bytes, wrong, on_grid))
        if matrices[0].shape[1] != shape[1]:
            self.problems.setdefault(name, f"its experts have {matrices[0].shape[1]} and {shape[1]} inputs")

    @cached_property
    def layers(self) -> tuple[LayerFinding, ...]:
        """The findings of all pruned layers."""
        report = None if self.declared.compacted else self.declared.report
        reported = {} if report is None else {layer.name: layer for layer in report.layers}
        findings = []
        for name in self.locations.layers:
            layer, grid = reported.get(name), self.grids.get(name)
            pattern = next((rules[name] for rules in self.patterns.values() if name in rules), None)
            finding = LayerFinding(
                name,
                declared=None if layer is None else layer.sparsity,
                pattern=None if pattern is None else str(pattern),
                bits=None if grid is None else grid.bits,
                problem=self.problems.get(name, "" if name in self.matrices else "its weight is in no file"),
            )
            if not finding.problem:
                finding = _with_matrices(finding, self.matrices[name], pattern)
                if layer is not None and finding.shape != layer.shape:
                    problem = f"its shape is {list(finding.shape or ())}, the report says {list(layer.shape)}"
                    finding = dataclasses.replace(finding, problem=problem)
            findings.append(finding)
        return tuple(findings)

    @property
    def sparsity(self) -> float | None:
        total = sum(math.prod(layer.shape) for layer in self.layers if layer.shape is not None)
        return sum(layer.zeros or 0 for layer in self.layers) / total if total else None

    def mismatches(self) -> list[str]:
        """Differences from the declared metadata."""
        lines = []
        for source, declaration in self.declared.declarations.items():
            lines += self._wrong_patterns(source)
            lines += [] if self.declared.compacted else self._wrong_sparsities(source, declaration)
        for bits in sorted({layer.bits for layer in self.layers if layer.bits}):
            quantized = [layer for layer in self.layers if layer.bits == bits]
            off = [layer.name for layer in quantized if layer.on_grid is False]
            if off:
                line = f"{CONFIG} says {bits} bits: {len(off)} of {len(quantized)} layers are not on their grid"
                lines.append(f"{line}, such as {off[0]}")
        for weight in self.moved:
            bits = self.locations.embeddings[weight].bits
            lines.append(f"{CONFIG} says {bits} bits of the word embeddings: {weight} is not on their grid")
        problems = [f"{layer.name}: {layer.problem}" for layer in self.layers if layer.problem]
        return [*lines, *_first(problems, "layers differ")]

    def _wrong_patterns(self, source: str) -> list[str]:
        patterns, lines = self.patterns[source], []
        for pattern in dict.fromkeys(patterns.values()):
            names = [name for name, declared in patterns.items() if declared == pattern]
            wrong = [name for name in names if any(pattern in matrix.wrong for matrix in self.matrices.get(name, ()))]
            if wrong:
                problem = f"{len(wrong)} of {len(names)} layers are not, such as {wrong[0]}"
                lines.append(f"{source} says {pattern}: {problem}")
        return lines

    def _wrong_sparsities(self, source: str, declaration: Declaration) -> list[str]:
        lines = []
        fewer = [
            f"{layer.name} with {layer.sparsity:.4f} for {layer.declared:.4f}"
            for layer in self.layers
            if layer.declared is not None and layer.shape is not None and layer.zeros is not None
            if layer.zeros < round(layer.declared * math.prod(layer.shape))
        ]
        if fewer and source == REPORT_NAME:
            of = f"{len(fewer)} of {len(self.layers)} layers have fewer zeros than it says, such as"
            lines.append(f"{source}: {of} {fewer[0]}")
        expected, sparsity = declaration.sparsity, self.sparsity
        if expected is not None and sparsity is not None and sparsity < expected - _ROUNDED:
            digits = next(digits for digits in range(4, 18) if f"{expected:.{digits}f}" != f"{sparsity:.{digits}f}")
            says = f"{source} says sparsity {expected:.{digits}f}"
            lines.append(f"{says}: the layers have {sparsity:.{digits}f}")
        return lines

    def notes(self) -> list[str]:
        """Differences that are not mismatches."""
        if self.declared.compacted:
            return ["the model was compacted: no zeros are declared"]
        lines = [
            f"{layer.name}: sparsity {layer.sparsity:.4f}, more than the declared {layer.declared:.4f}"
            for layer in self.layers
            if layer.sparsity and layer.declared is not None and layer.sparsity > layer.declared + _SPARSER
        ]
        return _first(lines, "layers are sparser than declared")


def _with_matrices(finding: LayerFinding, matrices: list[_Matrix], pattern: NM | None) -> LayerFinding:
    """Add the weight of a layer in the files, or the weights of its experts, one below another."""
    shape = sum(matrix.shape[0] for matrix in matrices), matrices[0].shape[1]
    zeros, size = sum(matrix.zeros for matrix in matrices), sum(matrix.bytes for matrix in matrices)
    return dataclasses.replace(
        finding,
        shape=shape,
        stored=matrices[-1].stored,
        zeros=zeros,
        sparsity=zeros / math.prod(shape),
        follows=None if pattern is None else not any(pattern in matrix.wrong for matrix in matrices),
        on_grid=None if finding.bits is None else all(matrix.on_grid for matrix in matrices),
        bits_per_weight=8 * size / math.prod(shape),
    )


def _is_on_grid(matrix: Tensor, grid: Grid, format: str) -> bool:
    """Whether a weight is on the declared grid; `format` is that of a packed one, which has passed its checks."""
    codec = Quantized.of(grid)
    try:
        return format == codec.name or bool(codec.pack(matrix, None))
    except MoonshotError:
        return False


def _patterns(declaration: Declaration, declared: DeclaredMetadata, layers: tuple[str, ...]) -> dict[str, NM]:
    """The n:m of every layer, by one declaration."""
    if declared.compacted:
        return {}
    try:
        if declaration.rules is not None:
            by_rules = declaration.rules.of(layers)
            return {name: pattern for name, pattern in by_rules.items() if isinstance(pattern, NM)}
        if any(other.rules is not None and other.rules.rules for other in declared.declarations.values()):
            return {}  # every layer has its own, which this file does not declare
        pattern = parse_pattern(declaration.pattern, None) if ":" in declaration.pattern else None
        return dict.fromkeys(layers, pattern) if isinstance(pattern, NM) else {}
    except MoonshotError:  # rules for other layers, or not a pattern: its line shows it
        return {}


def _first(lines: list[str], problem: str) -> list[str]:
    """The first of the lines, followed by their number; empty without lines."""
    more = f" ({len(lines)} {problem})" if len(lines) > 1 else ""
    return [lines[0] + more] if lines else []
