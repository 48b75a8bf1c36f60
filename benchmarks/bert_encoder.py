"""A BERT-sized encoder as torch exports it: token ids in, one vector a token out, weights as before training.

    ids (batch, 128) --(tables of 30,522 tokens, 128 positions)--> (batch, 128, 384) --(6 layers)--> (batch, 128, 384)

Layers are torch's own, with 12 heads, GELU between 384 and 1536 features, and normalisation after every sum, as in
Devlin et al., NAACL 2019. 22 million weights, of which the tables hold 12 million.
"""

from __future__ import annotations

import logging
import warnings

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

TOKENS, WIDTH, LAYERS, HEADS = 128, 384, 6, 12
VOCABULARY = 30522


class BertEncoder(nn.Module):
    """Embeddings and encoder layers, no head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(TOKENS, WIDTH)
        self.register_buffer("places", torch.arange(TOKENS).unsqueeze(0))
        self.norm = nn.LayerNorm(WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.layers(self.norm(self.embedding(ids) + self.positions(self.places)))


def bert_encoder(seed: int = 0) -> onnx.ModelProto:
    """Export the encoder with torch's initial weights, every layer's drawn anew; its input is `ids`, int64 (1, 128)."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = BertEncoder().eval()
        for parameter in network.layers.parameters():  # torch's encoder copies its first layer
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its exporter
        example = torch.zeros(1, TOKENS, dtype=torch.int64)
        exported = torch.onnx.export(
            network, (example,), input_names=["ids"], dynamo=True, external_data=False, verbose=False
        )
    assert exported is not None
    return exported.model_proto


def token_ids(seed: int = 1) -> NDArray[np.int64]:
    """Draw a sentence's token ids, shape (1, 128)."""
    return np.random.default_rng(seed).integers(0, VOCABULARY, (1, TOKENS))
