"""Entry point. Exit codes: 0 done, 2 usage, 1 refused or failed, with the reason on standard error."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

from heinfer.cli import (
    certificates,
    demonstrate,
    estimating,
    evaluating,
    inferring,
    node_role,
    partitioning,
    privacy,
    roles,
    signing,
    studies,
    training,
)
from heinfer.cli.logs import Format, set_up_logging
from heinfer.errors import HeinferError
from heinfer.processes import prepare_environment

#: What only the extra `train` brings.
TRAINING_PACKAGES = ("torch", "opacus", "dp_accounting", "matplotlib", "sklearn", "scipy", "tensorboard", "PIL")

app = typer.Typer(
    help="Private inference: an untrusted server evaluates the linear layers of an ONNX model on ciphertexts.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def options(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log ids, shapes, bytes and milliseconds.")] = False,
    log_format: Annotated[
        Format, typer.Option("--log-format", help="text for people; json: an object a line, for machines.")
    ] = "text",
) -> None:
    """Set up logging; values and keys are never logged."""
    set_up_logging(logging.INFO if verbose else logging.WARNING, log_format)


GROUPS = (
    partitioning,
    signing,
    estimating,
    roles,
    node_role,
    certificates,
    inferring,
    evaluating,
    demonstrate,
    training,
    privacy,
    studies,
)
for group in GROUPS:
    group.register(app)


def main() -> None:
    """Run a command and turn errors into exit codes."""
    prepare_environment()
    try:
        app()
    except HeinferError as error:
        sys.exit(_refuse(str(error)))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in TRAINING_PACKAGES:
            raise
        sys.exit(_refuse(f"training needs {error.name}: pip install 'heinfer[train]'"))
    except OSError as error:
        sys.exit(_refuse(f"{error.filename or 'system'}: {error.strerror or error}"))
    except MemoryError:
        sys.exit(_refuse("not enough memory: use a machine with more, a smaller model or fewer samples at a time"))


def _refuse(reason: str) -> int:
    print(f"heinfer: {reason}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    main()
