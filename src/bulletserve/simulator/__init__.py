"""A device made of arithmetic, so that everything that decides runs anywhere."""
