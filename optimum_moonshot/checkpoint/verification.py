"""Compare the weights in a folder's files, layer by layer, with its declared metadata, without loading the model."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ..errors import MoonshotError, check_path, reason, require
from ..masks import follows
from ..objective.patterns import NM, parse_pattern
from ..reports.tables import text_table
from .declared_metadata import (
    CARD,
    Declaration,
    DeclaredMetadata,
    WeightLocations,
    locate_weights,
    read_declared_metadata,
)
from .file_integrity import check_files, check_no_other_weights
from .hub import HUB_OPTIONS, local_folder
from .stored_weights import StoredWeights
from .weight_files import METHOD, is_packed_checkpoint, read_config, weight_files

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
    follows: bool | None = None  # whether it has that pattern
    problem: str = ""

    def row(self) -> list[str]:
        """Its row of the table."""
        shape = "" if self.shape is None else f"{self.shape[0]}×{self.shape[1]}"
        sparsities = ["" if value is None else f"{value:.4f}" for value in (self.declared, self.sparsity)]
        fits = {True: self.pattern or "", False: f"not {self.pattern}", None: ""}[self.follows]
        return [self.name, shape, self.stored or "", *sparsities, fits]


@dataclasses.dataclass(frozen=True)
class Verification:
    """The result of `verify`. It is true if everything matches the declared metadata."""

    path: str
    format: str  # "dense", "packed", or the method of another tool that quantized it
    checksums: bool | None  # whether those of a packed checkpoint are right; a dense one has none
    layers: tuple[LayerFinding, ...]
    sparsity: float | None  # zeros among the weights of the pruned layers that can be read
    model_sparsity: float | None  # zeros among all weights in the files; None where some cannot be read
    parameters: int | None  # all weights in the files; likewise
    declared: tuple[str, ...]  # the metadata of each file
    mismatches: tuple[str, ...]  # differences from it, and damage
    notes: tuple[str, ...]  # other differences from the files as they were written

    def __bool__(self) -> bool:
        return not self.mismatches

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
        return {**dataclasses.asdict(self), "matches": bool(self)}

    def table(self, width: int = 120) -> str:
        """A text table, `width` characters wide, of the layers, then the declared metadata and the mismatches."""
        headers = ["layer", "shape", "stored as", "declared", "sparsity", "n:m"]
        table = text_table(headers, [layer.row() for layer in self.layers], width, left=("stored as",))
        sums = {True: "; every checksum is right", False: "; damaged", None: ""}[self.checksums]
        lines = [f"format      {self.format}{sums}"]
        if self.sparsity is not None:
            whole = "" if self.model_sparsity is None else f", {self.model_sparsity:.4f} of the whole model"
            lines.append(f"sparsity    {self.sparsity:.4f} over {len(self.layers)} layers{whole}")
        lines += [f"declared    {line}" for line in self.declared]
        lines += [f"note        {note}" for note in self.notes]
        lines += [f"mismatch    {line}" for line in self.mismatches]
        count = len(self.mismatches)
        verdict = f"{count} mismatch{'es' if count > 1 else ''}" if count else "matches its metadata"
        lines.append(f"verdict     {verdict if self.declared or count else 'no metadata declares that it is pruned'}")
        return "\n".join([*([table, ""] if self.layers else []), *lines])


def verify(name_or_path: str | os.PathLike[str], *, trust_remote_code: bool = False, **hub: Any) -> Verification:
    """Compare the weights of a checkpoint with its declared metadata, whichever tool wrote it last.

    This checks the files (of a packed checkpoint, every checksum), the zeros and the n:m of every pruned layer against
    config.json, the report and the model card, and that transformers would load no other files. No model is loaded.
    More zeros than declared are a note; fewer zeros, or a weight whose zeros cannot be determined, are a mismatch.

    Args:
        name_or_path: a local folder or a Hub repository, dense, packed, or quantized afterwards by another tool.
        trust_remote_code: run the model's own code, to find its layers.
        hub: `revision`, `token`, `cache_dir` and `local_files_only` of a repository.

    Raises:
        MoonshotError: there is no checkpoint, or none in safetensors files.
    """
    check_path("name_or_path", name_or_path)
    unknown = sorted(hub.keys() - set(HUB_OPTIONS))
    supported = f"verify takes trust_remote_code, {', '.join(HUB_OPTIONS)}"
    require(not unknown, supported, field=", ".join(unknown))
    folder = local_folder(name_or_path, whole=True, **hub)
    packed, declared = is_packed_checkpoint(folder), read_declared_metadata(folder)
    format = "packed" if packed else "dense"
    files, damage, other = weight_files(folder, packed), _damage(folder, packed), _other_tool(folder)
    try:
        weights = StoredWeights(files)
    except (MoonshotError, SafetensorError, OSError) as error:
        raise MoonshotError(damage[0] if damage else f"{folder} cannot be read: {reason(error)}") from None
    with weights as stored:
        locations = locate_weights(folder, declared, stored.names(), trust_remote_code=trust_remote_code)
        comparison = _compare(stored, locations, declared, other)
    mismatches = [*declared.damaged, *damage, *comparison.mismatches()]
    card = declared.declarations.get(CARD)
    if card is not None and card.format not in (None, format):
        mismatches.append(f"{CARD} says that it is {card.format}: it is {format}")
    notes = [*locations.notes, *([f"config.json: another tool has quantized it ({other})"] if other else [])]
    parameters = comparison.parameters
    return Verification(
        path=str(name_or_path),
        format=other or format,
        checksums=not damage if packed else None,
        layers=comparison.layers,
        sparsity=comparison.sparsity,
        model_sparsity=comparison.zeros / parameters if parameters else None,
        parameters=parameters,
        declared=tuple(each.line() for each in declared.declarations.values()),
        mismatches=tuple(dict.fromkeys(mismatches)),
        notes=(*notes, *comparison.notes()),
    )


def _damage(folder: Path, packed: bool) -> list[str]:
    """The errors of the integrity checks of the files."""
    errors = []
    for check in (check_files, check_no_other_weights):
        try:
            check(folder, packed)
        except MoonshotError as error:
            errors.append(reason(error))
    return errors


def _other_tool(folder: Path) -> str | None:
    """The method of another tool that has quantized the checkpoint; None if there is none."""
    quantization = read_config(folder).get("quantization_config")
    method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else METHOD
    return None if method == METHOD else str(method)


@dataclasses.dataclass(frozen=True)
class _Comparison:
    """The weights in the files, and the metadata to compare them with."""

    layers: tuple[LayerFinding, ...]
    parameters: int | None  # all weights in the files; None where some cannot be read
    zeros: int  # among them
    declared: DeclaredMetadata
    patterns: Mapping[str, Mapping[str, NM]]  # source → layer → n:m
    matches: Mapping[tuple[str, NM], bool]  # whether a layer has a pattern

    @property
    def sparsity(self) -> float | None:
        total = sum(layer.shape[0] * layer.shape[1] for layer in self.layers if layer.shape is not None)
        return sum(layer.zeros or 0 for layer in self.layers) / total if total else None

    def mismatches(self) -> list[str]:
        """Differences from the declared metadata."""
        lines = []
        for each in self.declared.declarations.values():
            lines += self._wrong_patterns(each) + ([] if self.declared.compacted else self._wrong_sparsities(each))
        problems = [f"{each.name}: {each.problem}" for each in self.layers if each.problem]
        return [*lines, *_first(problems, "layers differ")]

    def _wrong_patterns(self, declaration: Declaration) -> list[str]:
        source, patterns = declaration.source, self.patterns[declaration.source]
        wrong = [name for name, pattern in patterns.items() if self.matches.get((name, pattern)) is False]
        lines = []
        for pattern in dict.fromkeys(patterns[name] for name in wrong):
            names = [name for name in wrong if patterns[name] == pattern]
            of = sum(other == pattern for other in patterns.values())
            lines.append(f"{source} says {pattern}: {len(names)} of {of} layers are not, such as {names[0]}")
        return lines

    def _wrong_sparsities(self, declaration: Declaration) -> list[str]:
        lines, declared = [], declaration.layers
        fewer = [
            layer
            for layer in self.layers
            if layer.name in declared and layer.shape is not None and layer.zeros is not None
            if layer.zeros < round(declared[layer.name] * layer.shape[0] * layer.shape[1])
        ]
        if fewer:
            layer = fewer[0]
            lines.append(
                f"{declaration.source}: {len(fewer)} of {len(declared)} layers have fewer zeros than it says, such as "
                f"{layer.name} with {layer.sparsity:.4f} for {declared[layer.name]:.4f}"
            )
        expected, sparsity = declaration.sparsity, self.sparsity
        if expected is not None and sparsity is not None and sparsity < expected - _ROUNDED:
            lines.append(f"{declaration.source} says sparsity {expected:.4f}: the layers have {sparsity:.4f}")
        return lines

    def notes(self) -> list[str]:
        """Differences that are not mismatches."""
        if self.declared.compacted:
            return ["the model was compacted: no zeros are declared"]
        lines = [
            f"{each.name}: sparsity {each.sparsity:.4f}, more than the declared {each.declared:.4f}"
            for each in self.layers
            if each.sparsity and each.declared is not None and each.sparsity > each.declared + _SPARSER
        ]
        return _first(lines, "layers are sparser than declared")


def _compare(
    stored: StoredWeights, locations: WeightLocations, declared: DeclaredMetadata, other: str | None
) -> _Comparison:
    """Read all weights once, one in memory at a time; `other` is the method of another tool."""
    by = f", quantized by {other}," if other else ""
    patterns = {each.source: _patterns(each, declared, locations.layers) for each in declared.declarations.values()}
    measured: dict[str, dict[str, Any]] = {}
    matches: dict[tuple[str, NM], bool] = {}
    parameters, zeros, readable = 0, 0, True
    for weight in stored.names():
        name = locations.weights.get(weight)
        try:
            mask, kind = stored.zeros(weight)
        except _UNREADABLE as error:
            readable = False
            if name is not None:
                measured[name] = {"problem": f"its weight{by} cannot be read: {reason(error)}"}
            continue
        count = int(mask.sum())
        parameters, zeros = parameters + mask.numel(), zeros + count
        if name is not None:
            matrix = ~locations.as_matrix(name, mask)
            for pattern in {rules[name] for rules in patterns.values() if name in rules}:
                matches[name, pattern] = matches.get((name, pattern), True) and follows(matrix, pattern)
            measured[name] = _with_part(measured.get(name), matrix.shape, kind, count)
    report, layers = None if declared.compacted else declared.report, []
    for name in locations.layers:
        values = measured.get(name, {"problem": "no file holds its weight"})
        expected = None if report is None else report.shapes.get(name)
        if expected is not None and values.get("shape") not in (None, expected):
            values["problem"] = f"its shape is {list(values['shape'])}, the report says {list(expected)}"
        first = next((rules[name] for rules in patterns.values() if name in rules), None)  # file that declares one
        sparsity = None if report is None else report.layers.get(name)
        match: dict[str, Any] = {} if first is None else {"follows": matches.get((name, first))}
        layers.append(LayerFinding(name, sparsity, None if first is None else str(first), **match, **values))
    return _Comparison(tuple(layers), parameters if readable else None, zeros, declared, patterns, matches)


def _with_part(before: dict[str, Any] | None, shape: torch.Size, kind: str, zeros: int) -> dict[str, Any]:
    """The measurements of a layer, with those of one more weight: the rows of the next expert."""
    if before is not None and before.get("problem"):
        return before
    if before is not None and before["shape"][1] != shape[1]:
        return {"problem": f"its experts have {before['shape'][1]} and {shape[1]} inputs"}
    rows, zeros = (0, zeros) if before is None else (before["shape"][0], before["zeros"] + zeros)
    whole = rows + shape[0], shape[1]
    return dict(shape=whole, stored=kind, zeros=zeros, sparsity=zeros / (whole[0] * whole[1]))


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
    """The first of some lines, with their number."""
    more = f" ({len(lines)} {problem})" if len(lines) > 1 else ""
    return [lines[0] + more] if lines else []
