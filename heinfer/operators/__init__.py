"""Exact linear operators on residue tensors, the programs made of them, their plain counterparts and their hints."""

from heinfer.operators.analysis import ScaleConflictError, analyse
from heinfer.operators.cutting import degrees_from, outlines, prepare_form
from heinfer.operators.hints import make_hints
from heinfer.operators.plain import evaluate_plain
from heinfer.operators.prepared import Hint, HintKind, Outline, PreparedForm, map_names
from heinfer.operators.program import Program
from heinfer.operators.residues import ResidueProgram, compile_step
from heinfer.operators.transposed import apply_transpose

__all__ = [
    "Hint",
    "HintKind",
    "Outline",
    "PreparedForm",
    "Program",
    "ResidueProgram",
    "ScaleConflictError",
    "analyse",
    "apply_transpose",
    "compile_step",
    "degrees_from",
    "evaluate_plain",
    "make_hints",
    "map_names",
    "outlines",
    "prepare_form",
]
