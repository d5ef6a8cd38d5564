"""Last import of the process that warm processes are forked from."""

import atexit
import gc
import os
import tempfile

from vllm.platforms.cpu import CpuPlatform

from rl.host.process import COLLECT_AT

CpuPlatform.register_triton_kernel_overrides()  # which reads all modules, once for all engines
CpuPlatform.register_triton_kernel_overrides = lambda _: None
tempfile.tempdir = None  # an import may have looked it up; processes have variables of their own
gc.set_threshold(*COLLECT_AT)
gc.freeze()  # a collection would write to the pages that processes share
atexit.register(os._exit, 0)  # a normal exit lists what Triton's bindings leak
