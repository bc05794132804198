"""Component 4, the concurrent execution engine: carries out launches on one device. It obeys, it does not judge.

Importing it settles how OpenMP waits, which has to happen before torch is loaded: by default a thread of a team spins
for milliseconds at the end of each operation, and as soon as anything else wants a core (our own HTTP front, a
client) a step on all cores takes ten to fifty times as long. A short spin costs a few percent on an idle machine and
keeps a busy one usable (docs/LOG.md, 2026-11-29). The environment's own setting wins.
"""

import os

SPIN_COUNT = "2000"

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
