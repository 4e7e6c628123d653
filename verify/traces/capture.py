"""Capture of a trace: run the model over a text and keep q, k, v of a few layers."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verify.traces.bits import round_to_bf16
from verify.traces.forward import forward, mean_loss
from verify.traces.keep import LOSS_LIMIT, Capture, CaptureError, Selection
from verify.traces.model import PACKAGE, VERSION, Model, locate, open_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from verify.traces.forward import Rotary

SCRIPT_VERSION = 1
"""Raise it whenever a capture of the same model and text would give other bits."""

TEXT = Path(__file__).parent / "data" / "bill-of-rights.txt"


def read_text(path: Path) -> str:
    """A UTF-8 text, newlines as they are."""
    try:
        return path.read_bytes().decode()
    except OSError as error:
        message = f"the text {path} cannot be read: {error.strerror}"
        raise CaptureError(message) from error
    except UnicodeDecodeError as error:
        message = f"the text {path} must be UTF-8: {error}"
        raise CaptureError(message) from error


def capture(
    text: Path,
    selection: Selection,
    rotary: Rotary = "interleaved",
    on_layer: Callable[[int, int], None] = lambda _done, _of: None,
) -> Capture:
    """Run the model over the beginning of a text.

    The model sees the text's tokens alone, with nothing before them.  All arithmetic is float64; q, k, v are rounded to
    BF16 once, at the end, and the rounded values are not fed back.

    Args:
        text: a UTF-8 file.
        selection: what to keep.
        rotary: the pairing that the weights are permuted for is `interleaved`; the other is a negative control.
        on_layer: told (layers done, layers in all) after each layer.

    Raises:
        CaptureError: the selection does not fit the model, or the text is too short or unreadable.
        verify.traces.model.ModelError: the model is missing or unknown.
    """
    words = read_text(text)
    model = open_model(locate())
    config = model.config
    selection.check(config)
    ids = model.tokenizer.encode(words).ids
    if model.tokenizer.decode(ids) != words:
        message = (
            f"the text {text} must be made of bytes that the model's vocabulary holds; decoding does not give it back"
        )
        raise CaptureError(message)
    if len(ids) < selection.tokens:
        message = f"the text {text} must have at least {selection.tokens} tokens, got {len(ids)}"
        raise CaptureError(message)
    tokens = np.array(ids[: selection.tokens])
    tensors: dict[str, np.ndarray] = {}

    def observe(index: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        if index in selection.layers:
            chosen = {
                "q": q[selection.query_heads(config)],
                "k": k[[*selection.kv_heads]],
                "v": v[[*selection.kv_heads]],
            }
            tensors.update({f"layer{index:02}.{part}": round_to_bf16(tensor) for part, tensor in chosen.items()})
        on_layer(index + 1, config.layers)

    hidden = forward(config, model.weight, tokens, observe, rotary)
    # The model has no output matrix of its own: logits are taken against the token embedding.
    loss = mean_loss(hidden, model.weight("token_embd"), tokens)
    return Capture(tensors, config.head_dim**-0.5, loss, provenance(model, text, words, selection, rotary, loss))


def provenance(
    model: Model, text: Path, words: str, selection: Selection, rotary: Rotary, loss: float
) -> dict[str, Any]:
    """The provenance of a capture."""
    return {
        "script": "verify.traces capture",
        "script_version": SCRIPT_VERSION,
        "model": "SmolLM2-135M-Instruct",
        "model_license": "Apache-2.0",
        "package": PACKAGE,
        "package_version": VERSION,
        "gguf": model.path.name,
        "gguf_sha256": model.sha256(),
        "arithmetic": "float64, q, k, v rounded once to BF16",
        "rotary": rotary,
        "rotary_base": model.config.rotary_base,
        "layers": list(selection.layers),
        "kv_heads": list(selection.kv_heads),
        "query_heads": selection.query_heads(model.config),
        "tokens": selection.tokens,
        "text": text.name,
        "text_sha256": hashlib.sha256(words.encode()).hexdigest(),
        # Six decimals: the last bits of the loss depend on the order in which BLAS sums.
        "loss_nats": round(loss, 6),
        "loss_limit_nats": LOSS_LIMIT,
    }
