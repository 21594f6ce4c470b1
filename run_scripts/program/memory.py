"""How the C library of Linux treats the memory that a program frees.

glibc gives the memory of a large array back to the system, and gets it again page by page. With kept memory, a step of
pretraining (`small`, 128x30, full softmax, one thread) takes 2.04 and 2.14 instead of 2.28 and 2.30 seconds of the
processor. Steps of `elmo benchmark --parts training` differ by less than their noise.
"""

import ctypes
import os
import sys
from contextlib import suppress

# glibc's numbers: the size of arrays that are mapped; how much free memory is kept; what is taken beyond a request.
MALLOC_OPTIONS = {-3: 2**30, -1: 2**31 - 1, -2: 2**26}


def keep_memory():
    """Keeps freed memory for the next arrays, unless the user decides by a variable of glibc."""
    has_own_settings = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if sys.platform != "linux" or has_own_settings:
        return
    with suppress(AttributeError):  # other C libraries
        mallopt = ctypes.CDLL(None).mallopt
        for name, value in MALLOC_OPTIONS.items():
            mallopt(name, value)
