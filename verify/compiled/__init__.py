"""What the TPU compiler made of a kernel: compile, read and check without a TPU.

`python -m verify.compiled report package.module:callable --shapes ...` does it for anyone's kernel;
docs/reading-a-schedule.md says how to read the result.  Everything here is *modelled* from the compiler's schedule;
nothing is measured.
"""

from verify.compiled.compile import Artifact, CompileError, Job, compile_job, compile_many
from verify.compiled.generations import GENERATIONS, Generation
from verify.compiled.report import Report, analyse_artifact
from verify.compiled.run import Assume
from verify.compiled.target import Argument, Target

__all__ = [
    "GENERATIONS",
    "Argument",
    "Artifact",
    "Assume",
    "CompileError",
    "Generation",
    "Job",
    "Report",
    "Target",
    "analyse_artifact",
    "compile_job",
    "compile_many",
]
