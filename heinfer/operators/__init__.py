"""Exact linear operators on residue tensors, the programs made of them, and their plain counterparts."""

from heinfer.operators.analysis import ScaleConflictError, analyse
from heinfer.operators.plain import evaluate_plain
from heinfer.operators.program import Program
from heinfer.operators.residues import ResidueProgram

__all__ = ["Program", "ResidueProgram", "ScaleConflictError", "analyse", "evaluate_plain"]
