"""How long the abuse and fuzz runs take: a few seconds among the other tests, a minute in CI, ten in `make soak`."""

import os

SOAK_S = float(os.environ.get("BULLET_SOAK_S", "4"))
