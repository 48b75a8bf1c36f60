"""Exact linear operators on residue tensors, the programs made of them, their plain counterparts and their hints."""

from heinfer.operators.analysis import ScaleConflictError, analyse
from heinfer.operators.cutting import prepare_form
from heinfer.operators.hints import make_hints
from heinfer.operators.plain import evaluate_plain
from heinfer.operators.prepared import Hint, HintKind, PreparedForm, map_names
from heinfer.operators.program import Program
from heinfer.operators.residues import ResidueProgram, compile_step

__all__ = [
    "Hint",
    "HintKind",
    "PreparedForm",
    "Program",
    "ResidueProgram",
    "ScaleConflictError",
    "analyse",
    "compile_step",
    "evaluate_plain",
    "make_hints",
    "map_names",
    "prepare_form",
]
