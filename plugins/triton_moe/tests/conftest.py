"""Where there is no GPU, kernels run in Triton's interpreter."""

import torch

from veomni_conformance.triton_interpreter import mend_interpreter

if not torch.cuda.is_available():
    mend_interpreter()
