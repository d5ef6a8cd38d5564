"""Last import of the process that warm processes are forked from."""

import gc

gc.freeze()  # a collection would write to the pages that processes share
