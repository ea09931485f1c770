"""The last module that the fork server of a run of many tests imports: what came before lives as long as its ranks.

Garbage collections of the ranks then look at what tests have made. To look at all that was imported as well takes a
tenth of a second each time, and copies most of the memory of a forked process, because it writes to each object.
"""

import gc

gc.collect()
gc.freeze()
