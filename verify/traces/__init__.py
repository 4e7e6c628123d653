"""Traces: q, k, v of real models as attention problems (`load`), and the script that captures them (`capture`).

`python -m verify.traces show FILE` prints what a trace holds; `python -m verify.traces capture` makes the committed
one.
"""

from verify.traces.load import Trace, TraceLayer, committed_trace, load_trace
from verify.traces.read import TraceError

__all__ = ["Trace", "TraceError", "TraceLayer", "committed_trace", "load_trace"]
