"""What a user of the system calls: a model behind a node, the three roles on this machine, evaluation."""

from heinfer.client.evaluation import evaluate
from heinfer.client.local import LocalModel, local
from heinfer.client.remote import RemoteModel, connect
from heinfer.client.report import Report

__all__ = ["LocalModel", "RemoteModel", "Report", "connect", "evaluate", "local"]
