"""Numbers of a node that don't fit together: refused with the node's name, wherever a pass stumbles over them.

onnx's inference, which comes first, finds most of them, but not all: it does not read the weights of recurrent
operators, sizes of Split, or attributes that overflow.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import onnx_ir as ir

from heinfer.errors import Offence, UnsupportedModelError

#: What Python and numpy raise for shapes, indices, numbers and attributes that can't be. Too little memory says
#: nothing about the model, and passes.
_ERRORS = (ArithmeticError, LookupError, TypeError, ValueError)


@contextmanager
def blamed(node: ir.Node) -> Iterator[None]:
    """Refuse a node whose inputs or attributes make the block of code fail.

    Raises:
        UnsupportedModelError: they do.
    """
    try:
        yield
    except _ERRORS as error:
        reason = f"its inputs and attributes don't fit together: {error or type(error).__name__}"
        offence = Offence(str(node.name), node.op_type, reason)
        raise UnsupportedModelError("an operator can't be partitioned:", [offence]) from error
